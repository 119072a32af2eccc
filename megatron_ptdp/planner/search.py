"""Searches all legal plans for the fastest that fit.

Plans come in families that share what a microbatch costs: tensor and pipeline sizes, microbatch, recomputation,
sequence parallelism. Work over devices is a lower bound for every member of a family: no schedule is faster than no
bubble and no message. Families are taken in the order of their bounds, and the search ends when the next bound is above
the worst plan that would still be shown. So nothing is lost, and most families are never opened.

Times in the search are closed forms (`pipeline.bounded`); the plans that are shown are simulated (`simulated`).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappush, heapreplace
from typing import Any

from megatron_ptdp.errors import BadFigure, Illegal, NothingFits
from megatron_ptdp.planner.estimate import Estimate, Question, estimate, pipeline_work, time_split
from megatron_ptdp.planner.explain.infeasible import why_illegal, why_nothing_fits
from megatron_ptdp.planner.memory import stage_memory
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.settings import check, with_settings
from megatron_ptdp.planner.simulated import pipeline_seconds
from megatron_ptdp.planner.space import families, lower_bound, members
from megatron_ptdp.schedules import rules_of

MAX_COUNTS = {"devices": 10**7, "batch": 10**8, "tokens": 10**18}
"""Of a question: larger counts are typing errors, and would be searched for hours."""

SPARE_PLANS = 2
"""Plans simulated beyond those that are shown, as the closed form may have put them in the wrong order."""

SLACK = 0.1
"""Share by which the closed form of a schedule that splits the backward pass may be too slow with few microbatches."""

MAX_PLANS_AHEAD = 16
"""Further plans that are simulated at most, as long as one of them might be faster than one that would be shown."""


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        best: the fastest plans that fit, each another configuration, in order.
        families, opened: the number of families, and of those whose members were timed.
        evaluated: plans whose time was computed.
        legal: legal plans among the opened families.
    """

    best: list[Estimate]
    families: int
    opened: int
    legal: int
    evaluated: int


def check_question(question: Question) -> None:
    """Refuses counts that are out of range.

    Raises:
        BadFigure: devices, batch or tokens below 1 or above `MAX_COUNTS`, or more devices than the cluster has.
    """
    for name, most in MAX_COUNTS.items():
        value = getattr(question, name)
        if not 1 <= value <= most:
            raise BadFigure(f"{name} is {value}, must be 1 to {most:,}")
    limit = question.cluster.limit
    if limit and question.devices > limit:
        raise BadFigure(f"devices is {question.devices}, but the cluster {question.cluster.name!r} has {limit}")


def search(question: Question, fixed: dict[str, Any] | None = None, top: int = 5, simulate: bool = True) -> Found:
    """The fastest plans that fit.

    Args:
        fixed: settings that every plan must have.
        top: the most plans to return.
        simulate: run the event simulator for those that are returned.

    Raises:
        PlanningError: the question or a fixed setting is impossible, or no plan is legal.
        NothingFits: legal plans exist, but each needs more memory than there is.
    """
    check_question(question)
    fixed = dict(fixed or {})
    with_settings(Plan(), fixed)
    if fixed.get("batch", question.batch) != question.batch:
        raise BadFigure(f"batch is {question.batch} and fixed to {fixed['batch']}; ask for one of them")
    kept: list[tuple[float, int, Plan]] = []  # a heap: the slowest first, and of equals the last that was found
    wanted, legal, evaluated, opened, entered = top + SPARE_PLANS + MAX_PLANS_AHEAD * simulate, 0, 0, 0, 0
    ordered = sorted(
        (lower_bound(question, family), number, family) for number, family in enumerate(families(question, fixed))
    )
    limit = question.cluster.device.memory_bytes
    for bound, _, family in ordered:
        if len(kept) >= wanted and bound > -kept[0][0]:
            break
        opened += 1
        best: dict[tuple[str, int], tuple[float, Plan]] = {}  # of each schedule and number of chunks
        for plan in members(question, family, fixed):
            legal += 1
            if stage_memory(plan, question.model, question.cluster, question.software).most > limit:
                continue
            evaluated += 1
            seconds = time_split(question, plan).total
            shape = (plan.schedule, plan.chunks)
            if shape not in best or seconds < best[shape][0]:
                best[shape] = (seconds, plan)
        for seconds, plan in best.values():
            entered += 1
            if len(kept) < wanted:
                heappush(kept, (-seconds, -entered, plan))
            elif -seconds > kept[0][0]:
                heapreplace(kept, (-seconds, -entered, plan))
    if not legal:
        raise Illegal(why_illegal(question, fixed))
    if not kept:
        raise NothingFits(why_nothing_fits(question, fixed))
    ranked = [plan for _, _, plan in sorted(kept, reverse=True)]
    return Found(_shown(question, ranked, top, simulate), len(ordered), opened, legal, evaluated)


def _shown(question: Question, ranked: list[Plan], top: int, simulate: bool) -> list[Estimate]:
    """The fastest of plans in the order of their closed forms.

    So plans are simulated in their order, until `top` of them are as fast as any other one might be.
    """
    if not simulate:
        return [estimate(question, plan) for plan in ranked[:top]]
    found: list[Estimate] = []
    for number, plan in enumerate(ranked):
        if number >= top + SPARE_PLANS and found[top - 1].seconds <= at_best(question, plan):
            continue
        found.append(estimate_simulated(question, plan))
        found.sort(key=lambda one: one.seconds)
    return found[:top]


def at_best(question: Question, plan: Plan) -> float:
    """Seconds that a simulation hardly ever goes below: the closed form, or less where that may be too slow."""
    few = rules_of(plan.schedule).splits_backward and plan.microbatches < 4 * plan.pipeline
    return time_split(question, plan).total * (1 - SLACK * few)


def estimate_exactly(question: Question, plan: Plan) -> Estimate:
    """One plan, checked and simulated.

    Raises:
        Illegal: it cannot run this model, or is for another number of devices or another batch.
    """
    check_question(question)
    if plan.devices != question.devices or plan.batch != question.batch:
        raise Illegal(
            f"the plan is for {plan.devices} devices and a batch of {plan.batch}, "
            f"the question for {question.devices} and {question.batch}"
        )
    check(plan, question.model)
    return estimate_simulated(question, plan)


def estimate_simulated(question: Question, plan: Plan) -> Estimate:
    """A legal plan, its pipeline's time by the event simulator."""
    work, _ = pipeline_work(question, plan)
    return estimate(question, plan, pipeline_seconds(plan, work))
