"""Memory of a plan on the first, the fullest middle and the last stage, in bytes per device.

Activations of one layer and microbatch, published by Korthikanti et al. 2022 (tables 2) for GPT, s b h units:

    nothing recomputed    10 + 24/t + 5 a s/(h t)       with sequence parallelism  34/t + 5 a s/(h t)
    selective             10 + 24/t                                                34/t
    full                  2 (only the input)                                       2/t

They are built up here from their parts, so that grouped keys, gated feed-forward parts and models without dropout
follow. A stage holds as many microbatches as its schedule has in flight. While a recomputed layer runs backward, one
layer's activations exist beside; the logits' in single precision exist beside on the last stage, and of each microbatch
in flight there their softmax, or its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_ptdp.config.cluster import Cluster, Software
from megatron_ptdp.config.model import Layer, Model
from megatron_ptdp.config.parallel import split_layers
from megatron_ptdp.planner import simulated
from megatron_ptdp.planner.layers import padded_vocabulary
from megatron_ptdp.planner.pipeline import has_closed_form, placement
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.schedules import rules_of

SOFTMAX_BYTES = 4
"""Bytes per logit that the backward pass takes from the forward pass."""

LOSS_BYTES = 4 + SOFTMAX_BYTES
"""Bytes per logit beside what half precision has: single precision, and the softmax (may be in place)."""


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
    """Memory of the devices of the first, the fullest middle and the last stage (the first's, where p < 3, for the
    middle's)."""

    first: Memory
    middle: Memory
    last: Memory

    @property
    def most(self) -> float:
        return max(self.first.total, self.middle.total, self.last.total)


@lru_cache(maxsize=16384)
def layer_activations(
    model: Model, layer: Layer, tensor: int, sequence_parallel: bool, recompute: str, flash: bool, element: int = 2
) -> float:
    """Bytes one layer keeps of one example for its backward pass."""
    tokens, t = layer.sequence, tensor
    rep = tensor if sequence_parallel else 1
    if recompute == "full":
        return element * tokens * layer.hidden / rep
    mask = 1 if model.dropout else 0
    whole = (
        tokens * layer.hidden * layer.blocks * (element + element + mask)
    )  # into and out of the norms, masks: 10 s h
    width, keys = layer.attention_width, layer.member_key_width(t) * t
    attention = element * tokens * (2 * width + 2 * keys)  # queries, keys, values, into the projection: 8 s h
    if layer.cross:
        attention += element * (2 * tokens * width + 2 * layer.cross * keys)
    ffn = element * tokens * layer.ffn * (3 if layer.gated else 2)  # into and out of the activation function: 16 s h
    scores = 0
    if recompute == "none" and not flash:  # softmax, mask, dropped: 5 a s²
        scores = layer.heads * tokens * (tokens + layer.cross) * ((2 * element + mask) if model.dropout else element)
    return whole / rep + (attention + ffn + scores) / t


def in_flight(plan: Plan, position: int) -> float:
    """Microbatches whose activations the device at `position` of the pipeline holds at most, each of all its layers.

    GPipe and looped m; 1F1B min(p - r, m) (PTD-P section 2.2); interleaved (2 (p - 1 - r) + (v - 1) p + 1)/v
    (Megatron-LM's warm-up); ZB-H1 min(p, m), ZB-V p, DualPipe-V p + 1/2, on every device, as those whose weights'
    gradients wait count too. Before ZB-V is full, which takes 2p - 1 microbatches, device r has (m + 1 + r)/2 of them.
    Tests hold these to the schedules' action lists. Other schedules: from these lists.
    """
    if not has_closed_form(plan):
        return simulated.in_flight(plan, position)
    p, v, m = plan.pipeline, plan.chunks, plan.microbatches
    if plan.schedule in ("gpipe", "looped-bfs"):
        return m
    if plan.schedule == "dualpipe-v":
        return min(p + 0.5, m)
    if plan.schedule == "zb-v":
        return min(p, (m + 1 + position) / 2)
    if rules_of(plan.schedule).splits_backward:
        return min(p, m)
    if v > 1:
        return min(2 * (p - 1 - position) + (v - 1) * p + 1, m * v) / v
    return min(p - position, m)


def waiting(plan: Plan, position: int) -> float:
    """Microbatches between their inputs' and their weights' gradients on a device, each of all its layers.

    With fewer than 2p - 1 microbatches those of ZB-V are a bound, which its last device reaches.
    """
    if not has_closed_form(plan):
        return simulated.waiting(plan, position)
    p, m = plan.pipeline, plan.microbatches
    at_most = {"zb-h1": position + 1.0, "zb-v": min(position, m - p) + 0.5, "dualpipe-v": (position + 1) / 2}
    return min(at_most.get(plan.schedule, 0.0), m)


def logits_held(plan: Plan, stash: float, kept: float) -> float:
    """Bytes that the last stage holds at most beside its layers: of each microbatch `stash` up to the gradients of its
    inputs, and `kept`, which is no more, from there to its weights'."""
    if not has_closed_form(plan):
        return simulated.logits(plan, stash, kept)
    if plan.schedule in ("gpipe", "looped-bfs"):
        return plan.microbatches * stash
    waits = min(plan.pipeline, plan.microbatches) - 1 if plan.schedule == "zb-h1" else 0
    return stash + waits * kept


def stage_memory(plan: Plan, model: Model, cluster: Cluster, software: Software) -> StageMemory:
    """Memory of a legal plan."""
    p = plan.pipeline
    first = _device_memory(plan, model, cluster, software, 0)
    if p == 1:
        return StageMemory(first, first, first)
    positions = _fullest_between(plan, model)
    between = [_device_memory(plan, model, cluster, software, position) for position in positions]
    middle = max(between, key=lambda memory: memory.total, default=first)
    return StageMemory(first, middle, _device_memory(plan, model, cluster, software, p - 1))


def _fullest_between(plan: Plan, model: Model) -> Sequence[int]:
    """Positions between the first and the last of which one is the fullest of all between.

    Of devices with the same layers, the first one has the most microbatches in flight; where a schedule splits the
    backward pass no device has fewer than the one before, in flight or waiting, so that the last one is the fullest.
    A schedule without a closed form may do as it likes.
    """
    if not has_closed_form(plan):
        return range(1, plan.pipeline - 1)
    spans = _spans(model, plan.pipeline, plan.chunks, rules_of(plan.schedule).v_placement)
    grows = rules_of(plan.schedule).splits_backward
    return [last if grows else first for first, last in spans]


def _recomputed_waits(plan: Plan, software: Software) -> bool:
    """Whether what is recomputed for the inputs' gradients stays until the weights' have been made. Of compiled stages
    both parts of a backward pass recompute it (`estimate.action_costs`)."""
    return plan.recompute == "full" and rules_of(plan.schedule).splits_backward and not software.compiled_stages


@lru_cache(maxsize=4096)
def _spans(model: Model, pipeline: int, chunks: int, v_placement: bool) -> tuple[tuple[int, int], ...]:
    """The first and the last position of each kind of device between the ends: those of a kind have the same layers."""
    spans: dict[tuple[tuple[Layer, int], ...], tuple[int, int]] = {}
    for position in range(1, pipeline - 1):
        layers = _share(model, pipeline, chunks, v_placement, position, 1).layers
        spans[layers] = spans.get(layers, (position, position))[0], position
    return tuple(spans.values())


def stages_of(plan: Plan, position: int) -> list[int]:
    """The stages on the device at `position`: every p-th, or there and back for a V placement."""
    return [stage for stage, device in enumerate(placement(plan)) if device == position]


def device_parameters(plan: Plan, model: Model, position: int) -> float:
    """Parameters on one device at `position` of the pipeline, before ZeRO."""
    return _share_of(plan, model, position).owned


def stage_layers(plan: Plan, model: Model, stage: int) -> tuple[Layer, ...]:
    """The layers of one stage."""
    split = split_layers(len(model.row), plan.stages)
    assert split is not None, "the plan is legal"
    start = sum(split[:stage])
    return model.row[start : start + split[stage]]


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of a model on one device of the pipeline: kinds of layers with their numbers, the ends, parameters."""

    layers: tuple[tuple[Layer, int], ...]
    has_first: bool
    has_last: bool
    owned: float


def _share_of(plan: Plan, model: Model, position: int) -> _Share:
    return _share(model, plan.pipeline, plan.chunks, rules_of(plan.schedule).v_placement, position, plan.tensor)


@lru_cache(maxsize=16384)
def _share(model: Model, pipeline: int, chunks: int, v_placement: bool, position: int, tensor: int) -> _Share:
    plan = Plan(pipeline=pipeline, chunks=chunks, schedule="zb-v" if v_placement else "interleaved")
    stages = stages_of(plan, position)
    counts: dict[Layer, int] = {}
    for stage in stages:
        for layer in stage_layers(plan, model, stage):
            counts[layer] = counts.get(layer, 0) + 1
    owned = sum(model.member_parameters(layer, tensor) * count for layer, count in counts.items())
    has_first, has_last = 0 in stages, plan.stages - 1 in stages
    embedding = padded_vocabulary(model, tensor) * model.hidden / tensor
    if has_first:
        owned += embedding + (model.sequence * model.hidden if model.positions else 0)
    if has_last and not (has_first and model.tied):
        owned += embedding
    return _Share(tuple(counts.items()), has_first, has_last, owned)


def _device_memory(plan: Plan, model: Model, cluster: Cluster, software: Software, position: int) -> Memory:
    device, t, d, b = cluster.device, plan.tensor, plan.data, plan.microbatch
    share = _share_of(plan, model, position)
    cut = [d if plan.zero >= stage else 1 for stage in (3, 2, 1)]
    weights = simulated.versions(plan, position) * share.owned * software.weight_bytes / cut[0]
    gradients = share.owned * software.gradient_bytes / cut[1]
    optimizer = share.owned * software.optimizer_bytes / cut[2]

    flash, sp, element = software.flash_attention, plan.sequence_parallel, software.element_bytes

    def kept(recompute: str) -> float:
        return sum(layer_activations(model, layer, t, sp, recompute, flash, element) * n for layer, n in share.layers)

    rep = t if sp else 1
    edge = element * model.sequence * model.hidden / rep
    dropped = edge / element if share.has_first and model.dropout else 0.0
    activations = (kept(plan.recompute) + dropped) * b * in_flight(plan, position)
    if _recomputed_waits(plan, software):
        activations += kept("selective") * b * waiting(plan, position)

    largest = max((layer for layer, _ in share.layers), key=model.layer_parameters, default=model.row[-1])
    working = 0.0
    if plan.recompute != "none":
        working = layer_activations(model, largest, t, sp, "none", flash, element) * b
    if share.has_last:
        loss_bytes = LOSS_BYTES + (element if element < 4 else 0)
        logits = b * model.sequence * (loss_bytes * padded_vocabulary(model, t) / t + 2 * edge / model.sequence)
        working = max(working, logits)
        if not (plan.recompute == "full" and software.compiled_stages):  # whose backward passes compute logits again
            stash, gradient = (  # one of which is in `working`
                b * (per_logit * model.sequence * padded_vocabulary(model, t) / t + 2 * edge)
                for per_logit in (SOFTMAX_BYTES, min(SOFTMAX_BYTES, element))
            )
            activations += logits_held(plan, stash, gradient) - stash
    if plan.pipeline > 1:
        working += 4 * b * element * model.tokens_per_example * model.hidden / rep
    if plan.zero == 3:  # the largest matrix gathered, the next one on its way, and one whole gradient
        attention = largest.attention_width / t + 2 * largest.member_key_width(t)
        matrix = model.hidden * max(largest.ffn / t, attention)
        working += matrix * (2 * software.weight_bytes + software.gradient_bytes)
    lost = device.reserved_bytes + device.fragmentation * (activations + working)
    return Memory(weights, gradients, optimizer, activations, working, lost)
