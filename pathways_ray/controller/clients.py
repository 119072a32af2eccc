"""Clients at the controller: sessions that open and close, their channels, and the messages that come by them."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pathways_ray import limits
from pathways_ray.controller import events, quotas
from pathways_ray.controller.channel import Channel, ChannelEvent, ChannelState
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.plan_queue import PlanQueue
from pathways_ray.controller.planning import PlanReply, plan_if_cheap, request_of
from pathways_ray.controller.programs import check_functions
from pathways_ray.controller.registration import Registration, TenantFunctions
from pathways_ray.controller.state import SendClient, Session
from pathways_ray.controller.tenants import Tenant, TenantBook
from pathways_ray.controller.turns import TURN_WORK, Hold, Turns, work_of
from pathways_ray.errors import PathwaysError, WireError, from_failure, to_failure
from pathways_ray.story import Entry
from pathways_ray.transport import batcher
from pathways_ray.transport.capabilities import authorised, session_of
from pathways_ray.transport.messages import Cancel, Launch, Register, SessionEnded, ToController, Upgrade

CHEAP_FUNCTION_BYTES = 1 << 20
"""Functions of a program beyond this are compared with their digests away from the loop; these take 2 ms."""

STREAM_LIMIT_S = 20.0
"""A session whose stream does not come within this time is closed."""


@dataclass(slots=True)
class Client:
    """The client of a session: its name, tenant, secret, channel, and the functions it has sent.

    `token` is the digest of the tenant's token, or "" for the operator's; `opened` is the time of its first request;
    `reading` is False while messages of it wait here.
    """

    session: int
    name: str
    tenant: Tenant
    token: str
    secret: str
    opened: float
    registration: Registration
    reading: bool = True
    channel: Channel = field(default_factory=Channel)


class Clients:
    """All clients, by the number of their session.

    Args:
        fusion: whether programs are fused when they are planned.
        sessions_made: sessions are numbered from the next number on.
        check: raises for functions that are not what their names say.
    """

    def __init__(
        self,
        launches: Launches,
        fusion: bool,
        sessions_made: int = 0,
        check: Callable[[Mapping[str, bytes]], None] = check_functions,
    ) -> None:
        self.launches = launches
        self.fusion = fusion
        self.sessions_made = sessions_made
        self.programs_made = 0
        self.check = check
        self.known: dict[int, Client] = {}
        self.turns = Turns()
        self.functions: dict[str, TenantFunctions] = {}
        self.islands_full: set[int] = set()
        self.plans = PlanQueue()
        self.plan_if_cheap = plan_if_cheap

    # --- opening and closing ------------------------------------------------------------------------------------------

    def open(
        self, name: str, tenant: Tenant, token: str, secret: str, now: float
    ) -> tuple[Client, list[events.Command]]:
        """Opens the next session for a tenant; its messages are kept until its stream comes."""
        self.sessions_made += 1
        number = self.sessions_made
        registration = Registration(self.functions.setdefault(tenant.name, TenantFunctions()))
        client = self.known[number] = Client(number, name, tenant, token, secret, now, registration)
        return client, [events.OpenChannel(number), *self.launches.open_session(number, tenant)]

    def close(self, session: int, *, at_once: bool = True) -> list[events.Command]:
        """Closes a session and frees what it holds; nothing happens for one that is closed."""
        client = self.known.pop(session, None)
        if client is None:
            return []
        if client.channel.state is not ChannelState.CLOSED:
            client.channel.apply(ChannelEvent.SESSION_CLOSED)
        self.turns.forget(session)
        self.plans.forget(session)
        client.registration.close()
        if not client.registration.tenants.held:
            self.functions.pop(client.tenant.name, None)
        return [
            *self.launches.close_session(session),
            events.CallManager("release_session", (session,)),
            events.CloseChannel(session, at_once),
        ]

    def end(self, client: Client, reason: str) -> list[events.Command]:
        """Closes a session from this side; its client hears why."""
        now = self.launches.tables.now
        self.launches.story.note(Entry(now, "session ended", cause=reason, session=client.session))
        return [SendClient(client.session, SessionEnded(reason)), *self.close(client.session)]

    def expire(self, now: float) -> list[events.Command]:
        """Closes sessions whose stream did not come."""
        commands: list[events.Command] = []
        for client in list(self.known.values()):
            if client.channel.state is ChannelState.OPENED and now - client.opened > STREAM_LIMIT_S:
                commands += self.end(client, f"the stream of the session did not come within {STREAM_LIMIT_S:.0f} s")
        return commands

    def tenants_read(self, book: TenantBook) -> list[events.Command]:
        """The table of tenants changed: sessions whose tenant has left it end, the others have its new values."""
        known = {digest: tenant for tenant, digest in book.entries}
        commands: list[events.Command] = []
        for client in list(self.known.values()):
            if not client.token:
                continue
            tenant = known.get(client.token)
            if tenant is None or tenant.name != client.tenant.name:
                gone = f"tenant {client.tenant.name!r} is not in the table of tenants any more, or has another token"
                commands += self.end(client, gone)
            elif client.tenant.trusted and not tenant.trusted:
                # What it has registered was checked as a trusted tenant's.
                commands += self.end(client, f"tenant {tenant.name!r} is not trusted any more")
            elif tenant != client.tenant:
                client.tenant = tenant
                commands += self.launches.set_tenant(tenant)
        return commands

    # --- the channel --------------------------------------------------------------------------------------------------

    def find(self, metadata: Mapping[str, str], secret: Callable[[Client], str]) -> Client | None:
        """The client that a connection names, if the connection shows its `secret`."""
        client = self.known.get(session_of(dict(metadata)))
        if client is None or not authorised(dict(metadata), secret(client)):
            return None
        return client

    def connection_changed(
        self, event: events.StreamOpened | events.StreamEnded | events.LinkOpened | events.LinkEnded, now: float
    ) -> list[events.Command]:
        """A connection of a client came or went; news of a session that is closed changes nothing."""
        client = self.known.get(event.session)
        if client is None:
            return []
        change = _CHANGES[type(event)]
        try:
            client.channel.apply(change)
        except WireError as error:
            return self.end(client, str(error))
        if client.channel.state is not ChannelState.CLOSED:
            return []
        self.launches.story.note(Entry(now, "client gone", cause=change, session=client.session))
        return self.close(client.session)

    def garbled(self, event: events.ClientGarbled, now: float) -> list[events.Command]:
        client = self.known.get(event.session)
        return self.end(client, event.reason) if client is not None else []

    def messages(self, event: events.ClientMessages, now: float) -> list[events.Command]:
        """Messages of a client, in order. One that is out of order, too big or trips this process ends its session."""
        client = self.known.get(event.session)
        if client is None:
            return []
        try:
            client.channel.check_carrier(event.carrier)
            self._check_size(client, event.size, event.messages)
        except PathwaysError as error:
            return self.end(client, str(error))
        if self.turns.put(event.session, event.messages):
            return []
        return self._work_off(client, event.messages)

    def turn(self, event: events.Turn, now: float) -> list[events.Command]:
        """The next session that waits has its turn."""
        self.turns.called = False
        found = self.turns.next()
        if found is None:
            return []
        session, messages = found
        return self._work_off(self.known[session], messages)

    def _work_off(self, client: Client, messages: Sequence[ToController]) -> list[events.Command]:
        """Works off messages until the session's turn is over, or something holds the rest."""
        commands: list[events.Command] = []
        session = self.launches.sessions[client.session]
        take, backlog = self.launches.admission.call, self.launches.admission.backlogs[client.session]
        left, taken, hold = TURN_WORK, 0, None
        try:
            for message in messages:
                if isinstance(message, Register):
                    if self.islands_full:
                        hold = Hold.ISLAND
                        break
                    taken += 1
                    made, hold = self._register(client, session, message)
                    commands += made
                    left -= work_of(message, 0)
                elif isinstance(message, Upgrade):
                    taken += 1
                    commands += self._upgrade(client, is_last=taken == len(messages))
                elif isinstance(message, Cancel):
                    taken += 1
                    left -= work_of(message, 0)
                    commands += self.launches.cancellation.cancel(session, message)
                else:
                    taken += 1
                    program = session.programs.get(message.program) if isinstance(message, Launch) else None
                    left -= work_of(message, program.result_count if program is not None else 0)
                    commands += take(session, message)
                    if len(backlog.waiting) >= limits.MAX_BACKLOG_CALLS:
                        backlog.full = True
                        hold = Hold.BACKLOG
                if left <= 0 or hold is not None:
                    break
        except PathwaysError as error:
            return commands + self.end(client, str(error))
        except Exception as error:  # it must not end the controller, and with it the sessions of others
            commands.append(events.ReportFault(traceback.format_exc()))
            return commands + self.end(client, f"internal error of the controller: {type(error).__name__}: {error}")
        if hold is not None or taken < len(messages):
            self.turns.wait(client.session, deque(islice(messages, taken, None)), hold)
            if client.reading:
                client.reading = False
                commands.append(events.PauseReading(client.session))
        elif not client.reading:
            client.reading = True
            commands.append(events.ResumeReading(client.session))
        return commands

    def after(self) -> list[events.Command]:
        """Lets sessions go on whose backlog an event has emptied, and asks for the next turn."""
        for session in self.launches.admission.relieved:
            self.turns.release(session, Hold.BACKLOG)
        self.launches.admission.relieved.clear()
        return [events.TakeTurn()] if self.turns.call() else []

    def island_full(self, event: events.IslandFull | events.IslandRoom, now: float) -> list[events.Command]:
        """The link to an island is full, or has room again. Until then no session registers a program: its functions
        would gather in this process, and hold up the launches of others."""
        if isinstance(event, events.IslandFull):
            self.islands_full.add(event.island)
            return []
        self.islands_full.discard(event.island)
        if not self.islands_full:
            self.turns.release_all(Hold.ISLAND)
        return []

    def _upgrade(self, client: Client, is_last: bool) -> list[events.Command]:
        client.channel.apply(ChannelEvent.UPGRADE)
        if not is_last:
            raise WireError("messages by the stream after the upgrade")
        return [events.SwitchToLink(client.session)]

    def _check_size(self, client: Client, size: int, messages: list[ToController]) -> None:
        """Raises `QuotaExceeded` for a batch over the tenant's quota of bytes. Many small messages that were gathered
        into one are fine, and a program is refused by itself."""
        if client.tenant.quota.message_bytes is None:
            return
        small = len(messages) > 1 and size <= batcher.MAX_BATCH_BYTES + len(messages)
        if not small and not any(isinstance(message, Register) for message in messages):
            refused = quotas.message_bytes(client.tenant, size, "a message")
            if refused is not None:
                raise from_failure(refused)

    # --- programs -----------------------------------------------------------------------------------------------------

    def _register(
        self, client: Client, session: Session, message: Register
    ) -> tuple[list[events.Command], Hold | None]:
        """Plans a program, or has it planned elsewhere; then the session's other messages have to wait."""
        self.programs_made += 1
        key, registration = self.programs_made, client.registration
        if len(session.programs) >= limits.MAX_PROGRAMS:
            return [], None
        refused = registration.refusal(session, message)
        if refused is not None:
            registration.withhold(message, refused)
            return self._registered(client, session, message, key, PlanReply(failure=refused, checked=False)), None
        # A program may arrive after a release that was called later: released slices are still known.
        request = request_of(message.graph, session.places, self.fusion, session.tenant)
        if sum(map(len, message.functions.values())) <= CHEAP_FUNCTION_BYTES:
            try:
                self.check(message.functions)
            except PathwaysError as error:
                reply: PlanReply | None = PlanReply(failure=to_failure(error), checked=False)
            else:
                reply = self.plan_if_cheap(request)
            if reply is not None:
                return self._registered(client, session, message, key, reply), None

        def planned(reply: PlanReply) -> list[events.Command]:
            self.turns.release(client.session, Hold.PLANNING)
            return self._registered(client, session, message, key, reply)

        return self.plans.put(client.session, request, message.functions, planned), Hold.PLANNING

    def _registered(
        self, client: Client, session: Session, message: Register, key: int, reply: PlanReply
    ) -> list[events.Command]:
        if reply.checked:
            client.registration.take(message.functions)
        program = client.registration.made(key, session, message, reply)
        if program.failure is not None:
            now = self.launches.tables.now
            text = program.failure.message
            self.launches.story.note(Entry(now, "program refused", program.name, text, session=session.id))
        return [*self.launches.register(session.id, message.program, program)]


_CHANGES: dict[type, ChannelEvent] = {
    events.StreamOpened: ChannelEvent.STREAM_OPENED,
    events.StreamEnded: ChannelEvent.STREAM_ENDED,
    events.LinkOpened: ChannelEvent.LINK_OPENED,
    events.LinkEnded: ChannelEvent.LINK_ENDED,
}
