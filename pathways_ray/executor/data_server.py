"""Where clients bring arrays to a host and take them from it: one stream per client, arrays cut into parts.

A put names the placed slice and the spec; the host derives which boxes its devices hold and waits for their bytes. A
fetch names devices; the host sends their shards once the buffer is there and computed.

The stream of a client is bound to its session by a token, and a put to a slice by a proof; the controller made both,
and the host checks them by itself (`transport.capabilities`). Nothing is allocated before that. What a client waits for
holds up nobody else: each stream has its own workers, and one that is not read stops the fetches that fill it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import jax
import numpy as np

from pathways_ray import limits
from pathways_ray.errors import (
    AuthenticationError,
    Failure,
    GraphError,
    PathwaysError,
    QuotaExceeded,
    WireError,
    from_failure,
    to_failure,
)
from pathways_ray.executor.allowance import Allowance, check_type, device_bytes
from pathways_ray.executor.compile import Compiler, dtype_of
from pathways_ray.executor.device_transfer import failure_in
from pathways_ray.executor.store import BufferStore
from pathways_ray.ir.regions import Box, box_shape, shard_boxes
from pathways_ray.ir.types import check_layout
from pathways_ray.transport import streams
from pathways_ray.transport.capabilities import Grant, grant_of, proves
from pathways_ray.transport.exposure import Exposure
from pathways_ray.transport.messages import (
    TO_HOST_DATA,
    DataFailed,
    Fetch,
    FetchPart,
    PutDone,
    PutOpen,
    PutPart,
)

CLOSE_LIMIT_S = 1.0
"""The end of a stream waits this long for its last messages to go out."""

WORKERS = 4
"""Shards of one client that are waited for and copied at a time."""

BACKLOG = 8
"""Parts of fetched arrays that wait for a client to read those before."""


class _Upload:
    """An array on its way in: a byte buffer for each distinct box of this host, filled from its start to its end."""

    def __init__(self, message: PutOpen, local: list[tuple[Box, int]]) -> None:
        self.message = message
        self.local = local
        self.boxes: list[Box] = list(dict.fromkeys(box for box, _ in local))
        self.dtype = dtype_of(message.type.dtype)
        self.shape = box_shape(self.boxes[0])
        size = math.prod(self.shape) * self.dtype.itemsize
        self.buffers = [np.empty(size, np.uint8) for _ in self.boxes]
        # Nothing else tells what is filled: a part that came twice would leave another client's bytes in a gap.
        self.filled = [0] * len(self.boxes)
        self.missing = size * len(self.boxes)

    def add(self, part: PutPart) -> None:
        if not 0 <= part.box < len(self.buffers):
            raise WireError(f"part of box {part.box}; this host holds {len(self.buffers)}")
        buffer, filled = self.buffers[part.box], self.filled[part.box]
        end = filled + len(part.data)
        if part.offset != filled or end > len(buffer) or (not part.data and len(buffer)):
            raise WireError(
                f"part at {part.offset} of {len(part.data)} bytes does not go on at {filled} of the {len(buffer)} of "
                "its box"
            )
        buffer[filled:end] = np.frombuffer(part.data, np.uint8)
        self.filled[part.box] = end
        self.missing -= len(part.data)

    def array(self, compiler: Compiler) -> jax.Array:
        held = {b: d.view(self.dtype).reshape(self.shape) for b, d in zip(self.boxes, self.buffers, strict=True)}
        shards = [jax.device_put(held[box], compiler.devices[index]) for box, index in self.local]
        sharding = compiler.sharding(self.message.placed, self.message.spec)
        return jax.make_array_from_single_device_arrays(self.message.type.shape, sharding, shards)


class _Stream:
    """One stream of a client: what it may do, and what it has under way."""

    def __init__(self, grant: Grant, allowance: Allowance) -> None:
        self.grant = grant
        self.allowance = allowance
        self.outbox = streams.AsyncOutbox()
        self.uploads: dict[int, _Upload] = {}
        self.fetches: set[asyncio.Task[None]] = set()
        self.workers = ThreadPoolExecutor(WORKERS, "fetch")
        self.turns = asyncio.Semaphore(WORKERS)

    @property
    def session(self) -> int:
        return self.grant.session


class DataServer:
    """Serves clients on an event loop in a thread of its own."""

    def __init__(self, host: int, compiler: Compiler, store: BufferStore, data_secret: str, exposure: Exposure) -> None:
        self.host = host
        self.compiler = compiler
        self.store = store
        self.data_secret = data_secret
        self.allowances: dict[int, Allowance] = {}
        self._started = threading.Event()
        self.address = ""
        threading.Thread(target=lambda: asyncio.run(self._main(exposure)), name="data", daemon=True).start()
        if not self._started.wait(30) or not self.address:
            raise RuntimeError(f"host {host} cannot serve data at {exposure.data or 'its own address'}")

    async def _main(self, exposure: Exposure) -> None:
        try:
            self._server, self.address = await streams.serve(
                {streams.DATA_STREAM: self._stream},
                streams.bind_address(exposure.data),
                tls=exposure.tls,
                facing_clients=True,
            )
        finally:
            self._started.set()
        await self._server.wait_for_termination()

    async def _stream(self, context: grpc.aio.ServicerContext) -> None:
        metadata = streams.metadata_of(context)
        grant = grant_of(self.data_secret, streams.session_of(metadata), metadata.get("authorization", ""))
        if grant is None or self.store.ended(grant.session):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong data token, or its session has ended")
            return
        stream = _Stream(grant, self.allowances.setdefault(grant.session, Allowance()))
        pump = asyncio.ensure_future(stream.outbox.pump(context.write))
        try:
            while (data := await streams.reading(context)) is not None and not self.store.ended(stream.session):
                for message in TO_HOST_DATA.decode_batch(data):
                    if isinstance(message, Fetch):
                        self._start_fetch(stream, message)
                    else:
                        self._upload(stream, message)
        except WireError:
            pass
        finally:
            self._end(stream)
            # A write that is cancelled half-way would keep the call open; what was sent before goes out first.
            stream.outbox.close()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(pump, CLOSE_LIMIT_S)

    def _end(self, stream: _Stream) -> None:
        for task in stream.fetches:
            task.cancel()
        stream.workers.shutdown(wait=False, cancel_futures=True)
        for upload in stream.uploads.values():
            stream.allowance.failed(upload.message.buffer)
        for session in [session for session in self.allowances if self.store.ended(session)]:
            del self.allowances[session]

    # --- puts ---------------------------------------------------------------------------------------------------------

    def _upload(self, stream: _Stream, message: PutOpen | PutPart) -> None:
        request = message.request
        try:
            if isinstance(message, PutOpen):
                self._open(stream, message)
            elif request in stream.uploads:
                stream.uploads[request].add(message)
            else:
                return
            upload = stream.uploads[request]
            if upload.missing <= 0:
                self.store.put(stream.session, upload.message.buffer, upload.array(self.compiler))
                stream.allowance.arrived(upload.message.buffer)
                del stream.uploads[request]
                stream.outbox.send(PutDone(request))
        except (PathwaysError, ValueError, TypeError, OverflowError, MemoryError, jax.errors.JaxRuntimeError) as error:
            failed = stream.uploads.pop(request, None)
            if failed is not None:
                stream.allowance.failed(failed.message.buffer)
            stream.outbox.send(DataFailed(request, to_failure(error, "put", host=self.host)))

    def _open(self, stream: _Stream, message: PutOpen) -> None:
        """Makes room for an array, once it is clear that it may come."""
        if not proves(self.data_secret, stream.session, message.placed, message.proof):
            raise AuthenticationError(
                f"session {stream.session} has no slice {message.placed.mesh.id} on these devices: the proof is wrong"
            )
        if message.request in stream.uploads:
            raise WireError(f"request {message.request} is under way already")
        if len(stream.uploads) >= limits.MAX_REQUESTS:
            raise QuotaExceeded(f"{limits.MAX_REQUESTS} puts of a stream may be under way; one more was asked for")
        self._check_devices(message)
        check_type(message.type)
        check_layout(message.type, message.spec, message.placed.mesh, "put")
        boxes = shard_boxes(message.type, message.spec, message.placed.mesh)
        local = [(boxes[k], d.index) for k, d in enumerate(message.placed.devices) if d.host == self.host]
        asked = device_bytes([box for box, _ in local], message.type.dtype)
        stream.allowance.take(
            message.buffer, asked, stream.grant.allowance, lambda number: self.store.holds(stream.session, number)
        )
        try:
            stream.uploads[message.request] = _Upload(message, local)
        except BaseException:
            stream.allowance.failed(message.buffer)
            raise

    def _check_devices(self, message: PutOpen) -> None:
        mine = [d for d in message.placed.devices if d.host == self.host]
        if not mine or len(message.placed.devices) != message.placed.mesh.size:
            raise GraphError(f"no device of {message.placed.mesh} is on host {self.host}")
        for device in mine:
            if not 0 <= device.index < len(self.compiler.devices):
                raise GraphError(f"host {self.host} has {len(self.compiler.devices)} devices, no number {device.index}")

    # --- fetches ------------------------------------------------------------------------------------------------------

    def _start_fetch(self, stream: _Stream, message: Fetch) -> None:
        if len(stream.fetches) >= limits.MAX_REQUESTS:
            text = f"{limits.MAX_REQUESTS} fetches of a stream may be under way; one more was asked for"
            stream.outbox.send(DataFailed(message.request, Failure("QuotaExceeded", text, "fetch", host=self.host)))
            return
        task = asyncio.ensure_future(self._fetch(stream, message))
        stream.fetches.add(task)
        task.add_done_callback(stream.fetches.discard)

    async def _fetch(self, stream: _Stream, message: Fetch) -> None:
        try:
            value = await self._present(stream.session, message.buffer)
            async with stream.turns:
                for device in message.devices:
                    await self._send_shard(stream, message.request, value, device)
        except (PathwaysError, RuntimeError, ValueError) as error:
            failure = failure_in(str(error)) or to_failure(error, "fetch", host=self.host)
            stream.outbox.send(DataFailed(message.request, failure))

    async def _present(self, session: int, buffer: int) -> Any:
        """The value of a buffer, once it is in the store (it may still be computed). Raises its failure."""
        loop = asyncio.get_running_loop()
        present = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(present.set)

        self.store.when_present(session, buffer, wake)
        await present.wait()
        value = self.store.get(session, buffer)
        if value is None:
            raise from_failure(Failure("BufferDeleted", f"buffer {buffer} was dropped", host=self.host))
        if isinstance(value, Failure):
            raise from_failure(value)
        return value

    async def _send_shard(self, stream: _Stream, request: int, value: Any, device: int) -> None:
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(stream.workers, self._shard_bytes, value, device)
        total = len(data)
        for offset in range(0, max(total, 1), limits.PART_BYTES):
            part = data[offset : offset + limits.PART_BYTES]
            stream.outbox.send(FetchPart(request, device, offset, total, bytes(part)))
            await asyncio.sleep(0)
            await stream.outbox.room(BACKLOG)

    def _shard_bytes(self, value: Any, device: int) -> memoryview[int]:
        """Waits for the shard on a device of this host and copies it to host memory, in C order."""
        if not 0 <= device < len(self.compiler.devices):
            raise GraphError(f"host {self.host} has {len(self.compiler.devices)} devices, no number {device}")
        wanted = self.compiler.devices[device]
        for shard in value.addressable_shards:
            if shard.device == wanted:
                array = np.ascontiguousarray(np.asarray(shard.data))
                return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
        raise GraphError(f"the buffer has no shard on device {device} of host {self.host}")
