"""The controller as a Ray actor: the front door for clients, the root of all island streams.

`Launches` decides; this file reads streams, plans registered programs, and asks the resource manager for slices. When
its process or the resource manager's dies, Ray starts it anew, without sessions; schedulers and hosts join again
(ADR 0014).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future

import grpc
import msgspec
import ray

from pathways_ray import limits, names
from pathways_ray.controller.crossings import Crossings
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.programs import (
    PlannedProgram,
    check_functions,
    decode_graph,
    order_text,
    placed_graph,
    plan_program,
)
from pathways_ray.controller.state import Command, SendIsland
from pathways_ray.errors import AuthenticationError, Failure, PathwaysError, SessionClosed, WireError, to_failure
from pathways_ray.ir.plan import plan_text
from pathways_ray.plugins import policy_named
from pathways_ray.transport import streams
from pathways_ray.transport.messages import (
    FROM_ISLAND,
    REQUEST,
    TO_CONTROLLER,
    VERSION,
    Accepted,
    CloseSession,
    CreateSlice,
    Done,
    Enqueued,
    Explain,
    Explained,
    FromIsland,
    HostAddress,
    HostDown,
    HostUp,
    IslandUp,
    Load,
    OpenSession,
    Ready,
    Refused,
    Register,
    ReleaseSlice,
    Reply,
    Request,
    RunFailed,
    SessionEnded,
    SessionOpened,
    SliceCreated,
    Status,
    StatusReply,
    encode,
)

STREAM_LIMIT_S = 20.0
"""A session whose stream does not come within this time is closed."""

COMPILE_LIMIT_S = 120.0
"""`explain` waits this long for the compiled memory analysis."""

MANAGER_LIMIT_S = 4.0
"""A resource manager that twice does not answer for this long is taken for dead."""

RESTART_PAUSE_S = 0.5
"""A controller that cannot serve ends after this pause, so that Ray does not start it in a tight loop."""


class _Client:
    """A session's secrets, its stream once it has one, and the functions it has sent."""

    def __init__(self, session: int, name: str, outbox: streams.AsyncOutbox) -> None:
        self.session = session
        self.name = name
        self.secret = secrets.token_hex(16)
        self.outbox = outbox
        self.functions: dict[str, bytes] = {}
        self.opened = time.monotonic()
        self.streaming = False


