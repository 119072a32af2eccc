"""Requests: calls of clients with one reply each. Some wait for the resource manager, or until a program compiles."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from pathways_ray import limits
from pathways_ray.controller import quotas, status, tenants
from pathways_ray.controller.changes import Changes, Continuation, IslandChange, is_replacement, left_behind
from pathways_ray.controller.clients import Client, Clients
from pathways_ray.controller.events import AnswerCall, AskForLog, Caller, CallManager, Command, Requested
from pathways_ray.controller.explaining import Explanations
from pathways_ray.controller.isolation import Isolation
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.looks import Looks
from pathways_ray.controller.open_calls import OpenCalls
from pathways_ray.controller.tenants import UNKNOWN_TOKEN, Tenant, TenantBook, TokenOwner
from pathways_ray.errors import (
    AuthenticationError,
    PathwaysError,
    SessionClosed,
    TooLarge,
    UsageError,
    WireError,
    to_failure,
)
from pathways_ray.story import Entry
from pathways_ray.transport import messages as wire
from pathways_ray.transport.capabilities import authorised, data_token, resume_tag, session_of, slice_tag

MAX_CALL_BYTES = 1 << 16
"""A call other than `Explain` and `ResumeSession`."""

AUDIT_PAUSE_S = 1.0
"""Time between two notes of refused requests."""

AFTER_CHANGE = wire.ReleaseSlice | wire.ExchangeSlices | wire.Suspend
"""Requests of a session that wait until slices of it have been exchanged, or all given back."""

_SLICE = msgspec.msgpack.Decoder(wire.SliceCreated | wire.Refused | wire.NotYet)


@dataclass(frozen=True)
class Slicing:
    """A request for a slice that waits for islands to join, at most until `deadline`."""

    call: int
    client: Client
    request: wire.CreateSlice
    deadline: float


def _nothing_to_resume(event: Requested, request: wire.ResumeSession, caller: Caller, now: float) -> list[Command]:
    raise SessionClosed(f"session {request.session} has ended: this controller has followed no other one")


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
    coalesce: bool = True
    waiting: dict[int, Continuation] = field(default_factory=dict)
    calls: OpenCalls = field(default_factory=OpenCalls)
    slicing: dict[int, deque[Requested]] = field(default_factory=dict)
    changing: dict[int, deque[Requested]] = field(default_factory=dict)
    not_yet: list[Slicing] = field(default_factory=list)
    known_status: dict[str, status.KnownStatus] = field(default_factory=dict)
    resume: Callable[[Requested, wire.ResumeSession, Caller, float], list[Command]] = _nothing_to_resume
    audited: float = -math.inf
    looking: int = 0
    """Calls of looks are numbered downward, apart from those of clients."""

    def __post_init__(self) -> None:
        self.looks = Looks(self.launches, self.clients)
        self.changes = Changes(self.launches, self.data_secret, self._ask_manager)
        self.looks.leaving = self.changes.moves.leaving
        self.explanations = Explanations(self.launches, self.clients)

    def caller(self, metadata: dict[str, str]) -> Caller:
        """The origin of a request that shows this: a session with its secret, a tenant or the operator with a token.

        Raises:
            SessionClosed: the session that is named is not open, or has another secret.
            AuthenticationError: the token is unknown.
        """
        if "session" in metadata:
            client = self.clients.find(metadata, lambda client: client.secret)
            if client is None:
                raise SessionClosed(f"session {session_of(metadata)} is not open, or the secret is not its own")
            return client.session
        owner = self.book.owner(metadata.get("authorization", ""))
        if authorised(metadata, self.token):
            return None
        if owner is None:
            raise AuthenticationError(UNKNOWN_TOKEN)
        return owner

    # --- answers ------------------------------------------------------------------------------------------------------

    def received(self, event: Requested, now: float) -> list[Command]:
        """Answers a request, or asks for what its answer needs."""
        try:
            reply, commands = self._answer(event, now)
        except PathwaysError as error:
            self._audit(event, error, now)
            reply, commands = wire.Refused(to_failure(error)), []
        return commands if reply is None else [*commands, AnswerCall(event.call, reply)]

    def _audit(self, event: Requested, error: PathwaysError, now: float) -> None:
        """Notes a request that is refused, one in a second: many of one must not push out what others did."""
        if now - self.audited >= AUDIT_PAUSE_S:
            self.audited = now
            session = event.caller if isinstance(event.caller, int) else 0
            refused = Entry(now, "request refused", type(event.request).__name__, str(error)[:200], session=session)
            self.launches.story.note(refused)

    def manager_answered(self, call: int, answer: Any) -> list[Command]:
        """Answers the request that waited for the resource manager."""
        if (go_on := self.waiting.pop(call, None)) is None:
            return []
        reply, commands = _outcome(go_on, answer)
        return commands if reply is None else [*commands, AnswerCall(call, reply)]

    def _ask_manager(self, call: int, method: str, arguments: tuple[Any, ...], go_on: Continuation) -> list[Command]:
        self.waiting[call] = lambda answer: go_on(_valid(answer))
        return [CallManager(method, arguments, call)]

    def _answer(self, event: Requested, now: float) -> tuple[wire.Reply | None, list[Command]]:
        """The reply, or None where it comes later; and commands."""
        request, caller = event.request, event.caller
        if isinstance(caller, TokenOwner):
            caller = self.book.still(caller)  # the table may have been read since the token was shown
        client = self.clients.known.get(caller) if isinstance(caller, int) else None
        if isinstance(caller, int) and client is None:
            raise SessionClosed(f"session {caller} has been closed")
        if event.size > MAX_CALL_BYTES and not isinstance(request, wire.Explain | wire.ResumeSession):
            raise TooLarge(f"a call of {event.size} bytes; the limit is {MAX_CALL_BYTES}")
        if client is not None:
            quotas.enforce(quotas.message_bytes(client.tenant, event.size, "a call"))
        if isinstance(request, wire.OpenSession) and not isinstance(caller, int):
            return None, self._open(event, request, caller, now)
        if isinstance(request, wire.ResumeSession):
            return None, self.resume(event, request, caller, now)
        if client is None and isinstance(request, wire.Status | wire.Look) and request.session == 0:
            assert not isinstance(caller, int)
            return self._look(event.call, caller and caller.tenant, request, now)
        if isinstance(request, wire.LiftRefusal) and caller is None:
            return self._lift(request, now), []
        if isinstance(request, wire.ReadLog) and caller is None:
            return None, [AskForLog(event.call, request)]
        if isinstance(request, IslandChange) and caller is None:
            return None, self.changes.island(event.call, request)
        if client is None or isinstance(request, wire.OpenSession) or request.session != client.session:
            raise AuthenticationError("what the call asks for is another session's, or takes a session's own secret")
        if client.session in self.changing and isinstance(request, AFTER_CHANGE):
            self.changing[client.session].append(event)
            return None, []
        match request:
            case wire.CreateSlice():
                return None, self._create_slice(event, client, request)
            case wire.ReleaseSlice():
                self.launches.remove_slice(client.session, request.slice)
                released = (client.session, request.slice)
                return None, self._ask_manager(event.call, "release_slice", released, lambda _: (wire.Accepted(), []))
            case wire.ListHeld():
                return self.changes.moves.held(self.launches.sessions[client.session], request), []
            case wire.ExchangeSlices() | wire.Suspend():
                return None, self._change(event.call, client.session, request)
            case wire.CloseSession():
                return wire.Accepted(), self.clients.close(client.session, at_once=False)
            case wire.Explain():
                reply, commands = self.explanations.explain(event.call, client, request, now)
                return reply, [*commands, *self.launches.prepare(client.session, request.program)]
            case wire.Status() | wire.Look():
                return self._look(event.call, client.tenant if client.token else None, request, now)
            case wire.LiftRefusal() | wire.ReadLog() | wire.DrainIsland() | wire.UndrainIsland() | wire.RemoveIsland():
                raise AuthenticationError("that takes the runtime's own token, the operator's")

    # --- sessions and slices ------------------------------------------------------------------------------------------

    def _open(self, event: Requested, request: wire.OpenSession, by: TokenOwner | None, now: float) -> list[Command]:
        if request.version != wire.VERSION:
            raise WireError(f"the client speaks protocol version {request.version}, this cluster {wire.VERSION}")
        owner, token = by or (tenants.operators(self.clients.sessions_made + 1), "")
        held = sum(client.tenant.name == owner.name for client in self.clients.known.values())
        quotas.enforce(quotas.sessions(owner, held))
        client, commands = self.clients.open(request.name[:256], owner, token, event.secret, now)
        commands += self.isolation.opened(client, now)
        return commands + self._ask_manager(event.call, "platforms", (), lambda found: self._opened(client, found))

    def _opened(self, client: Client, platforms: tuple[str, ...]) -> tuple[wire.Reply, list[Command]]:
        secret, tenant = self.data_secret, client.tenant
        return wire.SessionOpened(
            session=client.session,
            secret=client.secret,
            data_token=data_token(secret, client.session, tenant.quota.device_bytes, tenant.name),
            hosts=self.hosts_up(),
            platforms=platforms,
            fusion=self.clients.registrar.fusion,
            max_launches=limits.MAX_LAUNCHES_IN_FLIGHT,
            link_port=self.link_port,
            trusted=tenant.trusted,
            coalesce=self.coalesce,
            resume_tag=resume_tag(secret, client.session, tenant.name),
        ), []

    def hosts_up(self) -> tuple[wire.HostAddress, ...]:
        """The hosts that clients can reach."""
        hosts = (h for h in self.launches.hosts.values() if h.down_since is None)
        return tuple(wire.HostAddress(h.host, h.epoch, h.data_address) for h in hosts)

    def _create_slice(self, event: Requested, client: Client, request: wire.CreateSlice) -> list[Command]:
        """Asks for a slice; one request of a session at a time, so that all of them together keep nobody busy."""
        if client.session in self.slicing:
            self.slicing[client.session].append(event)
            return []
        state = self.launches.sessions[client.session]
        self.changes.moves.forget_places(state)
        quotas.enforce(quotas.slices(state))
        if request.shape and all(size > 0 for size in request.shape) and not is_replacement(state, request):
            quotas.enforce(quotas.devices(client.tenant, math.prod(request.shape), self.launches.sessions.values()))
        self.slicing[client.session], now = deque(), self.launches.tables.now
        deadline = now + self.isolation.patience_s(client)
        return self._ask_for_slice(Slicing(event.call, client, request, deadline), now)

    def _ask_for_slice(self, asked: Slicing, now: float) -> list[Command]:
        client, request = asked.client, asked.request
        arguments = (
            client.session,
            request.shape,
            request.axes,
            request.island,
            request.platform,
            request.name[:256],
            self.isolation.islands_of(client),
            request.within,
            request.places,
            request.instead,
            request.topology,
            request.memory,
            request.generation,
            asked.call,
            now >= asked.deadline,
        )

        def answered(answer: Any) -> tuple[wire.Reply | None, list[Command]]:
            try:
                found = self.isolation.checked(_SLICE.decode(_valid(answer)))
                if isinstance(found, wire.NotYet) and client.session in self.clients.known:
                    self.not_yet.append(asked)  # it is asked again with the next tick
                    return None, []
                reply, commands = self._slice_created(client, found, request)
            except PathwaysError as error:
                reply, commands = wire.Refused(to_failure(error)), []
            return reply, commands + self._go_on(self.slicing, client.session)

        self.waiting[asked.call] = answered
        return [CallManager("create_slice", arguments, asked.call)]

    def _go_on(self, waiting: dict[int, deque[Requested]], session: int) -> list[Command]:
        """The requests that waited for the one before: up to the first that others have to wait for again."""
        events = waiting.pop(session, deque())
        commands: list[Command] = []
        while events and session not in waiting:
            commands += self.received(events.popleft(), self.launches.tables.now)
        if events:
            waiting[session].extend(events)
        return commands

    def _change(self, call: int, session: int, request: wire.ExchangeSlices | wire.Suspend) -> list[Command]:
        """Has slices exchanged, or all given back for a while. What else changes the session's slices waits meanwhile:
        the resource manager would do it after that, and the controller before."""
        if isinstance(request, wire.Suspend):
            commands = self.changes.suspend(call, session, request.gives_way)
        else:
            commands = self.changes.exchange(call, session, request)
        self.changing[session], go_on = deque(), self.waiting[call]

        def answered(answer: Any) -> tuple[wire.Reply | None, list[Command]]:
            reply, commands = _outcome(go_on, answer)
            return reply, commands + self._go_on(self.changing, session)

        self.waiting[call] = answered
        return commands

    def ask_again(self, now: float) -> list[Command]:
        """Asks again for slices that the resource manager could not map yet."""
        again, self.not_yet = self.not_yet, []
        return [command for asked in again for command in self._ask_for_slice(asked, now)]

    def _slice_created(
        self, client: Client, reply: wire.SliceCreated | wire.Refused | wire.NotYet, request: wire.CreateSlice
    ) -> tuple[wire.Reply, list[Command]]:
        if isinstance(reply, wire.NotYet):
            raise SessionClosed(f"session {client.session} ended while it asked for a slice")
        if isinstance(reply, wire.Refused):
            return reply, []
        session, placed = client.session, reply.placed
        try:
            if session not in self.launches.sessions:
                raise SessionClosed(f"session {session} ended while it asked for a slice")
            quotas.enforce(left_behind(self.launches.sessions[session], request, placed))
            # Again: only now is it known how many devices a whole island has, and others may have asked meanwhile.
            if not is_replacement(self.launches.sessions[session], request):
                quotas.enforce(quotas.devices(client.tenant, placed.mesh.size, self.launches.sessions.values()))
        except PathwaysError as error:
            return wire.Refused(to_failure(error)), [CallManager("release_slice", (session, placed.mesh.id))]
        self.launches.add_slice(session, placed, request.within, request.instead, request.name[:256])
        return wire.SliceCreated(placed, slice_tag(self.data_secret, session, placed)), []

    # --- refusals -----------------------------------------------------------------------------------------------------

    def _lift(self, request: wire.LiftRefusal, now: float) -> wire.Reply:
        if not self.launches.circuit_breaker.lift(request.refusal):
            raise UsageError(f"no program is refused under {request.refusal[:64]!r}; 'pathways refusals' lists them")
        self.launches.story.note(Entry(now, "refusal lifted", request.refusal))
        return wire.Accepted()

    # --- status -------------------------------------------------------------------------------------------------------

    def _look(
        self, call: int, viewer: Tenant | None, request: wire.Status | wire.Look, now: float
    ) -> tuple[wire.Reply | None, list[Command]]:
        """Shows a tenant its own, the operator (None) everything."""
        if isinstance(request, wire.Look) and request.subject == "all":
            return None, self.looks.all(call, viewer.name if viewer is not None else "", partial(self._said, viewer))
        if isinstance(request, wire.Look):
            return None, self.looks.why(call, viewer.name if viewer is not None else "", request)
        known = self.known_status.setdefault(viewer.name if viewer is not None else "", status.KnownStatus())
        if viewer is not None and known.is_fresh_enough(now):
            return wire.StatusReply(known.text), []

        def answered(text: str) -> tuple[wire.Reply, list[Command]]:
            reply = self._status_reply(viewer, text)
            known.text = reply.text
            return reply, []

        return None, self._ask_manager(call, "status", (), answered)

    def _said(self, viewer: Tenant | None, then: Callable[[str], list[Command]]) -> list[Command]:
        """Has the status made for looks, which have numbers of their own; "null" where there is no status."""
        self.looking -= 1
        self.waiting[self.looking] = lambda answer: (
            None,
            then(self._status_reply(viewer, answer).text if isinstance(answer, str) else "null"),
        )
        return [CallManager("status", (), self.looking)]

    def _status_reply(self, viewer: Tenant | None, text: str) -> wire.StatusReply:
        found: dict[str, Any] = msgspec.json.decode(text)
        known = self.clients.known
        found |= status.of_launches(self.launches, self.report, {n: c.name for n, c in known.items()}) | self.about
        found["moved_bytes"] = self.looks.overview.moved_bytes()
        found["trusted_tenants"] = [tenant.name for tenant, _ in self.book.entries if tenant.trusted]
        if self.logs is not None:
            found["logs"] = status.logs(found["islands"], *self.logs)
        if viewer is not None:
            mine = {session for session, other in known.items() if other.tenant.name == viewer.name}
            found = status.for_tenant(found, viewer.name, mine, viewer.name if self.isolation.enabled else "")
        return wire.StatusReply(msgspec.json.encode(found).decode())


def _outcome(go_on: Continuation, answer: Any) -> tuple[wire.Reply | None, list[Command]]:
    try:
        return go_on(answer)
    except PathwaysError as error:
        return wire.Refused(to_failure(error)), []


def _valid(answer: Any) -> Any:
    """An answer of the resource manager. Raises `WireError` for how it failed."""
    if isinstance(answer, BaseException):
        raise WireError(f"the resource manager failed: {answer}")
    return answer
