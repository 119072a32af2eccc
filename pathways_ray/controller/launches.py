"""Launches and buffers at the controller: one face for the parts that decide about them.

`admission` decides when a launch may go, `dispatch` sends it to its islands, `outcomes` ends it, `hosts` follows the
processes that come and go; `state.Tables` is what they share. This file has the sessions and programs, and lets waiting
launches go on after every event that may have made room. Methods are events, the messages to send are returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set

from pathways_ray import limits
from pathways_ray.controller import buffers, early
from pathways_ray.controller.admission import Admission
from pathways_ray.controller.cancellation import Cancellation
from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.device_time import Shares
from pathways_ray.controller.dispatch import Dispatch
from pathways_ray.controller.distribution import Distribution
from pathways_ray.controller.hosts import Hosts
from pathways_ray.controller.outcomes import Outcomes, Settled
from pathways_ray.controller.preemption import Preemption
from pathways_ray.controller.preparation import Preparation
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.sequential import Sequential
from pathways_ray.controller.state import HostState, Send, SendClient, SendIsland, Session, Tables
from pathways_ray.controller.tenants import Tenant
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.story import Entry, NotePace
from pathways_ray.transport import messages as wire


class Launches:
    """The controller's tables, and the parts that change them.

    Args:
        parallel: dispatch all gangs of a launch at once; otherwise a gang is sent when the one before it is enqueued.
        max_in_flight: launches of one session without an outcome; further ones wait.
        cross_island: its policy orders launches over several islands.
        compile_limit_s: seconds that a host may compile one program.
        launch_limit_s: seconds for all parts of a launch that goes to its islands in parts.
    """

    def __init__(
        self,
        parallel: bool,
        max_in_flight: int,
        cross_island: CrossIslandWindow | None = None,
        compile_limit_s: float = limits.COMPILE_LIMIT_S,
        launch_limit_s: float = limits.LAUNCH_LIMIT_S,
    ) -> None:
        self.parallel = parallel
        self.cross_island = cross_island if cross_island is not None else CrossIslandWindow()
        self.tables = tables = Tables()
        self.ledger, self.circuit_breaker, self.story = tables.ledger, tables.circuit_breaker, tables.story
        self.hosts, self.away, self.sessions = tables.hosts, tables.away, tables.sessions
        self.programs, self.in_flight = tables.programs, tables.in_flight
        self.sequential = None if parallel else Sequential(tables.in_flight)
        self.dispatch = Dispatch(tables, self.sequential)
        self.preparation = Preparation(tables, Distribution(), compile_limit_s)
        self.outcomes = Outcomes(tables, self.cross_island, self.preparation)
        self.membership = Hosts(tables, self.preparation, self.dispatch, self.outcomes)
        self.admission = Admission(
            tables,
            self.preparation,
            self.membership,
            self.dispatch,
            self.outcomes,
            self.cross_island,
            max_in_flight,
            launch_limit_s,
        )

        self.story.pace = NotePace(self._tenant_of).paced
        self.cancellation = Cancellation(tables, self.admission)
        self.preemption = Preemption(tables, self.admission.memory, self.backlog)

    def device_shares(self) -> Shares:
        """The devices that computed lately, and for what part of the time, 0 to 1, since this was asked before."""
        return self.outcomes.device_time.report(self.programs, self.tables.now)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def open_session(self, session: int, tenant: Tenant | None = None) -> list[Send]:
        """A session of a tenant; without one, of a tenant of its own with weight 1 and no quota."""
        owner = tenant if tenant is not None else Tenant(f"session {session}")
        self.ledger.open(session, owner.name, owner.weight, owner.priority, owner.launch_limit_s or 0.0)
        self.sessions[session] = Session(session, owner, self.ledger.of(session))
        self.admission.open(session)
        self.tables.recorder.opened(session, owner.name)
        self.story.note(Entry(self.tables.now, "session opened", f"tenant {owner.name}", session=session))
        return self._accounts(self.tables.islands(), (session,))

    def _tenant_of(self, session: int) -> str:
        state = self.sessions.get(session)
        return state.tenant.name if state is not None else ""

    def flying(self, session: int) -> int:
        """Launches of a session that are on their islands."""
        state = self.sessions.get(session)
        return state.in_flight if state is not None else 0

    def backlog(self, session: int) -> int:
        """Calls of a session that wait here."""
        return self.admission.backlogs[session].size

    def set_tenant(self, tenant: Tenant) -> list[Send]:
        """The operator changed a tenant: all of it holds from now on, quotas for what is asked from now on."""
        mine = [s for s in self.sessions.values() if s.tenant.name == tenant.name]
        for session in mine:
            session.tenant = tenant
            self.ledger.open(session.id, tenant.name, tenant.weight, tenant.priority, tenant.launch_limit_s or 0.0)
        return self._accounts(self.tables.islands(), [session.id for session in mine])

    def island_up(self, island: int) -> list[Send]:
        """A scheduler joined, perhaps in place of one that died: it knows no session yet."""
        self.tables.schedulers.add(island)
        return self._accounts([island], self.sessions)

    def _accounts(self, islands: Iterable[int], sessions: Iterable[int]) -> list[Send]:
        tenants = [(s, self.sessions[s].tenant) for s in sessions]
        accounts = [wire.Account(s, t.name, t.weight, t.priority, t.launch_limit_s or 0.0) for s, t in tenants]
        return [SendIsland(island, account) for island in islands for account in accounts]

    def close_session(self, session: int) -> list[Send]:
        """Frees all a session holds, and forgets the launches that wait. Those on the devices run to their end and
        leave nothing behind."""
        state = self.sessions.get(session)
        if state is None:
            return []
        self.story.note(Entry(self.tables.now, "session closed", session=session))
        del self.sessions[session]
        commands: list[Send] = [SendIsland(island, wire.DropSession(session)) for island in self.tables.islands()]
        for program in state.programs.values():
            for one in program.parts:
                commands += self.preparation.forget(one)
        self.outcomes.donations.session_closed(session)
        commands += self.admission.close(state)
        self.ledger.close(session)
        self.tables.recorder.closed(session)
        return commands

    def add_slice(self, session: int, placed: PlacedSlice, within: int = 0, instead: int = 0, name: str = "") -> None:
        """Notes a slice of a session; the devices of a part of another one do not count again."""
        if self.sessions[session].suspended:
            self.sessions[session].suspended = self.sessions[session].gives_way = False
            self.story.note(Entry(self.tables.now, "session resumed", session=session))
        if instead:
            self.sessions[session].replacing[placed.mesh.id] = instead
        self.sessions[session].slices[placed.mesh.id] = placed
        if name:
            self.sessions[session].names[placed.mesh.id] = name
        self.tables.last_slice = max(self.tables.last_slice, placed.mesh.id)
        if within:
            self.sessions[session].parts[placed.mesh.id] = within
        self.sessions[session].places[placed.mesh.id] = placed
        where = f"slice {placed.mesh.id} on island {placed.island}, {placed.mesh.size} devices"
        self.story.note(Entry(self.tables.now, "slice created", where, session=session))

    def remove_slice(self, session: int, slice_id: int) -> bool:
        """Forgets a slice, with its parts. What is on its devices stays until its handles are dropped."""
        found = self.sessions[session]
        for part in [part for part, whole in found.parts.items() if whole == slice_id]:
            self.remove_slice(session, part)
        found.parts.pop(slice_id, None)
        found.names.pop(slice_id, None)
        found.replacing.pop(slice_id, None)
        if (place := found.places.pop(slice_id, None)) is not None:
            found.places[slice_id] = place  # at the end
        if found.slices.pop(slice_id, None) is None:
            return False
        self.story.note(Entry(self.tables.now, "slice released", f"slice {slice_id}", session=session))
        return True

    # --- programs -----------------------------------------------------------------------------------------------------

    def register(self, session: int, number: int, program: PlannedProgram) -> list[Send]:
        """A planned program, or one that failed to be planned, under the session's number for it."""
        commands = self.preparation.unregistered(self.sessions[session], number)
        self.sessions[session].programs[number] = program
        self.sessions[session].count_plans(program)
        self.tables.changed.add(session)
        program.number = number
        if program.failure is not None:
            return commands
        for one in program.parts:
            self.programs[one.key] = one
            commands += self.preparation.registered(one)
        return commands

    def prepare(self, session: int, number: int) -> list[Send]:
        """Somebody wants to know how a program was compiled."""
        program, now = self.sessions[session].programs.get(number), self.tables.now
        return [c for part in program.parts for c in self.preparation.asked(part, now)] if program is not None else []

    def ready(self, message: wire.Ready) -> list[Send]:
        """A host has compiled a program, or failed to. Its client hears once that all have.

        Not where gangs are sent one by one, which is a way to see what each of them costs: a client that coalesces
        launches waits for this.
        """
        program = self.programs.get(message.program)
        if program is None:
            return []
        self.tables.changed.add(program.session)
        if message.failure is not None:
            self.preparation.failed(program, message.failure)
        else:
            program.unready.discard(message.host)
            program.temporary_bytes[message.host] = message.temporary_bytes
            program.most_bytes = program.result_bytes + program.devices * max(program.temporary_bytes.values())
            if program.is_ready:
                program.wanted_since = math.inf
                self.circuit_breaker.compiled(program.culprit)
        session = self.sessions.get(program.session)
        if session is None:
            return []
        commands: list[Send] = []
        if self.parallel and not program.announced and program.is_ready and program.failure is None:
            program.announced = True
            commands.append(SendClient(session.id, early.prepared(self.tables, program)))
        return commands + self.admission.resume((session,))

    # --- launches and buffers -----------------------------------------------------------------------------------------

    def stored(self, *messages: wire.Stored) -> list[Send]:
        """Uploads have arrived on a host. Those that wait for them go on once all are noted."""
        commands: list[Send] = []
        going_on: dict[int, Session] = {}
        for message in messages:
            session = self.sessions.get(message.session)
            if session is None:
                continue
            if message.buffer in session.burnt:
                commands += buffers.drop_late(self.tables, message)
                continue
            commands += buffers.stored(session, message)
            if message.buffer not in session.arriving:
                going_on[session.id] = session
        return commands + self.admission.resume(going_on.values()) if going_on else commands

    def decided(self, message: wire.Decided) -> list[Send]:
        """The value is known by which a launch goes on."""
        session = self.admission.decisions.decided(message)
        return self.admission.resume((session,)) if session is not None else []

    def done(self, island: int, message: wire.Done) -> list[Send]:
        """Launches whose part on an island is complete."""
        return self._resume(self.outcomes.done(island, message))

    def run_failed(self, island: int, message: wire.IslandLaunchFailed) -> list[Send]:
        """A launch whose part on an island failed."""
        return self._resume(self.outcomes.failed(island, message))

    def enqueued(self, island: int, message: wire.Enqueued) -> list[Send]:
        """Sequential dispatch: a gang is on its device queues."""
        return self.sequential.enqueued(island, message) if self.sequential is not None else []

    def _resume(self, settled: Settled) -> list[Send]:
        if not settled.sessions and not self.cross_island.queued and not self.admission.memory.waiting:
            return settled.commands
        commands = settled.commands + self.admission.resume(settled.sessions)
        return commands + self.admission.memory_freed() if self.admission.memory.waiting else commands

    # --- hosts and time -----------------------------------------------------------------------------------------------

    def host_up(self, island: int, message: wire.HostUp) -> list[Send]:
        """A host serves under a new epoch."""
        self.admission.memory.changed()
        return self.membership.up(island, message) + self.admission.resume(self.sessions.values())

    def host_back(
        self, island: int, message: wire.HostUp, holds: wire.Holds, coming: Mapping[int, Set[int]]
    ) -> list[Send] | None:
        """A host has another scheduler, and is back with what it holds; None where that is nobody's.

        Args:
            coming: by session, the buffers that are uploaded, as messages say that have not had their turn.
        """
        self.admission.memory.changed()
        backlogs = self.admission.backlogs.items()
        waiting = {session: backlog.uploads() | coming.get(session, set()) for session, backlog in backlogs}
        commands = self.membership.resumed(island, message, holds, waiting)
        return None if commands is None else commands + self.admission.resume(self.sessions.values())

    def scheduler_lost(self, hosts: Sequence[HostState], reason: str) -> list[Send]:
        """The hosts of an island are without a scheduler, and keep what they hold."""
        return self._resume(self.membership.orphan(hosts, reason))

    def host_down(self, message: wire.HostDown, asked: bool = False) -> list[Send]:
        """A host is gone, perhaps since somebody has asked for its end."""
        return self._resume(self.membership.down(message, asked))

    def tick(self, now: float) -> list[Send]:
        """Time passes: launches fail that wait for a host that does not come back, for a compiler that does not come to
        them, or for an upload."""
        self.tables.now = now
        self.tables.buffers = sum(len(session.buffers) for session in self.sessions.values())
        return (
            self.preemption.tick(now)
            + self.membership.tick()
            + self.admission.resume(self.sessions.values() if self.away else self.admission.with_deferred())
            + self.admission.memory_freed()
        )
