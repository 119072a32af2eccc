"""Where clients bring arrays to a host and take them from it: one stream per client, arrays cut into parts.

A put names the placed slice and the spec; the host derives which boxes its devices hold and waits for their bytes. A
fetch names devices; the host sends their shards once the buffer is there and computed. The stream of a client is bound
to its session by a token that the host can compute itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import jax
import numpy as np

from pathways_ray import limits
from pathways_ray.errors import Failure, GraphError, PathwaysError, WireError, to_failure
from pathways_ray.executor.compile import Compiler, dtype_of
from pathways_ray.executor.device_transfer import failure_in
from pathways_ray.executor.store import BufferStore
from pathways_ray.ir.regions import Box, box_shape, shard_boxes
from pathways_ray.ir.types import check_layout
from pathways_ray.transport import streams
from pathways_ray.transport.messages import (
    TO_HOST_DATA,
    DataFailed,
    Fetch,
    FetchPart,
    PutDone,
    PutOpen,
    PutPart,
    ToHostData,
)

CLOSE_LIMIT_S = 1.0
"""The end of a stream waits this long for its last messages to go out."""


class _Upload:
    """An array on its way in: a byte buffer for each distinct box of this host."""

    def __init__(self, message: PutOpen, host: int) -> None:
        check_layout(message.type, message.spec, message.placed.mesh, "put")
        self.message = message
        boxes = shard_boxes(message.type, message.spec, message.placed.mesh)
        self.local = [(boxes[k], d.index) for k, d in enumerate(message.placed.devices) if d.host == host]
        self.boxes: list[Box] = list(dict.fromkeys(box for box, _ in self.local))
        self.dtype = dtype_of(message.type.dtype)
        self.shape = box_shape(self.boxes[0])
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        self.buffers = [np.empty(size, np.uint8) for _ in self.boxes]
        self.missing = size * len(self.boxes)

    def add(self, part: PutPart) -> None:
        if not 0 <= part.box < len(self.buffers):
            raise WireError(f"part of box {part.box}; this host holds {len(self.buffers)}")
        buffer = self.buffers[part.box]
        if part.offset < 0 or part.offset + len(part.data) > len(buffer):
            raise WireError(f"part at {part.offset} of {len(part.data)} bytes is outside the {len(buffer)} of its box")
        buffer[part.offset : part.offset + len(part.data)] = np.frombuffer(part.data, np.uint8)
        self.missing -= len(part.data)

    def array(self, compiler: Compiler) -> jax.Array:
        held = {b: d.view(self.dtype).reshape(self.shape) for b, d in zip(self.boxes, self.buffers, strict=True)}
        shards = [jax.device_put(held[box], compiler.devices[index]) for box, index in self.local]
        sharding = compiler.sharding(self.message.placed, self.message.spec)
        return jax.make_array_from_single_device_arrays(self.message.type.shape, sharding, shards)


class DataServer:
    """Serves clients on an event loop in a thread of its own."""

    def __init__(self, host: int, compiler: Compiler, store: BufferStore, token_of: Any, bind: str) -> None:
        self.host = host
        self.compiler = compiler
        self.store = store
        self.token_of = token_of
        self._copies = ThreadPoolExecutor(4, "fetch")
        self._started = threading.Event()
        self.address = ""
        threading.Thread(target=lambda: asyncio.run(self._main(bind)), name="data", daemon=True).start()
        self._started.wait(30)

    async def _main(self, bind: str) -> None:
        self._server, self.address = await streams.serve({streams.DATA_STREAM: self._stream}, {}, bind)
        self._started.set()
        await self._server.wait_for_termination()

    async def _stream(self, context: grpc.aio.ServicerContext) -> None:
        metadata = streams.metadata_of(context)
        session = int(metadata.get("session", "0") or 0)
        if not streams.authorised(metadata, self.token_of(session)):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong data token")
        outbox = streams.AsyncOutbox()
        pump = asyncio.ensure_future(outbox.pump(context.write))
        uploads: dict[int, _Upload] = {}
        fetches: set[asyncio.Task[None]] = set()
        try:
            while (data := await streams.reading(context)) is not None:
                for message in TO_HOST_DATA.decode_batch(data):
                    if isinstance(message, Fetch):
                        task = asyncio.ensure_future(self._fetch(session, message, outbox))
                        fetches.add(task)
                        task.add_done_callback(fetches.discard)
                    else:
                        self._upload(session, message, uploads, outbox)
        except WireError:
            pass
        finally:
            for task in fetches:
                task.cancel()
            # A write that is cancelled half-way would keep the call open; what was sent before goes out first.
            outbox.close()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(pump, CLOSE_LIMIT_S)

    def _upload(
        self, session: int, message: ToHostData, uploads: dict[int, _Upload], outbox: streams.AsyncOutbox
    ) -> None:
        assert not isinstance(message, Fetch)
        request = message.request
        try:
            if isinstance(message, PutOpen):
                self._check_devices(message)
                uploads[request] = _Upload(message, self.host)
            elif request in uploads:
                uploads[request].add(message)
            else:
                return
            upload = uploads[request]
            if upload.missing <= 0:
                self.store.put(session, upload.message.buffer, upload.array(self.compiler))
                del uploads[request]
                outbox.send(PutDone(request))
        except (PathwaysError, ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
            uploads.pop(request, None)
            outbox.send(DataFailed(request, to_failure(error, "put", host=self.host)))

    def _check_devices(self, message: PutOpen) -> None:
        mine = [d for d in message.placed.devices if d.host == self.host]
        if not mine or len(message.placed.devices) != message.placed.mesh.size:
            raise GraphError(f"no device of {message.placed.mesh} is on host {self.host}")
        for device in mine:
            if not 0 <= device.index < len(self.compiler.devices):
                raise GraphError(f"host {self.host} has {len(self.compiler.devices)} devices, no number {device.index}")

    async def _fetch(self, session: int, message: Fetch, outbox: streams.AsyncOutbox) -> None:
        loop = asyncio.get_running_loop()
        present = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(present.set)

        self.store.when_present(session, message.buffer, wake)
        await present.wait()
        value = self.store.get(session, message.buffer)
        if value is None:
            failure: Failure | None = Failure("BufferDeleted", f"buffer {message.buffer} was dropped", host=self.host)
        elif isinstance(value, Failure):
            failure = value
        else:
            failure = None
        if failure is not None:
            outbox.send(DataFailed(message.request, failure))
            return
        try:
            for device in message.devices:
                data = await loop.run_in_executor(self._copies, self._shard_bytes, value, device)
                total = len(data)
                for offset in range(0, max(total, 1), limits.PART_BYTES):
                    part = data[offset : offset + limits.PART_BYTES]
                    outbox.send(FetchPart(message.request, device, offset, total, bytes(part)))
                    await asyncio.sleep(0)
        except (PathwaysError, RuntimeError, ValueError) as error:
            text = str(error)
            failure = failure_in(text) or to_failure(error, "fetch", host=self.host)
            outbox.send(DataFailed(message.request, failure))

    def _shard_bytes(self, value: Any, device: int) -> memoryview[int]:
        """Waits for the shard on a device of this host and copies it to host memory, in C order."""
        wanted = self.compiler.devices[device]
        for shard in value.addressable_shards:
            if shard.device == wanted:
                array = np.ascontiguousarray(np.asarray(shard.data))
                return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
        raise GraphError(f"the buffer has no shard on device {device} of host {self.host}")
