"""Estimates in words: what binds a plan, why another one is slower, and the paper's three heuristics for this case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_ptdp.config.parallel import RECOMPUTE
from megatron_ptdp.errors import NothingFits, PlanningError
from megatron_ptdp.planner.estimate import Estimate, Question, TimeSplit, estimate, pipeline_work
from megatron_ptdp.planner.plan import Plan, illegal
from megatron_ptdp.planner.search import at_best, estimate_simulated, search
from megatron_ptdp.planner.space import divisors

CLOSE = 0.01
"""Plans whose times differ by less are called equal: the model is not better than that."""

PARTS = {
    "compute": "computation",
    "tensor": "tensor-parallel communication",
    "pipeline": "messages between stages",
    "data": "communication over replicas",
    "bubble": "the pipeline's bubble",
    "optimizer": "the optimizer",
}


def shares(time: TimeSplit) -> dict[str, float]:
    """Each part's share of the iteration."""
    return {part.name: getattr(time, part.name) / time.total for part in fields(time)}


def what_binds(question: Question, one: Estimate) -> str:
    """The largest loss beside computation, and whether memory keeps a faster neighbour out."""
    parts = shares(one.time)
    compute = parts.pop("compute")
    most = max(parts, key=lambda name: parts[name])
    text = f"computation {compute:.0%} of the time; the largest loss is {PARTS[most]}, {parts[most]:.1%}"
    best = _kept_out(question, one)
    if best is None:
        return f"{text}; no single change that memory forbids would be faster"
    change, gain = difference(one.plan, best.plan), one.seconds / best.seconds - 1
    return f"{text}; memory binds: {change} would be {gain:.1%} faster but lacks {best.missing / 1e9:.1f} GB per device"


def _kept_out(question: Question, one: Estimate) -> Estimate | None:
    """The faster neighbour that lacks the least memory, its time found in the same way as that of `one`."""
    faster = one.seconds / (1 + CLOSE)
    for near in sorted(neighbours(question, one.plan), key=lambda near: near.missing):
        if near.fits or at_best(question, near.plan) >= faster:
            continue
        if one.simulated:  # the closed form may leave out a bubble that the other plan's time has
            near = estimate_simulated(question, near.plan)
        if near.seconds < faster:
            return near
    return None


