"""The data server of a host: clients put arrays there and fetch them, over one stream each, in parts.

A put names the placed slice and the spec; the host derives which boxes its devices hold and waits for their bytes. A
fetch names devices; the host sends their shards once the buffer is there and computed.

The stream of a client is bound to its session by a token, and a put to a slice by a tag; the controller made both, and
the host checks them by itself (`transport.capabilities`). Nothing is allocated before that. A client that waits holds
up no other: each stream has its own workers, and one that is not read stops the fetches that fill it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from pathways_ray import limits
from pathways_ray.errors import PathwaysError, QuotaExceeded, TooLarge, WireError, to_failure
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.data.awaited_frees import FREES_LIMIT_S, AwaitedFrees, FreesAwaited
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.data.client_stream import MAX_PIPES, MAX_UNREAD, ClientStream, arriving
from pathways_ray.executor.data.early_calls import EarlyCalls
from pathways_ray.executor.data.equal_uploads import EqualUploads
from pathways_ray.executor.data.fetches import FetchServer
from pathways_ray.executor.data.served_calls import ServedCalls
from pathways_ray.executor.data.shard_reader import SMALL_BYTES, ShardReader
from pathways_ray.executor.data.upload import Upload
from pathways_ray.executor.data.upload_plan import UploadPlans
from pathways_ray.executor.data.upload_quota import UploadQuota
from pathways_ray.executor.run.instructions import Called, Handed
from pathways_ray.executor.threads import ending_with_process
from pathways_ray.observe.views import Arriving
from pathways_ray.transport import links, streams
from pathways_ray.transport import messages as wire
from pathways_ray.transport.batcher import MAX_HEADER_BYTES, check_batch
from pathways_ray.transport.busy_poll import BusyPoll
from pathways_ray.transport.capabilities import grant_of, session_of
from pathways_ray.transport.endpoints import ListenConfig
from pathways_ray.transport.local_sockets import LocalServer
from pathways_ray.transport.shared_memory import SharedFile

CLOSE_LIMIT_S = 1.0
"""The end of a stream waits this long for its last messages to go out."""

MAX_STREAMS = 8
"""Streams of one session. A client has one for each host, and another one while a broken one is given up."""

MAX_TENANT_STREAMS = limits.MAX_SESSIONS
"""Streams of one tenant: each takes threads and descriptors of this process, and a client has one."""

MAX_FILES = 16
"""Files in memory of one stream whose fetches are not answered: each is a descriptor of this process. What comes beyond
them goes over the link."""

MAX_BATCH = 1 << 14
"""Messages in one batch of a client: they are decoded at once."""

TURN_S = 0.005
"""Seconds for which the messages of one batch are taken, one behind the other, before other clients are served."""

MAX_BUFFERS = 2 * limits.MAX_SESSION_BUFFERS
"""Arrays of one session on this host, beyond which it takes no upload. The controller lets a session have half as many,
but hears only of those that its client names: uploads without end, of arrays without bytes, would fill this process."""

_PUT_ERRORS = (PathwaysError, ValueError, TypeError, OverflowError, MemoryError, OSError, jax.errors.JaxRuntimeError)


class DataServer:
    """Serves clients on an event loop in a thread of its own. `report` sends to the scheduler, from any thread, what
    went to `note` as it was stored; `hand` takes calls to the dispatcher. Links to `others` than clients are served at
    the same address, by their paths. `run` runs what the thread does, without end."""

    def __init__(
        self,
        host: int,
        compiler: Compiler,
        store: BufferStore,
        data_secret: str,
        listen: ListenConfig,
        report: Callable[[Sequence[wire.Stored]], None],
        note: Callable[[wire.Stored], None],
        hand: Callable[[Handed | Called], bool] = lambda handed: False,
        others: Mapping[str, links.Handler] = MappingProxyType({}),
        busy: BusyPoll | None = None,
        run: Callable[[Callable[[], None]], None] = lambda serve: serve(),
    ) -> None:
        self._busy = busy
        self.host = host
        self.compiler = compiler
        self.store = store
        self.reader = ShardReader(host, compiler.devices, store)
        self.equal = EqualUploads(compiler.devices) if compiler.backend.shares_memory else None
        self.plans = UploadPlans(host, len(compiler.devices))
        self.data_secret, self.report, self.note = data_secret, report, note
        self._unsaid: list[wire.Stored] = []  # stored in this step of the loop, and not reported yet
        self.quotas: dict[str, UploadQuota] = {}
        self.streams: set[ClientStream] = set()
        self.awaited = AwaitedFrees()
        self.early = EarlyCalls(self.streams, hand)
        self._hand = hand
        self.storing: set[asyncio.Task[None]] = set()
        self._started = threading.Event()
        self.address = ""
        self._others = others
        self._unable: BaseException | None = None
        threading.Thread(target=ending_with_process(self._run), args=(run, listen), name="data", daemon=True).start()
        if not self._started.wait(30) or not self.address:
            raise RuntimeError(f"host {host} cannot serve data at {listen.data or 'its own address'}") from self._unable

    def _run(self, run: Callable[[Callable[[], None]], None], listen: ListenConfig) -> None:
        """Serves until it fails; the constructor raises what keeps it from beginning."""
        try:
            run(lambda: asyncio.run(self._main(listen)))
        except BaseException as error:
            if self.address:
                raise
            self._unable = error
        finally:
            self._started.set()

    async def _main(self, listen: ListenConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self.local: LocalServer[ClientStream] = LocalServer(self._take_local, busy=self._busy)
        with contextlib.closing(self.local):
            self.fetches = FetchServer(self.reader, self.local)
            self.served = ServedCalls(self.reader, self.local, self.early.may, self._hand)
            server, self.address = await links.serve(
                {streams.DATA_STREAM: self._stream, **self._others},
                streams.bind_address(listen.data),
                listen.client_ports,
                tls=listen.tls,
                silence=limits.DATA_SILENCE_S,
            )
            self.store.on_end = self._session_ended
            self._started.set()
            await server.serve_forever()

    def later(self, act: Callable[[Any], None], what: Any) -> None:
        """Calls `act(what)` on the loop; from any thread."""
        self._loop.call_soon_threadsafe(act, what)

    def _session_ended(self, session: int) -> None:
        self.later(self._hang_up, session)

    def _hang_up(self, session: int) -> None:
        """Closes the streams of a session that has ended: no one reads them, and its fetches would wait without end."""
        for stream in [stream for stream in self.streams if stream.session == session]:
            stream.link.close("the session has ended")

    async def _stream(self, link: links.AsyncLink) -> None:
        metadata = link.metadata
        grant = grant_of(self.data_secret, session_of(metadata), metadata.get("authorization", ""))
        if grant is None or self.store.ended(grant.session):
            link.refuse("wrong data token, or its session has ended")
        if sum(stream.session == grant.session for stream in self.streams) >= MAX_STREAMS:
            link.refuse(f"the session has {MAX_STREAMS} data streams to this host, the most that it may have")
        if sum(stream.grant.tenant == grant.tenant for stream in self.streams) >= MAX_TENANT_STREAMS:
            link.refuse(f"the tenant has {MAX_TENANT_STREAMS} data streams to this host, the most that it may have")
        link.limit(limits.MAX_CLIENT_BATCH_BYTES + MAX_HEADER_BYTES)
        stream = ClientStream(link, grant, self.quotas.setdefault(grant.tenant, UploadQuota()))
        self.streams.add(stream)
        stream.outbox.send(wire.LocalDoor(*self.local.invite(stream)))
        self.early.opened(stream)
        pump = asyncio.ensure_future(stream.outbox.carry(link))
        try:
            while (data := await link.read()) is not None and not self.store.ended(stream.session):
                check_batch(data, MAX_BATCH)
                await self._take_batch(stream, wire.TO_HOST_DATA.decode_batch(data))
                await stream.outbox.room(MAX_UNREAD)
                # Batches that are here already would otherwise be worked off before another client is served.
                await asyncio.sleep(0)
        except (TooLarge, WireError) as error:
            link.close(str(error))
        finally:
            self.streams.discard(stream)
            self._end(stream)
            # A write that is cancelled half-way would keep the call open; what was sent before goes out first.
            stream.outbox.close()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(pump, CLOSE_LIMIT_S)

    async def _take_batch(self, stream: ClientStream, batch: Sequence[wire.ToHostData]) -> None:
        """Takes the messages of a batch. Between them others are served, once it takes long: it may be of calls that
        are computed here. Before a call that would be left, answers to those before it may leave. What is stored of
        arrays one behind the other is reported together."""
        began = time.perf_counter()
        for message in batch:
            crowded = type(message) is wire.ServeCall and not self.served.has_room(stream)
            if crowded or time.perf_counter() - began > TURN_S:
                self._say_stored()
                await stream.outbox.room(MAX_UNREAD)
                await asyncio.sleep(0)
                if self.store.ended(stream.session):
                    return
                began = time.perf_counter()
            try:
                if type(message) is wire.PutOpen or type(message) is wire.PutPart:
                    self._upload(stream, message)
                    continue
                self._say_stored()  # the message may be a launch with it
                if type(message) is wire.CancelFetch and message.request not in stream.fetches:
                    # Its question may have come by the local socket, and the session may end while that is read.
                    await self.local.catch_up(stream, lambda: stream.outbox.has_room(MAX_UNREAD))
                    began = 0.0
                self._take(stream, message)
            except FreesAwaited as error:  # its bytes are behind it: nothing more is read meanwhile
                self._say_stored()
                await self._open_later(stream, message, error)
        self._say_stored()

    def _take(self, stream: ClientStream, message: wire.ToHostData, local: Any = None, file: Any = None) -> None:
        """Takes a message; `local` is the local socket by which it came, if any, `file` came with it."""
        if isinstance(message, wire.LaunchEarly):  # first those that somebody waits for
            if message.request:
                first = message.results
                also = tuple([(request, first + place) for request, place in message.also]) if message.also else ()
                asked = wire.Fetch(message.request, first + message.asked, message.devices, also)
                self.fetches.take(stream, asked, local, file)
            self.early.take(stream, message)
        elif isinstance(message, wire.ServeCall):
            self.served.take(stream, message, local)
        elif isinstance(message, wire.Fetch):
            self.fetches.take(stream, message, local, file)
        elif isinstance(message, wire.CancelFetch):
            self.fetches.withdraw(stream, message.request)
        else:
            self._upload(stream, message, local, file)
            self._say_stored()

    def _take_local(
        self, stream: ClientStream, connection: socket.socket, data: bytes, file: SharedFile | None
    ) -> None:
        """Takes a message of the local socket, and the file that came with it."""
        try:
            message = wire.TO_HOST_DATA.decode(data)
            if isinstance(message, wire.PutPart):
                raise WireError("PutPart came by the local socket")
            if isinstance(message, wire.PutOpen) and file is None and not message.whole:
                lost = OSError("no file and no pipe came with an array; its host may have no descriptor left for one")
                self._put_failed(stream, message.request, None, lost)
                return
            if file is not None and not isinstance(message, wire.PutOpen):  # uploads are counted by `stream.upload`
                file = file if isinstance(message, wire.Fetch) and stream.files < MAX_FILES else None
            try:
                self._take(stream, message, connection, file)
            except FreesAwaited as error:
                self._wait(stream, message, error, connection, file)
        except WireError as error:
            stream.link.close(str(error))
        if not stream.outbox.has_room(MAX_UNREAD):
            stream.wait_for_reader(self.local, connection)

    def _end(self, stream: ClientStream) -> None:
        self._say_stored()
        self.local.dismiss(stream)
        for request in list(stream.fetches):
            self.fetches.withdraw(stream, request)
        stream.end()
        for upload in stream.uploads.values():
            stream.quota.release(stream.name_of(upload.message))
        used = {other.grant.tenant for other in self.streams}
        for tenant, quota in list(self.quotas.items()):
            if tenant not in used and quota.is_empty:
                del self.quotas[tenant]

    def arriving(self) -> tuple[Arriving, ...]:
        """Some of the uploads that come in; from any thread."""
        return arriving(self.streams)

    # --- puts ---------------------------------------------------------------------------------------------------------

    def _upload(self, stream: ClientStream, message: wire.PutOpen | wire.PutPart, *local: Any) -> None:
        request = message.request
        try:
            if isinstance(message, wire.PutOpen):
                upload = self._open(stream, message, *local)  # raises `FreesAwaited` beside the others
            elif request in stream.uploads:
                upload = stream.uploads[request]
                upload.add(message)
            else:
                return
            if upload.missing <= 0:
                if upload.size <= SMALL_BYTES and upload not in stream.handed:
                    self._stored(stream, upload, *self._made(stream, upload))
                    stream.uploads.pop(request, None)
                else:
                    del stream.uploads[request]
                    task = asyncio.ensure_future(self._store(stream, upload))
                    self.storing.add(task)
                    task.add_done_callback(self.storing.discard)
        except _PUT_ERRORS as error:
            self._put_failed(stream, request, stream.uploads.pop(request, None), error)

    def _wait(self, stream: ClientStream, message: Any, first: FreesAwaited, *local: Any) -> None:
        """Has an upload of the local socket wait, with its pipe or file."""
        if len(stream.handed) + stream.waiting >= MAX_PIPES:
            self._put_failed(stream, message.request, None, first.refusal)
            return
        stream.waiting += 1
        task = asyncio.ensure_future(self._open_later(stream, message, first, *local))
        self.storing.add(task)

        def over(task: asyncio.Task[None]) -> None:
            stream.waiting -= 1
            self.storing.discard(task)

        task.add_done_callback(over)

    async def _open_later(self, stream: ClientStream, message: Any, first: FreesAwaited, *local: Any) -> None:
        """Begins an upload once what its session has freed is gone."""

        def begin() -> None:
            if stream in self.streams and not self.store.ended(stream.session):
                self._take(stream, message, *local)

        try:
            limit_s = 0.0 if stream.waited_in_vain else FREES_LIMIT_S
            await self.awaited.open(stream.session, message, begin, first, limit_s)
        except FreesAwaited as error:
            stream.waited_in_vain = True
            self._put_failed(stream, message.request, None, error.refusal)

    async def _store(self, stream: ClientStream, upload: Upload) -> None:
        """Puts a big array on the devices in another thread: the loop serves all clients."""
        try:
            made = await self._loop.run_in_executor(stream.storing, self._made, stream, upload)
            self._stored(stream, upload, *made)
            self._say_stored()
        except Exception as error:  # whatever it is: also that the stream has ended just now
            self._put_failed(stream, upload.message.request, upload, error)
        finally:
            stream.handed.discard(upload)

    def _made(self, stream: ClientStream, upload: Upload) -> tuple[jax.Array, dict[int, bytes]]:
        array = upload.array(self.compiler)
        if self.equal is not None:
            array = self.equal.one_of(stream.grant.tenant, stream.session, upload, array)
        return array, upload.digests(self.data_secret) if upload.plan.positions else {}

    def _stored(self, stream: ClientStream, upload: Upload, array: jax.Array, digests: dict[int, bytes]) -> None:
        """Keeps an array. It is reported to the controller before its client can launch with it: at the end of this
        step of the loop, until which nothing leaves by a stream."""
        message, session, buffer = upload.message, stream.session, upload.message.buffer
        name = session, buffer
        reserved = stream.quota.reserved.get(name, 0)
        if not self.store.add(session, buffer, array, reserved, stream.gone):
            taken = WireError(f"buffer {buffer} is on host {self.host} already; an upload takes a new number")
            self._put_failed(stream, message.request, upload, taken)
            return
        stored = wire.Stored(self.host, session, buffer, message.placed.mesh.id, message.type, message.spec, digests)
        self.note(stored)
        self._unsaid.append(stored)
        if reserved:
            stream.quota.release(name) if stream.gone is None else stream.quota.keep(name)
        done = wire.PutDone(message.request)
        if upload.came_by is not None:
            self._say_stored()
            if self.local.send(upload.came_by, wire.encode([done])) and upload.is_awaited:
                return
        stream.outbox.send(done)

    def _say_stored(self) -> None:
        """Reports what is stored and was not reported yet."""
        if unsaid := self._unsaid:
            self._unsaid = []
            self.report(unsaid)

    def _put_failed(self, stream: ClientStream, request: int, failed: Upload | None, error: Exception) -> None:
        if failed is not None:
            stream.quota.release(stream.name_of(failed.message))
        stream.outbox.send(wire.DataFailed(request, to_failure(error, "put", host=self.host)))

    def _open(self, stream: ClientStream, message: wire.PutOpen, local: Any = None, came: Any = None) -> Upload:
        """Makes room for an array, once it is clear that it may come; one in a file has it. A small one that came whole
        is on its way at no time. Within no quota it reserves nothing, and is not among the stream's uploads."""
        stream.check(message, self.data_secret)
        if len(self.store.of_session(stream.session)) >= MAX_BUFFERS:
            raise QuotaExceeded(f"a session may have {MAX_BUFFERS} arrays on a host; one more was put")
        plan = self.plans.of(message.type, message.spec, message.placed)
        name = stream.session, message.buffer
        if message.whole and came is None and stream.gone is None and plan.bytes <= SMALL_BYTES:
            stream.quota.check(name, plan.device_bytes)
            return stream.upload(message, plan, local)
        behind = message.living >= 0 and self.awaited.is_ahead(stream.session, message)
        stream.quota.reserve(name, plan.device_bytes, stream.grant.allowance, message.living, behind)
        stream.waited_in_vain = False
        try:
            upload = stream.uploads[message.request] = stream.upload(message, plan, local, came)
        except BaseException:
            stream.quota.release(name)
            raise
        return upload
