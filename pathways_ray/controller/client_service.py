"""The front door: everything that clients say to the controller comes in here, and nothing before it is checked.

A client shows a token (a tenant's, or the operator's) to open a session, and the session's secret afterwards. Nothing
is read from a caller who shows neither. What a tenant may have is asked in `tenants`, what becomes of a launch in
`launches`; this file talks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec

from pathways_ray import limits
from pathways_ray.controller import tenants, views
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.programs import (
    PlannedProgram,
    check_functions,
    check_size,
    decode_graph,
    order_text,
    placed_graph,
    plan_program,
)
from pathways_ray.controller.state import Command
from pathways_ray.controller.tenants import Tenant, TenantBook
from pathways_ray.errors import (
    AuthenticationError,
    Failure,
    PathwaysError,
    QuotaExceeded,
    SessionClosed,
    TooLarge,
    UsageError,
    WireError,
    to_failure,
)
from pathways_ray.ir.graph import functions_in
from pathways_ray.ir.text import plan_text
from pathways_ray.transport import batcher, grpc_streams, links, outboxes, streams
from pathways_ray.transport.capabilities import data_token, link_tags, slice_tag
from pathways_ray.transport.endpoints import ListenConfig
from pathways_ray.transport.messages import (
    REQUEST,
    TO_CONTROLLER,
    VERSION,
    Accepted,
    CloseSession,
    CreateSlice,
    Explain,
    Explained,
    HostAddress,
    OpenSession,
    Refused,
    Register,
    ReleaseSlice,
    Reply,
    Request,
    SessionEnded,
    SessionOpened,
    SliceCreated,
    Status,
    StatusReply,
    ToClient,
    ToController,
    Upgrade,
    encode,
)

STREAM_LIMIT_S = 20.0
"""A session whose stream does not come within this time is closed."""

HANG_UP_LIMIT_S = 5.0
"""A client whose session is over has so long to end its stream."""

COMPILE_LIMIT_S = 120.0
"""`explain` waits this long for the compiled memory analysis."""

LAST_WORDS_S = 1.0
"""The end of a session waits this long for what was said last to go out."""

UNKNOWN = "the token is missing or wrong; it is printed where the cluster was started, or comes from its operator"


class Client:
    """A session: whose it is, its secret, its stream once it has one, the functions it has sent.

    `withheld` are functions that came in a message over the quota, by digest; `token` is the digest of the tenant's
    token, or "" for the operator's.
    """

    def __init__(self, session: int, name: str, tenant: Tenant, token: str, outbox: outboxes.AsyncOutbox) -> None:
        self.session = session
        self.name = name
        self.tenant = tenant
        self.token = token
        self.secret = secrets.token_hex(16)
        self.outbox = outbox
        self.functions: dict[str, bytes] = {}
        self.function_bytes = 0
        self.withheld: dict[str, Failure] = {}
        self.opened = time.monotonic()
        self.link: links.AsyncLink | None = None
        self.by_link = self.link_over = False
        self.reader: asyncio.Task[None] | None = None


class TenantsFile:
    """The table of tenants as its file has it; a file that is broken later leaves the last good table in force.

    Args:
        path: "" is no file, and no tenants.
        strict: raise for a file that is broken at the start. After a restart it is better to serve the operator alone.

    Raises:
        UsageError: with `strict`, the file is broken or cannot be read.
    """

    def __init__(self, path: str, strict: bool) -> None:
        self.path = path
        self.book = TenantBook()
        self.problem = ""
        self._seen: tuple[int, ...] = ()
        self.refresh()
        if strict and self.problem:
            raise UsageError(self.problem)

    def refresh(self) -> bool:
        """Reads the file if it is another one than before; True when the table changed."""
        if not self.path:
            return False
        before = self.book
        try:
            found = os.stat(self.path)
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen == self._seen:
                return False
            self.book = tenants.decode(Path(self.path).read_bytes())
            self._seen, self.problem = seen, ""
        except OSError as error:
            self._seen, self.problem = (), f"the tenants file {self.path} cannot be read: {error.strerror}"
        except UsageError as error:
            self._seen, self.problem = seen, f"{self.path}: {error}"
        return self.book != before


class ClientService:
    """Serves clients on the controller's event loop.

    Args:
        do: sends the commands that `launches` gives.
        token: the operator's.
        sessions_made: sessions are numbered from the next number on.
        strict: see `TenantsFile`.
    """

    def __init__(
        self,
        launches: Launches,
        do: Callable[[Sequence[Command]], None],
        listen: ListenConfig,
        token: str,
        data_secret: str,
        fusion: bool,
        sessions_made: int,
        strict: bool,
    ) -> None:
        self.launches = launches
        self.do = do
        self.listen = listen
        self.token = token
        self.data_secret = data_secret
        self.fusion = fusion
        self.tenants = TenantsFile(listen.tenants, strict)
        self.clients: dict[int, Client] = {}
        self.programs_made = 0
        self.sessions_made = sessions_made
        self.compiled = asyncio.Condition()
        self.about: dict[str, Any] = {}

    async def serve(self, resource_manager: Any) -> str:
        """Opens the door; returns `address:port`."""
        self.resource_manager = resource_manager
        self.server, address = await grpc_streams.serve(
            {streams.CLIENT_STREAM: self._client_stream, streams.CALL: self._call},
            streams.bind_address(self.listen.front),
            self.listen.port,
            self.listen.tls,
        )
        self.links, link_address = await links.serve(
            {streams.CLIENT_STREAM: self._client_lane},
            streams.bind_address(self.listen.front),
            tls=self.listen.tls,
            silence=limits.LINK_SILENCE_S,
        )
        self.link_port = links.endpoint(link_address)[1]
        return address

    def send(self, session: int, message: ToClient) -> None:
        client = self.clients.get(session)
        if client is not None:
            client.outbox.send(message)

    async def programs_changed(self) -> None:
        """Wakes those who wait for a program to be there, or to be compiled."""
        async with self.compiled:
            self.compiled.notify_all()

    async def tick(self, now: float) -> None:
        """Once a second: sessions that never got their stream (or lane) end, and those whose tenant has to go."""
        for client in list(self.clients.values()):
            absent = client.reader is None or (client.by_link and client.link is None)
            if absent and now - client.opened > STREAM_LIMIT_S:
                if client.link is not None:
                    client.link.close("the stream of the session did not come")  # no end of the stream will end it
                await self._close(client.session)
        if self.tenants.refresh():
            await self._tenants_changed()

    async def _tenants_changed(self) -> None:
        known = {digest: tenant for tenant, digest in self.tenants.book.entries}
        for client in list(self.clients.values()):
            if not client.token:
                continue
            tenant = known.get(client.token)
            if tenant is None or tenant.name != client.tenant.name:
                gone = f"tenant {client.tenant.name!r} is not in the table of tenants any more, or has another token"
                await self._end(client, gone)
            elif tenant != client.tenant:
                client.tenant = tenant
                self.do(self.launches.set_tenant(tenant))

    async def _end(self, client: Client, reason: str) -> None:
        """Ends a session from this side."""
        client.outbox.send(SessionEnded(reason))
        client.outbox.close()
        if client.reader is not None:
            client.reader.cancel()  # its stream says the last words
        await self._close(client.session)

    # --- the hot stream -----------------------------------------------------------------------------------------------

    async def _client_stream(self, context: grpc.aio.ServicerContext) -> None:
        metadata = grpc_streams.metadata_of(context)
        client = self.clients.get(streams.session_of(metadata))
        if client is None or not streams.authorised(metadata, client.secret):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown session or wrong secret")
            return
        if client.reader is not None:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "the session has its stream already")
            return
        client.by_link = metadata.get("link") == "1"
        if not client.by_link and (client.link is not None or client.link_over):
            if client.link is not None:
                client.link.close()
                client.link = None
            # What went to the lane meanwhile may not have arrived; before its first launch that is addresses only.
            for host in self.launches.hosts.values():
                there = host.data_address if host.down_since is None else ""
                client.outbox.send(HostAddress(host.host, host.epoch, there))
        if client.by_link and client.link_over:
            await self._close(client.session)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the lane of the session has ended")
            return
        pump = asyncio.ensure_future(client.outbox.pump(context.write)) if not client.by_link else None
        client.reader = asyncio.ensure_future(self._read(client, functools.partial(grpc_streams.reading, context)))
        try:
            await asyncio.wait({client.reader})
            if not client.reader.cancelled():
                client.reader.result()  # raises what was wrong here, and not with the client
        finally:
            client.reader.cancel()
            await self._close(client.session)
            client.outbox.close()
            if pump is not None:
                await self._last_words(pump)

    async def _client_lane(self, link: links.AsyncLink) -> None:
        """The messages of a client's stream, in both directions, where it can reach this port. The stream then carries
        nothing, but still shows by gRPC's pings that the client lives: the end of either is the end of the session."""
        metadata = link.metadata
        client = self.clients.get(streams.session_of(metadata))
        shown, welcome = link_tags(client.secret, client.session) if client is not None else ("", "")
        if client is None or not streams.authorised(metadata, shown):
            link.refuse("unknown session or wrong secret")
        if client.link is not None or (client.reader is not None and not client.by_link):
            link.refuse("the session has its stream already")
        client.link = link
        link.put(welcome.encode())
        pump = asyncio.ensure_future(client.outbox.carry(link))
        reader = asyncio.ensure_future(self._read(client, link.read))
        try:
            await asyncio.wait({reader, pump}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()  # raises what was wrong here, and not with the client
        finally:
            reader.cancel()
            await self._lane_ended(client, link, pump)

    async def _lane_ended(self, client: Client, link: links.AsyncLink, pump: asyncio.Task[None]) -> None:
        if client.link is not link or client.reader is None:
            # Either the client gave it up, and its stream, which is still to come, carries the messages; or that stream
            # comes for a lane that has ended meanwhile.
            client.link_over = True
            client.link = None if client.link is link else client.link
            pump.cancel()
            return
        client.reader.cancel()
        await self._close(client.session)
        client.outbox.close()
        await self._last_words(pump)

    async def _last_words(self, pump: asyncio.Task[None]) -> None:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await asyncio.wait_for(pump, LAST_WORDS_S)

    async def _read(self, client: Client, read: Callable[[], Awaitable[bytes | None]]) -> None:
        try:
            while (data := await read()) is not None and client.session in self.clients:
                messages = TO_CONTROLLER.decode_batch(data)
                self._check_batch(client, len(data), messages)
                for message in messages:
                    if isinstance(message, Register):
                        self._register(client, message)
                        await self.programs_changed()
                    elif isinstance(message, Upgrade):
                        raise WireError("an upgrade without a direct link")
                    else:
                        self.do(self.launches.from_client(client.session, message))
                await client.outbox.room(limits.MAX_BACKLOG)
        except (WireError, QuotaExceeded) as error:
            client.outbox.send(SessionEnded(str(error)))

    def _check_batch(self, client: Client, size: int, messages: list[ToController]) -> None:
        """Raises `QuotaExceeded` for a batch over the tenant's quota of bytes. Many small messages that were gathered
        into one are fine, and a program is refused by itself."""
        small = len(messages) > 1 and size <= batcher.MAX_BATCH_BYTES + len(messages)
        if not small and not any(isinstance(message, Register) for message in messages):
            tenants.check_message(client.tenant, size, "a message")

    def _register(self, client: Client, message: Register) -> None:
        self.programs_made += 1
        key = self.programs_made
        try:
            program = self._planned(key, client, message)
        except PathwaysError as error:
            program = PlannedProgram(key, client.session, "", failure=to_failure(error))
        except Exception as error:  # a malformed graph may trip the planner anywhere; it must not end the controller
            failure = Failure("WireError", f"program refused: {type(error).__name__}: {error}")
            program = PlannedProgram(key, client.session, "", failure=failure)
        if len(self.launches.sessions[client.session].programs) < limits.MAX_PROGRAMS:
            self.do(self.launches.register(client.session, message.program, program, message.repeats))

    def _planned(self, key: int, client: Client, message: Register) -> PlannedProgram:
        size = len(message.graph) + sum(map(len, message.functions.values()))
        try:
            tenants.check_message(client.tenant, size, "a program")
            if client.function_bytes + size > limits.MAX_SESSION_FUNCTION_BYTES:
                raise TooLarge(
                    f"the functions of a program have {size} bytes and those this session sent before "
                    f"{client.function_bytes}; {limits.MAX_SESSION_FUNCTION_BYTES} are the limit. Open a new session"
                )
        except PathwaysError as error:
            # The client takes these functions for sent: programs that name them later fail for the same reason.
            if len(client.withheld) < limits.MAX_PROGRAMS:
                client.withheld |= dict.fromkeys(message.functions, to_failure(error))
            raise
        check_functions(message.functions)
        client.functions.update(message.functions)
        client.function_bytes += sum(map(len, message.functions.values()))
        graph = decode_graph(message.graph)
        tenants.check_nodes(client.tenant, len(graph.nodes), graph.name)
        check_size(graph)
        for digest in (part.function for recipe in graph.recipes for part in functions_in(recipe.parts)):
            if digest in client.withheld and digest not in client.functions:
                return PlannedProgram(key, client.session, graph.name, failure=client.withheld[digest])
        # A program may arrive after a release that was called later: released slices are still known.
        slices = self.launches.sessions[client.session].places
        return plan_program(key, client.session, graph, client.functions, slices, self.fusion)

    async def _close(self, session: int) -> None:
        client = self.clients.pop(session, None)
        if client is None:
            return
        if client.reader is not None:  # whoever said that the session is over is about to hang up, and has to
            asyncio.get_running_loop().call_later(HANG_UP_LIMIT_S, client.reader.cancel)
        self.do(self.launches.close_session(session))
        await self.resource_manager.release_session.remote(session)

    # --- calls --------------------------------------------------------------------------------------------------------

    async def _call(self, context: grpc.aio.ServicerContext) -> None:
        metadata = grpc_streams.metadata_of(context)
        try:
            who = self._caller(metadata)
            data = await grpc_streams.reading(context) or b""
            if isinstance(who, Client):
                tenants.check_message(who.tenant, len(data), "a call")
            reply = await self._answer(REQUEST.decode(data), who)
        except PathwaysError as error:
            reply = Refused(to_failure(error))
        await context.write(encode(reply))

    def _caller(self, metadata: dict[str, str]) -> Client | Tenant | None:
        """Who shows this: a session with its secret, a tenant with its token, or, None, the operator.

        Raises:
            SessionClosed: the session that is named has another secret, or none.
            AuthenticationError: nobody has this token.
        """
        if "session" in metadata:
            client = self.clients.get(streams.session_of(metadata))
            if client is None or not streams.authorised(metadata, client.secret):
                raise SessionClosed(f"session {streams.session_of(metadata)} is not open, or the secret is not its own")
            return client
        tenant = self.tenants.book.owner(metadata.get("authorization", ""))
        if streams.authorised(metadata, self.token):
            return None
        if tenant is None:
            raise AuthenticationError(UNKNOWN)
        return tenant

    async def _answer(self, request: Request, who: Client | Tenant | None) -> Reply:
        if isinstance(request, OpenSession) and not isinstance(who, Client):
            return await self._open(request, who)
        if isinstance(request, Status) and request.session == 0 and who is None:
            return await self._status(None)
        if not isinstance(who, Client) or isinstance(request, OpenSession) or request.session != who.session:
            raise AuthenticationError("what the call asks for is another session's, or takes a session's own secret")
        match request:
            case CreateSlice():
                return await self._create_slice(who, request)
            case ReleaseSlice():
                self.launches.remove_slice(who.session, request.slice)
                await self.resource_manager.release_slice.remote(who.session, request.slice)
                return Accepted()
            case CloseSession():
                await self._close(who.session)
                return Accepted()
            case Explain():
                return await self._explain(who, request)
            case Status():
                return await self._status(who)

    async def _open(self, request: OpenSession, tenant: Tenant | None) -> Reply:
        if request.version != VERSION:
            raise WireError(f"the client speaks protocol version {request.version}, this cluster {VERSION}")
        number = self.sessions_made + 1
        owner = tenant if tenant is not None else tenants.operators(number)
        tenants.check_sessions(owner, sum(c.tenant.name == owner.name for c in self.clients.values()))
        self.sessions_made = number
        digest = next((d for t, d in self.tenants.book.entries if t == tenant), "")
        # By the client's own launches: others' must not hold up what it waits for.
        outbox = outboxes.AsyncOutbox(lambda: self.launches.flying(number))
        client = self.clients[number] = Client(number, request.name[:256], owner, digest, outbox)
        self.do(self.launches.open_session(number, owner))
        platforms = await self.resource_manager.platforms.remote()
        hosts = (h for h in self.launches.hosts.values() if h.down_since is None)
        return SessionOpened(
            session=number,
            secret=client.secret,
            data_token=data_token(self.data_secret, number, owner.quota.device_bytes),
            hosts=tuple(HostAddress(h.host, h.epoch, h.data_address) for h in hosts),
            platforms=platforms,
            fusion=self.fusion,
            max_launches=limits.MAX_LAUNCHES_IN_FLIGHT,
            link_port=self.link_port,
        )

    async def _create_slice(self, client: Client, request: CreateSlice) -> Reply:
        if request.shape and all(size > 0 for size in request.shape):
            self._check_devices(client, math.prod(request.shape))
        reply = await self.resource_manager.create_slice.remote(
            client.session, request.shape, request.axes, request.island, request.platform, request.name[:256]
        )
        answer: SliceCreated | Refused = msgspec.msgpack.decode(reply, type=SliceCreated | Refused)
        if not isinstance(answer, SliceCreated):
            return answer
        placed = answer.placed
        try:
            if client.session not in self.launches.sessions:
                raise SessionClosed(f"session {client.session} ended while it asked for a slice")
            # Again: only now is it known how many devices a whole island has, and others may have asked meanwhile.
            self._check_devices(client, placed.mesh.size)
        except PathwaysError:
            await self.resource_manager.release_slice.remote(client.session, placed.mesh.id)
            raise
        self.launches.add_slice(client.session, placed)
        return SliceCreated(placed, slice_tag(self.data_secret, client.session, placed))

    def _check_devices(self, client: Client, asked: int) -> None:
        sessions = (s for s in self.launches.sessions.values() if s.tenant.name == client.tenant.name)
        tenants.check_devices(client.tenant, asked, (p.mesh.size for s in sessions for p in s.slices.values()))

    async def _explain(self, client: Client, request: Explain) -> Reply:
        state = self.launches.sessions[client.session]
        graph = decode_graph(request.graph)
        tenants.check_nodes(client.tenant, len(graph.nodes), graph.name)
        check_size(graph)
        _, plans = placed_graph(graph, state.slices, self.fusion)
        temporary: dict[int, int] = {}
        if request.program >= 0:
            # The program comes on the stream, and this call may have overtaken it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMPILE_LIMIT_S), self.compiled:
                    await self.compiled.wait_for(lambda: _is_compiled(state.programs.get(request.program)))
            program = state.programs.get(request.program)
            if program is not None and program.failure is not None:
                return Refused(program.failure)
            temporary = program.temporary_bytes if program is not None else {}
        return Explained(plan_text(plans), order_text({p.island: p for p in plans}), temporary)

    async def status(self) -> dict[str, Any]:
        """What there is and who holds it, as the operator sees it."""
        status: dict[str, Any] = json.loads(await self.resource_manager.status.remote())
        names = {session: known.name for session, known in self.clients.items()}
        status |= views.of_launches(self.launches, names) | self.about
        if self.tenants.path:
            status["tenants_file"] = {"path": self.tenants.path, "problem": self.tenants.problem}
        return status

    async def _status(self, client: Client | None) -> Reply:
        status = await self.status()
        if client is not None and client.token:
            mine = {session for session, known in self.clients.items() if known.tenant.name == client.tenant.name}
            status = views.for_tenant(status, client.tenant.name, mine)
        return StatusReply(json.dumps(status))


def _is_compiled(program: PlannedProgram | None) -> bool:
    """Whether nothing more will become known of a program: every host has it compiled, or it failed."""
    return program is not None and (program.failure is not None or program.is_ready)
