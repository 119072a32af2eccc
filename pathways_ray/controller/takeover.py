"""Takeover: how a controller that follows another one learns what there is, and opens sessions again for their clients.

It has read nothing that its predecessor wrote down. The resource manager says which slices there are, schedulers the
highest numbers of launches and programs, hosts what they hold, and a client, which shows by a tag that a session is its
own, what of that it has handles to (its slices: `returning`). Until all hosts that are awaited have said so, or for
`GATHER_LIMIT_S`, clients wait, and so do launches of sessions that are new. What nobody has come for `RESUME_LIMIT_S`
later is freed.

No launch is taken over. Of those that a client has sent and has no outcome of it hears what schedulers know
(`inherited`), and of the rest that nobody does. So nothing runs twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pathways_ray import limits
from pathways_ray.controller import buffers, quotas, returning, tenants
from pathways_ray.controller.channel import ChannelState
from pathways_ray.controller.clients import Client
from pathways_ray.controller.comparing import compared
from pathways_ray.controller.events import AnswerCall, Caller, CallManager, Command, Requested
from pathways_ray.controller.inherited import launches
from pathways_ray.controller.programs import BufferType, number_of
from pathways_ray.controller.requests import Requests
from pathways_ray.controller.state import Arriving, Buffer, Named, Send, SendIsland, Session
from pathways_ray.controller.tenants import Tenant, TokenOwner
from pathways_ray.errors import (
    GraphError,
    PathwaysError,
    SessionClosed,
    TooLarge,
    to_failure,
)
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import check_layout
from pathways_ray.story import Entry
from pathways_ray.transport import messages as wire
from pathways_ray.transport.capabilities import slice_tag

GATHER_LIMIT_S = 10.0
"""Clients that come back wait this long for hosts to say what they hold; those that have not by then count as lost."""

MAX_RESUME_BYTES = 8 << 20
"""A call that resumes a session: 65,536 arrays, each of another type, take less. It is kept while it waits."""

MAX_NAMED = 2 * limits.MAX_SESSION_BUFFERS
"""Arrays in such a call: some are freed behind launches that wait at the client."""

NUMBERS_APART = 1 << 20
"""Launches are numbered from this far above the highest number that a scheduler tells: one that tells later may have
seen higher ones. So are programs, where the clock was set back."""

PROGRAMS_APART = 128
"""Programs that a controller may number for each number of a session, a hundredth of a second, before those of the next
controller begin. More would leave no room for `SEGMENT_BITS` in a number of 64 bits."""


def _drops_session(command: Command) -> bool:
    return isinstance(command, SendIsland) and isinstance(command.message, wire.DropSession)


class _Asked(NamedTuple):
    """A call that waits until the hosts have said what they hold."""

    event: Requested
    request: wire.ResumeSession
    caller: TokenOwner | None

    @property
    def owner(self) -> Tenant:
        return self.caller.tenant if self.caller is not None else tenants.operators(self.request.session)


class Takeover:
    """The findings of a controller that follows another one, and the sessions that come back to it.

    Args:
        found: the slices that the resource manager knows, and the islands that they are to leave.

    `slices` has them by session; it is `blind` where nobody knew of any that there ever was. `held` has what hosts
    hold, as they said under their `epochs`, `arrived`, by host and session, the last uploads since then; `open_since`
    is when sessions could first come back, `over_since` since when none can any more.
    """

    def __init__(self, requests: Requests, found: wire.HeldSlices) -> None:
        self.requests, self.launches, self.clients = requests, requests.launches, requests.clients
        self.tables = tables = requests.launches.tables
        self.inherited = self.launches.outcomes.inherited
        tables.last_slice = max(tables.last_slice, found.last_slice)
        requests.changes.moves.draining = set(found.draining)
        self.blind = not found.last_slice
        requests.changes.unsure = lambda: self.blind and not self.over
        self.slices = tables.unclaimed
        self.slices.clear()
        for one in found.slices:
            self.slices.setdefault(one.session, {})[one.placed.mesh.id] = one
        # Numbers are made from the time, which may have been set back: none is given again that somebody comes for.
        self.clients.sessions_made = max(self.clients.sessions_made, *self.slices, 0)
        self.held: dict[int, wire.Holds] = {}
        self.epochs: dict[int, int] = {}
        self.arrived: dict[tuple[int, int], deque[wire.Stored]] = {}
        self.asked: dict[int, _Asked] = {}
        self.began: float | None = None
        self.open_since: float | None = None
        self.over_since: float | None = None
        # Sessions are numbered by the clock. Hosts may have programs of a number that no scheduler has reported yet.
        self.first_program = self.clients.registrar.programs_made = self.clients.sessions_made * PROGRAMS_APART
        requests.isolation.waits = self.launches.membership.gathering = True

    @property
    def over(self) -> bool:
        """Whether no session can come back any more."""
        return self.over_since is not None

    # --- what there is ------------------------------------------------------------------------------------------------

    def island_up(self, hello: wire.IslandUp) -> None:
        """A scheduler tells the highest numbers that it has seen: those that follow are above them."""
        self.requests.changes.moves.heard_of(hello.island)
        self.tables.sequence = max(self.tables.sequence, hello.sequence + NUMBERS_APART)
        self._heard_of_program(hello.program)

    def _heard_of_program(self, number: int) -> None:
        """There is a program of this number. It is below those of this controller, unless the clock was set back: then
        these begin far above it."""
        registrar = self.clients.registrar
        if number > self.first_program:
            registrar.programs_made = max(registrar.programs_made, number + NUMBERS_APART)

    def outcomes(self, island: int, message: wire.IslandOutcomes) -> list[Send]:
        """A scheduler says what launches of the controller before have come to."""
        commands = self.inherited.told(island, message.outcomes)
        return commands + (self.inherited.abort_unknown() if self.open_since is not None else [])

    def says_again(self, message: wire.HostUp) -> None:
        """Takes a further list of a host that is up. Its answer to the controller before this one comes first, where
        that died before it heard it."""
        if message.holds is not None and message.host in self.held:
            self.held[message.host] = message.holds

    def host_up(self, island: int, message: wire.HostUp) -> list[Send]:
        """A host is up, with what it held under the controller before. What nobody can have a handle to is dropped."""
        assert message.holds is not None
        commands = self.launches.host_up(island, message)
        # Its scheduler may have died too, and have seen no launch since. Numbers up to that from which on it has data
        # may be of launches that waited here, and that nobody has seen: under those, its peers would take it for lost.
        seen = max(message.holds.sequence, message.holds.since or 0)
        self.tables.sequence = max(self.tables.sequence, seen + NUMBERS_APART)
        # It may not hear that a program of before is dropped, and would take that for a new one of its number.
        self._heard_of_program(max(map(number_of, message.holds.programs), default=0))
        if message.info is not None:
            self.requests.isolation.held_before(message.info.tenant, self.tables.now)
        if not self.over:
            self.held[message.host], self.epochs[message.host] = message.holds, message.epoch
        self.inherited.offered.setdefault(island, {}).update(dict.fromkeys(message.holds.offered))
        for one in compared(self.tables, self.tables.hosts[message.host], message.holds).unwanted:
            if isinstance(one, wire.DropProgram):
                self.inherited.drop(island, one)
            elif self.over or not isinstance(one, wire.DropSession):
                commands.append(SendIsland(island, one))
        return commands + (self.inherited.abort_unknown() if self.open_since is not None else [])

    def host_back(self, message: wire.HostUp, commands: Sequence[Command]) -> list[Command]:
        """A host is back that was without a scheduler. What it has of sessions that have not come back yet stays."""
        self.says_again(message)
        return [command for command in commands if self.over or not _drops_session(command)]

    def host_began(self, message: wire.HostUp) -> None:
        """A host has started again: it holds nothing yet."""
        if not self.over:
            self.held[message.host], self.epochs[message.host] = wire.Holds({}, ()), message.epoch
            self.arrived = {key: uploads for key, uploads in self.arrived.items() if key[0] != message.host}

    def stored(self, message: wire.Stored) -> None:
        """An upload of a session that may come back has arrived since its host said what it holds."""
        if message.host in self.held and message.session not in self.tables.sessions:
            last: deque[wire.Stored] = deque(maxlen=limits.MAX_REMEMBERED_UPLOADS)
            self.arrived.setdefault((message.host, message.session), last).append(message)

    def host_lost(self, host: int) -> None:
        """A host is gone, with what it held."""
        self.held.pop(host, None)

    def look(self, now: float) -> list[Command]:
        """Opens the sessions of clients that wait, once it is known what there is; frees what nobody has come for."""
        if self.began is None:
            self.began = now
        if self.open_since is None and (not self._awaited() or now - self.began >= GATHER_LIMIT_S):
            self.open_since, self.requests.isolation.waits = now, False
            missing = ", ".join(map(str, sorted(self._awaited()))) or "none"
            found = f"{len(self.slices)} sessions with slices, hosts missing: {missing}"
            self.launches.story.note(Entry(now, "took over", found))
            asked, self.asked = list(self.asked.values()), {}
            self.launches.membership.gathering = False
            peers = self.launches.membership.peers()
            begun = self.launches.admission.resume(self.launches.sessions.values())
            aborted = self.inherited.abort_unknown()
            return [*aborted, *peers, *begun, *(command for one in asked for command in self._answered(one, now))]
        if self.open_since is not None and not self.over and now - self.open_since >= limits.RESUME_LIMIT_S:
            return self._end(now)
        return []

    def _awaited(self) -> set[int]:
        """The hosts that have not said yet what they hold, of those that anything may be on."""
        hosts = self.tables.hosts
        placed = [one.placed for held in self.slices.values() for one in held.values()]
        if self.blind:
            placed += [one.placed for asked in self.asked.values() for one in asked.request.slices]
        named = {host for one in placed for host in one.hosts}
        return {host for host in named | hosts.keys() if host not in hosts or hosts[host].epoch == 0}

    def _end(self, now: float) -> list[Command]:
        self.over_since = now
        gone = self.slices.keys() | {session for holds in self.held.values() for session in holds.buffers}
        gone |= {session for _, session in self.arrived}
        commands: list[Command] = []
        for session in sorted(gone - self.tables.sessions.keys()):
            self.launches.story.note(Entry(now, "session ended", cause="its client did not come back", session=session))
            commands += [SendIsland(island, wire.DropSession(session)) for island in self.tables.islands()]
            commands.append(CallManager("release_session", (session,)))
        self.slices.clear()
        self.held.clear()
        self.arrived.clear()
        self.inherited.forget()
        return commands

    # --- sessions that come back --------------------------------------------------------------------------------------

    def received(self, event: Requested, request: wire.ResumeSession, caller: Caller, now: float) -> list[Command]:
        """Opens a session again for its client, at once or later.

        Raises:
            WireError: the client speaks another version of the protocol.
            AuthenticationError: the session is not of this tenant, or a tag is not its own, or not that of its slice.
            TooLarge: the request names more than a session may have.
            QuotaExceeded: the tenant has as many sessions as it may.
            SessionClosed: it cannot be resumed any more.
        """
        owner = returning.owner_of(request, caller, self.requests.data_secret)
        assert not isinstance(caller, int)
        groups = *request.kept, *(group for one in request.unanswered for group in one.results)
        named = sum(len(group.numbers) for group in groups)
        if event.size > MAX_RESUME_BYTES or named > MAX_NAMED:
            text = f"a call of {event.size} bytes that names {named} arrays"
            raise TooLarge(f"{text}; {MAX_RESUME_BYTES} and {MAX_NAMED} are the limits")
        returning.check_tags(request, self.requests.data_secret)
        asked = _Asked(event, request, caller)
        if self.open_since is not None:
            return self._answered(asked, now)
        before = self.asked.get(request.session)
        if before is None:
            self._check_sessions(owner)
        self.asked[request.session] = asked
        if before is None:
            return []
        again = to_failure(SessionClosed(f"session {request.session} was asked for once more"))
        return [AnswerCall(before.event.call, wire.Refused(again))]

    def _check_sessions(self, owner: Tenant) -> None:
        """Refuses one more session of a tenant; those count that others wait for."""
        open_ones = sum(client.tenant.name == owner.name for client in self.clients.known.values())
        waiting = sum(asked.owner.name == owner.name for asked in self.asked.values())
        quotas.enforce(quotas.sessions(owner, open_ones + waiting))

    def _answered(self, asked: _Asked, now: float) -> list[Command]:
        try:
            return self._resume(asked, now)
        except PathwaysError as error:
            return [AnswerCall(asked.event.call, wire.Refused(to_failure(error)))]

    def _resume(self, asked: _Asked, now: float) -> list[Command]:
        event, request, caller = asked
        number, client = request.session, self.clients.known.get(request.session)
        if client is not None and client.channel.state is ChannelState.OPENED:
            return [self._reply(event.call, client, request)]  # the reply to the first call got lost
        if client is not None or self.over:
            why = "is open" if client is not None else "was given up"
            raise SessionClosed(f"session {number} cannot be resumed: it {why}")
        if caller is not None:
            caller = self.requests.book.still(caller)  # it may have waited, and the table have been read meanwhile
        owner, token = caller or (tenants.operators(number), "")
        self._check_sessions(owner)
        isolated = self.requests.isolation.islands_for(owner, token)
        moves, known = self.requests.changes.moves, self.slices.get(number, {})
        held = [] if request.suspended else returning.slices_of(request, owner, isolated, moves, known)
        self.slices.pop(number, None)
        opened = self.clients.open(request.name[:256], owner, token, event.secret, now, number)
        client, commands = opened[0], [*opened[1], *self.requests.isolation.opened(opened[0], now)]
        for one in held:
            self.launches.add_slice(number, one.placed, one.within, name=one.name)
        # A slice that was given back may be named too; no other one of the session may get its number.
        self.tables.last_slice = max([self.tables.last_slice, *(one.placed.mesh.id for one in request.slices)])
        found = wire.HeldSlices(tuple(held), self.tables.last_slice)
        commands.append(CallManager("hold_slices", (number, wire.encode(found))))
        session = self.launches.sessions[number]
        session.suspended, session.gives_way = request.suspended, request.suspended and request.gives_way
        if request.suspended:
            session.away = {one.placed.mesh.id: one.placed.mesh for one in request.slices}
        commands += self._enter(session, request)
        return [*commands, self._reply(event.call, client, request)]

    def _enter(self, session: Session, request: wire.ResumeSession) -> list[Command]:
        """Enters the buffers that are on all their hosts, or on the way there, or that launches will make; others are
        dropped."""
        session.named = Named(request.next_buffer - 1)
        inherited = self.inherited.answer(session.id, request.unanswered)
        held = self._still_held()
        made = self.inherited.made_since(session.id, request.unanswered)
        there: dict[int, set[int]] = {}
        said: dict[int, list[wire.Stored]] = {}
        for host, holds in held.items():
            arrived = self.arrived.pop((host, session.id), ())
            later = made.get(self.tables.hosts[host].island, ())
            there[host] = {*holds.buffers.get(session.id, ()), *(one.buffer for one in arrived), *later}
            for report in (*(one for one in holds.uploads if one.session == session.id), *arrived):
                said.setdefault(report.buffer, []).append(report)
        commands: list[Command] = []
        for group in (*request.kept, *inherited.there):
            place = session.places.get(group.slice)
            kind = _type_of(group, place)
            if place is None or kind is None:
                continue
            for number in group.numbers:
                absent = {host for host in place.hosts if number not in there.get(host, ())}
                if session.lives(number) or number >= request.next_buffer:
                    continue
                never = buffers.sent_to_ended_process(self.tables, absent, number, group.epochs)
                if absent and (not group.arriving or never is not None):
                    continue
                if quotas.buffers(session, self.tables.buffers, 1, "an array of a session that is resumed") is not None:
                    continue
                session.keep(number, Buffer(kind, 0))
                if hosts := absent | {report.host for report in said.get(number, ())}:
                    session.arriving[number] = Arriving(hosts, group.epochs)
        for group in inherited.coming:
            if (kind := _type_of(group, session.places.get(group.slice))) is not None:
                for number in group.numbers:
                    if not session.lives(number) and number < request.next_buffer:
                        session.keep(number, Buffer(kind, 0))
        self.launches.admission.memory.changed()
        commands += self.inherited.drops(session.id, request.unanswered, session.buffers)
        # Parts of launches that still run may store under these: no other part of a launch may have their numbers.
        session.own_numbers = min((n for numbers in there.values() for n in numbers if n < 0), default=0)
        # Of those it is known what came to each host, and of newer ones the client will say more.
        for number, reports in said.items():
            if number in session.arriving or number >= request.next_buffer:
                commands += [command for report in reports for command in buffers.stored(session, report)]
            elif not session.lives(number):
                buffers.burn(session, number)
        stray: dict[int, set[int]] = {}
        for host, numbers in there.items():
            dropped = {n for n in numbers if n < request.next_buffer and n not in session.buffers}
            stray.setdefault(self.tables.hosts[host].island, set()).update(dropped)
        drops = [(island, tuple(sorted(found))) for island, found in sorted(stray.items()) if found]
        return commands + [SendIsland(island, wire.Drop(session.id, found)) for island, found in drops]

    def _still_held(self) -> dict[int, wire.Holds]:
        """The holdings of hosts that are there and have not started again since, with or without a scheduler."""
        known = ((self.tables.hosts.get(host), holds) for host, holds in self.held.items())
        return {
            host.host: holds
            for host, holds in known
            if host is not None and host.epoch == self.epochs[host.host] and (host.down_since is None or host.orphaned)
        }

    def _reply(self, call: int, client: Client, request: wire.ResumeSession) -> AnswerCall:
        session = self.launches.sessions[client.session]
        secret = self.requests.data_secret
        slices = tuple(wire.SliceCreated(one, slice_tag(secret, session.id, one)) for one in session.slices.values())
        done, failed, running = found = self.inherited.answer(session.id, request.unanswered)
        groups = *request.kept, *found.there, *found.coming
        lost = tuple(n for group in groups for n in group.numbers if not session.lives(n))
        # Of one that was up under the controller before, and is not, nobody else would tell: uploads there never end.
        down = (h for h in self.tables.hosts.values() if h.down_since is not None)
        hosts = *self.requests.hosts_up(), *(wire.HostAddress(h.host, h.epoch, "") for h in down)
        known = client.secret, self.requests.link_port, hosts, slices, tuple(dict.fromkeys(lost))
        reply = wire.SessionResumed(*known, launches(done), tuple(failed), launches(running))
        return AnswerCall(call, reply)


def _type_of(group: wire.KeptBuffers, place: PlacedSlice | None) -> BufferType | None:
    """The type of some arrays; None where they cannot lie so."""
    if place is None:
        return None
    try:
        check_layout(group.type, group.spec, place.mesh, "resume")
    except GraphError:
        return None
    return BufferType.on(place.mesh, group.type, group.spec)
