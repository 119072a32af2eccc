"""Bugs planted into what decides between the parts of a launch; they join the table of `planted`."""

from __future__ import annotations

from typing import Any

from pathways_ray.controller.backlog import Backlog
from pathways_ray.controller.decisions import Decisions
from pathways_ray.controller.lifecycle import LaunchEvent
from pathways_ray.controller.state import Whole
from pathways_ray.executor.run.prepared import PreparedProgram
from pathways_ray.ir.script import Course
from tests.simulation.planted import Original, Patch, bug, wrapped

DECIDING: dict[str, Any] = {
    "islands": {0: [0], 1: [1]},
    "clients": 2,
    "decisions": 1.0,
    "programs": 3,
    "poison": 0.0,
    "flaws": 0.0,
}
"""Programs that decide, on two islands of one host."""

DONATING: dict[str, Any] = DECIDING | {
    "islands": {0: [0]},
    "clients": 3,
    "decisions": 0.5,
    "programs": 4,
    "launches": (40, 40),
    "slices": 1,
}
"""The same beside programs that take the memory of their arguments."""


class Remembering(dict[int, int]):
    """Decisions that no new round forgets."""

    def pop(self, key: int, default: Any = None) -> Any:
        return self.get(key, default)


@bug(faults=0, **DECIDING)
def the_value_of_the_round_before_decides(patch: Patch) -> None:
    def init(original: Original, self: Course, *arguments: Any) -> None:
        original(self, *arguments)
        self.decided = Remembering()

    wrapped(patch, Course, "__init__", init)


@bug(faults=0, **DECIDING)
def branches_are_counted_from_one(patch: Patch) -> None:
    def decide(original: Original, self: Course, segment: int, values: Any) -> None:
        original(self, segment, [value - 1 for value in values])

    wrapped(patch, Course, "decide", decide)


@bug(faults=0, **DECIDING)
def what_lies_between_parts_is_freed_while_it_is_needed(patch: Patch) -> None:
    def launched(original: Original, self: Course, results: Any) -> None:
        original(self, results)
        self.freed += [buffer for buffer in dict.fromkeys(self.buffers.values()) if buffer < 0][:1]

    wrapped(patch, Course, "launched", launched)


@bug(faults=0, shown=5, **DECIDING)
def what_lies_between_parts_is_never_freed(patch: Patch) -> None:
    patch.setattr(Decisions, "_free", lambda self, session, whole: [])


@bug(faults=0, shown=14, **DONATING)
def results_that_are_handed_through_share_their_memory(patch: Patch) -> None:
    patch.setattr(PreparedProgram, "_hand_on", lambda self, slots: None)


@bug(faults=0, **DECIDING)
def a_launch_is_over_with_each_of_its_parts(patch: Patch) -> None:
    patch.setattr(Whole, "is_over", property(lambda self: True))


@bug(faults=0, **DECIDING)
def later_launches_pass_one_that_is_undecided(patch: Patch) -> None:
    def defer(original: Original, self: Backlog, launch: Any, program: Any, why: LaunchEvent) -> None:
        before = set(self.numbers)
        original(self, launch, program, why)
        if why is LaunchEvent.UNDECIDED:
            self.numbers = before

    def always(original: Original, self: Backlog, launch: Any, program: Any, why: Any = None) -> None:
        defer(original, self, launch, program, why or LaunchEvent.HOSTS_ABSENT)

    wrapped(patch, Backlog, "defer", always)
