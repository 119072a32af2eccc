"""What the controller decides about launches and buffers.

The life of a launch: *waiting* (its program is being compiled, too many launches of its session fly, or its islands
have as many cross-island launches as they take) → *in flight* (every island it touches has its `IslandLaunch`) → one outcome. A
session's launches are admitted in the order in which it made them, but for those that wait for a host or a compilation:
what has nothing to do with them may pass (`aside`). Admission numbers all launches of the cluster in one sequence.
Since a launch only consumes what was produced by launches before it, that linear order respects data dependencies, and
islands keep it for all launches that run on several of them.

Outcomes. A launch ends when every island it touches has reported, or at once when a host it needs is lost. A failed
launch is not reported before the launches it consumes from have their outcome, so that the root cause is known.

Buffers are counted per logical array. A session can name only its own: ids are looked up in the session's table.

Events are method calls, commands are returned. Time arrives in `tick`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from pathways_ray.controller import quotas
from pathways_ray.controller.circuit_breaker import CircuitBreaker
from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.deferred import DeferredLaunches
from pathways_ray.controller.programs import BufferType, PlannedProgram
from pathways_ray.controller.state import Buffer, Command, HostState, InFlight, SendClient, SendIsland, Session
from pathways_ray.controller.tenants import Tenant
from pathways_ray.controller.usage import Report
from pathways_ray.errors import Failure, GraphError
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import check_layout
from pathways_ray.scheduler.policies import Ledger
from pathways_ray.transport.messages import (
    Account,
    BuffersLost,
    Completed,
    Done,
    Drop,
    DropProgram,
    DropSession,
    Enqueued,
    Free,
    HostAddress,
    HostDown,
    HostUp,
    IslandLaunch,
    IslandLaunchFailed,
    Launch,
    LaunchFailed,
    Load,
    Peer,
    Peers,
    Prepared,
    Put,
    Ready,
)

Admission: TypeAlias = Literal["done", "absent", "no room"]
"""It is on its way or over; its hosts are away or have not compiled it; too many fly, or it is not its turn."""

HOST_ABSENCE_LIMIT_S = 20.0
"""A launch waits this long for a lost host's successor before it fails."""


