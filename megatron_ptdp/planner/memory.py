"""How much memory a plan needs on the first, a middle and the last stage, in bytes per device.

Activations of one layer and microbatch, published by Korthikanti et al. 2022 (tables 2) for GPT, s b h units:

    nothing recomputed    10 + 24/t + 5 a s/(h t)       with sequence parallelism  34/t + 5 a s/(h t)
    selective             10 + 24/t                                                34/t
    full                  2 (the input alone)                                      2/t

They are built up here from their parts, so that grouped keys, gated feed-forward parts and models without dropout
follow. A stage holds as many microbatches as its schedule has in flight. While a recomputed layer runs backward, one
layer's activations exist beside; the logits' in single precision exist beside on the last stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_ptdp.planner.cluster import Cluster, Software
from megatron_ptdp.planner.layers import padded_vocabulary
from megatron_ptdp.planner.model import Layer, Model
from megatron_ptdp.planner.operations import ELEMENT
from megatron_ptdp.planner.plan import SCHEDULES, Plan, split_layers

LOSS_BYTES = 2 + 4 + 4
"""Bytes per logit: half precision, single precision, the softmax kept for the backward pass (may be in place)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device, by class.

    Attributes:
        working: the layer that is run again, gathered weights of ZeRO-3, the logits, messages between stages.
        lost: fragmentation, and what the runtime holds.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    lost: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working + self.lost


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of the devices of the first, a middle and the last stage (the middle one is the first where p < 3)."""

    first: Memory
    middle: Memory
    last: Memory

    @property
    def most(self) -> float:
        return max(self.first.total, self.middle.total, self.last.total)


@lru_cache(maxsize=16384)
def layer_activations(
    model: Model, layer: Layer, tensor: int, sequence_parallel: bool, recompute: str, flash: bool
) -> float:
    """Bytes one layer keeps of one example for its backward pass."""
    tokens, t = layer.sequence, tensor
    rep = tensor if sequence_parallel else 1
    if recompute == "full":
        return ELEMENT * tokens * layer.hidden / rep
    blocks = 3 if layer.cross else 2
    mask = 1 if model.dropout else 0
    whole = tokens * layer.hidden * blocks * (ELEMENT + ELEMENT + mask)  # into and out of the norms, masks: 10 s h
    width, keys = layer.attention_width, layer.key_width
    attention = ELEMENT * tokens * (2 * width + 2 * keys)  # queries, keys, values, into the projection: 8 s h
    if layer.cross:
        attention += ELEMENT * (2 * tokens * width + 2 * layer.cross * keys)
    ffn = ELEMENT * tokens * layer.ffn * (3 if layer.gated else 2)  # into and out of the activation function: 16 s h
    scores = 0
    if recompute == "none" and not flash:  # softmax, mask, dropped: 5 a s²
        scores = layer.heads * tokens * (tokens + layer.cross) * ((2 * ELEMENT + mask) if model.dropout else ELEMENT)
    return whole / rep + (attention + ffn + scores) / t


def in_flight(plan: Plan, position: int) -> float:
    """Microbatches whose activations the device at `position` of the pipeline holds at most, each of all its layers.

    GPipe m; 1F1B and ZB-H1 min(p - r, m); interleaved (2 (p - 1 - r) + (v - 1) p + 1)/v chunks (PTD-P section 2.2,
    Megatron-LM's warm-up); looped m; the V schedules p on every device (Qi et al. 2024, DualPipe: p + 1).
    """
    p, v, m = plan.pipeline, plan.chunks, plan.microbatches
    if plan.schedule in ("gpipe", "looped-bfs"):
        return m
    if SCHEDULES[plan.schedule].v_placement:
        return min(p + (1 if plan.schedule == "dualpipe-v" else 0), m)
    if v > 1:
        return min(2 * (p - 1 - position) + (v - 1) * p + 1, m * v) / v
    return min(p - position, m)


def stage_memory(plan: Plan, model: Model, cluster: Cluster, software: Software) -> StageMemory:
    """Memory of a legal plan."""
    p = plan.pipeline
    first = _device_memory(plan, model, cluster, software, 0)
    if p == 1:
        return StageMemory(first, first, first)
    middle = _device_memory(plan, model, cluster, software, 1) if p > 2 else first
    return StageMemory(first, middle, _device_memory(plan, model, cluster, software, p - 1))


def stages_of(plan: Plan, position: int) -> list[int]:
    """The stages on the device at `position`: every p-th, or there and back for a V placement."""
    if SCHEDULES[plan.schedule].v_placement:
        return [position, 2 * plan.pipeline - 1 - position]
    return [position + plan.pipeline * chunk for chunk in range(plan.chunks)]


def device_parameters(plan: Plan, model: Model, position: int) -> float:
    """Parameters on one device at `position` of the pipeline, before ZeRO."""
    t, owned = plan.tensor, 0.0
    for stage in stages_of(plan, position):
        owned += sum(model.layer_parameters(layer) for layer in stage_layers(plan, model, stage)) / t
        embedding = padded_vocabulary(model, t) * model.hidden / t
        if stage == 0:
            owned += embedding + (model.sequence * model.hidden if model.positions else 0)
        if stage == plan.stages - 1 and (plan.stages > 1 or not model.tied):
            owned += embedding
    return owned


def stage_layers(plan: Plan, model: Model, stage: int) -> tuple[Layer, ...]:
    """The layers of one stage."""
    split = split_layers(len(model.row), plan.stages)
    assert split is not None, "the plan is legal"
    start = sum(split[:stage])
    return model.row[start : start + split[stage]]


def _device_memory(plan: Plan, model: Model, cluster: Cluster, software: Software, position: int) -> Memory:
    device, t, d, b = cluster.device, plan.tensor, plan.data, plan.microbatch
    owned = device_parameters(plan, model, position)
    cut = [d if plan.zero >= stage else 1 for stage in (3, 2, 1)]
    weights = owned * software.weight_bytes / cut[0]
    gradients = owned * software.gradient_bytes / cut[1]
    optimizer = owned * software.optimizer_bytes / cut[2]

    stages = stages_of(plan, position)
    layers = [layer for stage in stages for layer in stage_layers(plan, model, stage)]
    flash, sp = software.flash_attention, plan.sequence_parallel
    kept = sum(_kept(model, layer, t, sp, plan.recompute, flash) for layer in layers)
    rep = t if sp else 1
    edge = ELEMENT * model.sequence * model.hidden / rep
    if 0 in stages and model.dropout:
        kept += edge / ELEMENT
    activations = kept * b * in_flight(plan, position)

    largest = max(layers or model.row, key=model.layer_parameters)
    working = 0.0
    if plan.recompute != "none":
        working = _kept(model, largest, t, sp, "none", flash) * b
    if plan.stages - 1 in stages:
        logits = b * model.sequence * (LOSS_BYTES * padded_vocabulary(model, t) / t + 2 * edge / model.sequence)
        working = max(working, logits)
    if plan.pipeline > 1:
        working += 4 * b * ELEMENT * model.sequence * model.hidden / rep
    if plan.zero == 3:  # the largest matrix gathered, the next one on its way, and one whole gradient
        matrix = model.hidden * max(largest.ffn, largest.attention_width + 2 * largest.key_width) / t
        working += matrix * (2 * software.weight_bytes + software.gradient_bytes)
    lost = device.reserved_bytes + device.fragmentation * (activations + working)
    return Memory(weights, gradients, optimizer, activations, working, lost)


_kept = layer_activations
