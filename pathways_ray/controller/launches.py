"""What the controller decides about launches and buffers.

The life of a launch: *waiting* (its program is being compiled, or too many launches of its session fly) → *in flight*
(every island it touches has its `Run`) → one outcome. A session's launches are admitted in the order in which it made
them; admission numbers all launches of the cluster in one sequence, and every island gets its `Run`s in that
sequence. Since a launch only consumes what earlier launches produced, that one linear order respects data
dependencies.

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

import msgspec

from pathways_ray.controller.programs import Held, PlannedProgram
from pathways_ray.errors import Failure, GraphError
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import check_layout
from pathways_ray.transport.messages import (
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
    Launch,
    LaunchFailed,
    Peer,
    Peers,
    Put,
    Ready,
    Run,
    RunFailed,
    ToClient,
    ToIsland,
)

HOST_ABSENCE_LIMIT_S = 30.0
"""A launch waits this long for a lost host's successor before it fails."""


@dataclass(frozen=True, slots=True)
class SendIsland:
    island: int
    message: ToIsland


@dataclass(frozen=True, slots=True)
class SendClient:
    session: int
    message: ToClient


Command = SendIsland | SendClient


@dataclass(slots=True)
class _Buffer:
    """One logical array: what it is, the launch that makes it (0: it is there), why it failed."""

    held: Held
    producer: int
    failure: Failure | None = None


@dataclass(slots=True)
class _Session:
    """A tenant's state.

    `waiting` keeps the session's order while its head cannot be admitted, `admitting` is set while it is worked off.
    `places` remembers released slices too, since buffers may outlive them.
    """

    id: int
    slices: dict[int, PlacedSlice] = field(default_factory=dict)
    places: dict[int, PlacedSlice] = field(default_factory=dict)
    programs: dict[int, PlannedProgram] = field(default_factory=dict)
    buffers: dict[int, _Buffer] = field(default_factory=dict)
    waiting: deque[Launch | Put | Free] = field(default_factory=deque)
    in_flight: int = 0
    admitting: bool = False


@dataclass(slots=True)
class _InFlight:
    """A launch on its islands. `producers` are launches it consumes from that had no outcome at admission, `consumers`
    those that consume from it in turn; `root` is the failure of the first producer that failed."""

    sequence: int
    session: int
    launch: int
    program: PlannedProgram
    results: int
    arguments: tuple[int, ...]
    pending: set[int]
    producers: tuple[int, ...]
    next_gang: int = 0
    awaiting: set[int] = field(default_factory=set)
    failure: Failure | None = None
    root: Failure | None = None
    dependents: list[int] = field(default_factory=list)
    consumers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class HostState:
    """A host as last heard of; `down_since` is None while it is up."""

    host: int
    island: int
    epoch: int
    transfer_address: str
    data_address: str
    devices: int
    pid: int
    down_since: float | None = None


