"""Time and memory of a plan from its schedule's real action lists, by the event simulator.

The lists are those that the training runtime executes (`megatron_ptdp.schedules`), so what is drawn here is what will
run. A long iteration repeats itself in the middle: beyond `_steady` microbatches only a part is simulated, twice, and
the rest follows from the difference. That is exact where the schedule has a steady state. Schedules that do not take
fewer microbatches are simulated to their end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from megatron_ptdp.planner.pipeline import Work, links_seconds
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.schedules import (
    Costs,
    Link,
    Schedule,
    ScheduleError,
    Timeline,
    build,
    kept_versions,
    peak_memory,
    rules_of,
    simulate,
)

MAX_ACTIONS = 12_000
"""Actions that are simulated; beyond, two shorter runs are continued in a straight line."""

EARLY_ROUNDS = 4
"""Rounds of as many microbatches as devices, after which no further versions of the weights are kept."""


@lru_cache(maxsize=64)
def _schedule(name: str, devices: int, microbatches: int, chunks: int, slices: int) -> Schedule:
    return build(name, devices, microbatches, chunks, slices=slices)


def schedule_of(plan: Plan, microbatches: int | None = None) -> Schedule:
    """The schedule of a plan; of its first microbatches only, where `microbatches` is given."""
    return _schedule(plan.schedule, plan.pipeline, microbatches or plan.microbatches, plan.chunks, plan.token_slices)


def costs(work: Work) -> Costs:
    """The simulator's costs: blocking messages are in the work, hidden ones take their time beside it."""
    stages = work.stages
    return Costs(
        forward=tuple(stage.forward for stage in stages),
        input_grad=tuple(stage.inputs for stage in stages),
        weight_grad=tuple(stage.weights for stage in stages),
        link=Link(latency_s=work.transfer),
    )


def timeline(plan: Plan, work: Work, microbatches: int | None = None) -> Timeline:
    """The run of each action of the plan; of its first microbatches only, where `microbatches` is given."""
    return simulate(schedule_of(plan, microbatches), costs(work))


def pipeline_seconds(plan: Plan, work: Work, limit: int = MAX_ACTIONS) -> float:
    """Seconds of all microbatches of a plan. `limit`: actions that are simulated at most."""
    seconds = _continued(plan, limit, lambda microbatches: timeline(plan, work, microbatches).makespan)
    return max(seconds, links_seconds(plan, work))


def in_flight(plan: Plan, position: int) -> float:
    """Microbatches whose activations the device at `position` of the pipeline holds at most, each of all its layers."""
    return _peak(plan, position, stash=1.0)


def waiting(plan: Plan, position: int) -> float:
    """Microbatches between their inputs' and their weights' gradients on a device, each of all its layers."""
    return _peak(plan, position, stash=0.0)


def logits(plan: Plan, stash: float, kept: float) -> float:
    """Bytes that the last stage holds at most: of each microbatch `stash` up to the gradients of its inputs, and `kept`
    from there to its weights'."""

    def held(microbatches: int) -> float:
        schedule = schedule_of(plan, microbatches)
        before = (0.0,) * (schedule.stages - 1)
        return max(peak_memory(schedule, (*before, stash), (*before, kept)))

    return _continued(plan, MAX_ACTIONS, held) / plan.token_slices


def updates(plan: Plan) -> int:
    """Updates of a stage in one iteration: one at its end, or several on the way."""
    on_the_way = _early(plan).updates if rules_of(plan.schedule).stale else None
    return plan.microbatches // on_the_way.every if on_the_way else 1


def versions(plan: Plan, position: int) -> float:
    """Copies of its weights that the device at `position` of the pipeline holds at most."""
    if not rules_of(plan.schedule).stale:
        return 1.0
    schedule = _early(plan)
    kept = [
        kept for kept, device in zip(kept_versions(schedule), schedule.placement, strict=True) if device == position
    ]
    return sum(kept) / len(kept)


def _early(plan: Plan) -> Schedule:
    """The schedule of a plan's first microbatches, which shows all versions of the weights that it ever keeps."""
    return schedule_of(plan, min(plan.microbatches, EARLY_ROUNDS * plan.pipeline))


def _peak(plan: Plan, position: int, stash: float) -> float:
    def held(microbatches: int) -> float:
        return _peaks(plan, microbatches, stash)[position]

    return _continued(plan, MAX_ACTIONS, held) / (plan.chunks * plan.token_slices)


@lru_cache(maxsize=1024)
def _peaks(plan: Plan, microbatches: int, stash: float) -> tuple[float, ...]:
    schedule = schedule_of(plan, microbatches)
    return peak_memory(schedule, (stash,) * schedule.stages, (1.0,) * schedule.stages)


def _continued(plan: Plan, limit: int, figure: Callable[[int], float]) -> float:
    """A figure of all microbatches, from those of fewer where they have more than `limit` actions."""
    m, per_microbatch = plan.microbatches, 2 * plan.stages * plan.token_slices
    short = _steady(plan, limit // per_microbatch)
    step = plan.pipeline
    rest = (m - short) % step
    # With a rest, groups that have to be equal are of other sizes where there are fewer, if there are any.
    if m * per_microbatch <= limit or m <= short or (rest and rules_of(plan.schedule).equal_groups):
        return figure(m)
    try:
        less, more = figure(short - step + rest), figure(short + rest)
    except ScheduleError:  # one of a user's own need not take these numbers
        return figure(m)
    return more + (more - less) * ((m - short - rest) // step)


def _steady(plan: Plan, affordable: int) -> int:
    """A number of microbatches, a multiple of the stages, that has a steady state and can be afforded."""
    groups = max(3, affordable // 2 // plan.pipeline)
    return groups * plan.pipeline
