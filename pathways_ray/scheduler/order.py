"""The order of one island: which launch goes to its devices next, and when.

Four rules. All hosts of the island get the same launches in the same order, so that no two devices see two gangs in
different orders. Launches of one session keep their order, since later ones may consume what earlier ones make, but
for those of a higher priority, which pass what they have nothing to do with (`priorities`).
Launches that run on other islands as well (*cross-island* ones) keep the order of the controller's sequence on every
island; between them, launches of this island only go in as the policy likes. And the hosts have a bounded amount of
work at a time: a launch in a device's queue cannot be taken back, so it is out of the policy's hands.

Why no policy can make launches wait for each other: take the first cross-island launch that is not over. On each of its
islands everything that has to go before it is a launch of that island only, which ends by itself, or a cross-island one
that is over. So it is dispatched everywhere, and its gangs find their inputs; and so on with the next. A policy that
picks a session whose next launch is cross-island but not the first one yields to the session of the first one.

Drops of buffers stay behind the launches that came before them, but for what was given to one that has succeeded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import zip_longest
from types import MappingProxyType

import msgspec

from pathways_ray.errors import Failure
from pathways_ray.ir.plan import Device
from pathways_ray.observe.ring import Ring
from pathways_ray.scheduler.devices import DeviceTable
from pathways_ray.scheduler.early import EarlyRight
from pathways_ray.scheduler.events import Command, ToController, ToHosts
from pathways_ray.scheduler.membership import Membership
from pathways_ray.scheduler.policies import Policy, Usage, fifo
from pathways_ray.scheduler.queues import Queues
from pathways_ray.scheduler.rendezvous import disagree, disagreement, reach_barrier, report_of
from pathways_ray.scheduler.state import Decision, Outstanding, PartialFailure, ProgramState, SessionQueue
from pathways_ray.scheduler.withdrawals import WITHDRAWALS
from pathways_ray.story import Entry, Story
from pathways_ray.transport import messages as wire

QUANTUM_S = 0.004
"""Scheduling quantum: a session goes on for this much estimated device time, since hosts run neighbouring small
launches as one."""

MAX_ENDED = 1024
"""Launches that are remembered once they are over, with what they came to: the controller may die before their clients
have heard of it, and another island may still take what they gave. Of cross-island ones the controller has
`controller.cross_island.CROSS_ISLAND_WINDOW` on an island at once."""


class IslandOrder:
    """Programs, queues and launches of one island.

    Args:
        members: launches are dispatched while all hosts are up.
        window: launches with the hosts at once.
    """

    def __init__(self, members: Membership, window: int, policy: Policy = fifo, story: Story | None = None) -> None:
        self.members = members
        self.window = window
        self.policy = policy
        self.story = story if story is not None else Story("scheduler")
        self.outstanding: dict[int, Outstanding] = {}
        self.queues = queues = Queues(self.outstanding)
        self.ledger, self.programs, self.sessions = queues.ledger, queues.programs, queues.sessions
        self.waiting, self.cross_island = queues.waiting, queues.cross_island
        self._program_of, self._flush = queues.program_of, queues.flush
        self.devices = DeviceTable()
        self.early = EarlyRight()
        self.over = Ring("qdd")
        """Launches that are over: number, when hosts got them, when they were over."""
        self.inline = 0
        """Launches among the outstanding ones that lie in no device queue."""
        self.now = 0.0
        self.quantum: tuple[int, float] = (0, 0.0)
        self.last_sequence = self.last_program = 0
        self.left: set[int] = set()
        """Programs of a controller that is gone, for launches of it that waited here."""
        self.ended: deque[tuple[int, int, int, int, int, Failure | None]] = deque(maxlen=MAX_ENDED)
        """The last launches that are over: session, number in it and in the cluster, program, islands, and failure."""

    # --- messages from the controller ---------------------------------------------------------------------------------

    def from_controller(self, message: wire.ForOrder) -> list[Command]:
        """A message that has a place in the order, or sets what the order goes by."""
        match message:
            case wire.IslandLaunch():
                return self._enter(message)
            case wire.Drop():
                if message.given or (queue := self.waiting.get(message.session)) is None:
                    return [ToHosts(message)]
                queue.items.append(message)
                return []
            case wire.PrioritizedIslandLaunch():
                return self._enter(message.launch, message.priority)
            case wire.DropProgram():
                queue = self.waiting.get(message.session)
                if not message.session:  # of a controller before
                    queue = self.queues.waiting_for(message.program)
                if queue is None:
                    self.programs.pop(message.program, None)
                    return [ToHosts(message)]
                queue.items.append(message)
                return []
            case wire.Program():
                self.last_program = max(self.last_program, message.program)
                known, devices = self.programs.get(message.program), self.devices.set_of(message.devices)
                self.programs[message.program] = ProgramState.of(message, devices, known)
                return [ToHosts(message)]
            case wire.DropSession() | wire.Abort() | wire.CancelLaunch():
                return WITHDRAWALS[type(message)](self.queues, message, self.now) + self.advance()
            case wire.Account():
                self.ledger.open(
                    message.session, message.tenant, message.weight, message.priority, message.launch_limit_s
                )
                if message.session in self.sessions:
                    self.sessions[message.session].ended = False
                return []

    def _enter(self, launch: wire.IslandLaunch, priority: int = 0) -> list[Command]:
        if launch.sequence in self.outstanding:
            # A further gang: behind launches that wait for room it would wait for itself.
            return [ToHosts(launch)]
        if not self.members.agreed:
            # The controller did not know of the hosts' loss when it sent this; now it does, and has failed the launch.
            return []
        self.last_sequence = launch.sequence
        if launch.first:
            self.queues.put(launch, self.now, priority)
            return []
        queue = self.sessions.get(launch.session) or self.queues.open(launch.session)
        usage, items = queue.usage, queue.items
        self.ledger.enter(usage)
        commands = self.early.entered(usage.tenant, self.now) if usage.tenant != self.early.last else []
        if not self.waiting and self._may_start():
            program = self.programs.get(launch.program) or self._program_of(launch)
            if (queued := self._room(launch, program)) is not None:  # nearly always
                commands.append(self._dispatch(launch, program, usage, queued))
                return commands
        alone, head = self.waiting.keys() <= {launch.session}, items[0] if items else launch
        self.queues.put(launch, self.now, priority)  # a head that was looked at has no room before launches end
        return commands if alone and items[0] is head else commands + self.advance()

    def tick(self, leads: bool) -> list[Command]:
        """Time has passed; `leads` says whether the island has a host to which launches may be handed."""
        alone = self.members.complete and leads and self.ledger.active <= 1
        here = {one.usage.tenant for one in self.outstanding.values()}
        here |= {one.usage.tenant for one in self.waiting.values()}
        # The one that is alone now may have come before the last one, which is through.
        return self.early.tick(alone and here <= {self.early.last}, len(self.members.hosts), self.now)

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def advance(self) -> list[Command]:
        """Dispatches launches while all hosts are up and there is room."""
        commands: list[Command] = []
        while self.waiting and self._may_start():
            picked = self._pick()
            if picked is None:
                break
            self._start(*picked, commands)
        return commands

    def _may_start(self) -> bool:
        """Whether all hosts are up, and have not so many launches that they take no more."""
        return self.members.complete and len(self.outstanding) < self.window

    def _pick(self) -> tuple[SessionQueue, ProgramState, int] | None:
        """The session whose launch goes to the hosts now, its program and `_room`; None when no launch has room."""
        if len(self.waiting) == 1:
            return self._head(next(iter(self.waiting.values())))
        session, left = self.quantum
        if left > 0 and session in self.waiting and (head := self._head(self.waiting[session])) is not None:
            return head
        policy, now = self.policy, self.now
        full: set[Device] = set()
        for wanted in sorted(self.waiting.values(), key=lambda q: policy(q.candidate, now)):
            queue = self._leading(wanted)
            launch, program = queue.head, self._program_of(queue.head)
            if self.queues.calls_enough(launch.session, program):
                continue  # it waits for its own, not for room, so others pass it
            devices = program.devices.devices
            if full.isdisjoint(devices) and (queued := self._room(launch, program)) is not None:
                return queue, program, queued
            # The first in rank waits for room, and none passes it: small launches would keep a big one out for ever.
            full.update(devices)
        return None

    def _leading(self, queue: SessionQueue) -> SessionQueue:
        """The session that goes when the policy wants `queue`: itself, or that of the first cross-island launch."""
        if not self.cross_island or not self._program_of(launch := queue.head).cross_island:
            return queue
        sequence, session = self.cross_island[0]
        return queue if sequence == launch.sequence else self.sessions[session]

    def _head(self, wanted: SessionQueue) -> tuple[SessionQueue, ProgramState, int] | None:
        """Gives what goes when the policy wants this session; None where there is no room for that."""
        queue = self._leading(wanted) if self.cross_island else wanted
        launch = queue.head
        program = self._program_of(launch)
        queued = self._room(launch, program)
        return None if queued is None else (queue, program, queued)

    def _room(self, launch: wire.IslandLaunch, program: ProgramState) -> int | None:
        """Computations of a launch that may be in the queue of a device at once; None where there is no room for it.

        A computation that is cheap queues all the same where its arguments are not there yet, or another one is under
        way that the same thread has enqueued: behind a loop without end, so many that its host stands still. So those
        count that go behind anything else; and all, where another session could have handed its host a call of which
        nobody has heard here.
        """
        queued, ledger = program.computations, self.ledger
        if not program.counts:
            return None if self.queues.calls_enough(launch.session, program) else queued
        if program.is_inline and self.inline == len(self.outstanding) and len(ledger.tenant_of) <= 1:
            queued = 0
        return queued if program.devices.has_room(program.seconds, queued, ledger.active > 1) else None

    def _start(self, queue: SessionQueue, program: ProgramState, queued: int, commands: list[Command]) -> None:
        """Dispatches the next launch of a session that waits, and the drops behind it."""
        launch = queue.items.popleft()
        assert isinstance(launch, wire.IslandLaunch)
        queue.ranks.pop(launch.sequence, None)
        if program.cross_island:
            self.cross_island.popleft()
        commands.append(self._dispatch(launch, program, queue.usage, queued))
        self._flush(queue, commands, self.now)

    def _dispatch(self, launch: wire.IslandLaunch, program: ProgramState, usage: Usage, queued: int) -> Command:
        """Charges a launch that goes to the hosts now, and counts it on its devices."""
        length, now, is_inline = program.seconds, self.now, False
        estimate, charge = length.estimate, length.seconds * program.width
        if program.counts:
            is_inline = not queued
            self.inline += is_inline
            program.devices.add(estimate, queued)
        self.ledger.start(usage, charge)
        if self.policy is not fifo:
            session, left = self.quantum
            left = left if session == launch.session and left > 0 else QUANTUM_S
            self.quantum = launch.session, left - estimate
        hosts = set(self.members.hosts)
        self.outstanding[launch.sequence] = Outstanding(hosts, launch, program, usage, estimate, charge, now, is_inline)
        self.story.note_launch((now, "dispatched", program.name, "", launch.session, launch.sequence))
        return ToHosts(launch)

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

    def ready(self, host: int, message: wire.Ready) -> None:
        """Notes whether `host` runs the computations of a program within the call that enqueues them."""
        program = self.programs.get(message.program)
        if program is not None and not message.queues:
            program.inline.add(host)
            program.is_inline = program.inline >= program.devices.hosts

    def enqueued(self, host: int, message: wire.Enqueued) -> list[Command]:
        """Passes on that a gang is enqueued once every host says so: those without a part in it say so at once."""
        record = self.outstanding.get(message.sequence)
        if record is not None:
            said = record.enqueued.setdefault(message.first, set())
            said.add(host)
            if not record.hosts <= said:
                return []
            del record.enqueued[message.first]
        return [ToController(message)]

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
                decisions.append(disagreement(host, record.failed))
                break
            elif not hosts:
                self._over(record)
                decisions.append(ToController(report_of(record)))
        else:
            if self.waiting:
                decisions += self.advance()
        return [ToController(wire.Done(tuple(finished), tuple(device_us))), *decisions] if finished else decisions

    def failed(self, host: int, message: wire.IslandLaunchFailed) -> list[Decision]:
        """Notes that a launch failed on `host`; once it is over on every host, the first failure is reported."""
        record = self.outstanding.get(message.sequence)
        if record is None:
            return []
        record.hosts.discard(host)
        if record.failed is None:
            record.failed = PartialFailure(message)
        elif message.consumed:
            consumed = dict.fromkeys((*record.failed.report.consumed, *message.consumed))
            record.failed.report = msgspec.structs.replace(record.failed.report, consumed=tuple(consumed))
        record.failed.hosts.add(host)
        record.failed.affected.update(message.hosts or self.members.hosts)
        self.story.note_launch(Entry(self.now, "failed", message.failure.message, "", 0, message.sequence, host))
        if disagree(record):
            return [disagreement(host, record.failed)]
        if record.hosts:
            return []
        self._over(record)
        return [ToController(report_of(record)), *self.advance()]

    def _over(self, record: Outstanding) -> None:
        """A launch is over on all hosts: its room is free, and its tenant is charged with what it took."""
        launch, program, failed = record.launch, record.program, record.failed
        sequence, actual = launch.sequence, record.estimate
        del self.outstanding[sequence]
        self.over.add(sequence, record.at, self.now)
        failure = failed.report.failure if failed is not None else None
        self.ended.append((launch.session, launch.launch, sequence, launch.program, program.islands, failure))
        if program.counts:
            program.devices.remove(actual, 0 if record.is_inline else program.computations)
            self.inline -= record.is_inline
        if failed is None:
            actual = record.device_us * 1e-6
            program.seconds.measure(actual)
        self.ledger.end(record.usage, record.charge, actual * program.width)

    def clear(self, took: Mapping[int, float] = MappingProxyType({})) -> None:
        """Forgets all launches: those with the hosts and those that waited. What these alone were for goes too: no host
        has it any more, so no controller hears of it. Launches that had their devices for the seconds in `took` are
        charged with these, others as estimated."""
        for program in self.left:
            self.programs.pop(program, None)
        self.left.clear()
        for sequence, record in self.outstanding.items():
            if (seconds := took.get(sequence, 0.0)) > 0.0:
                self.ledger.settle(record.usage, record.charge, seconds * record.program.width)
            self.ledger.leave(record.usage)
        self.outstanding.clear()
        self.inline = 0
        self.queues.clear()
        self.devices.clear()
        self.early.forget()
