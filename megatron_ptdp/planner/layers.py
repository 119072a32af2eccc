"""Seconds of one layer, the embedding and the logits on one device of a tensor-parallel group, for one microbatch.

Operations are those of Megatron-LM (PTD-P section 4.2): biases, activation functions, dropouts and residual additions
fused, scale, mask and softmax fused. `rep` bytes are of an activation that every device of the group holds whole,
unless sequence parallelism shards it; `cut` bytes are of one that is sharded over the tensor axis. Numbers beside them
count reads and writes; a dropout mask is half an element.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_ptdp.config.cluster import Cluster, Software
from megatron_ptdp.config.model import Layer, Model
from megatron_ptdp.planner.network import Group, all_reduce, gather
from megatron_ptdp.planner.operations import Product, kernels_seconds, product_seconds

LOSS_FORWARD, LOSS_BACKWARD = 32, 16
"""Bytes per logit of a cross entropy in single precision: cast 6, maximum 4, subtract 8, exponential 8, sum 4, take 2
forward; scale 8, cast and subtract 8 backward (Megatron-LM, vocab_parallel_cross_entropy)."""


@dataclass(frozen=True, slots=True)
class Split:
    """The part of a plan that the cost of a layer depends on.

    `splits_backward`: the backward pass to the weights is an action of its own and comes later, so that no
    communication hides behind it.
    """

    tensor: int
    microbatch: int
    sequence_parallel: bool
    recompute: str
    splits_backward: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one microbatch. Of each pass: computation, then tensor-parallel communication that is exposed.

    `inputs` is the backward pass to the inputs, with what is recomputed; `weights` the backward pass to the weights.
    `hidden` is the communication that computation hides, which can hide nothing else then.
    """

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    forward_tensor: float = 0.0
    inputs_tensor: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.forward + other.forward,
            self.inputs + other.inputs,
            self.weights + other.weights,
            self.forward_tensor + other.forward_tensor,
            self.inputs_tensor + other.inputs_tensor,
            self.hidden + other.hidden,
        )

    def times(self, count: float) -> Cost:
        return Cost(
            self.forward * count,
            self.inputs * count,
            self.weights * count,
            self.forward_tensor * count,
            self.inputs_tensor * count,
            self.hidden * count,
        )

    @property
    def compute(self) -> float:
        return self.forward + self.inputs + self.weights

    @property
    def tensor(self) -> float:
        return self.forward_tensor + self.inputs_tensor


def score_products(layer: Layer, split: Split, software: Software) -> list[Product]:
    """The products with the scores, forward. Flash attention leaves out what a causal mask hides."""
    flash, element = software.flash_attention, software.element_bytes
    heads = split.microbatch * layer.heads // split.tensor
    products = []
    for keys, causal in ((layer.sequence, True), (layer.cross, False)):
        if keys:
            inner = keys // 2 if flash and causal else keys
            resident = float(element * heads * layer.sequence * inner) if flash else 0.0
            products.append(Product(layer.sequence, inner, layer.head_size, heads, resident, element))
            products.append(Product(layer.sequence, layer.head_size, inner, heads, resident, element))
    return products


def weight_products(layer: Layer, split: Split, element: int = 2) -> list[Product]:
    """The products with weights, forward."""
    t, tokens, h = split.tensor, split.microbatch * layer.sequence, layer.hidden
    width, keys = layer.attention_width // t, round(layer.member_key_width(t))
    sizes = [(tokens, width + 2 * keys, h), (tokens, h, width)]
    if layer.cross:
        sizes += [(tokens, width, h), (split.microbatch * layer.cross, 2 * keys, h), (tokens, h, width)]
    ffn = layer.ffn // t
    sizes += [(tokens, ffn * (2 if layer.gated else 1), h), (tokens, h, ffn)]
    return [Product(*size, element=element) for size in sizes]


