"""The pipeline's time by running the schedule's real action lists through the event simulator.

The lists are those that the training runtime executes (`megatron_ptdp.schedules`), so what is drawn here is what will
run. A long iteration repeats itself in the middle: beyond `_steady` microbatches only a part is simulated, twice, and
the rest follows from the difference. That is exact where the schedule has a steady state.
"""

from __future__ import annotations

from functools import lru_cache

from megatron_ptdp.planner.estimate import Question, pipeline_work
from megatron_ptdp.planner.pipeline import Work, links_seconds
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.schedules import Costs, Link, Schedule, Timeline, build, simulate


@lru_cache(maxsize=64)
def _schedule(name: str, devices: int, microbatches: int, chunks: int) -> Schedule:
    return build(name, devices, microbatches, chunks)


def costs(work: Work) -> Costs:
    """The simulator's costs: blocking messages are in the work, hidden ones take their time beside it."""
    stages = work.stages
    return Costs(
        forward=tuple(stage.forward for stage in stages),
        input_grad=tuple(stage.inputs for stage in stages),
        weight_grad=tuple(stage.weights for stage in stages),
        link=Link(latency_s=work.transfer),
    )


def timeline(question: Question, plan: Plan, microbatches: int | None = None) -> Timeline:
    """When each action of the plan runs; of its first microbatches only, where `microbatches` says so."""
    work, _ = pipeline_work(question, plan)
    return simulate(
        _schedule(plan.schedule, plan.pipeline, microbatches or plan.microbatches, plan.chunks), costs(work)
    )


def pipeline_seconds(question: Question, plan: Plan, limit: int = 12_000) -> float:
    """Seconds of all microbatches of a plan, by simulation.

    Args:
        limit: actions that are simulated at most; beyond, two shorter runs are continued in a straight line.
    """
    work, _ = pipeline_work(question, plan)
    return max(_simulated(question, plan, limit), links_seconds(plan, work))


def _simulated(question: Question, plan: Plan, limit: int) -> float:
    m, per_microbatch = plan.microbatches, 2 * plan.stages
    short = _steady(plan, limit // per_microbatch)
    if m * per_microbatch <= limit or m <= short:
        return timeline(question, plan).makespan
    step = plan.pipeline
    rest = (m - short) % step
    less = timeline(question, plan, short - step + rest).makespan
    more = timeline(question, plan, short + rest).makespan
    return more + (more - less) * ((m - short - rest) // step)


def _steady(plan: Plan, affordable: int) -> int:
    """A number of microbatches, a multiple of the stages, that has a steady state and can be afforded."""
    groups = max(3, affordable // 2 // plan.pipeline)
    return groups * plan.pipeline
