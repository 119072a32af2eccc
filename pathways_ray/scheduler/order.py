"""What the scheduler decides: which launch goes to the island's devices next, and when.

Four rules. All hosts of the island get the same launches in the same order, so that no two devices see two gangs in
different orders. Launches of one session keep their order, since later ones may consume what earlier ones make.
Launches that run on other islands as well (*cross-island* ones) keep the order of the controller's sequence on every
island; between them, launches of this island alone go in as the policy likes. And only so much is with the hosts at a
time: a device queue cannot be taken back, so what is in it is out of the policy's hands.

Why no policy can make launches wait for each other: take the first cross-island launch that is not over. On each of its
islands everything that has to go before it is a launch of that island alone, which ends by itself, or a cross-island one
that is over. So it gets its turn everywhere, and its gangs find their inputs; and so on with the next. A policy that
picks a session whose next launch is crossing but not the first one lends its turn to the session of the first one.

Drops of buffers stay behind the launches that came before them.

Events in, commands out: `handle(event) -> list[Command]`. No clock, no thread, no stream; time arrives in `tick`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import zip_longest

from pathways_ray.errors import Failure
from pathways_ray.scheduler.orders_seen import OrdersSeen
from pathways_ray.scheduler.policies import Candidate, Ledger, Policy, fifo
from pathways_ray.scheduler.state import (
    Command,
    Kill,
    Lane,
    Outstanding,
    ProgramState,
    Queue,
    Refuse,
    ToController,
    ToHosts,
)
from pathways_ray.transport.messages import (
    Account,
    BarrierReached,
    BarrierReleased,
    Done,
    Drop,
    DropProgram,
    DropSession,
    Enqueued,
    HostDown,
    HostUp,
    IslandLaunch,
    IslandLaunchFailed,
    Load,
    Ordered,
    Peers,
    Program,
    Ready,
    ToIsland,
)

ALONE_S = 0.2
"""Estimated work on one set of devices that may be with the hosts while one tenant has the island to itself."""

SHARED_S = 0.02
"""The same while several have launches: what a newcomer finds in the device queues before its turn."""

AT_LEAST = 2
"""Launches on one set of devices that may be with the hosts however long they take, so that devices do not run dry."""

STRANDED_S = 5.0
"""Where a launch has failed on one host, the hosts that have part in what failed get so long to end it as well."""

TURN_S = 0.004
"""A session keeps its turn for this much estimated device time: hosts run neighbouring small launches as one."""


@dataclass
class IslandOrder:
    """The state of one island's scheduler.

    Args:
        hosts: the ids of the island's hosts. Until all are up, and from the loss of one until its successor joins,
            launches are not dispatched.
        window: launches with the hosts at once.
        limit_s: seconds that a launch may be first in line on its devices; then the island starts anew.
    """

    island: int
    hosts: frozenset[int]
    window: int
    policy: Policy = fifo
    limit_s: float = math.inf
    epochs: dict[int, int] = field(default_factory=dict)
    listed: dict[int, int] = field(default_factory=dict)
    agreed: bool = True
    programs: dict[int, ProgramState] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    sessions: dict[int, Queue] = field(default_factory=dict)
    waiting: dict[int, Queue] = field(default_factory=dict)
    cross_island: deque[tuple[int, int]] = field(default_factory=deque)
    outstanding: dict[int, Outstanding] = field(default_factory=dict)
    lanes: dict[int, Lane] = field(default_factory=dict)
    seen: OrdersSeen = field(default_factory=OrdersSeen)
    now: float = 0.0
    up: bool = False
    turn: tuple[int, float] = (0, 0.0)
    first_since: dict[int, float] = field(default_factory=dict)

    # --- events -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Command]:
        """Time passes, in seconds; policies with ageing go by it.

        Nothing can be taken off a device, so an island starts anew when a launch keeps devices for longer than the
        limit (a loop without end), or hosts still sit in a gang that another one has failed to enter.
        """
        self.now = now
        self.first_since = {sequence: self.first_since.get(sequence, now) for sequence in self._suspects()}
        for sequence, since in self.first_since.items():
            record = self.outstanding[sequence]
            launch = f"launch {sequence} of program {record.program.name!r}"
            if now - since > self.limit_s:
                reason = f"{launch} was first on its devices for {now - since:.0f} s; the limit is {self.limit_s:.0f} s"
                return self._start_anew(reason, "LaunchTimeout")
            stranded = record.must_fail & record.hosts
            if record.failed is not None and stranded and now - max(since, record.failed_at) > STRANDED_S:
                failed, left = (", ".join(map(str, sorted(hosts))) for hosts in (record.failed_on, stranded))
                message = record.failed.failure.message
                return self._start_anew(f"{launch} failed on host {failed}, and host {left} waits in it: {message}")
        return []

    def _start_anew(self, reason: str, kind: str = "HostLost") -> list[Command]:
        host = min(self.hosts)
        return self.host_lost(host, self.epochs[host], reason, silent=True, kind=kind)

    def from_controller(self, message: ToIsland) -> list[Command]:
        """A message from the controller."""
        match message:
            case IslandLaunch():
                return self._run(message)
            case Drop() | DropProgram():
                queue = self.waiting.get(message.session)
                if queue is not None:
                    queue.items.append(message)
                    return []
                if isinstance(message, DropProgram):
                    self.programs.pop(message.program, None)
                return [ToHosts(message)]
            case Program():
                known = self.programs.get(message.program)
                seconds = known.seconds if known is not None else 0.0
                self.programs[message.program] = ProgramState(
                    message.name, message.devices, message.device_set, message.cross_island, seconds
                )
                return [ToHosts(message)]
            case Peers():
                self.listed = {peer.host: peer.epoch for peer in message.peers if peer.host in self.hosts}
                self._compare_epochs()
                return [ToHosts(message)]
            case DropSession():
                return self._drop_session(message)
            case Account():
                self.ledger.open(message.session, message.tenant, message.weight, message.priority)
                return []

    def from_host(
        self, host: int, epoch: int, message: Ready | Done | IslandLaunchFailed | Enqueued | BarrierReached | Ordered
    ) -> list[Command]:
        """A message from a host; one of an older epoch is dropped, since its launches have failed already."""
        if self.epochs.get(host) != epoch:
            return []
        match message:
            case Ready() | Enqueued():
                return [ToController(message)]
            case BarrierReached():
                return self._arrived(message)
            case Done():
                commands = self._done(host, message)
            case IslandLaunchFailed():
                commands = self._failed(host, message)
            case Ordered():
                return self._ordered(host, message)
        return commands + self._advance()

    def load(self) -> Load:
        """Launches that wait here, by tenant."""
        queued: dict[str, int] = {}
        for queue in self.waiting.values():
            name = queue.usage.tenant
            queued[name] = queued.get(name, 0) + sum(isinstance(item, IslandLaunch) for item in queue.items)
        return Load(self.island, queued)

    # --- launches -----------------------------------------------------------------------------------------------------

    def _run(self, run: IslandLaunch) -> list[Command]:
        if run.sequence in self.outstanding:
            # A further gang: behind launches that wait for room it would wait for itself.
            return [ToHosts(run)]
        if not self.agreed:
            # The controller did not know of the hosts' loss when it sent this; now it does, and has failed the launch.
            return []
        queue = self.sessions.get(run.session)
        if queue is None:
            usage = self.ledger.of(run.session)
            queue = self.sessions[run.session] = Queue(run.session, usage, Candidate(usage, 0, 0.0))
        if run.first == 0:
            self.ledger.enter(queue.usage)
            if self._program_of(run).cross_island:
                self.cross_island.append((run.sequence, run.session))
        else:
            mine = [
                k
                for k, item in enumerate(queue.items)
                if isinstance(item, IslandLaunch) and item.sequence == run.sequence
            ]
            if mine:  # else it is what is left of a launch that is over here
                queue.items.insert(mine[-1] + 1, run)
            return []
        queue.items.append(run)
        if len(queue.items) == 1:
            self._to_head(queue, run)
            self.waiting[run.session] = queue
        return self._advance()

    def _program_of(self, run: IslandLaunch) -> ProgramState:
        program = self.programs.get(run.program)
        if program is None:
            program = self.programs[run.program] = ProgramState()
        return program

    def _to_head(self, queue: Queue, run: IslandLaunch) -> None:
        queue.candidate.arrival = run.sequence
        queue.candidate.since = self.now

    def _advance(self) -> list[Command]:
        commands: list[Command] = []
        while self.up and self.waiting and len(self.outstanding) < self.window:
            queue = self._pick()
            if queue is None:
                break
            self._start(queue, commands)
        return commands

    def _pick(self) -> Queue | None:
        """The session whose next launch goes to the hosts now; None when there is no room for any."""
        session, left = self.turn
        if len(self.waiting) == 1:
            queue = self._leading(next(iter(self.waiting.values())))
            return queue if self._has_room(queue) else None
        if left > 0 and session in self.waiting and self._has_room(queue := self._leading(self.waiting[session])):
            return queue
        policy, now = self.policy, self.now
        full: set[int] = set()
        for wanted in sorted(self.waiting.values(), key=lambda q: policy(q.candidate, now)):
            queue = self._leading(wanted)
            program = self._program_of(queue.head)
            if program.device_set not in full and self._has_room(queue):
                return queue
            # What goes first waits for room, and nobody passes it: small launches would keep a big one out for ever.
            full.add(program.device_set)
        return None

    def _leading(self, queue: Queue) -> Queue:
        """The session that goes when the policy wants `queue`: itself, or that of the first cross-island launch."""
        if self._program_of(queue.head).cross_island and self.cross_island[0][0] != queue.head.sequence:
            return self.sessions[self.cross_island[0][1]]
        return queue

    def _has_room(self, queue: Queue) -> bool:
        """Whether there is room for the next launch of a session on its devices."""
        program = self._program_of(queue.head)
        lane = self.lanes.get(program.device_set)
        if program.cross_island or lane is None or lane.launches < AT_LEAST:
            return True
        limit = SHARED_S if self.ledger.active > 1 else ALONE_S
        return lane.seconds + program.estimate <= limit

    def _start(self, queue: Queue, commands: list[Command]) -> None:
        run = queue.items.popleft()
        assert isinstance(run, IslandLaunch)
        program = self._program_of(run)
        estimate = program.estimate
        if program.cross_island:
            self.cross_island.popleft()
        else:
            lane = self.lanes.get(program.device_set)
            if lane is None:
                lane = self.lanes[program.device_set] = Lane()
            lane.launches += 1
            lane.seconds += estimate
        self.ledger.start(queue.usage, estimate * program.devices)
        if self.policy is not fifo:
            session, left = self.turn
            self.turn = (queue.session, (left if session == queue.session and left > 0 else TURN_S) - estimate)
        self.outstanding[run.sequence] = Outstanding(set(self.hosts), run, program, queue.usage, estimate)
        commands.append(ToHosts(run))
        self._flush(queue, commands)

    def _flush(self, queue: Queue, commands: list[Command]) -> None:
        """Sends what stands before the next launch of a session."""
        items = queue.items
        while items:
            head = items[0]
            if isinstance(head, IslandLaunch):
                if head.first == 0:
                    self._to_head(queue, head)
                    return
                if head.sequence in self.outstanding:
                    commands.append(ToHosts(head))
            else:
                if isinstance(head, DropProgram):
                    self.programs.pop(head.program, None)
                commands.append(ToHosts(head))
            items.popleft()
        del self.waiting[queue.session]

    def _drop_session(self, message: DropSession) -> list[Command]:
        """A session ends: its launches of this island alone are taken out of the queue.

        Crossing ones stay: another island may have started its part, which would wait for this one for ever. They find
        none of their arguments and end at once.
        """
        commands: list[Command] = [ToHosts(message)]
        queue = self.sessions.pop(message.session, None)
        self.ledger.close(message.session)
        if queue is None or not queue.items:
            return commands
        ended = Failure("SessionClosed", "the session ended before the launch ran")
        dropped: set[int] = set()
        kept: deque[IslandLaunch | Drop | DropProgram] = deque()
        for item in queue.items:
            if isinstance(item, IslandLaunch) and not self._program_of(item).cross_island:
                if item.first == 0:
                    dropped.add(item.sequence)
                    self.ledger.leave(queue.usage)
            elif not isinstance(item, Drop):
                kept.append(item)
        queue.items = kept
        if any(isinstance(item, IslandLaunch) for item in kept):
            self.sessions[message.session] = queue
        commands += [ToController(IslandLaunchFailed(sequence, ended)) for sequence in sorted(dropped)]
        self._flush(queue, commands)
        return commands + self._advance()

    # --- hosts --------------------------------------------------------------------------------------------------------

    def host_up(self, message: HostUp) -> list[Command]:
        """A host joins. An epoch that is not newer than the last one seen is refused."""
        known = self.epochs.get(message.host, 0)
        if message.host not in self.hosts or message.epoch <= abs(known):
            return [Refuse(message.host, message.epoch)]
        others = {member: self.epochs.get(member, 0) for member in sorted(self.hosts)}
        if any(epoch == -message.epoch or abs(epoch) > message.epoch for epoch in others.values()):
            # The group it belongs to broke before it came, or is over. It has to start anew with the others.
            return [Refuse(message.host, message.epoch), Kill(message.host, message.epoch)]
        lost = []
        for member, epoch in others.items():
            if epoch < message.epoch:
                lost += self.host_lost(member, epoch, "a successor joined")
        self.epochs[message.host] = message.epoch
        self.up = all(self.epochs.get(host, 0) > 0 for host in self.hosts)
        self._compare_epochs()
        return [*lost, ToController(message), *self._advance()]

    def host_lost(
        self, host: int, epoch: int, reason: str, silent: bool = False, kind: str = "HostLost"
    ) -> list[Command]:
        """A host is gone, and with it the island's group: survivors may sit in a collective that never ends.

        So the whole island starts anew: every other host's process is killed (and this one's, when it is only
        `silent`), and the controller fails every launch it has on the island.
        """
        if self.epochs.get(host) != epoch or epoch <= 0:
            return []
        commands: list[Command] = []
        candidates = self._suspects()
        for member in sorted(self.hosts):
            known = self.epochs.get(member, 0)
            if known != epoch:
                continue
            self.epochs[member] = -known
            why = reason if member == host else f"host {host} of its island was lost: {reason}"
            commands.append(ToController(HostDown(member, known, why, kind, candidates)))
            candidates = ()
            if member != host or silent:
                commands.append(Kill(member, known))
        self._clear()
        return commands

    def _compare_epochs(self) -> None:
        """Notes whether the controller speaks of the hosts as they are now: it hears of losses a little later."""
        self.agreed = not self.listed or all(self.listed.get(h) == self.epochs.get(h) for h in self.hosts)

    def _suspects(self) -> tuple[int, ...]:
        """The launches that the hosts are at: the first in line on each set of devices."""
        first: dict[tuple[int, bool], int] = {}
        for sequence, record in self.outstanding.items():
            first.setdefault((record.program.device_set, record.program.cross_island), sequence)
        return tuple(first.values())

    def _clear(self) -> None:
        """Forgets all launches: those with the hosts and those that waited. Drops are moot, the hosts start empty."""
        self.up = False
        self._compare_epochs()
        for record in self.outstanding.values():
            self.ledger.leave(record.usage)
        for queue in self.waiting.values():
            for item in queue.items:
                if isinstance(item, IslandLaunch) and item.first == 0:
                    self.ledger.leave(queue.usage)
            queue.items.clear()
        self.outstanding.clear()
        self.waiting.clear()
        self.cross_island.clear()
        self.lanes.clear()
        self.seen = OrdersSeen()

    def _arrived(self, message: BarrierReached) -> list[Command]:
        """Opens a gate once every host has come to it with what the gang waits for: all enter its collective, or
        none."""
        record = self.outstanding.get(message.sequence)
        if record is None:
            return []
        hosts = record.arrived.setdefault(message.barrier, set())
        hosts.add(message.host)
        if message.failure is not None:
            record.missed.setdefault(message.barrier, message.failure)
        if hosts != self.hosts:
            return []
        del record.arrived[message.barrier]
        return [ToHosts(BarrierReleased(message.sequence, message.barrier, record.missed.pop(message.barrier, None)))]

    def _ordered(self, host: int, message: Ordered) -> list[Command]:
        """Compares what the hosts enqueued; hosts that differ have corrupted each other's results already."""
        clash = self.seen.add(sorted(self.hosts).index(host), message.gangs)
        if clash is None:
            return []
        one, other = (self._named(gang.sequence, gang.gang) for gang in clash)
        reason = (
            f"hosts of island {self.island} enqueued gangs in different orders: one had {one} where another had {other}"
        )
        return self.host_lost(host, self.epochs[host], reason, silent=True, kind="OrderMismatch")

    def _named(self, sequence: int, gang: int) -> str:
        record = self.outstanding.get(sequence)
        program = f" of program {record.program.name!r}" if record is not None else ""
        return f"gang {gang} of launch {sequence}{program}"

    def _done(self, host: int, message: Done) -> list[Command]:
        """Notes that `host` completed launches, and reports those that every host has completed.

        With many hosts this loop is most of what a scheduler does: it runs for every launch on every host.
        """
        finished: list[int] = []
        taken: list[int] = []
        commands: list[Command] = []
        outstanding = self.outstanding
        for sequence, device_us in zip_longest(
            message.sequences, message.device_us[: len(message.sequences)], fillvalue=0
        ):
            record = outstanding.get(sequence)
            if record is None:
                continue
            hosts = record.hosts
            hosts.discard(host)
            if device_us > record.device_us:
                record.device_us = device_us
            if record.failed is None:
                record.succeeded = True
                if not hosts:
                    self._over(record)
                    finished.append(sequence)
                    taken.append(record.device_us * record.program.devices)
            elif lost := self._disagree(record, host, succeeded=True):
                commands += lost
                break
            elif not hosts:
                self._over(record)
                commands.append(ToController(record.failed))
        return [ToController(Done(tuple(finished), tuple(taken))), *commands] if finished else commands

    def _failed(self, host: int, message: IslandLaunchFailed) -> list[Command]:
        """Notes that a launch failed on `host`; once it is over on every host, the first failure is reported."""
        record = self.outstanding.get(message.sequence)
        if record is None:
            return []
        record.hosts.discard(host)
        if record.failed is None:
            record.failed, record.failed_at = message, self.now
        record.failed_on.add(host)
        record.must_fail.update(message.hosts or self.hosts)
        if commands := self._disagree(record, host, succeeded=False):
            return commands
        if record.hosts:
            return []
        self._over(record)
        return [ToController(record.failed)]

    def _disagree(self, record: Outstanding, host: int, succeeded: bool) -> list[Command]:
        """Starts the island anew if some of its devices ran a gang that others did not: what their collectives
        exchanged since is worthless."""
        record.succeeded = record.succeeded or succeeded
        if not record.succeeded or record.failed is None:
            return []
        if record.must_fail <= record.hosts | record.failed_on:
            return []  # nobody who shares what failed has succeeded
        reason = f"the hosts disagree on a launch: {record.failed.failure.message}"
        return self.host_lost(host, self.epochs[host], reason, silent=True)

    def _over(self, record: Outstanding) -> None:
        """A launch is over on all hosts: its room is free, its tenant's account put right."""
        del self.outstanding[record.run.sequence]
        program = record.program
        if not program.cross_island:
            lane = self.lanes[program.device_set]
            lane.launches -= 1
            lane.seconds = lane.seconds - record.estimate if lane.launches else 0.0
        actual = record.estimate
        if record.failed is None:
            actual = record.device_us * 1e-6
            program.measure(actual)
        self.ledger.settle(record.usage, record.estimate * program.devices, actual * program.devices)
        self.ledger.leave(record.usage)

    def validate(self) -> None:
        """Re-derives what must hold between the tables; tests call it after every event."""
        assert len(self.outstanding) <= self.window
        fresh = {
            (item.sequence, queue.session)
            for queue in self.waiting.values()
            for item in queue.items
            if isinstance(item, IslandLaunch) and item.first == 0
        }
        for session, queue in self.waiting.items():
            assert session == queue.session
            assert self.sessions[session] is queue
            assert queue.head.first == 0, "a later gang waits at the head"
        assert set(self.cross_island) <= fresh
        assert list(self.cross_island) == sorted(self.cross_island)
        launches: dict[int, int] = {}
        for record in self.outstanding.values():
            if not record.program.cross_island:
                launches[record.program.device_set] = launches.get(record.program.device_set, 0) + 1
        assert launches == {lane: held.launches for lane, held in self.lanes.items() if held.launches}
