"""A mixture of experts in place of a layer's feed-forward part: members of TENSOR share the experts.

Tokens are dispatched: an expert computes those that chose it, and no others. Without a capacity nothing is dropped:
results do not depend on how the batch is cut, and are those of the dense form (each expert for all tokens, weighed by
zero where it was not chosen), which stays as the reference (`Compute.experts`). Shapes are fixed: the choices of a
member's own experts are sorted by expert and laid into blocks of equal size, each of one expert. There are blocks for
all choices, and one more for each expert that fills its last one in part. A member cannot know how many choices fall to
the others, so t members have blocks for t times the choices at worst.

With a capacity each expert takes so many tokens that on average all find room, times the factor, and the rest of its
tokens go past it. What computes then is proportional to the choices on any number of members. With sequence parallelism
each member routes its own part of the sequence, and tokens go to the members of their experts by an all-to-all, and
back by another one: nothing is gathered.

Weights are the router's probabilities, with `top_k` above 1 divided by their sum (GShard; with 1 as in the Switch
Transformer). The loss that keeps experts busy is that of the Switch Transformer (Fedus et al. 2021, eq. 4), of each
example alone: experts times the sum over experts of (share of the example's tokens that chose it / top_k) × (mean
probability). Of each example, so that it too adds up over microbatches and replicas; 1 when experts are equally busy.

Letters: N = B·S tokens, k choices of each, E experts, e own ones, m blocks of b rows, c rows of an expert's capacity.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megatron_ptdp.models.config import Compute, ModelConfig
from megatron_ptdp.models.interface import TENSOR, Tree
from megatron_ptdp.models.layers import activate, leave, own_part, vary, wide

SMALLEST_BLOCK = 8
"""Rows of a block at least."""


def experts(x: jax.Array, params: Tree, config: ModelConfig, compute: Compute) -> tuple[jax.Array, jax.Array]:
    """A block's input [B, S, H] through its experts; out of the block, with the balance loss of each example [B].

    Every member routes all tokens for itself, with a router that is typed as varying: its gradient is a partial sum, as
    a member's experts need a part of the weights only. So the balance is the same on all, and typed as different.
    """
    routed = route(wide(x) @ wide(params["router"]["weight"]), config.top_k)
    if compute.experts == "dense":
        y = _dense(x, own_part(routed.weights, 2).astype(x.dtype), params, config)
    elif config.capacity:
        rows = capacity_of(config, x.shape[0] * x.shape[1])
        y = _with_capacity(x, routed, params, config, rows)
    else:
        y = _dropless(x, routed, params, config)
    return leave(y, compute), routed.balance


def experts_of_parts(x: jax.Array, params: Tree, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """The own part [B, S/t, H] of a sequence through the experts of all members, and the balance of each example [B].

    With a capacity only. Tokens go to the members that have their experts, and come back, each by an all-to-all.
    """
    members = lax.axis_size(TENSOR)
    logits = wide(x) @ wide(params["router"]["weight"])
    routed = route(logits, config.top_k, parts=members)
    rows = capacity_of(config, x.shape[0] * x.shape[1])
    slots = _slots(routed, config.experts, rows, 0)
    sent = _spread(x.reshape(-1, x.shape[-1]), slots).reshape(members, -1, rows, x.shape[-1])
    came = lax.all_to_all(sent, TENSOR, 0, 0)  # [t, e, c, H]: from each member what it has for the own experts
    made = computed(jnp.swapaxes(came, 0, 1).reshape(came.shape[1], -1, x.shape[-1]), params, config)
    back = jnp.swapaxes(made.reshape(-1, members, rows, x.shape[-1]), 0, 1)
    back = lax.all_to_all(back, TENSOR, 0, 0).reshape(-1, x.shape[-1])
    return _gathered(back * _weights(routed, slots)[:, None].astype(x.dtype), slots).reshape(x.shape), routed.balance


def by_parts(config: ModelConfig, compute: Compute) -> bool:
    """Whether members of TENSOR route their own parts of the sequence."""
    return bool(config.experts and config.capacity and compute.sequence_parallel and compute.experts == "dispatched")


def capacity_of(config: ModelConfig, tokens: int) -> int:
    """Rows that an expert takes of so many tokens; of each member's part by itself, where they route their parts."""
    return min(ceil(config.capacity * tokens * config.top_k / config.experts), tokens)


