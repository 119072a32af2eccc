"""Explains a search without a result: the setting in the way, the missing bytes, and a change that would do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from megatron_ptdp.errors import Illegal
from megatron_ptdp.planner.estimate import Question
from megatron_ptdp.planner.memory import stage_memory
from megatron_ptdp.planner.plan import Plan, illegal
from megatron_ptdp.planner.space import candidates, divisors, families, members


def why_illegal(question: Question, fixed: dict[str, Any]) -> str:
    """The reason why no plan is legal, with what to change."""
    model, n, batch = question.model, question.devices, question.batch
    settings = ", ".join(f"{name}={value}" for name, value in fixed.items())
    asked = f"{model.name} on {n} devices with batch {batch}" + (f" and {settings}" if settings else "")
    for name in ("tensor", "pipeline", "data"):
        if name in fixed and n % fixed[name]:
            return f"no plan for {asked}: {name} {fixed[name]} does not divide {n} devices"
    if "tensor" in fixed and model.heads % fixed["tensor"]:
        return f"no plan for {asked}: tensor {fixed['tensor']} does not divide {model.heads} heads"
    fault = _fault(question, fixed)
    for name in fixed:
        rest = {other: value for other, value in fixed.items() if other != name}
        if any(True for family in families(question, rest) for _ in members(question, family, rest)):
            return f"no plan for {asked} is legal{fault}; without {name}={fixed[name]} there are some"
    if fault:
        return f"no plan for {asked} is legal{fault}"
    replicas = [d for d in divisors(n) if batch % d == 0]
    return (
        f"no plan for {asked} is legal: a batch of {batch} divides over {replicas[-1]} replicas at most, which leaves "
        f"{n // replicas[-1]} devices each for {len(model.row)} layers and {model.heads} heads"
    )


def _fault(question: Question, fixed: dict[str, Any]) -> str:
    """The rule that most plans break, where none is legal; "" where there are not even plans that break one."""
    least = {"zero": 0, **fixed}
    plans = (plan for family in families(question, least) for plan in candidates(question, family, least))
    faults = Counter(filter(None, (illegal(plan, question.model) for plan in plans)))
    return f": {faults.most_common(1)[0][0]}" if faults else ""


def why_nothing_fits(question: Question, fixed: dict[str, Any]) -> str:
    """The bytes that the smallest plan lacks, and the smallest change that would fit."""
    needed = least_memory(question, fixed)
    limit = question.cluster.device.memory_bytes
    text = (
        f"nothing fits: {question.model.name} on {question.devices} × {question.cluster.device.name} needs at least "
        f"{needed[0] / 1e9:.1f} GB per device ({needed[1].label()}), {(needed[0] - limit) / 1e9:.2f} GB "
        f"({needed[0] - limit:,.0f} bytes) more than the {limit / 1e9:.1f} GB there are"
    )
    for name, value in fixed.items():
        rest = {other: kept for other, kept in fixed.items() if other != name}
        try:
            memory, plan = least_memory(question, rest)
        except Illegal:
            continue
        if memory <= limit:
            return f"{text}; without {name}={value} it fits, as {plan.label()}"
    for factor in (2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024):
        larger = replace(question, devices=question.devices * factor)
        most = question.cluster.limit
        if most and larger.devices > most:
            break
        try:
            memory, plan = least_memory(larger, fixed if "data" not in fixed else {})
        except Illegal:
            continue
        if memory <= limit:
            return f"{text}; it fits on {larger.devices} devices, as {plan.label()}"
    return f"{text}; no number of such devices helps: take a smaller model, or devices with that much more memory"


def least_memory(question: Question, fixed: dict[str, Any]) -> tuple[float, Plan]:
    """The legal plan that needs least memory, and its bytes on the fullest device.

    What is not fixed is what needs least: microbatches of 1, full recomputation, 1F1B without chunks.

    Raises:
        Illegal: no plan is legal.
    """
    least: dict[str, Any] = {"microbatch": 1, "recompute": "full", "scatter_gather": True}
    if "chunks" not in fixed:
        least["schedule"] = "1f1b"
    best: tuple[float, Plan] | None = None
    for settings in ({**least, **fixed}, fixed):
        for family in families(question, settings):
            for plan in members(question, family, settings):
                needed = stage_memory(plan, question.model, question.cluster, question.software).most
                if best is None or needed < best[0]:
                    best = (needed, plan)
        if best is not None:
            return best
    raise Illegal(why_illegal(question, fixed))