@dataclass
class Launches:
    """The controller's state.

    Args:
        parallel: dispatch all gangs of a launch at once; otherwise a gang is sent when the one before it is enqueued.
        max_in_flight: launches of one session without an outcome; further ones wait.
    """

    parallel: bool
    max_in_flight: int
    hosts: dict[int, HostState] = field(default_factory=dict)
    away: set[int] = field(default_factory=set)
    sessions: dict[int, _Session] = field(default_factory=dict)
    programs: dict[int, PlannedProgram] = field(default_factory=dict)
    in_flight: dict[int, _InFlight] = field(default_factory=dict)
    sequence: int = 0
    now: float = 0.0

    # --- sessions -----------------------------------------------------------------------------------------------------

    def open_session(self, session: int) -> None:
        self.sessions[session] = _Session(session)

    def close_session(self, session: int) -> list[Command]:
        """Frees all a session holds. Its launches on the devices run to their end and leave nothing behind."""
        state = self.sessions.pop(session, None)
        if state is None:
            return []
        islands = {host.island for host in self.hosts.values()}
        commands: list[Command] = [SendIsland(island, DropSession(session)) for island in sorted(islands)]
        for program in state.programs.values():
            self.programs.pop(program.key, None)
            commands += [SendIsland(island, DropProgram(program.key)) for island in program.plans]
        return commands

    def add_slice(self, session: int, placed: PlacedSlice) -> None:
        self.sessions[session].slices[placed.mesh.id] = placed
        self.sessions[session].places[placed.mesh.id] = placed

    def remove_slice(self, session: int, slice_id: int) -> bool:
        """Forgets a slice. What is on its devices stays until its handles are dropped."""
        return self.sessions[session].slices.pop(slice_id, None) is not None

    # --- programs -----------------------------------------------------------------------------------------------------

    def register(self, session: int, number: int, program: PlannedProgram) -> list[Command]:
        """A planned program, or one that failed to be planned, under the session's number for it."""
        state = self.sessions[session]
        state.programs[number] = program
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
        return self._admit_waiting(session) if session else []

    # --- launches and buffers, from clients ---------------------------------------------------------------------------

    def from_client(self, session: int, message: Launch | Put | Free) -> list[Command]:
        state = self.sessions[session]
        state.waiting.append(message)
        return self._admit_waiting(state) if len(state.waiting) == 1 else []

    def _admit_waiting(self, session: _Session) -> list[Command]:
        commands: list[Command] = []
        if session.admitting:
            return commands  # what is admitted may end at once; the loop below goes on by itself
        session.admitting = True
        while session.waiting:
            head = session.waiting.popleft()
            match head:
                case Launch():
                    if not self._admit(session, head, commands):
                        session.waiting.appendleft(head)
                        break
                case Put():
                    self._put(session, head)
                case Free():
                    self._free(session, head.buffers, commands)
        session.admitting = False
        return commands

    def _put(self, session: _Session, put: Put) -> None:
        """Notes a buffer. One of a type or on a slice that cannot be is not made; a launch with it says so."""
        place = session.places.get(put.slice)
        if place is None:
            return
        with contextlib.suppress(GraphError):
            check_layout(put.type, put.spec, place.mesh, "put")
            session.buffers[put.buffer] = _Buffer(Held(put.type, put.slice, put.spec), 0)

    def _admit(self, session: _Session, launch: Launch, commands: list[Command]) -> bool:
        """Sends a launch on its way, or ends it with an error; False when it has to wait."""
        program = session.programs.get(launch.program)
        if program is None:
            refused = Failure("WireError", f"launch {launch.launch} names program {launch.program}, never registered")
            commands.append(SendClient(session.id, LaunchFailed(launch.launch, refused)))
            return True
        failure = program.failure or self._argument_failure(session, program, launch)
        if failure is None:
            if session.in_flight >= self.max_in_flight:
                return False
            if len(program.ready) < len(program.hosts) or (self.away and self._away(program)):
                failure = self._absence(program)
                if failure is None:
                    return False
        if failure is not None:
            for k, held in enumerate(program.results):
                session.buffers[launch.results + k] = _Buffer(held, 0, failure)
            commands.append(SendClient(session.id, LaunchFailed(launch.launch, failure)))
            return True
        self._start(session, program, launch, commands)
        return True

    def _argument_failure(self, session: _Session, program: PlannedProgram, launch: Launch) -> Failure | None:
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

    def _start(self, session: _Session, program: PlannedProgram, launch: Launch, commands: list[Command]) -> None:
        self.sequence += 1
        sequence = self.sequence
        buffers = session.buffers
        producers = tuple(p for n in launch.arguments if (p := buffers[n].producer) and p in self.in_flight)
        for k, held in enumerate(program.results):
            buffers[launch.results + k] = _Buffer(held, sequence)
        record = _InFlight(
            sequence,
            session.id,
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
        if not program.plans:
            self._finish(record, commands)
        elif self.parallel:
            run = Run(sequence, session.id, program.key, launch.arguments, launch.results)
            commands += [SendIsland(island, run) for island in program.plans]
        else:
            self._send_gang(record, commands)

    def _send_gang(self, record: _InFlight, commands: list[Command]) -> None:
        gang = record.next_gang
        record.awaiting = set(record.program.gang_islands[gang])
        run = Run(record.sequence, record.session, record.program.key, record.arguments, record.results, gang, 1)
        # The first one goes to every island, so that all take their arguments before the client may drop them.
        islands = record.program.plans if gang == 0 else record.program.gang_islands[gang]
        commands += [SendIsland(island, run) for island in islands]

    def _free(self, session: _Session, numbers: Iterable[int], commands: list[Command]) -> None:
        dropped: dict[int, list[int]] = {}
        for number in numbers:
            buffer = session.buffers.pop(number, None)
            if buffer is None:
                continue
            dropped.setdefault(session.places[buffer.held.slice].island, []).append(number)
        commands += [SendIsland(island, Drop(session.id, tuple(found))) for island, found in dropped.items()]

    # --- outcomes, from islands ---------------------------------------------------------------------------------------

    def done(self, island: int, message: Done) -> list[Command]:
        """Launches whose part on an island is complete."""
        commands: list[Command] = []
        for sequence in message.sequences:
            self._island_done(sequence, island, None, commands)
        return _batched(commands)

    def run_failed(self, island: int, message: RunFailed) -> list[Command]:
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

    def _finish(self, record: _InFlight, commands: list[Command]) -> None:
        """Gives a launch its outcome, and those that waited for it theirs; then the sessions' next launches may go."""
        settled = deque([record])
        sessions: dict[int, _Session] = {}
        while settled:
            record = settled.popleft()
            if record.sequence not in self.in_flight or self._waits(record):
                continue
            del self.in_flight[record.sequence]
            session = self.sessions.get(record.session)
            if session is not None:
                sessions[session.id] = session
                session.in_flight -= 1
                if record.failure is None:
                    self._succeed(session, record, commands)
                else:
                    self._fail(session, record, record.failure, commands)
            settled.extend(self.in_flight[s] for s in record.dependents if s in self.in_flight)
        for session in sessions.values():
            if session.waiting:
                commands += self._admit_waiting(session)

    def _waits(self, record: _InFlight) -> bool:
        """Whether a failure has to wait for a producer it may come from; the producer then knows of it."""
        if record.failure is None:
            return False
        for producer in record.producers:
            if producer in self.in_flight:
                self.in_flight[producer].dependents.append(record.sequence)
                return True
        return False

    def _succeed(self, session: _Session, record: _InFlight, commands: list[Command]) -> None:
        for k in range(len(record.program.results)):
            buffer = session.buffers.get(record.results + k)
            if buffer is not None:
                buffer.producer = 0
        commands.append(SendClient(session.id, Completed((record.launch,))))

    def _fail(self, session: _Session, record: _InFlight, failure: Failure, commands: list[Command]) -> None:
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
                buffer.producer, buffer.failure = 0, failure
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
        )
        self.away.discard(message.host)
        commands: list[Command] = list(self._peers())
        for program in self.programs.values():
            if message.host in program.hosts and island in program.messages:
                program.ready.discard(message.host)
                commands.append(SendIsland(island, program.messages[island]))
        address = HostAddress(message.host, message.epoch, message.data_address)
        commands += [SendClient(session, address) for session in self.sessions]
        for session in self.sessions.values():
            commands += self._admit_waiting(session)
        return commands

    def host_down(self, message: HostDown) -> list[Command]:
        """A host is gone: launches that need its island fail, buffers on it are lost."""
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
        for session in self.sessions.values():
            commands += self._lose_buffers(session, host.host, lost)
        for program in self.programs.values():
            program.ready.discard(host.host)
        failure = Failure("HostLost", f"host {host.host} was lost: {message.reason}", host=host.host)
        for record in list(self.in_flight.values()):
            if host.island in record.program.plans and record.sequence in self.in_flight:
                record.failure = failure
                record.producers = ()
                self._drop_results(record, commands)
                self._finish(record, commands)
        return commands

    def _lose_buffers(self, session: _Session, host: int, failure: Failure) -> list[Command]:
        lost = []
        for number, buffer in session.buffers.items():
            placed = session.places[buffer.held.slice]
            if buffer.failure is None and buffer.producer == 0 and host in placed.hosts:
                buffer.failure = failure
                lost.append(number)
        return [SendClient(session.id, BuffersLost(tuple(lost), failure))] if lost else []

    def _drop_results(self, record: _InFlight, commands: list[Command]) -> None:
        """Takes back what the surviving islands of a failed launch made or will make."""
        numbers = tuple(record.results + k for k in range(len(record.program.results)))
        for island in record.program.plans:
            if not self.parallel and island in record.pending:
                # The gangs that were held back run on failures, so that nothing of the launch stays on the hosts.
                rest = len(record.program.gang_islands) - record.next_gang - 1
                run = Run(record.sequence, record.session, record.program.key, record.arguments, record.results)
                if rest > 0:
                    run = msgspec.structs.replace(run, first=record.next_gang + 1, gangs=rest)
                    commands.append(SendIsland(island, run))
            commands.append(SendIsland(island, Drop(record.session, numbers)))

    def _peers(self) -> list[SendIsland]:
        up = [h for h in self.hosts.values() if h.down_since is None]
        peers = Peers(tuple(Peer(h.host, h.epoch, h.transfer_address) for h in up))
        return [SendIsland(island, peers) for island in sorted({h.island for h in self.hosts.values()})]

    def tick(self, now: float) -> list[Command]:
        """Time passes: launches that wait for a host that does not come back fail."""
        self.now = now
        if not self.away:
            return []
        commands: list[Command] = []
        for session in self.sessions.values():
            commands += self._admit_waiting(session)
        return commands

    def validate(self) -> None:
        """Re-derives what must hold between the tables; tests call it after every event."""
        for sequence, record in self.in_flight.items():
            assert record.sequence == sequence
            assert record.pending or record.failure is not None, f"launch {sequence} has nothing to wait for"
        for session in self.sessions.values():
            flying = sum(record.session == session.id for record in self.in_flight.values())
            assert session.in_flight == flying, (session.in_flight, flying)
            for number, buffer in session.buffers.items():
                assert not buffer.producer or buffer.producer in self.in_flight, f"buffer {number} waits for nobody"


def _batched(commands: list[Command]) -> list[Command]:
    """Joins the completions of each session into one message."""
    completed: dict[int, list[int]] = {}
    rest: list[Command] = []
    for command in commands:
        if isinstance(command, SendClient) and isinstance(command.message, Completed):
            completed.setdefault(command.session, []).extend(command.message.launches)
        else:
            rest.append(command)
    return [SendClient(s, Completed(tuple(done))) for s, done in completed.items()] + rest
