"""The fetches of a host's data server: small arrays in one answer, by the thread that has them at hand, big ones in
parts or in a file in memory, and whether arrays are there.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from pathways_ray import limits
from pathways_ray.errors import Failure, to_failure
from pathways_ray.executor.data.buffer_store import BufferStore, Later, may_be_later
from pathways_ray.executor.data.client_stream import MAX_UNREAD, ClientStream, FetchRequest
from pathways_ray.executor.data.failure_texts import failure_in
from pathways_ray.executor.data.shard_reader import NEAR_BYTES, SMALL_BYTES, ShardReader, is_computed
from pathways_ray.transport import messages as wire
from pathways_ray.transport.local_sockets import LocalServer
from pathways_ray.transport.pipes import HostPipe, is_pipe
from pathways_ray.transport.shared_memory import SharedFile

MAX_BACKLOG_PARTS = 8
"""Parts of fetched arrays that wait for a client to read those before."""

MAX_AT_ONCE = 16
"""Fetches of one stream under way beyond which small values are copied by its workers, and no more by the thread that
dispatches for all tenants. A server with a dozen threads is below it."""

MAX_BESIDE = 8
"""Shards of further arrays that an answer has beside those that are asked for, where that thread gives it."""

MAX_LOOKS = 256
"""Buffers of all questions of a stream, as if each were for as many as the one that is looked at, beyond which its
workers look at that one."""


class FetchServer:
    """Answers fetches, within the event loop that runs where it is made."""

    def __init__(self, reader: ShardReader, local: LocalServer[ClientStream]) -> None:
        self.host = reader.host
        self.store: BufferStore = reader.store
        self.reader = reader
        self.local = local
        self._most, self._near_bytes = len(reader.devices), reader.near_bytes
        self._loop = asyncio.get_running_loop()

    def take(
        self,
        stream: ClientStream,
        message: wire.Fetch,
        local: socket.socket | None = None,
        file: SharedFile | None = None,
    ) -> None:
        """Has the thread that stores the array answer, or this one if it is there."""
        request = message.request
        if len(stream.fetches) >= limits.MAX_REQUESTS or request in stream.fetches:
            text = f"{limits.MAX_REQUESTS} fetches of a stream may be under way, of different numbers; one more came"
            stream.outbox.send(wire.DataFailed(request, Failure("QuotaExceeded", text, "fetch", host=self.host)))
            return
        fetching = stream.fetches[request] = FetchRequest(message, local, file)
        fetching.come = partial(self._present, stream, fetching)
        self.store.when_present(stream.session, message.buffer, fetching.come, fetching.others)

    def _is_small(self, value: Any, fetching: FetchRequest) -> bool:
        devices = fetching.message.devices
        if not devices:
            return True
        if fetching.file is not None or len(devices) > self._most:
            return False
        size = math.prod(value.shape) * value.dtype.itemsize  # `nbytes` asks NumPy: seven calls
        if size <= SMALL_BYTES or fetching.local is None or size >= self._near_bytes:
            return bool(size <= SMALL_BYTES)
        if len(devices) > 1:  # several may have all of it
            size = math.prod(value.sharding.shard_shape(value.shape)) * value.dtype.itemsize * len(devices)
        return bool(size < self._near_bytes)

    def withdraw(self, stream: ClientStream, request: int) -> None:
        """Ends a fetch, whether it was answered or its client has given it up."""
        fetching = stream.fetches.pop(request, None)
        if fetching is not None:
            fetching.file = None  # its callback keeps the request for the collector
            self.store.forget(stream.session, fetching.buffer, fetching.come)
            if fetching.pipe is not None:
                fetching.pipe.end()
            if fetching.task is not None:
                fetching.task.cancel()

    def _present(self, stream: ClientStream, fetching: FetchRequest, later: Later | None = None) -> None:
        """Reads at once what is small and computed, and `later` what is not; a worker of the stream waits for the rest,
        and for all of a client with many fetches: at once is in the thread that dispatches for all tenants, and later
        in the one that watches a launch, which waits for no other."""
        message, asked = fetching.message, len(stream.fetches)
        also, devices = message.also, message.devices
        try:
            if asked > MAX_AT_ONCE or (also and asked * len(also) > MAX_LOOKS):
                stream.workers.submit(self._look, stream, fetching)
                return
            if fetching.others and self._awaits_another(stream, fetching):
                return
            value: Any = self.store.get(stream.session, message.buffer)
            few = not also or len(also) * len(devices) <= MAX_BESIDE
            quick = few and hasattr(value, "is_ready") and self._is_small(value, fetching)
            if quick and is_computed(value) and (not also or self._are_computed(stream, message)):
                self._read_small(stream, fetching, value)
            elif quick and later is not None and may_be_later(later, len(devices) * (1 + len(also))):
                read = self._present if also else self._read_small
                later.append(partial(read, stream, fetching))
                self.reader.begin(stream.session, message)
            else:
                stream.workers.submit(self._read, stream, fetching)
        except RuntimeError as error:  # the stream has ended, or there is no thread left, and its client waits
            self._reply(stream, fetching, [self._failed(message, error)])

    def _look(self, stream: ClientStream, fetching: FetchRequest) -> None:
        """Reads a value, unless another one has to come first; for a worker of the stream."""
        if not self._awaits_another(stream, fetching):
            self._read(stream, fetching)

    def _awaits_another(self, stream: ClientStream, fetching: FetchRequest) -> bool:
        """Has a question for several buffers wait for the next one that is not there; whether one is not."""
        while fetching.others:
            fetching.buffer = fetching.others.pop()
            if fetching.buffer not in self.store.of_session(stream.session):
                self.store.when_present(stream.session, fetching.buffer, fetching.come, fetching.others)
                if stream.fetches.get(fetching.message.request) is not fetching:  # withdrawn meanwhile
                    self.store.forget(stream.session, fetching.buffer, fetching.come)
                return True
        return False

    def _are_computed(self, stream: ClientStream, message: wire.Fetch) -> bool:
        """Whether none of the others that a question is for has to be waited for."""
        found = self.store.of_session(stream.session)
        others = [found.get(buffer) for _, buffer in message.also]
        return all(hasattr(other, "is_ready") and is_computed(other) for other in others)

    def _read(self, stream: ClientStream, fetching: FetchRequest) -> None:
        """Waits for a value and copies it; a big one has to wait for its turn."""
        message = fetching.message
        try:
            value = self.reader.value(stream.session, message.buffer)
            if self._is_small(value, fetching):
                self._read_small(stream, fetching, value)
            elif not is_computed(value) or not self._hand_over(stream, fetching, value):
                self._loop.call_soon_threadsafe(self._in_parts, stream, fetching, value)
        except Exception as error:
            self._reply(stream, fetching, [self._failed(message, error)])

    def _hand_over(self, stream: ClientStream, fetching: FetchRequest, value: Any) -> bool:
        """Has a big array come in a file, or by a pipe, from this worker of the stream; false where there is neither,
        or no room."""
        came, message = fetching.file, fetching.message
        if came is None:
            return False
        piped = is_pipe(came)
        if piped:
            arrays = self.reader.arrays(value, message.devices)
            fetching.pipe = HostPipe(came)
            if stream.fetches.get(message.request) is not fetching:  # withdrawn, perhaps before it could see the pipe
                fetching.pipe.end()
                return True
        elif not self.reader.write(value, message.devices, came):
            return False
        came = fetching.file = None  # a pipe has a descriptor of its own
        done = wire.FetchDone(message.request)
        if fetching.local is None or not self.local.send(fetching.local, wire.encode([done])):
            self._loop.call_soon_threadsafe(stream.outbox.send, done)
        if piped:
            assert fetching.pipe is not None
            fetching.pipe.write(arrays)
        if stream.fetches.get(message.request) is fetching:
            stream.fetches.pop(message.request, None)
        return True

    def _read_small(self, stream: ClientStream, fetching: FetchRequest, value: Any = None) -> None:
        """Waits for a value that is small and copies it; without one, for that in the store."""
        message = fetching.message
        try:
            if value is None:
                value = self.reader.value(stream.session, message.buffer)
            if message.also:
                self.reader.begin(stream.session, message)
            answer = self.reader.parts(message.request, value, message.devices)
            # One for no devices waits for the others here; nothing is made unasked for a client that does not read.
            if message.also and (not message.devices or stream.outbox.has_room(MAX_UNREAD)):
                room = NEAR_BYTES - value.nbytes if fetching.local is not None else limits.MAX_SIBLINGS_BYTES
                answer = [*self.reader.siblings(stream.session, message, room), *answer]
            self._reply(stream, fetching, answer, value)
        except Exception as error:
            self._reply(stream, fetching, [self._failed(message, error)])

    def _reply(
        self, stream: ClientStream, fetching: FetchRequest, answer: Sequence[wire.Message], value: Any = None
    ) -> None:
        """Answers at once, in this thread, a question that came by a local socket; the loop answers the others. What of
        a value is not small goes in parts where its client does not read that socket."""
        number, local, send = fetching.message.request, fetching.local, self.local.send
        if local is not None and stream.fetches.get(number) is fetching and send(local, wire.encode(answer)):
            stream.fetches.pop(number, None)
            fetching.file = None
        elif value is not None and fetching.message.devices and value.nbytes > SMALL_BYTES:
            self._loop.call_soon_threadsafe(self._in_parts, stream, fetching, value)
        else:
            self._loop.call_soon_threadsafe(self._answer, stream, fetching, answer)

    def _failed(self, message: wire.Fetch, error: Exception) -> wire.DataFailed:
        return wire.DataFailed(message.request, failure_in(str(error)) or to_failure(error, "fetch", host=self.host))

    def _answer(self, stream: ClientStream, fetching: FetchRequest, messages: Sequence[wire.Message]) -> None:
        if stream.fetches.get(fetching.message.request) is fetching:
            del stream.fetches[fetching.message.request]
            fetching.file = None
            for message in messages:
                stream.outbox.send(message)

    def _in_parts(self, stream: ClientStream, fetching: FetchRequest, value: Any) -> None:
        if stream.fetches.get(fetching.message.request) is fetching:
            fetching.task = asyncio.ensure_future(self._send(stream, fetching, value))

    async def _send(self, stream: ClientStream, fetching: FetchRequest, value: Any) -> None:
        message = fetching.message
        try:
            await stream.computed(value)
            async with stream.turns:
                work = self._loop.run_in_executor
                if not await work(stream.workers, self._hand_over, stream, fetching, value):
                    for device in message.devices:
                        await self._send_shard(stream, message.request, value, device)
        except Exception as error:
            stream.outbox.send(self._failed(message, error))
        fetching.file = None
        if stream.fetches.get(message.request) is fetching:
            del stream.fetches[message.request]

    async def _send_shard(self, stream: ClientStream, request: int, value: Any, device: int) -> None:
        data = await self._loop.run_in_executor(stream.workers, self.reader.bytes, value, device)
        total = len(data)
        for offset in range(0, max(total, 1), limits.PART_BYTES):
            # A view: a part is copied when it is encoded, right before it leaves.
            part = data[offset : offset + limits.PART_BYTES]
            stream.outbox.send(wire.FetchPart(request, device, offset, total, part))
            await asyncio.sleep(0)
            await stream.outbox.room(MAX_BACKLOG_PARTS)
