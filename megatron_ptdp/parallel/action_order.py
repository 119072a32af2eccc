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


def fused_last_stage(schedule: Schedule, recomputed: bool = False) -> frozenset[int]:
    """The microbatches whose forward on the last stage is followed at once by their full backward. Fused into one
    computation, they need not write the logits out.

    Args:
        recomputed: layers are. Then those too whose backward comes later but in the order of the forwards: nothing
            waits for their forward, which between the two would keep the input of each layer. Where backwards run in
            another order, the last stage would stand still until the first of them.
    """
    last = schedule.stages - 1
    row = tuple(chain.from_iterable(entry.parts for entry in schedule.rows[schedule.placement[last]]))
    if recomputed:
        return _in_order([action for action in row if action.stage == last])
    return frozenset(
        here.microbatch
        for here, there in pairwise(row)
        if here == Action(last, "F", here.microbatch) and there == Action(last, "B", here.microbatch)
    )


def _in_order(row: Iterable[Action]) -> frozenset[int]:
    """The microbatches whose full backward on a stage comes before that of any whose forward came later."""
    forwards: list[int] = []
    found, latest = set(), -1
    for action in row:
        if action.kind == "F":
            forwards.append(action.microbatch)
        elif action.kind in "BI":
            place = forwards.index(action.microbatch)
            if action.kind == "B" and place > latest:
                found.add(action.microbatch)
            latest = max(latest, place)
    return frozenset(found)


def completing(actions: Iterable[Action]) -> frozenset[Action]:
    """The last B or W of each stage, after which the sums of its gradients are complete."""
    return frozenset({action.stage: action for action in actions if action.kind in "BW"}.values())
