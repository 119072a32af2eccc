"""The client service: the sockets that clients connect to.

A client shows a token (a tenant's, or the operator's) to open a session, and the session's secret afterwards. Nothing
is read from a caller who shows neither. All decisions are those of `controller.core`; this file carries batches in, and
messages and replies out, by gRPC and by direct links.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import get_args

import grpc

from pathways_ray import limits
from pathways_ray.controller import events
from pathways_ray.controller.channel import Carrier, ChannelEvent
from pathways_ray.controller.clients import STREAM_LIMIT_S, Client
from pathways_ray.controller.core import ControllerCore
from pathways_ray.controller.requests import MAX_CALL_BYTES
from pathways_ray.controller.takeover import MAX_RESUME_BYTES
from pathways_ray.controller.tenants_file import TenantsFile
from pathways_ray.errors import PathwaysError, TooLarge, WireError, to_failure
from pathways_ray.transport import grpc_streams, links, outboxes, streams
from pathways_ray.transport import messages as wire
from pathways_ray.transport.batcher import check_batch
from pathways_ray.transport.capabilities import link_tags
from pathways_ray.transport.endpoints import ListenConfig

HANG_UP_LIMIT_S = 5.0
"""Seconds that a client which closes its session has to end its stream."""

CLOSE_LIMIT_S = 1.0
"""The end of a connection waits this long for the messages that were sent before, such as the close reason."""

MAX_EARLY_BYTES = 1 << 12
"""A batch on a direct link whose session has no stream yet: clients send none before they have the answer tag."""

LONG_CALLS: dict[type[wire.Request], int] = {
    wire.Explain: limits.MAX_GRAPH_BYTES + MAX_CALL_BYTES,
    wire.ResumeSession: MAX_RESUME_BYTES,
}
"""Calls that may have more than `MAX_CALL_BYTES`, and how many each may have."""

UNKNOWN_SESSION = "unknown session or wrong secret"
SECOND_CONNECTION = "the session has its stream already"
SECOND_LINK = "another direct link of the session waits for its stream already"
NO_STREAM = "the stream of the session did not come, or has ended"


class Connections:
    """The sockets of one session, and the messages that wait for them.

    Args:
        depth: launches of the session that are under way.
    """

    def __init__(self, depth: Callable[[], int]) -> None:
        self.stream_outbox = outboxes.AsyncOutbox(depth)
        self.link_outbox = outboxes.AsyncOutbox(depth)
        self.outbox = self.stream_outbox
        self.streaming = asyncio.Event()
        self.link_waits = False
        self.upgraded = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.reader: asyncio.Task[None] | None = None
        self.closed = False
        self.ended = asyncio.Event()

    def switch(self) -> None:
        """Sends `Upgraded` as the last message on the stream; the rest goes by the link."""
        self.stream_outbox.send(wire.Upgraded())
        self.stream_outbox.close()
        self.outbox = self.link_outbox
        self.upgraded.set()

    async def room(self) -> None:
        """Waits until the client may say more."""
        await self.reading.wait()
        await self.outbox.room(limits.MAX_BACKLOG)

    async def over(self) -> None:
        """Waits for the end of the session, and until its client has had time to take what was said before."""
        await self.ended.wait()
        await asyncio.sleep(HANG_UP_LIMIT_S)

    def close(self, *, at_once: bool) -> None:
        """Hangs up after the messages that were sent before: at once, or when the client has had time to."""
        self.closed = True
        self.ended.set()
        self.streaming.set()
        self.upgraded.set()
        self.reading.set()
        if at_once:
            self.outbox.close()
        if self.reader is not None and at_once:
            self.reader.cancel()
        elif self.reader is not None:
            asyncio.get_running_loop().call_later(HANG_UP_LIMIT_S, self.reader.cancel)


class ClientService:
    """Serves clients on the controller's event loop.

    Args:
        handle: takes an event to the core and carries out its commands.
        strict: see `TenantsFile`.
    """

    def __init__(
        self, core: ControllerCore, handle: Callable[[events.Event], None], listen: ListenConfig, strict: bool
    ) -> None:
        self.core = core
        self.handle = handle
        self.listen = listen
        self.tenants = TenantsFile(listen.tenants, strict)
        self.connections: dict[int, Connections] = {}
        self.replies: dict[int, asyncio.Future[wire.Reply]] = {}
        self.calls = itertools.count(1)

    async def serve(self) -> str:
        """Listens for clients; returns `address:port`."""
        self._tenants_read()
        self.server, address = await grpc_streams.serve(
            {streams.CLIENT_STREAM: self._client_stream, streams.CALL: self._call},
            streams.bind_address(self.listen.front),
            self.listen.port,
            self.listen.tls,
        )
        self.links, link_address = await links.serve(
            {streams.CLIENT_STREAM: self._client_link},
            streams.bind_address(self.listen.front),
            self.listen.client_ports,
            tls=self.listen.tls,
            silence=limits.LINK_SILENCE_S,
        )
        self.core.requests.link_port = links.endpoint(link_address)[1]
        return address

    def refresh(self) -> None:
        """Reads the table of tenants if its file is another one than before."""
        if self.tenants.refresh():
            self._tenants_read()

    def _tenants_read(self) -> None:
        self.handle(events.TenantsRead(self.tenants.book, self.tenants.path, self.tenants.problem))

    # --- commands -----------------------------------------------------------------------------------------------------

    def open(self, session: int) -> None:
        # By the client's own launches: others' must not hold up what it waits for.
        self.connections[session] = Connections(lambda: self.core.launches.flying(session))

    def send(self, session: int, message: wire.ToClient) -> None:
        connections = self.connections.get(session)
        if connections is not None:
            connections.outbox.send(message)

    def switch(self, session: int) -> None:
        self.connections[session].switch()

    def pause(self, session: int) -> None:
        self.connections[session].reading.clear()

    def resume(self, session: int) -> None:
        self.connections[session].reading.set()

    def close(self, command: events.CloseChannel) -> None:
        self.connections.pop(command.session).close(at_once=command.at_once)

    def answer(self, command: events.AnswerCall) -> None:
        reply = self.replies.get(command.call)
        if reply is not None and not reply.done():
            reply.set_result(command.reply)

    # --- connections --------------------------------------------------------------------------------------------------

    async def _client_stream(self, context: grpc.aio.ServicerContext) -> None:
        client = self.core.clients.find(grpc_streams.metadata_of(context), lambda client: client.secret)
        if client is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, UNKNOWN_SESSION)
            return
        if not client.channel.allows(ChannelEvent.STREAM_OPENED):
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, SECOND_CONNECTION)
            return
        connections = self.connections[client.session]
        pump = asyncio.ensure_future(connections.stream_outbox.pump(context.write))
        connections.reader = reader = asyncio.ensure_future(
            self._read_stream(client.session, connections, partial(grpc_streams.reading, context))
        )
        pump.add_done_callback(partial(_pumped, reader))
        self.handle(events.StreamOpened(client.session))
        connections.streaming.set()
        try:
            await asyncio.wait({reader})
            if not reader.cancelled():
                reader.result()  # raises what was wrong here, and not with the client
        finally:
            reader.cancel()
            self.handle(events.StreamEnded(client.session))
            connections.stream_outbox.close()
            connections.link_outbox.close()
            await _finish(pump)

    async def _client_link(self, link: links.AsyncLink) -> None:
        """A direct link: its answer tag goes out once the session has its stream; it is read after the upgrade."""
        client = self.core.clients.find(link.metadata, _link_tag)
        if client is None:
            link.refuse(UNKNOWN_SESSION)
        connections = self.connections[client.session]
        if not connections.streaming.is_set():
            await _stream_before(link, connections)
        if not connections.streaming.is_set() or connections.closed:
            link.refuse(NO_STREAM)
        if not client.channel.allows(ChannelEvent.LINK_OPENED):
            link.refuse(SECOND_CONNECTION)
        self.handle(events.LinkOpened(client.session))
        link.put(link_tags(client.secret, client.session)[1].encode())
        try:
            if await _first(connections.upgraded.wait(), link.wait_closed()) and not connections.closed:
                reading = self._read_link(client.session, connections, link)
                await _first(connections.link_outbox.carry(link), reading, connections.over())
        finally:
            self.handle(events.LinkEnded(client.session))

    async def _read_stream(
        self, session: int, connections: Connections, read: Callable[[], Awaitable[bytes | None]]
    ) -> None:
        while (data := await read()) is not None and (waits := self._take(session, Carrier.STREAM, data)) is not False:
            del data
            if waits:
                await connections.room()
            # Batches that are here already would otherwise be worked off before anything else happens.
            await asyncio.sleep(0)

    async def _read_link(self, session: int, connections: Connections, link: links.AsyncLink) -> None:
        while await link.each(partial(self._take, session, Carrier.LINK), in_turns=True):
            await connections.room()

    def _take(self, session: int, carrier: Carrier, data: bytes) -> bool | None:
        """Takes a batch of a client to the core. Returns True where the next one has to wait, False where none is taken
        any more."""
        if (connections := self.connections.get(session)) is None:
            return False
        try:
            check_batch(data)
            messages = wire.TO_CONTROLLER.decode_batch(data)
        except (TooLarge, WireError) as error:
            self.handle(events.ClientGarbled(session, str(error)))
            return False
        self.handle(events.ClientMessages(session, carrier, len(data), messages))
        return None if connections.reading.is_set() and connections.outbox.has_room(limits.MAX_BACKLOG) else True

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _call(self, context: grpc.aio.ServicerContext) -> None:
        try:
            caller = self.core.requests.caller(grpc_streams.metadata_of(context))
            name = self.core.requests.calls.enter(caller)
            try:
                data = await grpc_streams.reading(context) or b""
                check_call(data)
                reply = await self.request(caller, wire.REQUEST.decode(data), len(data))
            finally:
                self.core.requests.calls.leave(name)
        except PathwaysError as error:
            reply = wire.Refused(to_failure(error))
        await context.write(wire.encode(reply))

    async def request(self, caller: events.Caller, request: wire.Request, size: int = 0) -> wire.Reply:
        """The core's reply to a request of `size` bytes."""
        call = next(self.calls)
        self.replies[call] = asyncio.get_running_loop().create_future()
        try:
            self.handle(events.Requested(call, caller, request, size, secrets.token_hex(16)))
            return await self.replies[call]
        finally:
            del self.replies[call]


