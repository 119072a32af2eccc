"""Bytes on each level of the network, per device and iteration.

A level's share is the average over the iteration. What crosses an island or a data centre is the total of a level times
the devices behind the link.
"""

from __future__ import annotations

from megatron_ptdp.planner import simulated
from megatron_ptdp.planner.estimate import Estimate, Question, boundary_seconds, message_bytes, shared_embedding
from megatron_ptdp.planner.memory import device_parameters, stage_layers, stages_of
from megatron_ptdp.planner.network import Group, Traffic, crossed, spread
from megatron_ptdp.planner.plan import Plan


def traffic(question: Question, estimate: Estimate) -> list[Traffic]:
    """Bytes that each level carries, innermost first."""
    plan = estimate.plan
    parts = {"tensor": _tensor(question, plan), "pipeline": _pipeline(question, plan), "data": _data(question, plan)}
    rows = []
    for level in question.cluster.levels:
        tensor, pipeline, data = (parts[axis].get(level.name, 0.0) for axis in ("tensor", "pipeline", "data"))
        seconds = (tensor + pipeline + data) * level.oversubscription / level.bandwidth
        if level.message_bandwidth:
            seconds += pipeline / level.message_bandwidth - pipeline * level.oversubscription / level.bandwidth
        busy = seconds / estimate.seconds
        rows.append(Traffic(level.name, tensor, pipeline, data, busy))
    return rows


def _tensor(question: Question, plan: Plan) -> dict[str, float]:
    """An all-reduce is two passes: 4 of b s h per layer forward and as many backward, 4 more recomputed (facts 1.1).

    The first device has the embedding's, forward, beside; and those of the logits, backward, and of their losses, where
    it has the last stage as well.
    """
    model, stages = question.model, stages_of(plan, 0)
    layers = [layer for stage in stages for layer in stage_layers(plan, model, stage)]
    ends = float(question.software.element_bytes * plan.microbatch * model.tokens_per_example * model.hidden)
    if plan.stages - 1 in stages:
        element = question.software.element_bytes
        ends += plan.microbatch * model.sequence * (element * model.hidden + 3 * 4.0)
    total = spread(question.cluster, Group(plan.tensor), ends, 2 * plan.microbatches)
    for layer in layers:
        passes = layer.blocks * (6 if plan.recompute == "full" else 4) + (layer.blocks if plan.sequence_parallel else 0)
        size = float(question.software.element_bytes * plan.microbatch * layer.sequence * layer.hidden)
        for name, carried in spread(question.cluster, Group(plan.tensor), size, passes * plan.microbatches).items():
            total[name] = total.get(name, 0.0) + carried
    return total


def _pipeline(question: Question, plan: Plan) -> dict[str, float]:
    """One activation forward and one gradient backward per chunk and microbatch, as an average over the boundaries."""
    if plan.pipeline == 1:
        return {}
    size = message_bytes(question, plan)
    cut = plan.tensor if plan.sequence_parallel or plan.scatter_gather else 1
    levels = crossed(question.cluster, plan.tensor * plan.data, plan.pipeline)
    assert len(levels) == len(boundary_seconds(question, plan))
    total: dict[str, float] = {}
    for level in levels:
        carried = 2 * plan.chunks * plan.microbatches * size / cut / len(levels)
        total[level.name] = total.get(level.name, 0.0) + carried
    if cut > 1 and not plan.sequence_parallel:
        gathers = 2 * plan.chunks * plan.microbatches
        for name, carried in spread(question.cluster, Group(plan.tensor), size, gathers).items():
            total[name] = total.get(name, 0.0) + carried
    return total


def _data(question: Question, plan: Plan) -> dict[str, float]:
    """Gradients summed once an update, or scattered and weights gathered; for each microbatch with ZeRO 2 and 3.
    Beside them the gradients of the embedding that the first and the last stage share."""
    owned = device_parameters(plan, question.model, 0)
    software, m = question.software, plan.microbatches
    gradients, weights = owned * software.gradient_bytes, owned * software.weight_bytes
    if plan.zero == 0:
        size, passes = gradients, 2.0
    elif plan.zero < 3:
        size, passes = gradients * (m if plan.zero == 2 else 1) + weights, 1.0
    else:
        size, passes = m * (gradients + weights * (3 if plan.recompute == "full" else 2)), 1.0
    total = spread(question.cluster, Group(plan.data, plan.tensor), size, passes * simulated.updates(plan))
    for name, carried in spread(question.cluster, *shared_embedding(question, plan), 2.0).items():
        total[name] = total.get(name, 0.0) + carried
    return total
