"""Links: streams between the runtime's own processes, as frames on a TCP connection of their own.

A gRPC message costs some 70 us from process to process and 100 us of CPU time at each end, whatever is in it. Between a
controller, its schedulers and their hosts that was most of the time of a small launch (ADR 0017). A link carries the
same batches (`batcher.batches`) in a fraction of that.

Each end sends a ping every `PING_S`, and gives up an end that is silent for `SILENCE_S`. The end that dials begins with
a `Handshake`, which names the path and shows the secret; before that, nothing long is read.

This file has the end on an event loop; `thread_links` has one for threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NoReturn, cast

import msgspec

from pathways_ray import limits
from pathways_ray.liveness import Liveness
from pathways_ray.machine_load import slowness
from pathways_ray.transport.endpoints import Tls, joined
from pathways_ray.transport.frames import (
    AT_ONCE_BYTES,
    AT_ONCE_FOR_STRANGERS,
    CLOSE_REASON,
    HANDSHAKE,
    PING,
    Frames,
    Handshake,
    LinkLost,
    framed,
)
from pathways_ray.transport.messages import encode
from pathways_ray.transport.rooms import Room
from pathways_ray.transport.sockets import READ_BYTES, keep_alive
from pathways_ray.transport.tls import Trust, client_context, server_context

PING_S = 5.0
SILENCE_S = 20.0
"""Two pings may be late, and a machine that stops for some seconds is not given up."""


def silence_of(limit_s: float) -> float:
    """The silence after which a link between processes of the runtime is given up, where a silent process counts as
    lost after `limit_s`: longer, so that it is the process that is judged, and not its link."""
    return max(SILENCE_S, 2.5 * limit_s)


_PEER = "the other end"
_room = Room(READ_BYTES)
HANDSHAKE_LIMIT_S = 10.0
MAX_HANDSHAKE_BYTES = 4096
MAX_UNAUTHENTICATED = 256
"""Connections without a handshake that a server holds: more would let any peer use up its file descriptors. A further
one takes the place of the oldest, so that a port is never closed: a handshake comes within a round trip."""

MAX_UNAUTHENTICATED_OF_ADDRESS = 64
"""Those of one address; a further one takes the place of its oldest."""

CONNECT_LIMIT_S = 10.0

MAX_READ_AHEAD_BYTES = 4 << 20
BATCH_OVERHEAD_BYTES = 256
"""Bytes of batches that wait to be read, and the bytes that Python needs for each; beyond them the other end waits."""


class AsyncLink(asyncio.BufferedProtocol):
    """One end of a link on an event loop.

    A handler reads batches until there are no more, puts batches while the link is not full, and closes or refuses it.
    """

    def __init__(
        self,
        greeted: Callable[[AsyncLink], None] | None = None,
        silence: float = 0.0,
        unauthenticated: dict[AsyncLink, str] | None = None,
    ) -> None:
        self.path = self.reason = ""
        self.metadata: dict[str, str] = {}
        self._greeted, self._loop = greeted, asyncio.get_running_loop()
        self._unauthenticated: dict[AsyncLink, str] = unauthenticated if unauthenticated is not None else {}
        self._frames = Frames(MAX_HANDSHAKE_BYTES if greeted is not None else limits.MAX_MESSAGE_BYTES)
        self._frames.at_once = AT_ONCE_FOR_STRANGERS
        self._batches, self._ahead = deque[bytes](), 0
        self._gone, self._heard = asyncio.Event(), self._loop.time()
        self._reader: asyncio.Future[bool | None] | None = None
        self._take: Callable[[bytes], bool | None] | None = None
        self._failure: Exception | None = None
        self._room: asyncio.Future[None] | None = None
        self.full = False
        """Whether the other end does not take the batches sent before."""
        self._transport: asyncio.Transport | None = None
        self._space = _room.space
        self._paused = self._over = self._closed = self._in_turns = False
        self.given_up = False
        """Whether the other end was given up for its silence: its process may be there, and stopped."""
        self._peer: Liveness[str] = Liveness(silence or SILENCE_S, PING_S)
        self._timer: asyncio.TimerHandle | None = None

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, which Ray brings along, is no subclass
        keep_alive(transport.get_extra_info("socket"))
        if self._greeted is not None:
            self._enter((transport.get_extra_info("peername") or ("",))[0])
            self._timer = self._loop.call_later(HANDSHAKE_LIMIT_S, self._hang_up, "no handshake came")
        else:
            self._live()

    def _enter(self, address: str) -> None:
        """Enters a connection without a handshake, for which another one may have to go."""
        waiting = self._unauthenticated
        of_address = [link for link, other in waiting.items() if other == address]
        if len(of_address) >= MAX_UNAUTHENTICATED_OF_ADDRESS:
            of_address[0]._displace()
        elif len(waiting) >= MAX_UNAUTHENTICATED:
            next(iter(waiting))._displace()
        waiting[self] = address

    def _displace(self) -> None:
        self._unauthenticated.pop(self, None)
        self._hang_up("a newer connection took the place of this one, which had sent no handshake yet")
        if self._transport is not None:
            self._transport.abort()  # not when the other end has read that: it may never do so

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._space

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(self._space[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        """Takes bytes, which the caller may overwrite afterwards."""
        self._heard, take = self._loop.time(), self._take
        if self._in_turns and len(data) > READ_BYTES // 2:
            take = None  # uvloop reads on in this step where there is more, and others are to go on between
        try:
            for batch in self._frames.feed(data):
                if take is not None:
                    self._give(batch, take)
                    take = None if self._in_turns else self._take
                elif self._greeted is None:
                    self._batches.append(batch)
                    self._ahead += len(batch) + BATCH_OVERHEAD_BYTES
                else:
                    self._greet(HANDSHAKE.decode(batch), self._greeted)
        except (LinkLost, msgspec.MsgspecError, ValueError) as error:
            self._hang_up(str(error))
            return
        if self._frames.close_reason is not None:
            self.reason = self._frames.close_reason
        if self._batches:
            self._wake()
        if self._ahead > MAX_READ_AHEAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _greet(self, handshake: Handshake, greeted: Callable[[AsyncLink], None]) -> None:
        self._greeted = None
        self._unauthenticated.pop(self, None)
        self.path, self.metadata = handshake.path, handshake.metadata
        self._frames.limit = limits.MAX_MESSAGE_BYTES
        self._live()
        greeted(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._unauthenticated.pop(self, None)
        self._gone.set()
        self.reason = self.reason or (str(exc) if exc is not None else "it closed the connection")
        if self._timer is not None:
            self._timer.cancel()
        self._wake()
        self.resume_writing()

    def eof_received(self) -> bool:
        """The other end sends no more, but may still listen (without TLS, which has no half-open connections)."""
        self.reason = self.reason or "it closed the connection"
        self._over = True
        self._wake()
        transport = self._transport
        return self._greeted is None and transport is not None and transport.get_extra_info("sslcontext") is None

    def _wake(self, end: bool | None = None) -> None:
        self._take = None  # what comes now waits for who wakes
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(end)

    def _give(self, batch: bytes, take: Callable[[bytes], bool | None]) -> None:
        try:
            if (end := take(batch)) is not None:
                self._wake(end)
        except Exception as error:  # for who called `each`, also where the link has ended meanwhile
            self._failure = error
            self._wake()

    def pause_writing(self) -> None:
        self._room, self.full = self._loop.create_future(), True

    def resume_writing(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room, self.full = None, False

    # Called by the owner.

    async def read(self) -> bytes | None:
        """The next batch, or None at the end. Who reads has looked at the metadata."""
        self._frames.at_once = AT_ONCE_BYTES
        while not self._batches:
            if self._over or self._closed:
                return None
            await self._woken()
        batch = self._batches.popleft()
        self._ahead -= len(batch) + BATCH_OVERHEAD_BYTES
        if self._paused and self._ahead <= MAX_READ_AHEAD_BYTES // 2 and self._transport is not None:
            self._paused = False
            self._heard = self._loop.time()
            if not self._closed and not self._transport.is_closing():
                self._transport.resume_reading()
        return batch

    async def each(self, take: Callable[[bytes], bool | None], in_turns: bool = False) -> bool | None:
        """Has each batch taken as soon as it comes, until the end or until `take` returns something, which this returns
        then: no task wakes for it, as for `read`. With `in_turns` others go on between batches that come together."""
        self._frames.at_once, end = AT_ONCE_BYTES, None
        while end is None and (self._batches or not (self._over or self._closed)):
            if not self._batches:
                self._take, self._in_turns = take, in_turns
                end = await self._woken()
            else:
                end = take(cast(bytes, await self.read()))
                if in_turns:
                    await asyncio.sleep(0)
        return end

    async def _woken(self) -> bool | None:
        self._reader = self._loop.create_future()
        try:
            end = await self._reader
        finally:
            self._take = self._reader = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return end

    async def write(self, batch: bytes) -> None:
        """Sends a batch; waits while the other end does not take the batches before. After the end it does nothing: the
        reader learns of the end."""
        if self._room is not None:
            await asyncio.shield(self._room)  # other writers wait for it too
        self.put(batch)

    async def wait_closed(self) -> None:
        """Waits until the connection is gone, and not only on its way to be."""
        await self._gone.wait()

    def when_room(self, callback: Callable[[], None]) -> None:
        """Calls back once it takes it again, or is gone."""
        if self._room is None:
            self._loop.call_soon(callback)
        else:
            self._room.add_done_callback(lambda _: callback())

    def put(self, batch: bytes) -> None:
        """Sends a batch at once, or keeps it while the link is full."""
        transport = self._transport
        if self._closed or transport is None or transport.is_closing():
            return
        for piece in framed(batch):
            transport.write(piece)

    def limit(self, most: int) -> None:
        """Takes no batch of more than `most` bytes from now on."""
        self._frames.limit = most

    def refuse(self, reason: str) -> NoReturn:
        """Hangs up with a reason. Raises `LinkLost`, which ends the handler."""
        self._hang_up(reason)
        raise LinkLost(reason)

    def close(self, reason: str = "") -> None:
        """Hangs up, with a close reason if one is given; the batches sent before go out."""
        if reason:
            self._hang_up(reason)
        self._over = True  # with TLS the connection lasts until the other end agrees
        self._wake()
        self._paused = False  # so that a peer that takes nothing is given up for its silence
        # One of asyncio's with TLS that is closed twice raises when it is written to, and cannot be aborted.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def _hang_up(self, reason: str) -> None:
        self.reason = self.reason or reason
        words = reason.encode()[:MAX_HANDSHAKE_BYTES]
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write((len(words) | CLOSE_REASON).to_bytes(4, "big") + words)
            self._transport.close()

    def _live(self) -> None:
        """Sends a ping, and looks whether the other end was heard from."""
        if self._timer is not None:
            self._timer.cancel()
        if self._closed or self._transport is None:
            return
        now, looked = self._loop.time(), self._peer.looked
        if looked is None or self._heard > looked:
            self._peer.hear(_PEER, self._heard)
        if self._peer.silent(now, slowness()) and not self._paused:
            self.reason = f"it was silent for {now - self._heard:.0f} s"
            self.given_up = True
            self._transport.abort()
            return
        if self._room is None and not self._transport.is_closing():
            self._transport.write(PING)
        self._timer = self._loop.call_later(PING_S, self._live)


Handler = Callable[[AsyncLink], Awaitable[None]]


async def serve(
    handlers: dict[str, Handler],
    bind: str,
    ports: tuple[int, int] = (0, 0),
    tls: Tls | None = None,
    silence: float = 0.0,
) -> tuple[asyncio.Server, str]:
    """Serves links at address `bind`, on the first free port of those from the first to the last of `ports`, or on any
    one for (0, 0); returns the server and `address:port`.

    A handler gets each link whose handshake names its path, and has to look at the metadata before it reads. The link
    ends with it, or when the other end is silent for `silence` seconds (0: `SILENCE_S`).

    Raises:
        OSError: all ports are taken, or the address is not one of this machine.
        UsageError: a file of `tls` cannot be read.
    """
    tasks: set[asyncio.Task[None]] = set()
    unauthenticated: dict[AsyncLink, str] = {}

    async def handled(link: AsyncLink, handler: Handler) -> None:
        try:
            with contextlib.suppress(LinkLost):
                await handler(link)
        finally:
            link.close()

    def greeted(link: AsyncLink) -> None:
        handler = handlers.get(link.path)
        if handler is None:
            raise LinkLost(f"no path {link.path!r} is served here")
        task = asyncio.ensure_future(handled(link, handler))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    context = server_context(tls) if tls is not None else None
    for port in range(ports[0], ports[1] + 1):
        with contextlib.suppress(OSError) if port < ports[1] else contextlib.nullcontext():
            server = await asyncio.get_running_loop().create_server(
                lambda: AsyncLink(greeted, silence, unauthenticated),
                bind.strip("[]"),
                port,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_LIMIT_S if context is not None else None,
            )
            return server, joined(bind, server.sockets[0].getsockname()[1])
    raise OSError(f"there is no port from {ports[0]} to {ports[1]}")


async def dial(
    address: str, path: str, metadata: dict[str, str], trust: Trust | None = None, silence: float = 0.0
) -> AsyncLink:
    """A link to the server of `path` at `address`. Raises `LinkLost` when nothing listens there, or it refuses."""
    host, port = endpoint(address)
    context = client_context(trust) if trust is not None else None
    name = ((trust.name if trust is not None else "") or host) if context is not None else None
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            _, link = await asyncio.get_running_loop().create_connection(
                lambda: AsyncLink(silence=silence), host, port, ssl=context, server_hostname=name
            )
    except (OSError, TimeoutError, ssl.SSLError) as error:
        raise LinkLost(f"no answer at {address}: {error or type(error).__name__}") from None
    await link.write(encode(Handshake(path, metadata)))
    return link


def endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