class Routed(NamedTuple):
    """The choices of tokens: the weight of each expert [B, S, E], zero if not chosen; the chosen ones [B, S, k]; the
    balance of each example [B]."""

    weights: jax.Array
    chosen: jax.Array
    balance: jax.Array


def route(logits: jax.Array, top_k: int, parts: int = 1) -> Routed:
    """The choices of tokens by their logits [B, S, E].

    Args:
        parts: members of TENSOR that have a part of each example's tokens.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    count = logits.shape[-1]
    left, chosen = probabilities, jnp.zeros_like(probabilities)
    numbers = []
    for _ in range(top_k):  # of equal ones the first
        numbers.append(jnp.argmax(left, axis=-1))
        best = jax.nn.one_hot(numbers[-1], count, dtype=probabilities.dtype)
        left, chosen = jnp.where(best > 0, -1.0, left), chosen + best
    weights = probabilities * chosen
    if top_k > 1:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    busy, mean = jnp.mean(chosen, axis=1) / top_k, jnp.mean(probabilities, axis=1)
    if parts > 1:
        busy, mean = vary(lax.psum(jnp.stack([busy, mean]), TENSOR) / parts, TENSOR)
    return Routed(weights, jnp.stack(numbers, -1), count * jnp.sum(busy * mean, axis=-1))


def _dense(x: jax.Array, own: jax.Array, params: Tree, config: ModelConfig) -> jax.Array:
    """Each own expert for all tokens, by the own weights [B, S, e]."""
    y = jnp.einsum("bsh,ehf->besf", x, params["in"]["weight"])
    if config.bias:
        y = y + params["in"]["bias"][:, None, :]
    y = activate(y, config.activation) * jnp.swapaxes(own, 1, 2)[..., None]
    y = jnp.einsum("besf,efh->bsh", y, params["out"]["weight"])
    return y + own @ params["out"]["bias"] if config.bias else y


def _dropless(x: jax.Array, routed: Routed, params: Tree, config: ModelConfig) -> jax.Array:
    """All choices of own experts, in blocks."""
    own = params["in"]["weight"].shape[0]
    tokens = x.shape[0] * x.shape[1]
    choices = tokens * min(config.top_k, own)
    rows = block_rows(tokens * config.top_k // config.experts)
    slots, expert = _blocks(routed, own, rows, choices // rows + own)
    blocks = _spread(x.reshape(tokens, -1), slots).reshape(len(expert), rows, -1)
    picked = jax.tree.map(lambda part: part[expert], {name: params[name] for name in ("in", "out")})
    y = computed(blocks, picked, config).reshape(-1, x.shape[-1])
    return _gathered(y * _weights(routed, slots)[:, None].astype(x.dtype), slots).reshape(x.shape)


def block_rows(average: int) -> int:
    """Rows of a block, for experts with so many rows on average: the smaller, the less is computed for nothing; the
    larger, the fewer copies of weights there are."""
    return max(SMALLEST_BLOCK, average // 4)


def _with_capacity(x: jax.Array, routed: Routed, params: Tree, config: ModelConfig, rows: int) -> jax.Array:
    """The first `rows` choices of each own expert."""
    own = params["in"]["weight"].shape[0]
    slots = _slots(routed, own, rows, lax.axis_index(TENSOR) * own)
    tokens = _spread(x.reshape(-1, x.shape[-1]), slots).reshape(own, rows, -1)
    y = computed(tokens, params, config).reshape(-1, x.shape[-1])
    return _gathered(y * _weights(routed, slots)[:, None].astype(x.dtype), slots).reshape(x.shape)


def computed(x: jax.Array, params: Tree, config: ModelConfig) -> jax.Array:
    """Rows [m, b, H] through the matrices [m, H, F] and [m, F, H]."""
    y = jnp.einsum("mbh,mhf->mbf", x, params["in"]["weight"])
    if config.bias:
        y = y + params["in"]["bias"][:, None, :]
    y = jnp.einsum("mbf,mfh->mbh", activate(y, config.activation), params["out"]["weight"])
    return y + params["out"]["bias"][:, None, :] if config.bias else y


# --- which token lies where -------------------------------------------------------------------------------------------


class _Places(NamedTuple):
    """Rows that take tokens, and tokens that find their rows: `token` and `choice` of each row (any, where it is not
    `filled`), and the `row` of each choice [N, k] (any, where it is not `there`)."""

    token: jax.Array
    choice: jax.Array
    filled: jax.Array
    row: jax.Array
    there: jax.Array


def _sorted(routed: Routed, own: int, first: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Choices of experts `first` up to `first + own`, each once: the expert of each choice (`own` for others), the
    choices in order of expert, how many each expert has, and the place of each choice among those of its expert."""
    chosen = routed.chosen.reshape(-1) - first
    chosen = jnp.where((chosen >= 0) & (chosen < own), chosen, own)
    order = jnp.argsort(chosen, stable=True)
    counts = jnp.sum(chosen[:, None] == jnp.arange(own), axis=0)
    starts = jnp.cumsum(counts) - counts
    rank = jnp.argsort(order) - starts[jnp.minimum(chosen, own - 1)]
    return chosen, order, counts, rank


