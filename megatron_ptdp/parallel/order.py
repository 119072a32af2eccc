"""From the rows of a schedule to one list: the order in which the controller enqueues a step.

It is the order in which the actions start when the schedule is simulated. So each is enqueued after what it needs, each
device gets its own in the order of its row, and no device's list runs far ahead of the others'.
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


def joined(schedule: Schedule) -> frozenset[int]:
    """The microbatches whose forward on the last stage is followed at once by their full backward: run as one, the
    logits never leave the computation."""
    last = schedule.stages - 1
    row = tuple(chain.from_iterable(entry.parts for entry in schedule.rows[schedule.placement[last]]))
    return frozenset(
        here.microbatch
        for here, there in pairwise(row)
        if here == Action(last, "F", here.microbatch) and there == Action(last, "B", here.microbatch)
    )


def completing(actions: Iterable[Action]) -> dict[Action, int]:
    """The last B or W of each stage, after which the sums of its gradients are complete; and the stage."""
    found = {action.stage: action for action in actions if action.kind in "BW"}
    return {action: stage for stage, action in found.items()}
