"""The space of plans: families that share what a microbatch costs, and their legal members."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megatron_ptdp.config.parallel import RECOMPUTE, ZERO, split_layers
from megatron_ptdp.planner.estimate import Question, split_of, stage_costs
from megatron_ptdp.planner.pipeline import CLOSED_FORMS
from megatron_ptdp.planner.plan import Plan, illegal, tensor_fault
from megatron_ptdp.schedules import rules_of, schedule_names


def divisors(number: int) -> list[int]:
    """All divisors, in order."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return small + [number // k for k in reversed(small) if k * k != number]


def families(question: Question, fixed: dict[str, Any]) -> Iterator[Plan]:
    """One plan for each family: its schedule and the rest are still open."""
    model, n, batch = question.model, question.devices, question.batch

    def allowed(name: str, values: list[Any]) -> list[Any]:
        return [value for value in values if name not in fixed or fixed[name] == value]

    # Flash attention keeps no scores: `selective` is then `none`, and only what is asked for by name.
    kinds = [kind for kind in RECOMPUTE if kind != "selective" or not question.software.flash_attention]
    kinds = [fixed["recompute"]] if "recompute" in fixed else kinds
    for t in allowed("tensor", [t for t in divisors(n) if not tensor_fault(model, t)]):
        for p in allowed("pipeline", [p for p in divisors(n // t) if p <= len(model.row) + 2]):
            d = n // (t * p)
            if batch % d or ("data" in fixed and fixed["data"] != d):
                continue
            for b in allowed("microbatch", divisors(batch // d)):
                for recompute in kinds:
                    for sp in allowed("sequence_parallel", [False, True] if t > 1 else [False]):
                        cut = fixed.get("token_slices", 1)
                        yield Plan(p, t, d, 1, b, batch, recompute=recompute, sequence_parallel=sp, token_slices=cut)


def members(question: Question, family: Plan, fixed: dict[str, Any]) -> Iterator[Plan]:
    """The legal plans of a family."""
    sgs = [True, False] if family.pipeline > 1 and family.tensor > 1 else [True]
    for plan in candidates(question, family, fixed):
        if illegal(plan, question.model):
            continue
        for sg in sgs:
            if fixed.get("scatter_gather", sg) == sg:
                yield plan if sg else replace(plan, scatter_gather=False)


def candidates(question: Question, family: Plan, fixed: dict[str, Any]) -> Iterator[Plan]:
    """The plans of a family, legal or not: those whose layers divide."""
    for schedule, chunks in _schedules(len(question.model.row), family.pipeline, fixed.get("schedule")):
        if fixed.get("schedule", schedule) != schedule or fixed.get("chunks", chunks) != chunks:
            continue
        for zero in ZERO:
            if fixed.get("zero", zero) == zero:
                yield replace(family, schedule=schedule, chunks=chunks, zero=zero)


@lru_cache(maxsize=4096)
def _schedules(layers: int, pipeline: int, named: str | None) -> tuple[tuple[str, int], ...]:
    """Schedules and chunks that divide the layers: of those with closed forms, and of the one that is asked for by
    name."""
    if pipeline == 1:
        return (("1f1b", 1),)
    pairs = []
    for name in schedule_names():
        if name not in CLOSED_FORMS and name != named:
            continue
        rules = rules_of(name)
        most = rules.chunks or (layers + 2) // pipeline
        for chunks in range(max(rules.full_chunks, rules.chunks), most + 1):
            if split_layers(layers, pipeline * chunks):
                pairs.append((name, chunks))
    return tuple(pairs)


def lower_bound(question: Question, family: Plan) -> float:
    """Seconds below which no plan of the family can be: all work, spread evenly, without bubble or messages."""
    costs = stage_costs(question.model, question.cluster, question.software, split_of(family), 1, 1)
    return family.microbatches * sum(cost.compute + cost.tensor for cost in costs) / family.pipeline
