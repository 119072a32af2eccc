"""Hosts that come and go: news for islands and clients, and what is lost with a host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pathways_ray.controller import buffers
from pathways_ray.controller.dispatch import Dispatch
from pathways_ray.controller.outcomes import Outcomes, Settled
from pathways_ray.controller.preparation import Preparation
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import HostState, Send, SendClient, SendIsland, Session, Tables
from pathways_ray.errors import Failure
from pathways_ray.story import LAST_ENTRIES, Entry
from pathways_ray.transport.messages import BuffersLost, HostAddress, HostDown, HostUp, Peer, Peers

HOST_ABSENCE_LIMIT_S = 20.0
"""A launch waits this long for a lost host's successor before it fails."""


class Hosts:
    """The table of hosts."""

    def __init__(self, tables: Tables, preparation: Preparation, dispatch: Dispatch, outcomes: Outcomes) -> None:
        self.tables = tables
        self.preparation = preparation
        self.dispatch = dispatch
        self.outcomes = outcomes

    def expect(self, islands: Mapping[int, Sequence[int]]) -> None:
        """The hosts of the cluster as it begins: none has joined, and none is waited for for ever."""
        for island, members in islands.items():
            for host in members:
                self.tables.hosts[host] = HostState(host, island, 0, "", "", 0, 0, down_since=self.tables.now)
                self.tables.away.add(host)

    def up(self, island: int, message: HostUp) -> list[Send]:
        """A host serves under a new epoch: everybody learns its addresses."""
        tables = self.tables
        tables.hosts[message.host] = HostState(
            message.host,
            island,
            message.epoch,
            message.transfer_address,
            message.data_address,
            message.devices,
            message.pid,
            since=tables.sequence,
            memory=message.memory,
            pool=message.pool,
            info=message.info,
        )
        tables.away.discard(message.host)
        detail = f"epoch {message.epoch} on island {island}"
        cause = f"its process before died of {message.crash}" if message.crash else ""
        tables.story.note(Entry(tables.now, "host up", detail, cause, host=message.host))
        if message.crash:
            tables.circuit_breaker.crashed(message.host, message.crash, tables.now)
        commands: list[Send] = list(self._peers())
        self.preparation.host_up(island, message.host)
        address = HostAddress(message.host, message.epoch, message.data_address)
        return commands + [SendClient(session, address) for session in tables.sessions]

    def down(self, message: HostDown) -> Settled:
        """A host is gone: launches that need its island fail, buffers on it are lost, and the circuit breaker looks for
        the program that was the cause."""
        tables = self.tables
        host = tables.hosts.get(message.host)
        if host is None or host.epoch != message.epoch or host.down_since is not None:
            return Settled([], [])
        host.down_since = tables.now
        tables.away.add(host.host)
        members = [h.host for h in tables.hosts.values() if h.island == host.island]
        detail = f"epoch {host.epoch} on island {host.island}: {message.kind}"
        tables.story.note(Entry(tables.now, "host lost", detail, message.reason, host=host.host))
        commands: list[Send] = list(self._peers())
        commands += [SendClient(s, HostAddress(host.host, host.epoch, "")) for s in tables.sessions]
        for program in tables.programs.values():
            program.ready.discard(host.host)
        seen = tables.story.lines(tables.now, launch=next(iter(message.candidates), 0), hosts=frozenset(members))
        text = f"host {host.host} was lost: {message.reason}"
        failure = Failure(message.kind, text, host=host.host, story=(*message.story[-LAST_ENTRIES:], *seen))
        not_compiled = self.preparation.host_down(message, failure)
        # Launches first: what ends them is the loss of the host, not that of the arguments they had there.
        lost = [record for record in tables.in_flight.values() if host.island in record.program.islands]
        for record in lost:
            record.failure = failure
            record.producers = ()
            commands += self.dispatch.drop_results(record)
        settled = self.outcomes.settle(lost)
        commands += settled.commands
        commands += self.outcomes.donations.island_lost(host.island)
        text = f"the buffer was on host {host.host}, which is gone: {message.reason}"
        for session in tables.sessions.values():
            commands += self._lose_buffers(session, host.host, Failure("BufferLost", text, host=host.host))
        waiting = [s for p in not_compiled if (s := tables.sessions.get(p.session)) is not None]
        return Settled(commands, [*settled.sessions, *waiting])

    def _lose_buffers(self, session: Session, host: int, failure: Failure) -> list[Send]:
        lost = []
        buffers.host_lost(session, host)
        for number, buffer in session.buffers.items():
            placed = session.places[buffer.type.slice]
            if buffer.failure is None and buffer.producer == 0 and host in placed.hosts:
                session.fail(buffer, failure)
                session.arriving.pop(number, None)
                lost.append(number)
        return [SendClient(session.id, BuffersLost(tuple(lost), failure))] if lost else []

    def _peers(self) -> list[SendIsland]:
        up = [h for h in self.tables.hosts.values() if h.down_since is None]
        peers = Peers(tuple(Peer(h.host, h.epoch, h.transfer_address, h.since) for h in up))
        return [SendIsland(island, peers) for island in self.tables.islands()]

    def away(self, program: PlannedProgram) -> list[HostState]:
        """Hosts that are down on the islands of a program: such an island starts nothing, whichever hosts it needs."""
        hosts = self.tables.hosts
        return [hosts[host] for host in sorted(self.tables.away) if hosts[host].island in program.islands]

    def are_ready(self, program: PlannedProgram) -> bool:
        """Whether a program can be launched now; if not, it may be later."""
        return (
            program.is_ready
            and not program.unsent
            and not (self.tables.away and self.away(program))
            and not self.preparation.must_wait(program)
        )

    def absence(self, program: PlannedProgram) -> Failure | None:
        """The failure of a launch whose islands have been without a host for too long."""
        now = self.tables.now
        for host in self.away(program):
            assert host.down_since is not None
            absent = now - host.down_since
            if absent > HOST_ABSENCE_LIMIT_S:
                story = self.tables.story.lines(now, hosts=frozenset({host.host}))
                down = f"host {host.host} has been down for {absent:.0f} s"
                text = down if math.isfinite(absent) else f"island {host.island} was removed, with host {host.host}"
                return Failure("HostLost", text, host=host.host, story=story)
        return None