def _slots(routed: Routed, own: int, rows: int, first: jax.Array | int) -> _Places:
    """Row c of expert e takes choice number c of it, if there is one."""
    top_k = routed.chosen.shape[-1]
    chosen, order, counts, rank = _sorted(routed, own, first)
    starts = jnp.cumsum(counts) - counts
    place = jnp.minimum(starts[:, None] + jnp.arange(rows), len(order) - 1).reshape(-1)
    filled = (jnp.arange(rows) < counts[:, None]).reshape(-1)
    there = (chosen < own) & (rank < rows)
    row = jnp.where(there, chosen * rows + rank, 0)
    choice = order[place]
    return _Places(choice // top_k, choice, filled, row.reshape(-1, top_k), there.reshape(-1, top_k))


def _blocks(routed: Routed, own: int, rows: int, count: int) -> tuple[_Places, jax.Array]:
    """`count` blocks of `rows` rows, and the own expert of each block."""
    top_k = routed.chosen.shape[-1]
    chosen, order, counts, rank = _sorted(routed, own, lax.axis_index(TENSOR) * own)
    starts = jnp.cumsum(counts) - counts
    ends = jnp.cumsum(-(-counts // rows))  # blocks up to those of each expert
    begins = ends - -(-counts // rows)
    block = jnp.arange(count)
    expert = jnp.minimum(jnp.sum(block[:, None] >= ends, axis=1), own - 1)
    at = ((block - begins[expert]) * rows)[:, None] + jnp.arange(rows)
    filled = ((at < counts[expert][:, None]) & (block < ends[-1])[:, None]).reshape(-1)
    place = jnp.minimum(starts[expert][:, None] + at, len(order) - 1).reshape(-1)
    there = chosen < own
    row = jnp.where(there, begins[jnp.minimum(chosen, own - 1)] * rows + rank, 0)
    choice = order[place]
    places = _Places(choice // top_k, choice, filled, row.reshape(-1, top_k), there.reshape(-1, top_k))
    return places, expert


def _weights(routed: Routed, places: _Places) -> jax.Array:
    """The weight of the choice in each row."""
    found = jnp.take_along_axis(routed.weights, routed.chosen, axis=-1).reshape(-1)
    return jnp.where(places.filled, found[places.choice], 0)


# Both ways are gathers, and each is the other's derivative: a sum of rows in a scatter would be slow, and in any order.


@jax.custom_vjp
def _spread(x: jax.Array, places: _Places) -> jax.Array:
    """Tokens [N, H] in their rows, zeros in those that take none."""
    return jnp.where(places.filled[:, None], x[places.token], 0)


@jax.custom_vjp
def _gathered(y: jax.Array, places: _Places) -> jax.Array:
    """The sum of each token's rows, [N, H]."""
    return jnp.sum(jnp.where(places.there[..., None], y[places.row], 0), axis=1)


_spread.defvjp(lambda x, places: (_spread(x, places), places), lambda places, ct: (_gathered(ct, places), None))
_gathered.defvjp(lambda y, places: (_gathered(y, places), places), lambda places, ct: (_spread(ct, places), None))
