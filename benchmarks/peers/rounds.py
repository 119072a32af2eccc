"""Measures systems side by side: all alive at the same time, each case once per round, in turn.

A case that fails is dropped, and its error is kept. A system that ends, or does not answer in time, loses the case that
was under way and is restarted for its other cases, up to two times.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import measure
from benchmarks.peers.process import PeerEnded, PeerError
from benchmarks.peers.protocol import CHAIN
from benchmarks.peers.systems import SYSTEMS, Running, SystemInfo, start

RUN_LIMIT_S = 60.0  # a run is made to take about TARGET_S; the slowest peers take a second for the smallest count
TARGET_S = 0.5
COUNTS = (2 * CHAIN, 64 * CHAIN)  # at least two calls of a chain; more calls tell nothing new
CHANCES = 3
SETTLE_S = 0.5  # over which the load that is not ours is sampled, before each round


@dataclass(frozen=True)
class Case:
    system: str
    mode: str
    payload: str

    def __str__(self) -> str:
        return f"{self.system} {self.mode} ({self.payload})"

    @staticmethod
    def of(words: str, payload: str) -> Case:
        """The case of a system and a mode with a blank between."""
        system, mode = words.split()
        return Case(system, mode, payload)


@dataclass
class Session:
    """Systems on one topology. `samples` are microseconds per computation, one for each round."""

    hosts: int
    devices: int
    say: Callable[[str], None]
    systems: dict[str, Running] = field(default_factory=dict)
    samples: dict[Case, list[float]] = field(default_factory=dict)
    counts: dict[Case, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    busy: list[float] = field(default_factory=list)

    @property
    def where(self) -> dict[str, int]:
        return {"hosts": self.hosts, "devices_per_host": self.devices}

    def start(self, name: str, info: SystemInfo) -> None:
        if problem := info.problem():
            self.fail(name, problem)
            return
        self.say(f"starting {name}")
        try:
            self.systems[name] = start(info, self.hosts, self.devices)
        except PeerError as error:
            self.fail(name, f"did not start: {error}")

    def fail(self, what: Case | str, error: str) -> None:
        self.errors[str(what)] = error
        self.say(f"{what}: {error}")

    def cases(self, modes: Sequence[str], payloads: Sequence[str]) -> list[Case]:
        """The wanted cases of the running systems; empty means all."""
        return [
            Case(name, mode, payload)
            for name, running in self.systems.items()
            for payload, of_payload in running.described.get("modes", {}).items()
            for mode in of_payload
            if (not modes or mode in modes) and (not payloads or payload in payloads)
        ]

    def attempt(self, case: Case, count: int) -> float | None:
        """Seconds, or None if the case is dropped."""
        try:
            return self.systems[case.system].seconds(RUN_LIMIT_S, case.mode, case.payload, count)
        except PeerError as error:
            self.fail(case, str(error))
            self.samples.pop(case, None)
            self.counts.pop(case, None)
            if isinstance(error, PeerEnded):
                self.restart(case.system)
            return None

    def restart(self, name: str) -> None:
        if self.systems[name].process is not None:
            self.systems[name].close()
            self.ended[name] += 1
            if self.ended[name] < CHANCES:
                self.start(name, SYSTEMS[name].or_here(True))
                for case in [*self.counts]:  # or the next of its samples would have what it compiles
                    if case.system == name and case in self.counts:
                        self.attempt(case, self.counts[case])

    def warm_up(self, cases: Sequence[Case], target_s: float) -> None:
        """Compiles, and finds how many computations take about `target_s`; the first run of a case is ignored.

        Then every case runs twice as it will be measured: only there does a system find repeated launches that it
        compiles and then runs faster; the count follows.
        """
        for case in cases:
            self.say(f"warming up {case}")
            if self.attempt(case, COUNTS[0]) is None or (seconds := self.attempt(case, COUNTS[0])) is None:
                continue
            self.counts[case] = count_for(seconds / COUNTS[0], target_s)
            self.samples[case] = []
        for case in [*self.counts] * 2:
            if case in self.counts and (seconds := self.attempt(case, self.counts[case])) is not None:
                self.counts[case] = max(self.counts[case], count_for(seconds / self.counts[case], target_s))
        measure.settle()

    def round(self, number: int) -> None:
        """Every case once, beginning with another one each time."""
        self.busy.append(measure.busy_cores(SETTLE_S))
        for case in measure.in_turn(list(self.counts), number):
            if case in self.counts and (seconds := self.attempt(case, self.counts[case])) is not None:
                self.samples[case].append(1e6 * seconds / self.counts[case])

    def close(self) -> None:
        for running in self.systems.values():
            running.close()


def count_for(seconds_each: float, target_s: float) -> int:
    """Computations that take about `target_s`: a multiple of CHAIN, and within COUNTS."""
    wanted = round(target_s / max(seconds_each, 1e-9) / CHAIN) * CHAIN
    return min(max(wanted, COUNTS[0]), COUNTS[1])


@contextlib.contextmanager
def session(
    hosts: int, devices: int, systems: Mapping[str, SystemInfo], say: Callable[[str], None]
) -> Iterator[Session]:
    """Starts the systems one after the other; closes all of them, whatever happens."""
    with contextlib.closing(Session(hosts, devices, say)) as made:
        for name, info in systems.items():
            made.start(name, info)
        yield made


def rows(made: Session) -> list[dict[str, Any]]:
    """The JSON form of the samples."""
    return [
        {**vars(case), "payload_is": made.systems[case.system].described["payloads"][case.payload], **made.where}
        | {"count": made.counts[case], "us_per_computation": measure.spread(values)}
        for case, values in made.samples.items()
        if values
    ]
