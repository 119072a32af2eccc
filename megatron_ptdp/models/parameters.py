"""The parameters of a model's parts: shapes, sharding over TENSOR, and initial values.

Those of `count` layers are stacked along dimension 0. Standard deviations: GPT as GPT-2, 0.02, and divided by
sqrt(2 layers) where a block ends; T5 as T5.1.0, where scores are not scaled and the queries are smaller instead.
"""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import PartitionSpec as P

from megatron_ptdp.models.config import BUCKETS, ModelConfig
from megatron_ptdp.models.interface import TENSOR, Parameter, Tree


def norm(c: ModelConfig) -> Tree:
    scale = Parameter((c.hidden,), P(None), initial="ones", decay=False)
    return {"scale": scale, "bias": replace(scale, initial="zeros")} if c.bias else {"scale": scale}


def attention(c: ModelConfig) -> Tree:
    """Queries [H, a, d]; keys and values [H, 2, a, d]; out [a, d, H]. Heads are shared."""
    width = c.heads * c.head_size
    query, rest, out = 0.02, 0.02, _ending(c)
    if c.kind == "t5":
        query, rest, out = (c.hidden * c.head_size) ** -0.5, c.hidden**-0.5, width**-0.5
    return {
        "query": _matrix(c, (c.hidden, c.heads, c.head_size), 1, query),
        "key_value": _matrix(c, (c.hidden, 2, c.heads, c.head_size), 2, rest),
        "out": _matrix(c, (c.heads, c.head_size, c.hidden), 0, out),
    }


def relative_positions(c: ModelConfig) -> Parameter:
    """Biases of scores for each bucket of distances and each head; every layer has a table of its own."""
    return Parameter((BUCKETS, c.heads), P(None, TENSOR), scale=c.hidden**-0.5, decay=False)


def feed_forward(c: ModelConfig) -> Tree:
    """Weights in [H, F] and out [F, H], sharded over F; with experts [E, H, F] and [E, F, H], sharded over E."""
    start, end = (c.hidden**-0.5, c.ffn**-0.5) if c.kind == "t5" else (0.02, _ending(c))
    if not c.experts:
        return {"in": _matrix(c, (c.hidden, c.ffn), 1, start), "out": _matrix(c, (c.ffn, c.hidden), 0, end)}
    experts = P(TENSOR, None, None)
    tree: Tree = {
        "router": {"weight": Parameter((c.hidden, c.experts), P(None, None), scale=start)},
        "in": {"weight": Parameter((c.experts, c.hidden, c.ffn), experts, scale=start)},
        "out": {"weight": Parameter((c.experts, c.ffn, c.hidden), experts, scale=end)},
    }
    if c.bias:
        for name, size in (("in", c.ffn), ("out", c.hidden)):
            tree[name]["bias"] = Parameter((c.experts, size), P(TENSOR, None), initial="zeros", decay=False)
    return tree


def stacked(tree: Tree, count: int) -> Tree:
    """The parameters of `count` layers, from those of one."""
    if not isinstance(tree, Parameter):
        return {name: stacked(part, count) for name, part in tree.items()}
    return replace(tree, shape=(count, *tree.shape), spec=P(None, *tree.spec), stacked=True)


def table(c: ModelConfig, tensor: int, *, tied: bool, scale: float) -> Parameter:
    """A row per token [V, H], V rounded up to a multiple of the members that share it."""
    rows = -(-c.vocabulary // tensor) * tensor
    padded = (0, c.vocabulary) if rows > c.vocabulary else None
    return Parameter((rows, c.hidden), P(TENSOR, None), scale=scale, padded=padded, tied=tied)


def positions(c: ModelConfig) -> Parameter:
    return Parameter((c.sequence, c.hidden), P(None, None), scale=0.02)


def _ending(c: ModelConfig) -> float:
    return 0.02 / (2 * c.layers) ** 0.5


def _matrix(c: ModelConfig, shape: tuple[int, ...], shared: int, scale: float) -> Tree:
    """A matrix and perhaps its bias. Its first dimension is what goes in, or where that is shared, its last what comes
    out: the bias has the dimensions that come out."""
    spec = tuple(TENSOR if i == shared else None for i in range(len(shape)))
    tree: Tree = {"weight": Parameter(shape, P(*spec), scale=scale)}
    if c.bias:
        kept = slice(len(shape) - 1, None) if shared == 0 else slice(1, None)
        tree["bias"] = Parameter(shape[kept], P(*spec[kept]), initial="zeros", decay=False)
    return tree