def neighbours(question: Question, plan: Plan) -> Iterator[Estimate]:
    """The legal plans that differ in one setting, with the same devices and batch; closed forms."""
    near: list[Plan] = [replace(plan, recompute=kind) for kind in RECOMPUTE if kind != plan.recompute]
    near += [replace(plan, zero=zero) for zero in range(4) if zero != plan.zero]
    near.append(replace(plan, sequence_parallel=not plan.sequence_parallel))
    near += [replace(plan, microbatch=size) for size in (plan.microbatch * 2, plan.microbatch // 2) if size]
    near += [replace(plan, chunks=size) for size in (plan.chunks * 2, plan.chunks // 2) if size]
    for grow, shrink in (("tensor", "pipeline"), ("tensor", "data"), ("pipeline", "data")):
        for a, b in ((grow, shrink), (shrink, grow)):
            if getattr(plan, b) % 2 == 0:
                near.append(replace(plan, **{a: getattr(plan, a) * 2, b: getattr(plan, b) // 2}))
    for other in near:
        if not illegal(other, question.model):
            yield estimate(question, other)


def difference(plan: Plan, other: Plan) -> str:
    """The settings in which two plans differ, as `name old -> new`."""
    before, after = plan.as_dict(), other.as_dict()
    changed = [f"{name} {before[name]} → {after[name]}" for name in before if before[name] != after[name]]
    return ", ".join(changed) or "nothing"


def device_seconds(one: Estimate) -> float:
    """Seconds of a device for a token: plans with other batches and devices are compared by it."""
    return one.plan.devices / one.tokens_per_second


def measure(one: Estimate, other: Estimate) -> str:
    """The words for what two plans are compared by; "" where an iteration of both is the same work on as many
    devices."""
    if one.plan.devices != other.plan.devices:
        return " per token and device"
    same = round(one.tokens_per_second * one.seconds) == round(other.tokens_per_second * other.seconds)
    return "" if same else " per token"


def why_slower(winner: Estimate, other: Estimate) -> str:
    """The time that a slower plan spends and the winner does not, by part."""
    slower = device_seconds(other) / device_seconds(winner) - 1
    before, after = shares(winner.time), shares(other.time)
    deltas = {name: after[name] * (1 + slower) - before[name] for name in before}
    largest = sorted((name for name in deltas if abs(deltas[name]) >= 0.001), key=lambda name: -abs(deltas[name]))[:4]
    parts = ", ".join(f"{PARTS[name]} {deltas[name]:+.1%}" for name in largest) or "no part by more than 0.1%"
    verdict = f"{slower:+.1%} time{measure(winner, other)}" + (
        " (equal within the model)" if abs(slower) < CLOSE else ""
    )
    return f"{verdict}: {parts}; {difference(winner.plan, other.plan)}"


@dataclass(frozen=True, slots=True)
class Heuristic:
    """One of the paper's rules for this case.

    Attributes:
        rule: as the paper states it, in short.
        says: what it means here.
        found: what the search found.
        agrees: whether they are the same, or equal within the model.
    """

    rule: str
    says: str
    found: str
    agrees: bool


def heuristics(question: Question, best: Estimate, fixed: dict[str, Any] | None = None) -> list[Heuristic]:
    """PTD-P's takeaways 1, 2 and 3 beside what the search found under the same fixed settings."""
    fixed = fixed or {}
    return [
        _tensor_in_server(question, best, fixed),
        _smallest_model_parallel(question, best, fixed),
        _microbatch(question, best),
    ]


def _with(question: Question, best: Estimate, fixed: dict[str, Any], **more: Any) -> Estimate | None:
    """The best plan with some settings, timed in the way of `best`; None where no plan is legal and fits."""
    if any(fixed.get(name, value) != value for name, value in more.items()):
        return None
    try:
        return search(question, {**fixed, **more}, top=1, simulate=best.simulated).best[0]
    except (PlanningError, NothingFits):
        return None


def _tensor_in_server(question: Question, best: Estimate, fixed: dict[str, Any]) -> Heuristic:
    rule = "tensor parallelism up to the devices of a server, then pipeline parallelism across servers"
    server = question.cluster.levels[0].size if question.cluster.levels else 1
    server = server or question.devices
    plan = best.plan
    fitting = [t for t in divisors(question.devices) if t <= server and question.model.heads % t == 0]
    wanted = min(max(fitting), plan.tensor * plan.pipeline)  # a model that needs less is not cut further
    says = f"tensor = {wanted} (servers of {server}), no more"
    found = f"the best has tensor = {plan.tensor}, pipeline = {plan.pipeline}"
    if plan.tensor == wanted:
        return Heuristic(rule, says, found, True)
    other = _with(question, best, fixed, tensor=wanted)
    if other is None:
        return Heuristic(rule, says, f"{found}; with tensor = {wanted} nothing is legal and fits", False)
    slower = other.seconds / best.seconds - 1
    found += f"; the best with tensor = {wanted} ({other.plan.label()}) takes {slower:+.1%} time"
    return Heuristic(rule, says, found, slower < CLOSE)


def _smallest_model_parallel(question: Question, best: Estimate, fixed: dict[str, Any]) -> Heuristic:
    rule = "model-parallel size t·p just large enough that the model fits; all other devices are replicas"
    plan, smallest = best.plan, None
    for data in reversed(divisors(question.devices)):
        if question.batch % data == 0 and (smallest := _with(question, best, fixed, data=data, zero=plan.zero)):
            break
    if smallest is None:
        return Heuristic(rule, "nothing else fits", f"the best has t·p = {plan.tensor * plan.pipeline}", True)
    size = smallest.plan.tensor * smallest.plan.pipeline
    slower = smallest.seconds / best.seconds - 1
    says = f"t·p = {size} ({smallest.plan.label()}), with ZeRO {plan.zero} as the best has"
    found = f"the best has t·p = {plan.tensor * plan.pipeline}; the smallest takes {slower:+.1%} time"
    return Heuristic(rule, says, found, size == plan.tensor * plan.pipeline or slower < CLOSE)


def _microbatch(question: Question, best: Estimate) -> Heuristic:
    rule = "the best microbatch minimises (b'/b + p - 1)·(t_f(b) + t_b(b)), b' the batch per replica (eq. 1)"
    plan = best.plan
    per_replica = plan.batch // plan.data
    times: dict[int, float] = {}
    whole: dict[int, float] = {}
    for size in divisors(per_replica):
        one = replace(plan, microbatch=size)
        if illegal(one, question.model):
            continue
        near = estimate(question, one)
        if near.fits:
            work, _ = pipeline_work(question, one)
            busiest = max(device.total for device in work.per_device())
            whole[size] = near.seconds
            times[size] = (per_replica / size + (plan.pipeline - 1) / plan.chunks) * busiest
    if not times:
        return Heuristic(rule, "nothing fits", "nothing fits", True)
    wanted = min(times, key=lambda size: times[size])
    ruled, searched = _curve(times), _curve(whole)
    found = f"the best has microbatch = {plan.microbatch}; by eq. 1 {ruled}; by the whole estimate {searched}"
    close = plan.microbatch in times and times[plan.microbatch] / times[wanted] - 1 < CLOSE
    return Heuristic(rule, f"microbatch = {wanted}", found, close)


def _curve(times: dict[int, float]) -> str:
    """Each microbatch's time over the least, for the first few."""
    least = min(times.values())
    return ", ".join(f"{size}: {seconds / least - 1:+.1%}" for size, seconds in list(times.items())[:6])
