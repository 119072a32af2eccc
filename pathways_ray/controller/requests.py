"""Requests: calls of clients with one reply each. Some wait for the resource manager, or until a program compiles."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from pathways_ray import limits
from pathways_ray.controller import quotas, status, tenants
from pathways_ray.controller.clients import Client, Clients
from pathways_ray.controller.events import AnswerCall, Caller, CallManager, Command, Requested
from pathways_ray.controller.isolation import Isolation
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.programs import check_size, decode_graph, order_text, placed_graph
from pathways_ray.controller.tenants import Tenant, TenantBook
from pathways_ray.errors import AuthenticationError, PathwaysError, SessionClosed, WireError, from_failure, to_failure
from pathways_ray.ir.text import plan_text
from pathways_ray.transport import messages as wire
from pathways_ray.transport.capabilities import authorised, data_token, session_of, slice_tag

COMPILE_LIMIT_S = 120.0
"""`explain` waits this long for the compiled memory analysis."""

UNKNOWN_TOKEN = "the token is missing or wrong; it is printed where the cluster was started, or comes from its operator"

_SLICE = msgspec.msgpack.Decoder(wire.SliceCreated | wire.Refused)

Continuation: TypeAlias = Callable[[Any], tuple[wire.Reply, list[Command]]]
"""The rest of a request, once the resource manager has answered."""


@dataclass(frozen=True)
class Explaining:
    """An `explain` that waits until its program is compiled, at most until `deadline`."""

    session: int
    program: int
    plan: str
    order: str
    deadline: float


@dataclass
class Requests:
    """Answers requests.

    Args:
        token: the operator's.
        data_secret: signs what clients show to hosts.
        book: the table of tenants.
        about: what status shows of the controller itself.
        logs: the folder of the runtime's logs, and the Ray node of the controller.
        link_port: the port for direct links; 0 where there is no such port.
    """

    launches: Launches
    clients: Clients
    report: status.Report
    token: str
    data_secret: str
    book: TenantBook = field(default_factory=TenantBook)
    about: dict[str, Any] = field(default_factory=dict)
    logs: tuple[str, str] | None = None
    link_port: int = 0
    isolation: Isolation = field(default_factory=Isolation)
    waiting: dict[int, Continuation] = field(default_factory=dict)
    explaining: dict[int, Explaining] = field(default_factory=dict)

    def caller(self, metadata: dict[str, str]) -> Caller:
        """The origin of a request that shows this: a session with its secret, a tenant or the operator with a token.

        Raises:
            SessionClosed: the session that is named is not open, or has another secret.
            AuthenticationError: the token is unknown.
        """
        if "session" in metadata:
            client = self.clients.find(metadata, lambda client: client.secret)
            if client is None:
                number = session_of(metadata)
                raise SessionClosed(f"session {number} is not open, or the secret is not its own")
            return client.session
        tenant = self.book.owner(metadata.get("authorization", ""))
        if authorised(metadata, self.token):
            return None
        if tenant is None:
            raise AuthenticationError(UNKNOWN_TOKEN)
        return tenant

    # --- answers ------------------------------------------------------------------------------------------------------

    def received(self, event: Requested, now: float) -> list[Command]:
        """Answers a request, or asks for what its answer needs."""
        try:
            reply, commands = self._answer(event, now)
        except PathwaysError as error:
            reply, commands = wire.Refused(to_failure(error)), []
        return commands if reply is None else [*commands, AnswerCall(event.call, reply)]

    def manager_answered(self, call: int, answer: Any) -> list[Command]:
        """Answers the request that waited for the resource manager."""
        go_on = self.waiting.pop(call, None)
        if go_on is None:
            return []
        try:
            if isinstance(answer, BaseException):
                raise WireError(f"the resource manager failed: {answer}")
            reply, commands = go_on(answer)
        except PathwaysError as error:
            reply, commands = wire.Refused(to_failure(error)), []
        return [*commands, AnswerCall(call, reply)]

    def _ask_manager(self, call: int, method: str, arguments: tuple[Any, ...], go_on: Continuation) -> list[Command]:
        self.waiting[call] = go_on
        return [CallManager(method, arguments, call)]

    def _answer(self, event: Requested, now: float) -> tuple[wire.Reply | None, list[Command]]:
        """The reply, or None where it comes later; and commands."""
        request, caller = event.request, event.caller
        client = self.clients.known.get(caller) if isinstance(caller, int) else None
        if isinstance(caller, int) and client is None:
            raise SessionClosed(f"session {caller} has been closed")
        if client is not None:
            _refuse(quotas.message_bytes(client.tenant, event.size, "a call"))
        if isinstance(request, wire.OpenSession) and not isinstance(caller, int):
            return None, self._open(event, request, caller, now)
        if isinstance(request, wire.Status) and request.session == 0 and caller is None:
            return None, self._status(event.call, None)
        if client is None or isinstance(request, wire.OpenSession) or request.session != client.session:
            raise AuthenticationError("what the call asks for is another session's, or takes a session's own secret")
        match request:
            case wire.CreateSlice():
                return None, self._create_slice(event.call, client, request)
            case wire.ReleaseSlice():
                self.launches.remove_slice(client.session, request.slice)
                arguments = (client.session, request.slice)
                return None, self._ask_manager(event.call, "release_slice", arguments, lambda _: (wire.Accepted(), []))
            case wire.CloseSession():
                return wire.Accepted(), self.clients.close(client.session, at_once=False)
            case wire.Explain():
                return self._explain(event.call, client, request, now), []
            case wire.Status():
                return None, self._status(event.call, client)

    # --- sessions and slices ------------------------------------------------------------------------------------------

    def _open(self, event: Requested, request: wire.OpenSession, tenant: Tenant | None, now: float) -> list[Command]:
        if request.version != wire.VERSION:
            raise WireError(f"the client speaks protocol version {request.version}, this cluster {wire.VERSION}")
        owner = tenant if tenant is not None else tenants.operators(self.clients.sessions_made + 1)
        held = sum(client.tenant.name == owner.name for client in self.clients.known.values())
        _refuse(quotas.sessions(owner, held))
        token = next((digest for other, digest in self.book.entries if other == tenant), "")
        client, commands = self.clients.open(request.name[:256], owner, token, event.secret, now)
        commands += self.isolation.opened(client, now)
        return commands + self._ask_manager(event.call, "platforms", (), lambda found: self._opened(client, found))

    def _opened(self, client: Client, platforms: tuple[str, ...]) -> tuple[wire.Reply, list[Command]]:
        hosts = (h for h in self.launches.hosts.values() if h.down_since is None)
        reply = wire.SessionOpened(
            session=client.session,
            secret=client.secret,
            data_token=data_token(
                self.data_secret, client.session, client.tenant.quota.device_bytes, client.tenant.name
            ),
            hosts=tuple(wire.HostAddress(h.host, h.epoch, h.data_address) for h in hosts),
            platforms=platforms,
            fusion=self.clients.fusion,
            max_launches=limits.MAX_LAUNCHES_IN_FLIGHT,
            link_port=self.link_port,
        )
        return reply, []

    def _create_slice(self, call: int, client: Client, request: wire.CreateSlice) -> list[Command]:
        sessions = self.launches.sessions
        if request.shape and all(size > 0 for size in request.shape):
            _refuse(quotas.devices(client.tenant, math.prod(request.shape), sessions.values()))
        arguments = (
            client.session,
            request.shape,
            request.axes,
            request.island,
            request.platform,
            request.name[:256],
            self.isolation.islands_of(client),
        )
        return self._ask_manager(call, "create_slice", arguments, lambda answer: self._slice_created(client, answer))

    def _slice_created(self, client: Client, answer: bytes) -> tuple[wire.Reply, list[Command]]:
        reply: wire.SliceCreated | wire.Refused = _SLICE.decode(answer)
        if isinstance(reply, wire.Refused):
            return reply, []
        session, placed = client.session, reply.placed
        try:
            if session not in self.launches.sessions:
                raise SessionClosed(f"session {session} ended while it asked for a slice")
            # Again: only now is it known how many devices a whole island has, and others may have asked meanwhile.
            _refuse(quotas.devices(client.tenant, placed.mesh.size, self.launches.sessions.values()))
        except PathwaysError as error:
            return wire.Refused(to_failure(error)), [CallManager("release_slice", (session, placed.mesh.id))]
        self.launches.add_slice(session, placed)
        return wire.SliceCreated(placed, slice_tag(self.data_secret, session, placed)), []

    # --- explain ------------------------------------------------------------------------------------------------------

    def _explain(self, call: int, client: Client, request: wire.Explain, now: float) -> wire.Reply | None:
        session = self.launches.sessions[client.session]
        graph = decode_graph(request.graph)
        _refuse(quotas.nodes(client.tenant, len(graph.nodes), graph.name))
        check_size(graph)
        _, plans = placed_graph(graph, session.slices, self.clients.fusion)
        plan, order = plan_text(plans), order_text({p.island: p for p in plans})
        if request.program < 0:
            return wire.Explained(plan, order, {})
        explaining = Explaining(session.id, request.program, plan, order, now + COMPILE_LIMIT_S)
        reply = self._explained(explaining, now)
        if reply is None:  # the program comes on the stream, and this call may have overtaken it
            self.explaining[call] = explaining
        return reply

    def _explained(self, waiting: Explaining, now: float) -> wire.Reply | None:
        session = self.launches.sessions.get(waiting.session)
        program = session.programs.get(waiting.program) if session is not None else None
        if program is not None and program.failure is not None:
            return wire.Refused(program.failure)
        if session is not None and now < waiting.deadline and (program is None or not program.is_ready):
            return None
        return wire.Explained(waiting.plan, waiting.order, program.temporary_bytes if program is not None else {})

    def programs_changed(self, now: float) -> list[Command]:
        """Answers those who waited for a program that is compiled now, has failed, or takes too long."""
        commands: list[Command] = []
        for call, waiting in list(self.explaining.items()):
            reply = self._explained(waiting, now)
            if reply is not None:
                del self.explaining[call]
                commands.append(AnswerCall(call, reply))
        return commands

    # --- status -------------------------------------------------------------------------------------------------------

    def _status(self, call: int, client: Client | None) -> list[Command]:
        return self._ask_manager(call, "status", (), lambda text: (self._status_reply(client, text), []))

    def _status_reply(self, client: Client | None, text: str) -> wire.Reply:
        found: dict[str, Any] = json.loads(text)
        known = self.clients.known
        names = {session: other.name for session, other in known.items()}
        found |= status.of_launches(self.launches, self.report, names) | self.about
        if self.logs is not None:
            found["logs"] = status.logs(found["islands"], *self.logs)
        if client is not None and client.token:
            mine = {session for session, other in known.items() if other.tenant.name == client.tenant.name}
            found = status.for_tenant(found, client.tenant.name, mine, self.isolation.islands_of(client))
        return wire.StatusReply(json.dumps(found))


def _refuse(failure: Any) -> None:
    """Raises the error of a refusal, if there is one."""
    if failure is not None:
        raise from_failure(failure)
