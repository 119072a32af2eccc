"""Computations of a program, with what their compiler says of them: hosts tell it when somebody asks, clients read it.

All figures are XLA's, of one device: where a slice has several, each does as much.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

TOTALS = ("flops", "transcendentals", "bytes accessed", "optimal_seconds")
"""What can be added up over computations. Others are of one operand or result of one computation."""


class Computation(msgspec.Struct, frozen=True):
    """A computation of a program on an island.

    `number` is that of the executable in the island's plan, `runs` how often a launch has it run. `cost` and `memory`
    have XLA's names, and are empty where it does not say. `text` is the code that it made, where that was asked for.
    """

    number: int
    name: str
    runs: int
    cost: dict[str, float] = {}
    memory: dict[str, int] = {}
    text: str = ""


class Report(msgspec.Struct, frozen=True):
    """The computations of a program that one host of an island has a part in."""

    program: int
    island: int
    computations: tuple[Computation, ...]


REPORT = msgspec.json.Encoder()
REPORTS = msgspec.json.Decoder(tuple[Report, ...])


def each_once(reports: Iterable[Report]) -> list[Computation]:
    """The computations of some reports: hosts that share one say the same of it."""
    found = {(r.program, r.island, c.number): c for r in reports for c in r.computations}
    return [found[key] for key in sorted(found)]


def total_cost(computations: Iterable[Computation]) -> dict[str, float]:
    """The cost of a launch: of one computation all that XLA says, of several the sums of what can be added up."""
    all_of_them = list(computations)
    if len(all_of_them) == 1 and all_of_them[0].runs == 1:
        return dict(all_of_them[0].cost)
    return {
        name: sum(c.cost[name] * c.runs for c in all_of_them if c.cost.get(name, 0.0) > 0.0)
        for name in TOTALS
        if any(name in c.cost for c in all_of_them)
    }


def total_memory(computations: Iterable[Computation], name: str) -> int:
    """The bytes that all computations need of a kind, each on a device of its slice."""
    return sum(c.memory.get(name, 0) for c in computations)


def largest_memory(computations: Iterable[Computation], name: str) -> int:
    """The bytes that the computation needs of a kind that needs most of it."""
    return max((c.memory.get(name, 0) for c in computations), default=0)
