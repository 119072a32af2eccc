"""Bugs planted into what hosts tell each other to begin by a value; they join the table of `planted`."""

from __future__ import annotations

from typing import Any

from pathways_ray.controller.decisions import Decisions
from pathways_ray.executor.run.early import EarlyLaunches
from pathways_ray.transport.messages import Following
from tests.simulation.planted import Original, Patch, bug, wrapped
from tests.simulation.planted_early import ALONE

FOLLOWING: dict[str, Any] = ALONE | {
    "decisions": 1.0,
    "slices": 2,
    "programs": 2,
    "launches": (120, 120),
    "poison": 0.0,
}
"""One user whose programs decide, on two islands of one host, whose branches may begin early."""


@bug(faults=0, shown=12, **FOLLOWING)
def another_branch_begins_than_the_value_says(patch: Patch) -> None:
    def decided(original: Original, self: EarlyLaunches, sequence: int, value: int) -> Following | None:
        found: Following | None = original(self, sequence, 1 - value)
        return found

    wrapped(patch, EarlyLaunches, "decided", decided)


@bug(faults=0, seeds=160, shown=145, **FOLLOWING)
def a_branch_begins_that_was_launched_before(patch: Patch) -> None:
    """What told of it came late: it has run, and what it made may have been dropped."""

    def note(original: Original, self: EarlyLaunches, session: int, results: int) -> None:
        if results > 0:
            original(self, session, results)

    wrapped(patch, EarlyLaunches, "_note", note)


@bug(faults=0, seeds=400, shown=151, **FOLLOWING | {"cancels": 0.5})
def a_branch_that_is_never_launched_stays_on_its_host(patch: Patch) -> None:
    patch.setattr(Decisions, "_taken_back", lambda self, session, program, segment, told: [])
