"""Hosts that come and go: news for islands and clients, and what is lost with a host."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from pathways_ray import limits
from pathways_ray.controller import buffers
from pathways_ray.controller.comparing import compared
from pathways_ray.controller.dispatch import Dispatch
from pathways_ray.controller.outcomes import Outcomes, Settled
from pathways_ray.controller.preparation import Preparation
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import HostState, Send, SendClient, SendIsland, Session, Tables
from pathways_ray.errors import Failure
from pathways_ray.story import LAST_ENTRIES, Entry
from pathways_ray.transport.messages import BuffersLost, Holds, HostAddress, HostDown, HostUp, Peer, Peers

RESTARTS = "its island starts again for what a launch or a compilation did there"
"""The reason of a loss that the scheduler has decided, for tenants whose launch it was not."""


class Loss(NamedTuple):
    """The failures that follow from the loss of a host. It ended with `cause`; launches on its island end with `named`
    if their tenant is one of `tenants`, whose launch or program it names, others with `plain`, but for those that are
    `overdue`. To other tenants, what else was there is gone for the `reason`."""

    cause: Failure
    named: Failure
    plain: Failure
    reason: str
    tenants: frozenset[str] = frozenset()
    overdue: Mapping[int, Failure] = MappingProxyType({})


class Hosts:
    """The table of hosts."""

    def __init__(self, tables: Tables, preparation: Preparation, dispatch: Dispatch, outcomes: Outcomes) -> None:
        self.tables = tables
        self.preparation = preparation
        self.dispatch = dispatch
        self.outcomes = outcomes
        self.gathering = False
        """Whether hosts that live may not have come yet: others, told that they are gone, would drop connections. So no
        list of hosts is sent, and no launch: a scheduler drops those that come before a list with its hosts."""

    def expect(self, islands: Mapping[int, Sequence[int]]) -> None:
        """The hosts of the cluster as it begins: none has joined, and none is waited for for ever."""
        for island, members in islands.items():
            for host in members:
                self.tables.hosts[host] = HostState(host, island, 0, "", "", 0, 0, down_since=self.tables.now)
                self.tables.away.add(host)

    def up(self, island: int, message: HostUp) -> list[Send]:
        """A host serves under a new epoch: everybody learns its addresses."""
        tables = self.tables
        before = tables.hosts.get(message.host)
        lost = self.lose(before, "it started again") if before is not None and before.orphaned else []
        return lost + self._up(island, message, {})  # what was uploaded under another controller has been entered

    def _up(self, island: int, message: HostUp, waiting: Mapping[int, Collection[int]]) -> list[Send]:
        tables, holds, before = self.tables, message.holds, self.tables.hosts.get(message.host)
        # It says so again to each scheduler: one may die before it has passed it on.
        crash = message.crash if before is None or before.epoch < message.epoch else ""
        # One that lived on, without its scheduler or the controller, has data of launches that peers still wait for.
        since = tables.sequence if holds is None or holds.since is None else holds.since
        tables.hosts[message.host] = HostState(
            message.host,
            island,
            message.epoch,
            message.transfer_address,
            message.data_address,
            message.devices,
            message.pid,
            since=since,
            memory=message.memory,
            pool=message.pool,
            info=message.info,
            machine=message.machine,
        )
        tables.away.discard(message.host)
        detail = f"epoch {message.epoch} on island {island}"
        cause = f"its process before died of {crash}" if crash else ""
        tables.story.note(Entry(tables.now, "host up", detail, cause, host=message.host))
        if crash:
            tables.circuit_breaker.crashed(message.host, crash, tables.now)
        else:
            tables.circuit_breaker.unexplained(message.host)
        commands: list[Send] = list(self._peers())
        self.preparation.host_up(island, message.host)
        for one in tables.sessions.values():
            commands += buffers.host_began(tables, one, message.host)
        address = HostAddress(message.host, message.epoch, message.data_address)
        commands += [SendClient(number, address) for number in tables.sessions]
        for upload in holds.uploads if holds is not None else ():
            session = tables.sessions.get(upload.session)
            if session is None:
                continue
            # One that the client has not named yet may have to wait for that: messages go in their order.
            yet_to_come = upload.buffer not in session.named
            if yet_to_come or upload.buffer in session.arriving or upload.buffer in waiting.get(session.id, ()):
                commands += buffers.stored(session, upload)
            elif not session.lives(upload.buffer):
                buffers.burn(session, upload.buffer)
        return commands

    def down(self, message: HostDown, asked: bool = False) -> Settled:
        """A host is gone: launches that need its island fail, buffers on it are lost, and the circuit breaker looks for
        the program that was the cause.

        Args:
            asked: whether somebody has asked for its end, which nobody has to be alarmed by.
        """
        tables = self.tables
        host = tables.hosts.get(message.host)
        if host is not None and not host.epoch:
            # Nothing is there but launches of before: once it is up, nobody else would tell their end.
            loss = self._loss(host, message)
            return Settled(self._fail_inherited(host.island, loss), [])
        if host is None or host.epoch != message.epoch or host.down_since is not None:
            return Settled([], [])
        event = "host ended" if asked else "host lost"
        commands = self._away(host, event, message.kind, message.reason, message.decided)
        commands += [SendClient(s, HostAddress(host.host, host.epoch, "")) for s in tables.sessions]
        loss = self._loss(host, message)
        not_compiled = self.preparation.host_down(message, loss.cause)
        # Launches first: what ends them is the loss of the host, not that of the arguments they had there.
        settled = self._fail_launches(host.island, loss)
        commands += settled.commands
        for session in tables.sessions.values():
            why = message.reason if session.tenant.name in loss.tenants else loss.reason
            commands += self._lose_buffers(session, host, f"the buffer was on host {host.host}, which is gone: {why}")
        waiting = [s for p in not_compiled if (s := tables.sessions.get(p.session)) is not None]
        return Settled(commands, [*settled.sessions, *waiting])

    def _loss(self, host: HostState, message: HostDown) -> Loss:
        """The failures that the loss of a host ends in, by what its scheduler says of it."""
        story, now, launch = self.tables.story, self.tables.now, message.launch or next(iter(message.candidates), 0)
        members = frozenset(h.host for h in self.tables.hosts.values() if h.island == host.island)
        told = (*message.story[-LAST_ENTRIES:], *story.lines(now, launch=launch, hosts=members))
        reason, tenants = RESTARTS if message.decided else message.reason, self._tenants_of(launch, message)
        named = Failure("HostLost", f"host {host.host} was lost: {message.reason}", host=host.host, story=told)
        text = f"host {host.host} was lost: {reason}"
        plain = msgspec.structs.replace(named, message=text, story=story.lines(now, hosts=members))
        if message.kind == "HostLost":
            return Loss(named, named, plain, reason, tenants)
        # Its scheduler ended it, for what launches did.
        text = f". The hosts of island {host.island} start again"
        ended = msgspec.structs.replace(named, kind=message.kind, message=message.reason + text)
        if message.kind == "LaunchTimeout":
            return Loss(ended, named, plain, reason, tenants, dict.fromkeys(message.candidates, ended))
        return Loss(
            ended, ended, msgspec.structs.replace(plain, kind=message.kind, message=reason + text), reason, tenants
        )

    def _tenants_of(self, launch: int, message: HostDown) -> frozenset[str]:
        """The tenants that the reason and the story of a loss are for: those of what they name."""
        tables, found = self.tables, set[int]()
        if (record := tables.in_flight.get(launch)) is not None:
            found.add(record.session)
        elif (program := tables.failed.get(launch)) is not None:
            found.add(program.session)
        elif (fate := self.outcomes.inherited.fates.get(launch)) is not None:
            found.add(fate.told.session)
        for key in message.compiling if message.decided else ():
            if (program := tables.programs.get(key)) is not None:
                found.add(program.session)
        return frozenset(tables.sessions[one].tenant.name for one in found if one in tables.sessions)

    def _away(self, host: HostState, event: str, kind: str, reason: str, private: bool = False) -> list[Send]:
        """A host can be used no more, or not for now. A `private` reason names what is a tenant's."""
        tables = self.tables
        host.down_since = tables.now
        tables.away.add(host.host)
        detail = f"epoch {host.epoch} on island {host.island}: {kind}"
        tables.story.note(Entry(tables.now, event, detail, reason, host=host.host, private=private))
        for program in tables.programs.values():
            if host.host in program.hosts:
                program.unready.add(host.host)
        return list(self._peers())

    def _fail_launches(self, island: int, loss: Loss) -> Settled:
        """Ends the launches that are on an island. Those that are `overdue` have a failure of their own, and say what
        they compute there."""
        lost = [record for record in self.tables.in_flight.values() if island in record.program.islands]
        dropped: list[Send] = []
        for record in lost:
            record.failure = self._failure(loss, record.session)
            if record.sequence in loss.overdue:
                record.failure = record.program.plans[island].attributed(loss.overdue[record.sequence])
            record.producers = ()
            dropped += self.dispatch.drop_results(record)
        settled = self.outcomes.settle(lost)
        undecided = self.outcomes.donations.island_lost(island)
        inherited = self._fail_inherited(island, loss)
        return Settled([*dropped, *settled.commands, *undecided, *inherited], settled.sessions)

    def _fail_inherited(self, island: int, loss: Loss) -> list[Send]:
        """Ends the launches of a controller before that are on an island."""
        return self.outcomes.inherited.island_lost(
            island, lambda launch, session: loss.overdue.get(launch) or self._failure(loss, session)
        )

    def _failure(self, loss: Loss, session: int) -> Failure:
        """The failure that a loss is for a session: with names, if they are its tenant's."""
        found = self.tables.sessions.get(session)
        return loss.named if found is not None and found.tenant.name in loss.tenants else loss.plain

    # --- hosts without a scheduler ------------------------------------------------------------------------------------

    def orphan(self, hosts: Sequence[HostState], reason: str) -> Settled:
        """The hosts of an island have lost their scheduler, and nothing else: launches fail that were on their way, and
        what they may have taken is lost. The rest of what they hold stays, for as long as it may take them to join the
        successor."""
        commands: list[Send] = []
        for host in hosts:
            host.orphaned = True
            commands += self._away(host, "host without a scheduler", "it keeps what it holds", reason)
        in_flight = self.tables.in_flight.values()
        donated = {(s.id, number) for s in self.tables.sessions.values() for number in s.donated}
        donated -= {
            (one.session, number) for one in in_flight if not one.program.takes_memory for number in one.donated
        }
        lost = Failure("HostLost", reason, host=hosts[0].host)
        settled = self._fail_launches(hosts[0].island, Loss(lost, lost, lost, reason))
        commands += settled.commands
        for session in self.tables.sessions.values():
            doubtful = [number for number in session.buffers if (session.id, number) in donated]
            for host in hosts:
                buffers.host_lost(session, host.host)
                commands += self._fail_buffers(session, host, doubtful, f"a launch may have taken it: {reason}")
        return Settled(commands, settled.sessions)

    def resumed(
        self, island: int, message: HostUp, holds: Holds, waiting: Mapping[int, Collection[int]]
    ) -> list[Send] | None:
        """A host is back with what it holds. What nobody has a handle to is dropped there, and what it should have and
        has not is lost. None where what it holds is nobody's: it has to start again.

        Args:
            waiting: by session, the buffers that it uploads and that wait to be entered.
        """
        tables = self.tables
        host = tables.hosts.get(message.host)
        if host is None or host.epoch != message.epoch or not host.orphaned:
            return None
        commands = self._up(island, message, waiting)
        commands += self.outcomes.inherited.abort_again(island)  # while the programs are there that take back
        difference = compared(tables, host, holds)
        commands += [SendIsland(island, unwanted) for unwanted in difference.unwanted]
        for number, missing in difference.missing.items():
            text = f"it was not on host {host.host} any more when that had another scheduler"
            commands += self._fail_buffers(tables.sessions[number], host, missing, text)
        return commands

    def lose(self, host: HostState, reason: str) -> list[Send]:
        """A host that lost its scheduler does not come back with what it held."""
        host.orphaned = False
        commands: list[Send] = [SendClient(s, HostAddress(host.host, host.epoch, "")) for s in self.tables.sessions]
        text = f"the buffer was on host {host.host}, which is gone: {reason}"
        for session in self.tables.sessions.values():
            commands += self._lose_buffers(session, host, text)
        return commands

    def overdue(self) -> list[HostState]:
        """The hosts that have been without a scheduler for too long."""
        found = [host for host in self.tables.hosts.values() if host.orphaned]
        now = self.tables.now
        return [h for h in found if h.down_since is not None and now - h.down_since > limits.ORPHAN_LIMIT_S]

    def _fail_buffers(self, session: Session, host: HostState, numbers: Iterable[int], text: str) -> list[Send]:
        lost = []
        failure = Failure("BufferLost", text, host=host.host)
        for number in numbers:
            buffer = session.buffers[number]
            if buffer.failure is None and not buffer.producer and host.host in session.places[buffer.type.slice].hosts:
                session.fail(number, buffer, failure)
                session.arriving.pop(number, None)
                lost.append(number)
        return [SendClient(session.id, BuffersLost(tuple(lost), failure))] if lost else []

    def _lose_buffers(self, session: Session, host: HostState, text: str) -> list[Send]:
        buffers.host_lost(session, host.host)
        return self._fail_buffers(session, host, list(session.buffers), text)

    def _peers(self) -> list[SendIsland]:
        return [] if self.gathering else self.peers()

    def peers(self) -> list[SendIsland]:
        """The list of the hosts that are up, for all islands."""
        up = [h for h in self.tables.hosts.values() if h.down_since is None]
        peers = Peers(tuple(Peer(h.host, h.epoch, h.transfer_address, h.since, h.machine, h.data_address) for h in up))
        return [SendIsland(island, peers) for island in self.tables.islands()]

    def away(self, program: PlannedProgram) -> list[HostState]:
        """Hosts that are down on the islands of a program: such an island starts nothing, whichever hosts it needs."""
        hosts = self.tables.hosts
        return [hosts[host] for host in sorted(self.tables.away) if hosts[host].island in program.islands]

    def are_ready(self, program: PlannedProgram) -> bool:
        """Whether a program can be launched now; if not, it may be later."""
        tables = self.tables
        return not (
            program.unready
            or program.unsent
            or self.gathering
            or (tables.away and self.away(program))
            or (tables.circuit_breaker.suspects and self.preparation.must_wait(program))
        )

    def absence(self, program: PlannedProgram) -> Failure | None:
        """The failure of a launch whose islands have been without a host for too long."""
        failures = map(self._absence_of, self.away(program))
        return next((failure for failure in failures if failure is not None), None)

    def _absence_of(self, host: HostState) -> Failure | None:
        now = self.tables.now
        assert host.down_since is not None
        absent = now - host.down_since
        if absent <= limits.HOST_ABSENCE_LIMIT_S:
            return None
        story = self.tables.story.lines(now, hosts=frozenset({host.host}))
        down = f"host {host.host} has been down for {absent:.0f} s"
        text = down if math.isfinite(absent) else f"island {host.island} was removed, with host {host.host}"
        return Failure("HostLost", text, host=host.host, story=story)

    def tick(self) -> list[Send]:
        """Time passes: launches that the controller before has left fail on islands that have been without a host for
        too long. This one has lost no host there, and no host will report."""
        inherited, commands = self.outcomes.inherited, list[Send]()
        for number in sorted(self.tables.away) if inherited.fates else ():
            host = self.tables.hosts[number]
            if (failure := self._absence_of(host)) is not None:
                commands += inherited.island_lost(host.island, lambda *_: failure)
        return commands
