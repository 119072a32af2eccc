"""Schedules over slices of a microbatch's tokens, as in TeraPipe (arXiv:2102.07988).

In a causal model a token looks at those before it. So a stage can begin with the first tokens of an example before the
stage in front has ended the last: a microbatch is cut along its tokens into *slices*, and the pipeline fills with
these, with a bubble of (p-1)/(m·n) for m microbatches of n slices. Forwards of a microbatch take its slices in order,
as each needs what the ones before left on its stage (keys and values); backwards take them in the opposite order, as
each needs the gradients of what the later ones took.

In such a schedule unit j·n + t is slice t of microbatch j: it has the form of any other, and `check`, `simulate` and
`draw` take it as it is. `check_slices` looks at the order of slices besides.
"""

from __future__ import annotations

from megatron_ptdp.schedules.actions import Action, Schedule, ScheduleError, loop
from megatron_ptdp.schedules.check import check
from megatron_ptdp.schedules.rules import Rules

TERAPIPE = Rules("terapipe", token_slices=True)


def terapipe(devices: int, microbatches: int, slices: int = 1) -> Schedule:
    """All forwards, slice by slice, then all backwards, each microbatch from its last slice to its first.

    Raises:
        ScheduleError: a size is below 1.
    """
    TERAPIPE.require(devices, microbatches, 1)
    if slices < 1:
        raise ScheduleError(f"terapipe needs at least 1 of its slices, but there are {slices}")
    units = range(microbatches * slices)
    backwards = [j * slices + t for j in range(microbatches) for t in reversed(range(slices))]
    rows = [
        [*(Action(stage, "F", k) for k in units), *(Action(stage, "B", k) for k in backwards)]
        for stage in range(devices)
    ]
    return Schedule.of("terapipe", len(units), loop(devices), rows)


def check_slices(schedule: Schedule, slices: int) -> None:
    """Makes sure that a schedule can run and keeps the order of slices on each stage.

    Raises:
        ScheduleError: with the action that is out of order; or as `check` does.
    """
    check(schedule)
    if slices < 1 or schedule.microbatches % slices:
        raise ScheduleError(f"{schedule.microbatches} units are no microbatches of {slices} slices")
    for row in schedule.rows:
        ended: set[Action] = set()
        for action in (part for entry in row for part in entry.parts):
            at = action.microbatch % slices
            step, limit = (-1, 0) if action.kind == "F" else (1, slices - 1)
            needed = action._replace(microbatch=action.microbatch + step)
            if action.kind != "W" and at != limit and needed not in ended:
                raise ScheduleError(f"{action} comes before {needed}, of the slice that it needs")
            ended.add(action)
