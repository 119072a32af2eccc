"""Bugs planted into calls of host functions; they join the table of `planted`."""

from __future__ import annotations

from typing import Any

from pathways_ray.executor.run import barriers, host_plan
from pathways_ray.executor.run.barriers import InputBarrier
from pathways_ray.executor.run.call_steps import CallStep
from pathways_ray.executor.run.steps import Slots
from pathways_ray.ir.plan import Return
from tests.simulation.planted import Original, Patch, bug, wrapped

CALLING: dict[str, Any] = {
    "islands": {0: [0, 1], 1: [2]},
    "clients": 3,
    "calls": 0.4,
    "poison": 0.0,
    "flaws": 0.0,
    "launches": (40, 40),
}
"""Programs of which hosts run a part beside their devices."""


@bug(faults=0, **CALLING)
def what_a_call_gives_is_taken_before_it_is_over(patch: Patch) -> None:
    def elsewhere(original: Original, step: Any, plan: Any) -> bool:
        return not isinstance(step, Return) and original(step, plan)

    wrapped(patch, barriers, "_comes_from_elsewhere", elsewhere)


@bug(faults=0, **CALLING)
def a_gang_may_take_the_memory_that_a_call_reads(patch: Patch) -> None:
    def run(original: Original, self: CallStep, slots: Slots) -> None:
        original(self, slots)
        for slot in self.inputs:
            slots.values[slot] = None

    wrapped(patch, CallStep, "run", run)


@bug(faults=0, shown=23, **CALLING)
def hosts_of_a_slice_go_on_from_a_call_each_for_itself(patch: Patch) -> None:
    def with_barriers(original: Original, *arguments: Any) -> Any:
        return tuple(
            step._replace(rendezvous=False) if isinstance(step, InputBarrier) and step.calls else step
            for step in original(*arguments)
        )

    wrapped(patch, host_plan, "with_barriers", with_barriers)
