"""Deadlines of launches on their devices, and of compilations.

Neither can be stopped. So the island restarts when a launch keeps its devices, or a compiler a host, for longer than
the operator's limit; and when hosts still sit in a gang that another one has failed to enter.

What a launch waits for is not its fault, and does not count: hosts say which launches are first in the queues of all
their devices that these use, and since when, and which are in the queues behind others. A launch runs from when the
last of its hosts came to it, and not while it is in a queue behind others on one of them. Where a launch waits and no
device of the island runs anything for twice the longest limit, but what waits for others on another host, the island
restarts too, and nobody is blamed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from pathways_ray.errors import Failure
from pathways_ray.limits import COMPILE_LIMIT_S
from pathways_ray.scheduler.order import IslandOrder
from pathways_ray.scheduler.state import Outstanding, ProgramState, RestartIsland
from pathways_ray.transport.messages import Heartbeat

MAX_STRANDED_S = 5.0
"""When a launch has failed on one host, the hosts that share the failed value must end it within this time as well, of
which only that counts in which they ran: one that is stopped is a matter of the silence limit."""

LONGEST_BEAT_S = 2.0
"""Time between two heartbeats of a host that counts as one in which it ran: in a longer one it did not."""

STUCK_LIMITS = 2
"""Where launches wait for each other, or for nothing that one can see, for so many of the longest limits."""

STUCK_BEHIND_OTHERS_LIMITS = 10
"""The same of a launch that other islands take part in: its part there may be behind several that are within theirs."""


@dataclass
class Deadlines:
    """Times at which launches began to keep their devices, and hosts to compile.

    `running` has by host and launch when it came to the head of its devices' queues there, `early` in the same way the
    programs of those that clients handed over and nobody has sent yet, `compiling` by host and program the seconds that
    its compilation took so far, `beats` when each host was heard last, `ran_s` how long each has run.
    `limits_s` has the limits of those that are running: a launch keeps its own once it is over and its program dropped.
    `held` is when a launch on some devices was last seen in the `queued` of a host.
    `first_since` has what each host had run when a launch that has failed somewhere was first seen first in line,
    `stuck_since` when the oldest launch, and those at the devices, were last seen to get on.

    Args:
        limit_s: seconds that a launch may keep its devices, unless its tenant has a limit of its own.
        compile_limit_s: seconds that a host may compile one program.
    """

    limit_s: float = math.inf
    compile_limit_s: float = COMPILE_LIMIT_S
    running: dict[int, dict[int, float]] = field(default_factory=dict)
    early: dict[int, dict[int, int]] = field(default_factory=dict)
    queued: dict[int, frozenset[int]] = field(default_factory=dict)
    compiling: dict[tuple[int, int], float] = field(default_factory=dict)
    beats: dict[int, float] = field(default_factory=dict)
    ran_s: dict[int, float] = field(default_factory=dict)
    limits_s: dict[int, float] = field(default_factory=dict)
    held: dict[int, float] = field(default_factory=dict)
    first_since: dict[int, dict[int, float]] = field(default_factory=dict)
    stuck_since: tuple[int, frozenset[int], float] = (0, frozenset(), 0.0)

    def clear(self) -> None:
        """The hosts start again."""
        self.running.clear()
        self.early.clear()
        self.queued.clear()
        self.compiling.clear()
        self.beats.clear()
        self.ran_s.clear()
        self.limits_s.clear()
        self.first_since.clear()

    def heard(self, host: int, message: Heartbeat, now: float) -> None:
        """Notes the launches that keep a host's devices, and those that wait for them there; it ran since it was heard
        last, and its compilers with it."""
        ran = min(now - self.beats.get(host, now), LONGEST_BEAT_S) / max(message.slowness, 1.0)
        self.beats[host] = now
        self.ran_s[host] = self.ran_s.get(host, 0.0) + ran
        for one, program in self.compiling:
            if one == host:
                self.compiling[one, program] += ran
        self.running[host] = {entry.sequence: now - entry.ms / 1000 for entry in message.running}
        self.queued[host] = frozenset(message.queued)
        self.early[host] = {entry.sequence: entry.program for entry in message.running if entry.program}

    def overdue(self, order: IslandOrder, hosts: frozenset[int], now: float) -> RestartIsland | None:
        """The reason to restart the island, if there is one; `hosts` are those of it that are up, at least one."""
        outstanding, programs = order.outstanding, order.programs
        for (host, program), seconds in self.compiling.items():
            if seconds > self.compile_limit_s:
                what = "a program that was dropped, or that an earlier scheduler sent,"
                if program in programs:
                    what = f"program {programs[program].name!r}"
                text = f"it compiled {what} for {seconds:.0f} s"
                reason = f"{text}; the limit is {self.compile_limit_s:.0f} s (compile_limit_s)"
                return RestartIsland(host, reason, program=program)
        runs = {sequence for running in self.running.values() for sequence in running}
        self.held = {sequence: at for sequence, at in self.held.items() if sequence in runs}
        self.limits_s = {sequence: self._limit_of(sequence, order) for sequence in runs}
        for sequence, limit_s in sorted(self.limits_s.items()):
            record = outstanding.get(sequence)
            seconds = self._seconds(sequence, record, hosts, now)
            if seconds > limit_s and not has_succeeded(sequence, order):
                # One that has failed may have left a computation on a device: one that did not depend on what failed.
                name = _named(record) if record is not None else self._unknown(sequence, programs)
                text = f"{name} was first on its devices for {seconds:.0f} s"
                reason = f"{text}; the limit is {limit_s:.0f} s (launch_limit_s)"
                program = self._early_program(sequence)
                return RestartIsland(min(hosts), reason, "LaunchTimeout", sequence, program, seconds)
        first = first_in_line(outstanding)
        failed = {sequence: outstanding[sequence] for sequence in first if outstanding[sequence].failed is not None}
        # Each behind another one: hosts have taken launches in different orders, and none of these will end.
        waiting = None if runs.difference(*self.queued.values()) else frozenset(runs)
        longest_s = order.ledger.longest_limit_s
        return self._stranded(failed, hosts) or self._stuck(outstanding, waiting, hosts, now, longest_s)

    def _limit_of(self, sequence: int, order: IslandOrder) -> float:
        """The limit of a launch that runs, or has failed: that of its tenant, or the runtime's. One that nobody has
        sent yet is of the tenant whose program it is: hosts take it from no other."""
        if (record := order.outstanding.get(sequence)) is not None:
            return record.usage.launch_limit_s or self.limit_s
        key = self._early_program(sequence) or next((key for number, key, _ in _over(order) if number == sequence), 0)
        program = order.programs.get(key)
        usage = order.ledger.usages.get(program.tenant) if program is not None else None
        if usage is None:
            return self.limits_s.get(sequence, self.limit_s)
        return usage.launch_limit_s or self.limit_s

    def _early_program(self, sequence: int) -> int:
        """The program of a launch that nobody has sent yet; otherwise 0. Of several hosts not all need be at it."""
        return next((early[sequence] for early in self.early.values() if sequence in early), 0)

    def _unknown(self, sequence: int, programs: Mapping[int, ProgramState]) -> str:
        """A launch that is not with the hosts, as far as this scheduler knows."""
        if sequence >= 0:
            return f"launch {sequence}, which has failed,"
        program = programs.get(self._early_program(sequence))
        return f"a launch of program {program.name if program is not None else ''!r} that was only handed over"

    def _seconds(self, sequence: int, record: Outstanding | None, hosts: frozenset[int], now: float) -> float:
        """The seconds that a launch has run. Nobody says when one ends that is not with the hosts: it ran when they
        were heard last."""
        if record is not None:
            return now - self._since(sequence, record.hosts, now)
        heard = max((self.beats[host] for host in hosts if sequence in self.running.get(host, ())), default=now)
        return heard - self._since(sequence, hosts, now)

    def _since(self, sequence: int, hosts: Collection[int], now: float) -> float:
        """The time at which a launch came to the head of the last device queue that it is in."""
        if any(sequence in self.queued.get(host, ()) for host in hosts):
            self.held[sequence] = now
        started = [at for host in hosts if (at := self.running.get(host, {}).get(sequence)) is not None]
        return max([*started, self.held.get(sequence, -math.inf)]) if started else now

    def _stranded(self, first: Mapping[int, Outstanding], hosts: frozenset[int]) -> RestartIsland | None:
        """Hosts wait in a launch that failed on others, and is the first in line."""
        self.first_since = {sequence: self.first_since.get(sequence) or dict(self.ran_s) for sequence in first}
        for sequence, record in first.items():
            failed, before = record.failed, self.first_since[sequence]
            if failed is None:
                continue
            waited_s = {host: self.ran_s.get(host, 0.0) - before.get(host, 0.0) for host in record.hosts}
            stranded = {host for host in failed.affected & record.hosts if waited_s[host] > MAX_STRANDED_S}
            if stranded:
                on, left = (", ".join(map(str, sorted(members))) for members in (failed.hosts, stranded))
                reason = f"{_named(record)} failed on host {on}, and host {left} waits in it: "
                return RestartIsland(min(hosts), reason + failed.report.failure.message, launch=sequence)
        return None

    def _stuck(
        self,
        outstanding: Mapping[int, Outstanding],
        waiting: frozenset[int] | None,
        hosts: frozenset[int],
        now: float,
        longest_s: float,
    ) -> RestartIsland | None:
        """The oldest launch waits for what never comes: no device of the island has run anything for twice the longest
        limit, but for the same launches, `waiting` for each other; None where another one runs. A host function has a
        limit of its own, and runs on none. What another island computes for it may be anybody's, and behind others."""
        oldest = next(iter(outstanding), 0)
        moves = waiting is None or any(record.program.calls for record in outstanding.values())
        if not oldest or moves or (oldest, waiting) != self.stuck_since[:2]:
            self.stuck_since = oldest, waiting or frozenset(), now
        waited = now - self.stuck_since[2]
        elsewhere = not waiting and bool(oldest) and outstanding[oldest].program.cross_island
        limits = STUCK_BEHIND_OTHERS_LIMITS if elsewhere else STUCK_LIMITS
        if waited <= limits * max(self.limit_s, longest_s):
            return None
        reason = f"{_named(outstanding[oldest])} has waited for {waited:.0f} s while nothing ran"
        return RestartIsland(min(hosts), reason, launch=oldest)


def first_in_line(outstanding: Mapping[int, Outstanding], host: int | None = None) -> tuple[int, ...]:
    """The launches that the hosts may be at, or one of them: the first on each device."""
    first: dict[tuple[int, bool], int] = {}
    for sequence, record in outstanding.items():
        if host is not None and host not in record.hosts:
            continue
        for group in record.program.devices.groups:
            if host is None or host in group.hosts:
                first.setdefault((id(group), record.program.counts), sequence)
    return tuple(dict.fromkeys(first.values()))


def _over(order: IslandOrder) -> Iterator[tuple[int, int, Failure | None]]:
    """The number, program and failure of launches that are over, the last one first."""
    return ((sequence, program, failure) for _, _, sequence, program, _, failure in reversed(order.ended))


def has_succeeded(sequence: int, order: IslandOrder) -> bool:
    """Whether a launch is over, and left nothing on a device."""
    return next((failure is None for number, _, failure in _over(order) if number == sequence), False)


def _named(record: Outstanding) -> str:
    return f"launch {record.launch.sequence} of program {record.program.name!r}"