class Controller:
    """One for a cluster. Everything runs on an event loop in a thread of its own.

    Args:
        runtime: its name, by which the resource manager is found.
        bind: the address to serve on; "" is where Ray reaches this machine.
        port: 0 is a free one, another one after each restart.
        token: what lets clients in.
    """

    def __init__(
        self,
        runtime: str,
        bind: str,
        port: int,
        token: str,
        link_secrets: tuple[str, str],
        parallel: bool,
        fusion: bool,
        policy: str = "fifo",
    ) -> None:
        self.runtime = runtime
        self.bind = bind
        self.port = port
        self.data_secret, self.link_secret = link_secrets
        self.incarnation = secrets.token_hex(8)
        self.restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self.token = token
        self.fusion = fusion
        self.launches = Launches(
            parallel=parallel,
            max_in_flight=limits.MAX_LAUNCHES_IN_FLIGHT,
            crossings=Crossings(policy_named(policy)),
        )
        self.policy = policy
        self.clients: dict[int, _Client] = {}
        self.islands: dict[int, streams.AsyncOutbox] = {}
        self.programs_made = 0
        # Hosts know a session by its number: one from before a restart must not come again.
        self.sessions_made = int(time.time() * 100) if self.restarted else 0
        self.compiled = asyncio.Condition()
        self.address: Future[str] = Future()
        # A thread of its own, since Ray calls nothing but the constructor after a restart.
        threading.Thread(target=self._serve, name="serve", daemon=True).start()

    def start(self) -> str:
        """`address:port` of the front door; answers once it serves."""
        return self.address.result()

    def _serve(self) -> None:
        """Serves until the resource manager is gone or something is wrong; then the process ends, and all sessions."""
        try:
            asyncio.run(self._main())
        except BaseException as error:
            traceback.print_exc()
            if not self.address.done() and not self.restarted:
                self.address.set_exception(error)  # for who starts the runtime, and will end this process
                return
        time.sleep(RESTART_PAUSE_S)
        os._exit(1)

    async def _main(self) -> None:
        self.resource_manager = ray.get_actor(names.resource_manager(self.runtime), names.NAMESPACE)
        self.server, address = await streams.serve(
            {streams.CLIENT_STREAM: self._client_stream, streams.ISLAND_STREAM: self._island_stream},
            {streams.CALL: self._call},
            streams.bind_address(self.bind),
            self.port,
        )
        self.clock = asyncio.ensure_future(self._tick())
        await self._report(address)
        self.address.set_result(address)
        while not self.clock.done():
            await asyncio.sleep(1.0)
            await self._report(address)
        self.clock.result()

    async def _report(self, address: str) -> None:
        """Tells the resource manager that this controller serves.

        Raises:
            ray.exceptions.RayError: the resource manager is gone, and with it which slice has which devices.
            TimeoutError: it has not answered for so long that it was killed.
        """
        for last in (False, True):
            try:
                # Twice: after a pause of this process the time may be over before an answer that is there is seen.
                async with asyncio.timeout(MANAGER_LIMIT_S):
                    await self.resource_manager.controller_serves.remote(self.incarnation, address)
                return
            except TimeoutError:
                if last:
                    ray.kill(self.resource_manager, no_restart=False)
                    raise

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            self._do(self.launches.tick(now))
            for client in list(self.clients.values()):
                if not client.streaming and now - client.opened > STREAM_LIMIT_S:
                    await self._close(client.session)
            await asyncio.sleep(1.0)

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, SendIsland):
                outbox = self.islands.get(command.island)
            else:
                client = self.clients.get(command.session)
                outbox = client.outbox if client else None
            if outbox is not None:
                outbox.send(command.message)

    # --- islands ------------------------------------------------------------------------------------------------------

    async def _island_stream(self, context: grpc.aio.ServicerContext) -> None:
        if not streams.authorised(streams.metadata_of(context), self.link_secret):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong link secret")
        data = await streams.reading(context)
        rest = FROM_ISLAND.decode_batch(data) if data else []
        hello = rest.pop(0) if rest else None
        if not isinstance(hello, IslandUp):
            return
        # A new scheduler may be heard of before the end of the old one's stream.
        self._island_ended(hello.island, self.islands.get(hello.island))
        outbox = self.islands[hello.island] = streams.AsyncOutbox(self.launches.in_flight.__len__)
        self._do(self.launches.island_up(hello.island))
        pump = asyncio.ensure_future(outbox.pump(context.write))
        try:
            while True:
                for message in rest:
                    await self._from_island(hello.island, message)
                if (data := await streams.reading(context)) is None:
                    break
                rest = FROM_ISLAND.decode_batch(data)
        finally:
            pump.cancel()
            self._island_ended(hello.island, outbox)
            await self.resource_manager.withdraw.remote(f"scheduler-{hello.island}", hello.address)

    def _island_ended(self, island: int, outbox: streams.AsyncOutbox | None) -> None:
        """The stream that `outbox` belongs to is over: what it knew of hosts is worth nothing any more."""
        if outbox is None or self.islands.get(island) is not outbox:
            return
        del self.islands[island]
        for host in [h for h in self.launches.hosts.values() if h.island == island]:
            self._do(self.launches.host_down(HostDown(host.host, host.epoch, "its island's scheduler ended")))

    async def _from_island(self, island: int, message: FromIsland) -> None:
        match message:
            case Done():
                self._do(self.launches.done(island, message))
            case RunFailed():
                self._do(self.launches.run_failed(island, message))
            case Enqueued():
                self._do(self.launches.enqueued(island, message))
            case Ready():
                self._do(self.launches.ready(message))
                async with self.compiled:
                    self.compiled.notify_all()
            case HostUp():
                self._do(self.launches.host_up(island, message))
            case HostDown():
                self._do(self.launches.host_down(message))
                await self.resource_manager.leave.remote(message.host, message.epoch)
            case Load():
                self.launches.load(message)
            case IslandUp():
                pass

    # --- clients: the hot stream --------------------------------------------------------------------------------------

    async def _client_stream(self, context: grpc.aio.ServicerContext) -> None:
        metadata = streams.metadata_of(context)
        client = self.clients.get(int(metadata.get("session", "0") or 0))
        if client is None or not streams.authorised(metadata, client.secret):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown session or wrong secret")
            return
        client.streaming = True
        pump = asyncio.ensure_future(client.outbox.pump(context.write))
        try:
            while (data := await streams.reading(context)) is not None:
                for message in TO_CONTROLLER.decode_batch(data):
                    if isinstance(message, Register):
                        self._register(client, message)
                        async with self.compiled:
                            self.compiled.notify_all()
                    else:
                        self._do(self.launches.from_client(client.session, message))
        except WireError as error:
            client.outbox.send(SessionEnded(str(error)))
        finally:
            await self._close(client.session)
            client.outbox.close()
            with contextlib.suppress(
                asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError, Exception
            ):
                await asyncio.wait_for(pump, 1.0)

    def _register(self, client: _Client, message: Register) -> None:
        self.programs_made += 1
        key = self.programs_made
        try:
            check_functions(message.functions)
            client.functions.update(message.functions)
            graph = decode_graph(message.graph)
            # A program may arrive after a release that was called later: released slices are still known.
            slices = self.launches.sessions[client.session].places
            program = plan_program(key, client.session, graph, client.functions, slices, self.fusion)
        except PathwaysError as error:
            program = PlannedProgram(key, client.session, "", failure=to_failure(error))
        except Exception as error:  # a malformed graph may trip the planner anywhere; it must not end the controller
            failure = Failure("WireError", f"program refused: {type(error).__name__}: {error}")
            program = PlannedProgram(key, client.session, "", failure=failure)
        self._do(self.launches.register(client.session, message.program, program))

    async def _close(self, session: int) -> None:
        if self.clients.pop(session, None) is not None:
            self._do(self.launches.close_session(session))
            await self.resource_manager.release_session.remote(session)

    # --- clients: calls -----------------------------------------------------------------------------------------------

    async def _call(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            return encode(await self._answer(REQUEST.decode(data), streams.metadata_of(context)))
        except PathwaysError as error:
            return encode(Refused(to_failure(error)))

    async def _answer(self, request: Request, metadata: dict[str, str]) -> Reply:
        if isinstance(request, OpenSession):
            return await self._open(request, metadata)
        if isinstance(request, Status) and request.session == 0 and streams.authorised(metadata, self.token):
            return await self._status()
        client = self.clients.get(request.session)
        if client is None or not streams.authorised(metadata, client.secret):
            raise SessionClosed(f"session {request.session} is not open, or the secret is not its own")
        match request:
            case CreateSlice():
                return await self._create_slice(client, request)
            case ReleaseSlice():
                self.launches.remove_slice(client.session, request.slice)
                await self.resource_manager.release_slice.remote(client.session, request.slice)
                return Accepted()
            case CloseSession():
                await self._close(client.session)
                return Accepted()
            case Explain():
                return await self._explain(client, request)
            case Status():
                return await self._status()

    async def _open(self, request: OpenSession, metadata: dict[str, str]) -> Reply:
        if not streams.authorised(metadata, self.token):
            raise AuthenticationError("the token is missing or wrong; it is printed where the cluster was started")
        if request.version != VERSION:
            raise WireError(f"the client speaks protocol version {request.version}, this cluster {VERSION}")
        self.sessions_made += 1
        client = _Client(self.sessions_made, request.name, streams.AsyncOutbox(self.launches.in_flight.__len__))
        self.clients[client.session] = client
        self._do(self.launches.open_session(client.session))
        hosts = (h for h in self.launches.hosts.values() if h.down_since is None)
        return SessionOpened(
            session=client.session,
            secret=client.secret,
            data_token=data_token(self.data_secret, client.session),
            hosts=tuple(HostAddress(h.host, h.epoch, h.data_address) for h in hosts),
            platforms=await self.resource_manager.platforms.remote(),
            fusion=self.fusion,
            max_launches=limits.MAX_LAUNCHES_IN_FLIGHT,
        )

    async def _create_slice(self, client: _Client, request: CreateSlice) -> Reply:
        reply = await self.resource_manager.create_slice.remote(
            client.session, request.shape, request.axes, request.island, request.platform, request.name
        )
        answer: SliceCreated | Refused = msgspec.msgpack.decode(reply, type=SliceCreated | Refused)
        if isinstance(answer, SliceCreated) and client.session in self.launches.sessions:
            self.launches.add_slice(client.session, answer.placed)
        return answer

    async def _explain(self, client: _Client, request: Explain) -> Reply:
        state = self.launches.sessions[client.session]
        _, plans = placed_graph(decode_graph(request.graph), state.slices, self.fusion)
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

    async def _status(self) -> Reply:
        status = json.loads(await self.resource_manager.status.remote())
        sessions = self.launches.sessions
        status["sessions"] = [
            {
                "session": s.id,
                "name": self.clients[s.id].name if s.id in self.clients else "",
                "buffers": len(s.buffers),
                "bytes": sum(b.held.type.nbytes for b in s.buffers.values()),
                "programs": len(s.programs),
                "in_flight": s.in_flight,
                "waiting": len(s.waiting),
            }
            for s in sessions.values()
        ]
        status["tenants"] = self.launches.tenants()
        status["policy"] = self.policy
        status["buffers"] = sum(len(s.buffers) for s in sessions.values())
        status["launches"] = self.launches.sequence
        status["in_flight"] = len(self.launches.in_flight)
        status["controller"] = {"pid": os.getpid(), "dispatch": "parallel" if self.launches.parallel else "sequential"}
        return StatusReply(json.dumps(status))


def _is_compiled(program: PlannedProgram | None) -> bool:
    """Whether nothing more will become known of a program: every host has it compiled, or it failed."""
    return program is not None and (program.failure is not None or len(program.ready) >= len(program.hosts))


def data_token(secret: str, session: int) -> str:
    """What proves to a host that a data stream belongs to a session: hosts compute it themselves."""
    return hmac.new(secret.encode(), str(session).encode(), hashlib.sha256).hexdigest()