def backward(product: Product) -> tuple[Product, Product]:
    """The products that give the gradients of both factors."""
    m, n, k = product.m, product.n, product.k
    return replace(product, m=m, n=k, k=n), replace(product, m=k, n=n, k=m)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of the kernels of a layer that are no products, one number per kernel."""

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    scores: tuple[float, ...]  # those of `forward` that selective recompute runs again


def kernel_bytes(model: Model, layer: Layer, split: Split, software: Software) -> Bytes:
    """Bytes that the other operations of a layer read and write."""
    t, tokens, element = split.tensor, split.microbatch * layer.sequence, software.element_bytes
    mask = 1 / element if model.dropout else 0.0
    rep = float(element * tokens * layer.hidden) / (t if split.sequence_parallel else 1)
    cut = float(element * tokens) / t
    width, keys = layer.attention_width * cut, layer.member_key_width(t) * element * tokens
    ffn, up = layer.ffn * cut, layer.ffn * cut * (2 if layer.gated else 1)
    norms, residuals = [2 * rep] * layer.blocks, [(3 + mask) * rep] * layer.blocks
    scores: list[float] = []
    scores_back: list[float] = []
    if not software.flash_attention:
        size = float(element * split.microbatch * layer.heads * layer.sequence) / t * (layer.sequence + layer.cross)
        scores = [2 * size] + ([(2 + mask) * size] if model.dropout else [])
        scores_back = [3 * size] + ([(2 + mask) * size] if model.dropout else [])
    forward = [*norms, *residuals, 2 * width, up + ffn, *scores]
    inputs = [3 * rep] * layer.blocks + [(5 + mask) * rep] * layer.blocks
    inputs += [2 * width, 2 * (width + 2 * keys), ffn + 2 * up, *scores_back]
    own = model.member_parameters(layer, t)
    if software.fused_accumulation:
        weights = [(2 * software.gradient_bytes - element) * own]
    else:
        weights = [(element + 2 * software.gradient_bytes) * own]
    if model.bias:
        weights += [rep] * layer.blocks + [width + 2 * keys, up]
    return Bytes(tuple(forward), tuple(inputs), tuple(weights), tuple(scores))


def exposed(communication: float, compute: float, overlap: float) -> float:
    """Seconds of communication that remain when a share of it is hidden, as far as there is computation to hide it."""
    return communication - overlap * min(communication, compute)


@lru_cache(maxsize=16384)
def layer_cost(model: Model, layer: Layer, split: Split, cluster: Cluster, software: Software) -> Cost:
    """Seconds of one layer for one microbatch.

    Each device of the group sums (or scatters and gathers) a block's output forward and its input's gradient backward.
    Sequence parallelism gathers each block's input once more, behind the backward pass to the inputs (Korthikanti et
    al. 2022, 4.2.2): what is longer than that pass shows.
    """
    device = cluster.device
    scores = score_products(layer, split, software)
    weighted = weight_products(layer, split, software.element_bytes)
    kernels = kernel_bytes(model, layer, split, software)

    def seconds(products: list[Product]) -> float:
        return sum(product_seconds(device, product) for product in products)

    def attention(products: list[Product]) -> float:
        return seconds(products) / (software.attention_efficiency if software.flash_attention else 1.0)

    score_forward = attention(scores)
    forward = seconds(weighted) + score_forward + kernels_seconds(device, kernels.forward)
    inputs = seconds([backward(product)[0] for product in weighted])
    inputs += attention([factor for product in scores for factor in backward(product)])
    inputs += kernels_seconds(device, kernels.inputs)
    if software.flash_attention:  # its backward pass makes the scores again
        inputs += attention(scores[::2])
    weights = seconds([backward(product)[1] for product in weighted]) + kernels_seconds(device, kernels.weights)
    weights = max(weights, software.kernels_weights * device.launch)  # kernels shorter than their launch wait

    size = float(software.element_bytes * split.microbatch * layer.sequence * layer.hidden)
    sums = layer.blocks * all_reduce(cluster, Group(split.tensor), size) if split.tensor > 1 else 0.0
    again = layer.blocks * gather(cluster, Group(split.tensor), size) if split.sequence_parallel else 0.0
    forward_tensor = exposed(sums, forward, software.forward_overlap)
    inputs_tensor = exposed(sums, weights, 0.0 if split.splits_backward else software.backward_overlap)
    # A compiled stage that splits its backward pass spreads it again over its actions (`action_costs`).
    inputs_tensor += exposed(again, inputs, 0.0 if split.splits_backward and software.compiled_stages else 1.0)
    hidden = 2 * sums + again - forward_tensor - inputs_tensor

    forward = max(forward, software.kernels_forward * device.launch - forward_tensor)
    inputs = max(inputs, software.kernels_inputs * device.launch - inputs_tensor)
    if split.recompute == "full":
        inputs += forward
        inputs_tensor += forward_tensor
        hidden += sums - forward_tensor
    elif split.recompute == "selective" and not software.flash_attention:
        inputs += score_forward + kernels_seconds(device, kernels.scores)
    return Cost(forward, inputs, weights, forward_tensor, inputs_tensor, hidden)


def padded_vocabulary(model: Model, tensor: int) -> int:
    """The vocabulary in multiples of 128 per device, as Megatron-LM pads it."""
    whole = 128 * tensor
    return -(-model.vocabulary // whole) * whole


@lru_cache(maxsize=4096)
def embedding_cost(model: Model, split: Split, cluster: Cluster, software: Software) -> Cost:
    """Seconds of the embedding for one microbatch: look up, add positions, drop; backward, a dense gradient."""
    device, t, element = cluster.device, split.tensor, software.element_bytes
    tokens = split.microbatch * model.tokens_per_example
    size = float(element * tokens * model.hidden)
    rep = size / (t if split.sequence_parallel else 1)
    own = padded_vocabulary(model, t) * model.hidden / t
    forward = kernels_seconds(device, (2 * size, 3 * rep, (2.5 if model.dropout else 0.0) * rep))
    weights = kernels_seconds(device, (2 * size, 2 * element * own, 2 * software.gradient_bytes * own))
    return Cost(forward, 0.0, weights, all_reduce(cluster, Group(t), size) if t > 1 else 0.0, 0.0)


@lru_cache(maxsize=4096)
def logits_cost(model: Model, split: Split, cluster: Cluster, software: Software) -> Cost:
    """Seconds of the last norm, the logits and the loss for one microbatch. Megatron-LM never recomputes them."""
    device, t, element = cluster.device, split.tensor, software.element_bytes
    tokens = split.microbatch * model.sequence
    own = padded_vocabulary(model, t) // t
    product = Product(tokens, own, model.hidden, element=element)
    back_inputs, back_weights = backward(product)
    size = float(element * tokens * model.hidden)
    rep = size / (t if split.sequence_parallel else 1)
    logits = float(tokens) * own
    forward = product_seconds(device, product) + kernels_seconds(device, (2 * rep, LOSS_FORWARD * logits))
    inputs = product_seconds(device, back_inputs) + kernels_seconds(device, (3 * rep, LOSS_BACKWARD * logits))
    accumulated = 2 * software.gradient_bytes * own * model.hidden
    weights = product_seconds(device, back_weights) + kernels_seconds(device, (accumulated,))
    if t == 1:
        return Cost(forward, inputs, weights)
    losses = 3 * all_reduce(cluster, Group(t), 4.0 * tokens)
    return Cost(forward, inputs, weights, losses, all_reduce(cluster, Group(t), size))
