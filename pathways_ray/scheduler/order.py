"""The order of one island: which launch goes to its devices next, and when.

Four rules. All hosts of the island get the same launches in the same order, so that no two devices see two gangs in
different orders. Launches of one session keep their order, since later ones may consume what earlier ones make.
Launches that run on other islands as well (*cross-island* ones) keep the order of the controller's sequence on every
island; between them, launches of this island only go in as the policy likes. And the hosts have a bounded amount of
work at a time: a launch in a device's queue cannot be taken back, so it is out of the policy's hands.

Why no policy can make launches wait for each other: take the first cross-island launch that is not over. On each of its
islands everything that has to go before it is a launch of that island only, which ends by itself, or a cross-island one
that is over. So it is dispatched everywhere, and its gangs find their inputs; and so on with the next. A policy that
picks a session whose next launch is cross-island but not the first one yields to the session of the first one.

Drops of buffers stay behind the launches that came before them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec

from pathways_ray.errors import Failure
from pathways_ray.ir.plan import Device
from pathways_ray.scheduler.deadlines import Deadlines
from pathways_ray.scheduler.devices import DeviceTable
from pathways_ray.scheduler.events import Command, ToController, ToHosts
from pathways_ray.scheduler.membership import Membership
from pathways_ray.scheduler.policies import Candidate, Ledger, Policy, fifo
from pathways_ray.scheduler.rendezvous import disagree, reach_barrier
from pathways_ray.scheduler.state import (
    Decision,
    Outstanding,
    PartialFailure,
    ProgramState,
    RestartIsland,
    SessionQueue,
)
from pathways_ray.story import Entry, Story
from pathways_ray.transport import messages as wire

SINGLE_TENANT_WINDOW_S = 0.2
"""Estimated work on a device that may be with the hosts while one tenant has the island to itself."""

CONTENDED_WINDOW_S = 0.02
"""The same while several tenants have launches: a newcomer finds this much in the device queues before its launch."""

MIN_DEVICE_LAUNCHES = 2
"""Launches on a device that may be with the hosts however long they take, so that devices do not run dry."""

MAX_DEVICE_COMPUTATIONS = 28
"""Computations on one device that may be with the hosts, unless one launch has more. From 32 on, XLA's CPU client has
the thread wait that enqueues for all devices of its host: behind a loop without end, a host would stand still."""

QUANTUM_S = 0.004
"""Scheduling quantum: a session goes on for this much estimated device time, since hosts run neighbouring small
launches as one."""


@dataclass
class IslandOrder:
    """Programs, queues and launches of one island.

    Args:
        members: launches are dispatched while all hosts are up.
        window: launches with the hosts at once.
        deadlines: of launches on their devices, and of compilations.
    """

    members: Membership
    window: int
    policy: Policy = fifo
    deadlines: Deadlines = field(default_factory=Deadlines)
    story: Story = field(default_factory=lambda: Story("scheduler"))
    programs: dict[int, ProgramState] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    sessions: dict[int, SessionQueue] = field(default_factory=dict)
    waiting: dict[int, SessionQueue] = field(default_factory=dict)
    cross_island: deque[tuple[int, int]] = field(default_factory=deque)
    outstanding: dict[int, Outstanding] = field(default_factory=dict)
    devices: DeviceTable = field(default_factory=DeviceTable)
    now: float = 0.0
    quantum: tuple[int, float] = (0, 0.0)

    # --- messages from the controller ---------------------------------------------------------------------------------

    def from_controller(
        self,
        message: wire.IslandLaunch
        | wire.Program
        | wire.Drop
        | wire.DropProgram
        | wire.DropSession
        | wire.Account
        | wire.CancelLaunch
        | wire.Abort,
    ) -> list[Command]:
        """A message that has a place in the order, or sets what the order goes by."""
        match message:
            case wire.IslandLaunch():
                return self._enter(message)
            case wire.Drop() | wire.DropProgram():
                queue = self.waiting.get(message.session)
                if queue is not None:
                    queue.items.append(message)
                    return []
                if isinstance(message, wire.DropProgram):
                    self.programs.pop(message.program, None)
                return [ToHosts(message)]
            case wire.Program():
                known = self.programs.get(message.program) or ProgramState()
                self.programs[message.program] = ProgramState(
                    message.name,
                    self.devices.set_of(message.devices),
                    message.cross_island,
                    known.seconds,
                    message.computations,
                )
                return [ToHosts(message)]
            case wire.DropSession():
                return self._drop_session(message)
            case wire.Abort():
                return self._abort(message)
            case wire.CancelLaunch():
                return self._cancel(message)
            case wire.Account():
                self.ledger.open(
                    message.session, message.tenant, message.weight, message.priority, message.launch_limit_s
                )
                return []

    def _enter(self, launch: wire.IslandLaunch) -> list[Command]:
        if launch.sequence in self.outstanding:
            # A further gang: behind launches that wait for room it would wait for itself.
            return [ToHosts(launch)]
        if not self.members.agreed:
            # The controller did not know of the hosts' loss when it sent this; now it does, and has failed the launch.
            return []
        queue = self.sessions.get(launch.session)
        if queue is None and launch.first != 0:
            return []  # a further gang of a launch that is over here, with its session
        if queue is None:
            usage = self.ledger.of(launch.session)
            queue = self.sessions[launch.session] = SessionQueue(launch.session, usage, Candidate(usage, 0, 0.0))
        if launch.first != 0:
            _insert_gang(queue, launch)
            return []
        self.ledger.enter(queue.usage)
        if self._program_of(launch).cross_island:
            self.cross_island.append((launch.sequence, launch.session))
        queue.items.append(launch)
        if len(queue.items) == 1:
            self._to_head(queue, launch)
            self.waiting[launch.session] = queue
        return self.advance()

    def _drop_session(self, message: wire.DropSession) -> list[Command]:
        """A session ends: its launches of this island only are taken out of the queue.

        Cross-island ones stay: another island may have started its part, which would wait for this one for ever. They
        compute nothing, and end at once.
        """
        self.story.note(Entry(self.now, "session ended", session=message.session))
        commands: list[Command] = [ToHosts(message)]
        queue = self.sessions.pop(message.session, None)
        self.ledger.close(message.session)
        if queue is None or not queue.items:
            return commands
        ended = Failure("SessionClosed", "the session ended before the launch ran")
        dropped: set[int] = set()
        kept: deque[wire.IslandLaunch | wire.Drop | wire.DropProgram] = deque()
        for item in queue.items:
            if isinstance(item, wire.IslandLaunch) and not self._program_of(item).cross_island:
                if item.first == 0:
                    dropped.add(item.sequence)
                    self.ledger.leave(queue.usage)
            elif isinstance(item, wire.IslandLaunch):
                kept.append(msgspec.structs.replace(item, cancelled=ended))
            elif not isinstance(item, wire.Drop):
                kept.append(item)
        queue.items = kept
        if any(isinstance(item, wire.IslandLaunch) for item in kept):
            self.sessions[message.session] = queue
            queue.ended = True
        commands += [ToController(wire.IslandLaunchFailed(sequence, ended)) for sequence in sorted(dropped)]
        self._flush(queue, commands)
        return commands + self.advance()

    def _abort(self, message: wire.Abort) -> list[Command]:
        """Launches have ended on other islands: those that wait here are taken out, hosts hear of the others. They end
        there soon, on the failure, and leave their place in the window then."""
        commands: list[Command] = [ToHosts(message)]
        ended = {sequence for sequence, _ in message.launches}
        for sequence, session in [waiting for waiting in self.cross_island if waiting[0] in ended]:
            self.cross_island.remove((sequence, session))
            queue = self.sessions[session]
            head = queue.head
            queue.items = deque(
                i for i in queue.items if not (isinstance(i, wire.IslandLaunch) and i.sequence == sequence)
            )
            self.ledger.leave(queue.usage)
            if head.sequence == sequence:
                self._flush(queue, commands)
        return commands + self.advance()

    def _cancel(self, message: wire.CancelLaunch) -> list[Command]:
        """Ends a launch that waits here. A cross-island one keeps its place, see `_drop_session`, and computes nothing.
        One that is not here is over, or lost with the hosts."""
        sequence = message.sequence
        if sequence in self.outstanding:
            return [ToController(wire.Begun(sequence))]
        for queue in self.waiting.values():
            found = [i for i in queue.items if isinstance(i, wire.IslandLaunch) and i.sequence == sequence]
            if not found:
                continue
            if self._program_of(found[0]).cross_island:
                for item in found:
                    place = queue.items.index(item)
                    queue.items[place] = msgspec.structs.replace(item, cancelled=message.failure)
                return []
            for item in found:
                queue.items.remove(item)
            self.ledger.leave(queue.usage)
            commands: list[Command] = [ToController(wire.IslandLaunchFailed(sequence, message.failure))]
            self._flush(queue, commands)
            return commands + self.advance()
        return []

    def _program_of(self, launch: wire.IslandLaunch) -> ProgramState:
        program = self.programs.get(launch.program)
        if program is None:
            program = self.programs[launch.program] = ProgramState()
        return program

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def advance(self) -> list[Command]:
        """Dispatches launches while all hosts are up and there is room."""
        commands: list[Command] = []
        while self.members.complete and self.waiting and len(self.outstanding) < self.window:
            queue = self._pick()
            if queue is None:
                break
            self._start(queue, commands)
        return commands

    def _pick(self) -> SessionQueue | None:
        """The session whose next launch goes to the hosts now; None when there is no room for any."""
        session, left = self.quantum
        if len(self.waiting) == 1:
            queue = self._leading(next(iter(self.waiting.values())))
            return queue if self._has_room(queue) else None
        if left > 0 and session in self.waiting and self._has_room(queue := self._leading(self.waiting[session])):
            return queue
        policy, now = self.policy, self.now
        full: set[Device] = set()
        for wanted in sorted(self.waiting.values(), key=lambda q: policy(q.candidate, now)):
            queue = self._leading(wanted)
            devices = self._program_of(queue.head).devices.devices
            if full.isdisjoint(devices) and self._has_room(queue):
                return queue
            # The first in rank waits for room, and none passes it: small launches would keep a big one out for ever.
            full.update(devices)
        return None

    def _leading(self, queue: SessionQueue) -> SessionQueue:
        """The session that goes when the policy wants `queue`: itself, or that of the first cross-island launch."""
        if self._program_of(queue.head).cross_island and self.cross_island[0][0] != queue.head.sequence:
            return self.sessions[self.cross_island[0][1]]
        return queue

    def _has_room(self, queue: SessionQueue) -> bool:
        """Whether there is room for the next launch of a session on its devices."""
        program = self._program_of(queue.head)
        window = CONTENDED_WINDOW_S if self.ledger.active > 1 else SINGLE_TENANT_WINDOW_S
        return program.cross_island or all(
            not group.launches
            or (
                group.computations + program.computations <= MAX_DEVICE_COMPUTATIONS
                and (group.launches < MIN_DEVICE_LAUNCHES or group.seconds + program.seconds.estimate <= window)
            )
            for group in program.devices.groups
        )

    def _start(self, queue: SessionQueue, commands: list[Command]) -> None:
        launch = queue.items.popleft()
        assert isinstance(launch, wire.IslandLaunch)
        program = self._program_of(launch)
        estimate = program.seconds.estimate
        if program.cross_island:
            self.cross_island.popleft()
        else:
            program.devices.add(estimate, program.computations)
        self.ledger.start(queue.usage, estimate * program.width)
        if self.policy is not fifo:
            session, left = self.quantum
            self.quantum = (queue.session, (left if session == queue.session and left > 0 else QUANTUM_S) - estimate)
        self.outstanding[launch.sequence] = Outstanding(set(self.members.hosts), launch, program, queue.usage, estimate)
        self.story.note_launch(Entry(self.now, "dispatched", program.name, "", launch.session, launch.sequence))
        commands.append(ToHosts(launch))
        self._flush(queue, commands)

    def _flush(self, queue: SessionQueue, commands: list[Command]) -> None:
        """Sends the messages before the next launch of a session."""
        items = queue.items
        while items:
            head = items[0]
            if isinstance(head, wire.IslandLaunch):
                if head.first == 0:
                    self._to_head(queue, head)
                    return
                if head.sequence in self.outstanding:
                    commands.append(ToHosts(head))
            else:
                if isinstance(head, wire.DropProgram):
                    self.programs.pop(head.program, None)
                commands.append(ToHosts(head))
            items.popleft()
        del self.waiting[queue.session]
        if queue.ended:
            del self.sessions[queue.session]

    def _to_head(self, queue: SessionQueue, launch: wire.IslandLaunch) -> None:
        queue.candidate.arrival = launch.sequence
        queue.candidate.since = self.now

    # --- messages from hosts ------------------------------------------------------------------------------------------

    def reached(self, message: wire.BarrierReached) -> list[Command]:
        """Releases an input barrier once every host has reached it: all enter the gang's collective, or none."""
        record = self.outstanding.get(message.sequence)
        release = reach_barrier(record, message, self.members.hosts) if record is not None else None
        if release is None:
            return []
        failure = release.failure.message if release.failure is not None else ""
        self.story.note_launch(Entry(self.now, f"barrier {release.barrier}", failure, "", 0, release.sequence))
        return [ToHosts(release)]

    def done(self, host: int, message: wire.Done) -> list[Decision]:
        """Notes that `host` completed launches, and reports those that every host has completed.

        With many hosts this loop is most of what a scheduler does: it runs for every launch on every host.
        """
        finished: list[int] = []
        device_us: list[int] = []
        decisions: list[Decision] = []
        outstanding = self.outstanding
        for sequence, taken in zip_longest(message.sequences, message.device_us[: len(message.sequences)], fillvalue=0):
            record = outstanding.get(sequence)
            if record is None:
                continue
            hosts = record.hosts
            hosts.discard(host)
            record.succeeded = True
            if taken > record.device_us:
                record.device_us = taken
            if record.failed is None:
                if not hosts:
                    self._over(record)
                    finished.append(sequence)
                    device_us.append(record.device_us)
            elif disagree(record):
                decisions.append(_disagreement(host, record.failed))
                break
            elif not hosts:
                self._over(record)
                decisions.append(ToController(_report(record)))
        else:
            decisions += self.advance()
        return [ToController(wire.Done(tuple(finished), tuple(device_us))), *decisions] if finished else decisions

    def failed(self, host: int, message: wire.IslandLaunchFailed) -> list[Decision]:
        """Notes that a launch failed on `host`; once it is over on every host, the first failure is reported."""
        record = self.outstanding.get(message.sequence)
        if record is None:
            return []
        record.hosts.discard(host)
        if record.failed is None:
            record.failed = PartialFailure(message, self.now)
        elif message.consumed:
            consumed = dict.fromkeys((*record.failed.report.consumed, *message.consumed))
            record.failed.report = msgspec.structs.replace(record.failed.report, consumed=tuple(consumed))
        record.failed.hosts.add(host)
        record.failed.affected.update(message.hosts or self.members.hosts)
        self.story.note_launch(Entry(self.now, "failed", message.failure.message, "", 0, message.sequence, host))
        if disagree(record):
            return [_disagreement(host, record.failed)]
        if record.hosts:
            return []
        self._over(record)
        return [ToController(_report(record)), *self.advance()]

    def _over(self, record: Outstanding) -> None:
        """A launch is over on all hosts: its room is free, and its tenant is charged with what it took."""
        del self.outstanding[record.launch.sequence]
        program = record.program
        if not program.cross_island:
            program.devices.remove(record.estimate, program.computations)
        actual = record.estimate
        if record.failed is None:
            actual = record.device_us * 1e-6
            program.seconds.measure(actual)
        self.ledger.settle(record.usage, record.estimate * program.width, actual * program.width)
        self.ledger.leave(record.usage)

    # --- all launches at once -----------------------------------------------------------------------------------------

    def overdue(self) -> RestartIsland | None:
        """A launch that keeps its devices for too long, or a compilation that does not end, as the reason to restart
        the island."""
        return self.deadlines.overdue(self.outstanding, self.programs, self.candidates(), self.members.hosts, self.now)

    def candidates(self, host: int | None = None) -> tuple[int, ...]:
        """The launches that the hosts may be at, or one of them: the first in line on each device."""
        first: dict[tuple[int, bool], int] = {}
        for sequence, record in self.outstanding.items():
            if host is not None and host not in record.hosts:
                continue
            for group in record.program.devices.groups:
                if host is None or host in group.hosts:
                    first.setdefault((id(group), record.program.cross_island), sequence)
        return tuple(dict.fromkeys(first.values()))

    def clear(self) -> None:
        """Forgets all launches: those with the hosts and those that waited. Drops are moot, since hosts start empty."""
        for record in self.outstanding.values():
            self.ledger.leave(record.usage)
        for queue in self.waiting.values():
            for item in queue.items:
                if isinstance(item, wire.IslandLaunch) and item.first == 0:
                    self.ledger.leave(queue.usage)
                elif isinstance(item, wire.DropProgram):
                    self.programs.pop(item.program, None)
            queue.items.clear()
        self.sessions = {number: queue for number, queue in self.sessions.items() if not queue.ended}
        self.outstanding.clear()
        self.waiting.clear()
        self.cross_island.clear()
        self.devices.clear()
        self.deadlines.clear()

    def queued(self) -> dict[str, int]:
        """Launches that wait here, by tenant."""
        queued: dict[str, int] = {}
        for queue in self.waiting.values():
            name = queue.usage.tenant
            queued[name] = queued.get(name, 0) + sum(isinstance(item, wire.IslandLaunch) for item in queue.items)
        return queued

    def gang_text(self, sequence: int, gang: int) -> str:
        """A gang in words."""
        record = self.outstanding.get(sequence)
        program = f" of program {record.program.name!r}" if record is not None else ""
        return f"gang {gang} of launch {sequence}{program}"

    def validate(self) -> None:
        """Re-derives what must hold between the tables; tests call it after every event."""
        assert len(self.outstanding) <= self.window
        fresh = {
            (item.sequence, queue.session)
            for queue in self.waiting.values()
            for item in queue.items
            if isinstance(item, wire.IslandLaunch) and item.first == 0
        }
        for session, queue in self.waiting.items():
            assert session == queue.session
            assert self.sessions[session] is queue
            assert queue.head.first == 0, "a later gang waits at the head"
        assert set(self.cross_island) <= fresh
        assert list(self.cross_island) == sorted(self.cross_island)
        local = [record.program for record in self.outstanding.values() if not record.program.cross_island]
        for group in self.devices.groups:
            assert group.launches == sum(group in program.devices.groups for program in local), group
        for devices in self.devices:
            found = [device for group in devices.groups for device in group.devices]
            assert sorted(found) == sorted(devices.devices), devices


def _insert_gang(queue: SessionQueue, launch: wire.IslandLaunch) -> None:
    """Puts a further gang of a launch behind those that wait; without any, the launch is over here."""
    for k in range(len(queue.items) - 1, -1, -1):
        item = queue.items[k]
        if isinstance(item, wire.IslandLaunch) and item.sequence == launch.sequence:
            queue.items.insert(k + 1, launch)
            return


def _report(record: Outstanding) -> wire.IslandLaunchFailed:
    """The report of a launch that is over everywhere, and failed on some hosts. One on which it succeeded has consumed
    what it was to; that may be any argument, as far as is known here."""
    assert record.failed is not None
    report = record.failed.report
    return msgspec.structs.replace(report, consumed=record.launch.arguments) if record.succeeded else report


def _disagreement(host: int, failed: PartialFailure) -> RestartIsland:
    return RestartIsland(
        host, f"the hosts disagree on a launch: {failed.report.failure.message}", launch=failed.report.sequence
    )
