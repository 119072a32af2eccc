"""The order in which the controller enqueues the actions of a step, from the rows of a schedule.

It is the order in which the actions start when the schedule is simulated. So each action follows those that it needs,
each device gets its actions in the order of its row, and no device's queue runs far ahead of the others'.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise

from megatron_ptdp.schedules import Action, Schedule, simulate


def enqueued(schedule: Schedule) -> tuple[Action, ...]:
    """All actions of a step; the two of an overlapped pair one after the other.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    return tuple(chain.from_iterable(span.entry.parts for span in simulate(schedule).started))


def fused_last_stage(schedule: Schedule) -> frozenset[int]:
    """The microbatches whose forward on the last stage is followed at once by their full backward. Fused into one
    computation, they need not write the logits out."""
    last = schedule.stages - 1
    row = tuple(chain.from_iterable(entry.parts for entry in schedule.rows[schedule.placement[last]]))
    return frozenset(
        here.microbatch
        for here, there in pairwise(row)
        if here == Action(last, "F", here.microbatch) and there == Action(last, "B", here.microbatch)
    )


def completing(actions: Iterable[Action]) -> frozenset[Action]:
    """The last B or W of each stage, after which the sums of its gradients are complete."""
    return frozenset({action.stage: action for action in actions if action.kind in "BW"}.values())
