"""Bugs planted into how sessions give way to each other; they join the table of `planted`."""

from __future__ import annotations

import math
from typing import Any

from pathways_ray.client import suspending
from pathways_ray.controller.memory import Memory
from pathways_ray.controller.preemption import Preemption
from pathways_ray.simulation.programs import ARRAY
from tests.simulation.planted import Original, Patch, bug, wrapped

GIVING_WAY: dict[str, Any] = {
    "islands": {0: [0], 1: [1]},
    "clients": 4,
    "preempts": 0.5,
    "moves": 0.0,
    "suspends": 0.0,
    "poison": 0.0,
    "flaws": 0.0,
}
"""The controller has sessions give way to others while they work."""


@bug(faults=0, shown=5, **GIVING_WAY)
def who_has_given_way_is_not_told_to_come_back(patch: Patch) -> None:
    def without(original: Original, self: Preemption) -> Any:
        return (one for one in original(self) if not one.is_away)

    wrapped(patch, Preemption, "_wanting", without)


SHRINKING: dict[str, Any] = GIVING_WAY | {
    "islands": {0: [0, 1], 1: [2]},
    "devices": 2,
    "changes": 8,
    "launches": (40, 80),
}
"""The operator removes the larger island for good, while who had it is away."""


@bug(faults=0, seeds=250, shown=242, **SHRINKING)
def who_has_given_way_waits_for_slices_that_no_island_can_hold(patch: Patch) -> None:
    def refused(original: Original, suspension: Any, reason: str, now: float, limit_s: float) -> Any:
        return original(suspension, reason, now, math.inf)

    wrapped(patch, suspending, "_refused", refused)


TIGHT: dict[str, Any] = GIVING_WAY | {
    "islands": {0: [0]},
    "devices": 1,
    "clients": 3,
    "preempts": 0.0,
    "memory": 24 * ARRAY.nbytes,
    "launches": (15, 30),
    "loops": 0.0,
    "hostile": 0,
}
"""What sessions hold does not fit beside each other: they take turns."""


@bug(faults=0, shown=1, **TIGHT)
def two_that_wait_for_each_other_both_stay(patch: Patch) -> None:
    patch.setattr(Preemption, "_may_displace", lambda self, *given: False)


@bug(faults=0, shown=1, **TIGHT)
def launches_of_who_gives_way_wait_for_memory(patch: Patch) -> None:
    def take(original: Original, self: Memory, *arguments: Any) -> Any:
        self.let_through.clear()
        return original(self, *arguments)

    wrapped(patch, Memory, "take", take)