@dataclass
class Launches:
    """The controller's state.

    Args:
        parallel: dispatch all gangs of a launch at once; otherwise a gang is sent when the one before it is enqueued.
        max_in_flight: launches of one session without an outcome; further ones wait.
        cross_island: its policy orders launches over several islands.
    """

    parallel: bool
    max_in_flight: int
    cross_island: CrossIslandWindow = field(default_factory=CrossIslandWindow)
    ledger: Ledger = field(default_factory=Ledger)
    circuit_breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    report: Report = field(default_factory=Report)
    hosts: dict[int, HostState] = field(default_factory=dict)
    away: set[int] = field(default_factory=set)
    sessions: dict[int, Session] = field(default_factory=dict)
    programs: dict[int, PlannedProgram] = field(default_factory=dict)
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    sequence: int = 0
    now: float = 0.0

    # --- sessions -----------------------------------------------------------------------------------------------------

    def open_session(self, session: int, tenant: Tenant | None = None) -> list[Command]:
        """A session of a tenant; without one, of a tenant of its own with weight 1 and no quota."""
        owner = tenant if tenant is not None else Tenant(f"session {session}")
        self.ledger.open(session, owner.name, owner.weight, owner.priority)
        self.sessions[session] = Session(session, owner, self.ledger.of(session))
        return self._accounts(self._islands(), (session,))

    def flying(self, session: int) -> int:
        """Launches of a session that are on their islands."""
        state = self.sessions.get(session)
        return state.in_flight if state is not None else 0

    def set_tenant(self, tenant: Tenant) -> list[Command]:
        """The operator changed a tenant: weight and priority hold from now on, quotas for what is asked from now on."""
        mine = [s for s in self.sessions.values() if s.tenant.name == tenant.name]
        for session in mine:
            session.tenant = tenant
            self.ledger.open(session.id, tenant.name, tenant.weight, tenant.priority)
        return self._accounts(self._islands(), [session.id for session in mine])

    def island_up(self, island: int) -> list[Command]:
        """A scheduler joined, perhaps in place of one that died: it knows nobody yet."""
        return self._accounts([island], self.sessions)

    def _islands(self) -> list[int]:
        return sorted({host.island for host in self.hosts.values()})

    def _accounts(self, islands: Iterable[int], sessions: Iterable[int]) -> list[Command]:
        tenants = [(s, self.sessions[s].tenant) for s in sessions]
        accounts = [Account(s, tenant.name, tenant.weight, tenant.priority) for s, tenant in tenants]
        return [SendIsland(island, account) for island in islands for account in accounts]

    def close_session(self, session: int) -> list[Command]:
        """Frees all a session holds, and forgets the launches that wait. Those on the devices run to their end and
        leave nothing behind."""
        state = self.sessions.pop(session, None)
        if state is None:
            return []
        self.cross_island.held.pop(session, None)
        for message in (*state.aside.calls, *state.waiting):
            if isinstance(message, Launch):
                self.ledger.leave(state.usage)
        self.ledger.close(session, lasting=state.tenant.name != f"session {session}")
        commands: list[Command] = [SendIsland(island, DropSession(session)) for island in self._islands()]
        for program in state.programs.values():
            self.programs.pop(program.key, None)
            commands += [SendIsland(island, DropProgram(session, program.key)) for island in program.plans]
        return commands + self._release()

    def add_slice(self, session: int, placed: PlacedSlice) -> None:
        self.sessions[session].slices[placed.mesh.id] = placed
        self.sessions[session].places[placed.mesh.id] = placed

    def remove_slice(self, session: int, slice_id: int) -> bool:
        """Forgets a slice. What is on its devices stays until its handles are dropped."""
        return self.sessions[session].slices.pop(slice_id, None) is not None

    # --- programs -----------------------------------------------------------------------------------------------------

    def register(self, session: int, number: int, program: PlannedProgram, repeats: int = -1) -> list[Command]:
        """A planned program, or one that failed to be planned, under the session's number for it.

        Args:
            repeats: the number of a program whose run of launches it stands for: the client hears when it is compiled.
                Not where gangs are sent one by one, which is a way to see what each of them costs.
        """
        state = self.sessions[session]
        state.programs[number] = program
        program.number = number
        program.repeats = self.parallel and repeats in state.programs
        if program.failure is not None:
            return []
        self.programs[program.key] = program
        return [SendIsland(island, message) for island, message in program.messages.items()]

    def ready(self, message: Ready) -> list[Command]:
        """A host has compiled a program, or failed to."""
        program = self.programs.get(message.program)
        if program is None:
            return []
        if message.failure is not None:
            program.failure = message.failure
        program.ready.add(message.host)
        program.temporary_bytes[message.host] = message.temporary_bytes
        session = self.sessions.get(program.session)
        if session is None:
            return []
        commands: list[Command] = []
        if program.repeats and program.is_ready and program.failure is None:
            program.repeats = False  # said once
            commands.append(SendClient(session.id, Prepared(program.number)))
        return commands + self._admit_waiting(session)

    # --- launches and buffers, from clients ---------------------------------------------------------------------------

    def from_client(self, session: int, message: Launch | Put | Free) -> list[Command]:
        state = self.sessions[session]
        if isinstance(message, Launch):
            refused = quotas.launches(state)
            if refused is not None:
                return self._refuse(state, message, refused)
            self.ledger.enter(state.usage)
        state.waiting.append(message)
        return self._admit_waiting(state) if len(state.waiting) == 1 else []  # behind another one it has to wait

    def _refuse(self, session: Session, launch: Launch, failure: Failure) -> list[Command]:
        """Ends a launch that gets no further; what would consume its results fails for the same reason."""
        program = session.programs.get(launch.program)
        for number, held in enumerate(program.results if program is not None else (), launch.results):
            if not session.lives(number):
                session.keep(number, Buffer(held, 0, failure))
        return [SendClient(session.id, LaunchFailed(launch.launch, failure))]

    def _admit_waiting(self, session: Session) -> list[Command]:
        commands: list[Command] = []
        if session.admitting:
            return commands  # what is admitted may end at once; the loop below goes on by itself
        session.admitting = True
        was_held = session.id in self.cross_island.held
        again: deque[Any] | None = None
        if session.aside.calls:
            again, session.aside = deque(session.aside.calls), DeferredLaunches()
        while again or (session.waiting and not session.aside.full):
            queue = again or session.waiting
            call = queue.popleft()
            if not self._work_off(session, call, commands):
                queue.appendleft(call)
                break
        if again:
            session.aside.calls += again
        session.admitting = False
        if was_held and session.id not in self.cross_island.held:
            commands += self._release()  # those it held back may go
        return commands

    def _work_off(self, session: Session, call: Launch | Put | Free, commands: list[Command]) -> bool:
        """Does what was called, or sets it aside; False when it has to wait, and all that was called after it."""
        aside = session.aside
        match call:
            case Launch():
                stopped = aside.calls and self._stopped(session, call)
                admitted = "absent" if stopped else self._admit(session, call, commands)
                if admitted == "absent":
                    program = session.programs[call.program]
                    aside.add(call, program.plans, len(program.results))
                return admitted != "no room"
            case Put():
                self._put(session, call, commands)
            case Free():
                self._free(session, aside.keep(call.buffers) if aside.calls else call.buffers, commands)
        return True

    def _stopped(self, session: Session, launch: Launch) -> bool:
        """Whether a launch has to do with one that was set aside, and has to wait behind it."""
        program, aside = session.programs.get(launch.program), session.aside
        # A buffer that is not there yet must not be waited for: it might come to be, as another one's.
        known = all(n in session.buffers or n in aside.numbers for n in launch.arguments)
        return program is not None and known and aside.stops(launch, program.plans, len(program.results))

    def _put(self, session: Session, put: Put, commands: list[Command]) -> None:
        """Notes a buffer. One of a type or on a slice that cannot be is not made; a launch with it says so."""
        place = session.places.get(put.slice)
        if place is None:
            return
        with contextlib.suppress(GraphError):
            check_layout(put.type, put.spec, place.mesh, "put")
            held = BufferType.on(place.mesh, put.type, put.spec)
            failure = quotas.device_bytes(session, self.sessions.values(), held.device_bytes, f"{put.type} to put")
            if session.lives(put.buffer):
                return  # clients count their buffers up; what the hosts have there now is this session's own trouble
            session.keep(put.buffer, Buffer(held, 0, failure))
            if failure is not None:
                commands.append(SendIsland(place.island, Drop(session.id, (put.buffer,))))
                commands.append(SendClient(session.id, BuffersLost((put.buffer,), failure)))

    def _admit(self, session: Session, launch: Launch, commands: list[Command]) -> Admission:
        """Sends a launch on its way, or ends it with an error, unless it has to wait."""
        program = session.programs.get(launch.program)
        if program is None:
            self.ledger.leave(session.usage)
            text = f"launch {launch.launch} names program {launch.program}, never registered"
            commands += self._refuse(session, launch, Failure("WireError", text))
            return "done"
        failure = (
            program.failure
            or self.circuit_breaker.refusal(program.digest)
            or self._argument_failure(session, program, launch)
            or self._result_failure(session, program, launch)
            or quotas.device_bytes(
                session, self.sessions.values(), program.result_bytes, f"the results of program {program.name!r}"
            )
        )
        if failure is None:
            if session.in_flight >= self.max_in_flight:
                return "no room"
            if not program.is_ready or (self.away and self._away(program)):
                failure = self._absence(program)
                if failure is None:
                    return "absent"
        if failure is not None:
            self.cross_island.held.pop(session.id, None)
            self.ledger.leave(session.usage)
            commands += self._refuse(session, launch, failure)
            return "done"
        if program.cross_island and not self.cross_island.may_start(
            session.id, session.usage, tuple(program.plans), self.now
        ):
            return "no room"
        self._start(session, program, launch, commands)
        return "done"

    def _release(self) -> list[Command]:
        """Lets sessions go on whose next launch waited for room on several islands, in the policy's order."""
        commands: list[Command] = []
        while self.cross_island.held and (session := self.cross_island.in_turn(self.now)) is not None:
            commands += self._admit_waiting(self.sessions[session])
        return commands

    def _argument_failure(self, session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
        if len(launch.arguments) != len(program.arguments):
            return Failure(
                "GraphError",
                f"program {program.name!r} takes {len(program.arguments)} buffers, the launch gives "
                f"{len(launch.arguments)}",
            )
        for number, expected in zip(launch.arguments, program.arguments, strict=True):
            buffer = session.buffers.get(number)
            if buffer is None:
                return Failure("BufferDeleted", f"buffer {number} of this session does not exist (deleted?)")
            if buffer.failure is not None:
                return buffer.failure
            if buffer.held != expected:
                return Failure(
                    "GraphError",
                    f"program {program.name!r} takes {expected.type} on slice {expected.slice}; buffer {number} is "
                    f"{buffer.held.type} on slice {buffer.held.slice}",
                )
        return None

    def _result_failure(self, session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
        """A number stands for one buffer: another one under it would be on hosts without being counted."""
        for number in range(launch.results, launch.results + len(program.results)):
            if session.lives(number):
                return Failure("WireError", f"launch {launch.launch} gives its result number {number}, which is taken")
        return None

    def _away(self, program: PlannedProgram) -> list[HostState]:
        """Hosts that are down on the islands of a program: such an island starts nothing, whichever hosts it needs."""
        return [self.hosts[host] for host in sorted(self.away) if self.hosts[host].island in program.plans]

    def _absence(self, program: PlannedProgram) -> Failure | None:
        """The failure of a launch whose islands have been without a host for too long."""
        for host in self._away(program):
            assert host.down_since is not None
            absent = self.now - host.down_since
            if absent > HOST_ABSENCE_LIMIT_S:
                return Failure("HostLost", f"host {host.host} has been down for {absent:.0f} s", host=host.host)
        return None

    def _start(self, session: Session, program: PlannedProgram, launch: Launch, commands: list[Command]) -> None:
        self.sequence += 1
        sequence = self.sequence
        buffers = session.buffers
        producers = tuple(p for n in launch.arguments if (p := buffers[n].producer) and p in self.in_flight)
        for k, held in enumerate(program.results):
            session.keep(launch.results + k, Buffer(held, sequence))
        record = InFlight(
            sequence,
            session.id,
            session.usage,
            launch.launch,
            program,
            launch.results,
            launch.arguments,
            set(program.plans),
            producers,
        )
        self.in_flight[sequence] = record
        for producer in producers:
            self.in_flight[producer].consumers.append(sequence)
        session.in_flight += 1
        if program.cross_island:
            self.cross_island.start(program.plans)
            record.estimate = program.device_time.estimate
            self.ledger.start(session.usage, record.estimate)
        if not program.plans:
            self._finish(record, commands)
        elif self.parallel:
            run = IslandLaunch(sequence, session.id, program.key, launch.arguments, launch.results)
            commands += [SendIsland(island, run) for island in program.plans]
        else:
            self._send_gang(record, commands)

    def _send_gang(self, record: InFlight, commands: list[Command]) -> None:
        gang = record.next_gang
        record.awaiting = set(record.program.gang_islands[gang])
        run = IslandLaunch(
            record.sequence, record.session, record.program.key, record.arguments, record.results, gang, 1
        )
        # The first one goes to every island, so that all take their arguments before the client may drop them.
        islands = record.program.plans if gang == 0 else record.program.gang_islands[gang]
        commands += [SendIsland(island, run) for island in islands]

    def _free(self, session: Session, numbers: Iterable[int], commands: list[Command]) -> None:
        dropped: dict[int, list[int]] = {}
        for number in numbers:
            buffer = session.forget(number)
            if buffer is None:
                continue
            dropped.setdefault(session.places[buffer.held.slice].island, []).append(number)
        commands += [SendIsland(island, Drop(session.id, tuple(found))) for island, found in dropped.items()]

    # --- outcomes, from islands ---------------------------------------------------------------------------------------

    def done(self, island: int, message: Done) -> list[Command]:
        """Launches whose part on an island is complete."""
        commands: list[Command] = []
        for k, sequence in enumerate(message.sequences):
            if k < len(message.device_us) and (record := self.in_flight.get(sequence)) is not None:
                record.device_seconds += message.device_us[k] * 1e-6 * record.program.messages[island].devices
            self._island_done(sequence, island, None, commands)
        return _batched(commands)

    def run_failed(self, island: int, message: IslandLaunchFailed) -> list[Command]:
        """A launch whose part on an island failed."""
        commands: list[Command] = []
        self._island_done(message.sequence, island, message.failure, commands)
        return commands

    def enqueued(self, island: int, message: Enqueued) -> list[Command]:
        """Sequential dispatch: the gang is on its device queues, the next one may start its host work."""
        record = self.in_flight.get(message.sequence)
        commands: list[Command] = []
        if record is None or message.first != record.next_gang:
            return commands
        record.awaiting.discard(island)
        if not record.awaiting and record.next_gang + 1 < len(record.program.gang_islands):
            record.next_gang += 1
            self._send_gang(record, commands)
        return commands

    def _island_done(self, sequence: int, island: int, failure: Failure | None, commands: list[Command]) -> None:
        record = self.in_flight.get(sequence)
        if record is None or island not in record.pending:
            return
        record.pending.discard(island)
        if failure is not None and (record.failure is None or (failure.node and not record.failure.node)):
            record.failure = failure
        if not record.pending:
            self._finish(record, commands)

    def _finish(self, record: InFlight, commands: list[Command]) -> None:
        """Gives a launch its outcome, and those that waited for it theirs; then the sessions' next launches may go."""
        settled = deque([record])
        sessions: dict[int, Session] = {}
        while settled:
            record = settled.popleft()
            if record.sequence not in self.in_flight or self._waits(record):
                continue
            del self.in_flight[record.sequence]
            self._settle(record)
            session = self.sessions.get(record.session)
            if session is not None:
                sessions[session.id] = session
                session.in_flight -= 1
                if record.failure is None:
                    self._succeed(session, record, commands)
                else:
                    self._fail(session, record, record.failure, commands)
            settled.extend(self.in_flight[s] for s in record.dependents if s in self.in_flight)
        if self.cross_island.held:
            commands += self._release()
        for session in sessions.values():
            if session.backlog:
                commands += self._admit_waiting(session)

    def _settle(self, record: InFlight) -> None:
        """Puts the tenant's account right: what the launch took, in place of what it was charged in advance."""
        program = record.program
        actual = record.estimate
        if record.failure is None:
            actual = record.device_seconds
            program.device_time.measure(actual)
            self.circuit_breaker.clear(program.digest)
        if program.cross_island:
            self.cross_island.end(program.plans)
        self.ledger.settle(record.usage, record.estimate, actual)
        self.ledger.leave(record.usage)

    def _waits(self, record: InFlight) -> bool:
        """Whether a failure has to wait for a producer it may come from; the producer then knows of it."""
        if record.failure is None:
            return False
        for producer in record.producers:
            if producer in self.in_flight:
                self.in_flight[producer].dependents.append(record.sequence)
                return True
        return False

    def _succeed(self, session: Session, record: InFlight, commands: list[Command]) -> None:
        for k in range(len(record.program.results)):
            buffer = session.buffers.get(record.results + k)
            if buffer is not None:
                buffer.producer = 0
        device_us = round(1e6 * record.device_seconds / record.program.devices)
        shared = len(self.in_flight) > session.in_flight
        commands.append(SendClient(session.id, Completed((record.launch,), (device_us,), shared)))

    def _fail(self, session: Session, record: InFlight, failure: Failure, commands: list[Command]) -> None:
        for number in record.arguments:
            buffer = session.buffers.get(number)
            if buffer is not None and buffer.failure is not None:
                failure = buffer.failure
                break
        failure = record.root or failure
        # The buffer between may be gone by the time a consumer reports, so the cause is handed on by launch.
        for sequence in record.consumers:
            consumer = self.in_flight.get(sequence)
            if consumer is not None and consumer.root is None:
                consumer.root = failure
        for k in range(len(record.program.results)):
            buffer = session.buffers.get(record.results + k)
            if buffer is not None:
                session.fail(buffer, failure)
        commands.append(SendClient(session.id, LaunchFailed(record.launch, failure)))

    # --- hosts --------------------------------------------------------------------------------------------------------

    def host_up(self, island: int, message: HostUp) -> list[Command]:
        """A host serves under a new epoch: everybody learns its addresses, its island its programs."""
        self.hosts[message.host] = HostState(
            message.host,
            island,
            message.epoch,
            message.transfer_address,
            message.data_address,
            message.devices,
            message.pid,
            since=self.sequence,
        )
        self.away.discard(message.host)
        if message.crash:
            self.circuit_breaker.crashed(message.host, message.crash)
        commands: list[Command] = list(self._peers())
        for program in self.programs.values():
            if island in program.messages:
                program.ready.discard(message.host)
                commands.append(SendIsland(island, program.messages[island]))
        address = HostAddress(message.host, message.epoch, message.data_address)
        commands += [SendClient(session, address) for session in self.sessions]
        for session in self.sessions.values():
            commands += self._admit_waiting(session)
        return commands

    def host_down(self, message: HostDown) -> list[Command]:
        """A host is gone: launches that need its island fail, buffers on it are lost, programs are suspected."""
        host = self.hosts.get(message.host)
        if host is None or host.epoch != message.epoch or host.down_since is not None:
            return []
        host.down_since = self.now
        self.away.add(host.host)
        commands: list[Command] = list(self._peers())
        commands += [SendClient(s, HostAddress(host.host, host.epoch, "")) for s in self.sessions]
        lost = Failure(
            "BufferLost", f"the buffer was on host {host.host}, which is gone: {message.reason}", host=host.host
        )
        for program in self.programs.values():
            program.ready.discard(host.host)
        text = f"host {host.host} was lost: {message.reason}"
        failure = Failure(message.kind, text, host=host.host, story=message.story)
        candidates = [record.program for s in message.candidates if (record := self.in_flight.get(s)) is not None]
        members = [h.host for h in self.hosts.values() if h.island == host.island]
        if candidates:
            self.circuit_breaker.suspect({p.digest: p.name for p in candidates}, members, failure)
        # Launches first: what ends them is the loss of the host, not that of the arguments they had there.
        for record in list(self.in_flight.values()):
            if host.island in record.program.plans and record.sequence in self.in_flight:
                record.failure = failure
                record.producers = ()
                self._drop_results(record, commands)
                self._finish(record, commands)
        for session in self.sessions.values():
            commands += self._lose_buffers(session, host.host, lost)
        return commands

    def _lose_buffers(self, session: Session, host: int, failure: Failure) -> list[Command]:
        lost = []
        for number, buffer in session.buffers.items():
            placed = session.places[buffer.held.slice]
            if buffer.failure is None and buffer.producer == 0 and host in placed.hosts:
                session.fail(buffer, failure)
                lost.append(number)
        return [SendClient(session.id, BuffersLost(tuple(lost), failure))] if lost else []

    def _drop_results(self, record: InFlight, commands: list[Command]) -> None:
        """Takes back what the surviving islands of a failed launch made or will make."""
        numbers = tuple(record.results + k for k in range(len(record.program.results)))
        for island in record.program.plans:
            if not self.parallel and island in record.pending:
                # The gangs that were held back run on failures, so that nothing of the launch stays on the hosts.
                rest = len(record.program.gang_islands) - record.next_gang - 1
                run = IslandLaunch(
                    record.sequence, record.session, record.program.key, record.arguments, record.results
                )
                if rest > 0:
                    run = msgspec.structs.replace(run, first=record.next_gang + 1, gangs=rest)
                    commands.append(SendIsland(island, run))
            commands.append(SendIsland(island, Drop(record.session, numbers)))

    def _peers(self) -> list[SendIsland]:
        up = [h for h in self.hosts.values() if h.down_since is None]
        peers = Peers(tuple(Peer(h.host, h.epoch, h.transfer_address, h.since) for h in up))
        return [SendIsland(island, peers) for island in sorted({h.island for h in self.hosts.values()})]

    def tick(self, now: float) -> list[Command]:
        """Time passes: launches that wait for a host that does not come back fail."""
        self.now = now
        self.report.note(now, self.ledger.usages.values())
        commands: list[Command] = self._release() if self.cross_island.held else []
        if not self.away:
            return commands
        for session in self.sessions.values():
            commands += self._admit_waiting(session)
        return commands

    def load(self, message: Load) -> None:
        """How many launches of each tenant wait on an island."""
        self.report.queued[message.island] = message.queued

    def tenants(self) -> list[dict[str, Any]]:
        """What each tenant has and had, for people and metrics."""
        return self.report.tenants(self.ledger.usages.values(), self.sessions.values())

    def validate(self) -> None:
        """Re-derives what must hold between the tables; tests call it after every event."""
        for sequence, record in self.in_flight.items():
            assert record.sequence == sequence
            assert record.pending or record.failure is not None, f"launch {sequence} has nothing to wait for"
        for session in self.sessions.values():
            flying = sum(record.session == session.id for record in self.in_flight.values())
            assert session.in_flight == flying, (session.in_flight, flying)
            held = sum(b.held.device_bytes for b in session.buffers.values() if b.failure is None)
            assert session.device_bytes == held, (session.device_bytes, held)
            for number, buffer in session.buffers.items():
                assert not buffer.producer or buffer.producer in self.in_flight, f"buffer {number} waits for nobody"
        under_way: dict[int, int] = {}
        for record in self.in_flight.values():
            for island in record.program.plans if record.program.cross_island else ():
                under_way[island] = under_way.get(island, 0) + 1
        assert under_way == {island: n for island, n in self.cross_island.under_way.items() if n}
        assert self.cross_island.held.keys() <= {s.id for s in self.sessions.values() if s.backlog}


def _batched(commands: list[Command]) -> list[Command]:
    """Joins the completions of each session into one message."""
    completed: dict[int, tuple[list[int], list[int]]] = {}
    shared: dict[int, bool] = {}
    rest: list[Command] = []
    for command in commands:
        if isinstance(command, SendClient) and isinstance(command.message, Completed):
            launches, device_us = completed.setdefault(command.session, ([], []))
            launches += command.message.launches
            device_us += command.message.device_us
            shared[command.session] = command.message.contended
        else:
            rest.append(command)
    return [SendClient(s, Completed(tuple(a), tuple(b), shared[s])) for s, (a, b) in completed.items()] + rest