def check_call(data: bytes) -> None:
    """Looks at a call before it is decoded, which would keep the controller: gRPC takes much longer ones. Raises
    `TooLarge`, or `WireError` for bytes that begin as none does."""
    most = next((size for kind, size in LONG_CALLS.items() if wire.is_tagged(data, kind)), MAX_CALL_BYTES)
    if len(data) > most:
        is_call = any(wire.is_tagged(data, kind) for kind in get_args(wire.Request))
        what = f"a call of {len(data)} bytes; the limit is {most}"
        raise TooLarge(what) if is_call else WireError(f"{what}. It begins as no request does")


def _link_tag(client: Client) -> str:
    return link_tags(client.secret, client.session)[0]


async def _stream_before(link: links.AsyncLink, connections: Connections) -> None:
    """Waits until the session of a direct link has its stream, for a while. Nobody reads the link meanwhile, so it is
    the only one of its session that waits, and takes no long batch."""
    if connections.link_waits:
        link.refuse(SECOND_LINK)
    connections.link_waits = True
    link.limit(MAX_EARLY_BYTES)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STREAM_LIMIT_S):
                await _first(connections.streaming.wait(), link.wait_closed())
    finally:
        connections.link_waits = False
    link.limit(limits.MAX_MESSAGE_BYTES)


async def _first(*waits: object) -> bool:
    """Waits for the first of several; True when it is the first that was given. The others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # raises what was wrong here, and not with the client
        return bool(tasks[0].done())
    finally:
        for task in tasks:
            task.cancel()


def _pumped(reader: asyncio.Task[None], pump: asyncio.Task[None]) -> None:
    """Ends a stream that carries no more messages: its client would wait for ever for what they say."""
    if pump.cancelled() or (error := pump.exception()) is None:
        return
    if not isinstance(error, grpc_streams.ENDED):
        traceback.print_exception(error)
    reader.cancel()


async def _finish(pump: asyncio.Task[None]) -> None:
    """Waits for what was sent before to go out."""
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await asyncio.wait_for(pump, CLOSE_LIMIT_S)
