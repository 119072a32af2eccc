"""The parts of a transformer that know of tensor parallelism, as one member sees them.

Rules. A value is either *whole*, the same on all members of TENSOR, or *own*, a part or a partial sum that differs.
Between the blocks of a layer values are whole [B, S, H], or with sequence parallelism each member has its own part of
the sequence [B, S/t, H]. `enter` leads into a block, where all members have the whole sequence and each computes with
its own heads or columns; `leave` adds up what they made and leads out. Each is one collective in one of the two
directions (both with sequence parallelism), and autodiff makes the one that belongs to the other:

    without sequence parallelism    enter: nothing, backward a sum        leave: a sum, backward nothing
    with                            enter: gather, backward sum+scatter   leave: sum+scatter, backward gather

Letters of shapes: B examples, S tokens, H hidden, a heads, d head size, F ffn, V vocabulary, t members of TENSOR.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megatron_ptdp.models.config import Activation, Compute
from megatron_ptdp.models.interface import TENSOR, Tree

SEQUENCE = 1  # the dimension of [B, S, H] that sequence parallelism shares


def vary(tree: Tree, *axes: str) -> Tree:
    """Values typed as varying over these mesh axes; the gradient is summed over the axes that this adds."""

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in axes if axis not in varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def varying(x: Any) -> frozenset[str]:
    """The mesh axes along which a value differs, for all that its type says."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def wide(x: jax.Array) -> jax.Array:
    """The array in float32, or in its own dtype if that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def enter(x: jax.Array, compute: Compute) -> jax.Array:
    """[B, S, H] or the own part of it, into a block: all members have all of it, as a start of what is their own."""
    if not compute.sequence_parallel:
        return vary(x, TENSOR)
    if compute.scatter == "psum":
        return _gather(x)
    return lax.all_gather(x, TENSOR, axis=SEQUENCE, tiled=True)


def leave(x: jax.Array, compute: Compute) -> jax.Array:
    """The sum over TENSOR of [B, S, H], out of a block: whole, or with sequence parallelism the own part of it."""
    if not compute.sequence_parallel:
        return lax.psum(x, TENSOR)
    if compute.scatter == "psum":
        return _scatter(x)
    return lax.psum_scatter(x, TENSOR, scatter_dimension=SEQUENCE, tiled=True)


def own_part(x: jax.Array, dimension: int) -> jax.Array:
    """The part of a whole array that falls to this member, along a dimension."""
    size = x.shape[dimension] // lax.axis_size(TENSOR)
    return lax.dynamic_slice_in_dim(vary(x, TENSOR), lax.axis_index(TENSOR) * size, size, dimension)


# A gather and a sum with scatter that are each other's derivative, without a reduce-scatter in either direction.


@jax.custom_vjp
def _gather(x: jax.Array) -> jax.Array:
    return lax.all_gather(x, TENSOR, axis=SEQUENCE, tiled=True)


@jax.custom_vjp
def _scatter(x: jax.Array) -> jax.Array:
    return own_part(lax.psum(x, TENSOR), SEQUENCE)


_gather.defvjp(lambda x: (_gather(x), None), lambda _, ct: (_scatter(ct),))
_scatter.defvjp(lambda x: (_scatter(x), None), lambda _, ct: (_gather(ct),))


@partial(jax.checkpoint, prevent_cse=False)  # of this its input is kept, of several arrays of that size it makes
def norm(x: jax.Array, params: Tree) -> jax.Array:
    """Norm over the last dimension: with a bias LayerNorm (eps 1e-5, as GPT), without RMSNorm (eps 1e-6, as T5)."""
    y = wide(x)
    if "bias" in params:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + (1e-5 if "bias" in params else 1e-6))
    y = y * params["scale"]
    return (y + params["bias"] if "bias" in params else y).astype(x.dtype)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def activate(x: jax.Array, activation: Activation) -> jax.Array:
    return jax.nn.gelu(x, approximate=True) if activation == "gelu" else jax.nn.relu(x)


def tokens_first(x: jax.Array) -> jax.Array:
    """[B, S, H] as [B·S, H]: so the gradient of a matrix is a product over one dimension, which XLA for CPU computes
    without copies of its factors in another layout. Those take a sixth of a whole backward."""
    return x.reshape(-1, x.shape[-1])


def columns(x: jax.Array, rows: tuple[int, ...], params: Tree) -> jax.Array:
    """A column-parallel product: [B·S, H] times the own columns [H, ...] gives [B, S, ...] for `rows` (B, S)."""
    weight = params["weight"]
    y = (x @ weight.reshape(weight.shape[0], -1)).reshape(*rows, *weight.shape[1:])
    return y + params["bias"] if "bias" in params else y


def rows(x: jax.Array, params: Tree, compute: Compute) -> jax.Array:
    """A row-parallel product: own [B, S, ...] times the own rows [..., H], summed over TENSOR, out of the block."""
    weight = params["weight"]
    y = tokens_first(x.reshape(*x.shape[:2], -1)) @ weight.reshape(-1, weight.shape[-1])
    y = leave(y.reshape(*x.shape[:2], -1), compute)
    return y + params["bias"] if "bias" in params else y  # after the sum: once


def attention(
    x: jax.Array,
    source: jax.Array,
    params: Tree,
    compute: Compute,
    *,
    causal: bool = False,
    scaled: bool = True,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Attention of a block's input [B, S, H] over `source` [B, K, H], with the own heads; out of the block.

    `bias` [own heads, S, K] is added to the scores; `scaled` divides them by sqrt(d).
    """
    query, key_value = _heads(x, source, params)
    core: Callable[..., jax.Array] = partial(_core, causal=causal, scaled=scaled)
    if compute.recompute == "selective":
        core = jax.checkpoint(core)
    return rows(core(query, key_value[:, :, 0], key_value[:, :, 1], bias), params["out"], compute)


def attention_after(
    x: jax.Array, past: tuple[jax.Array, jax.Array], params: Tree, compute: Compute
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Causal attention of some tokens [B, S, H] over those before them, of which `past` has the keys and values
    [B, P, a, d], and over themselves; out of the block, with their own keys and values."""
    query, key_value = _heads(x, x, params)
    own = key_value[:, :, 0], key_value[:, :, 1]
    key, value = (jnp.concatenate(pair, axis=1) for pair in zip(past, own, strict=True))
    return rows(_core(query, key, value, None, causal=True, scaled=True), params["out"], compute), own


def _heads(x: jax.Array, source: jax.Array, params: Tree) -> tuple[jax.Array, jax.Array]:
    """The queries [B, S, a, d] of a block's input, and the keys and values [B, K, 2, a, d] of `source`."""
    tokens = tokens_first(x)  # once: the backward keeps it
    query = columns(tokens, x.shape[:2], params["query"])
    return query, columns(tokens if source is x else tokens_first(source), source.shape[:2], params["key_value"])


def _core(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, *, causal: bool, scaled: bool
) -> jax.Array:
    """[B, S, a, d] and two [B, K, a, d] give [B, S, a, d]. Causal ones are the last S of the K tokens."""
    if scaled:
        query = query * query.shape[-1] ** -0.5
    scores = wide(jnp.einsum("bsad,bkad->bask", query, key))
    if bias is not None:
        scores = scores + bias
    if causal:
        places = jnp.arange(key.shape[1])
        seen = places[None, :] <= places[key.shape[1] - query.shape[1] :, None]
        # Added, not chosen: the backward need not keep a mask of the scores' size.
        scores = scores + jnp.where(seen, 0, jnp.finfo(scores.dtype).min / 2)
    return jnp.einsum("bask,bkad->bsad", jax.nn.softmax(scores, axis=-1).astype(value.dtype), value)


def feed_forward(x: jax.Array, params: Tree, compute: Compute, activation: Activation) -> jax.Array:
    """A block's input [B, S, H] through the own columns of the ffn; out of the block."""
    inner = columns(tokens_first(x), x.shape[:2], params["in"])
    return rows(activate(inner, activation), params["out"], compute)


def embed(tokens: jax.Array, table: jax.Array, compute: Compute) -> jax.Array:
    """Rows of a table whose own part is [V/t, H], for tokens [B, S]; out of the block."""
    local = tokens - lax.axis_index(TENSOR) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    found = jnp.take(table, jnp.where(mine, local, 0), axis=0)
    return leave(jnp.where(mine[..., None], found, 0), compute)


def token_losses(x: jax.Array, table: jax.Array, targets: jax.Array, vocabulary: int) -> jax.Array:
    """Cross entropy in nats [B, S] of a block's input [B, S, H], whole on every member.

    The logits stay shared: each member has those of its rows [V/t, H] of the table, of which those past `vocabulary`
    are padding.
    """
    own = lax.axis_index(TENSOR) * table.shape[0] + jnp.arange(table.shape[0])
    logits = jnp.einsum("nh,vh->nv", tokens_first(x), table).reshape(*x.shape[:2], -1)
    return _cross_entropy(wide(logits), own, targets, vocabulary)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _cross_entropy(logits: jax.Array, own: jax.Array, targets: jax.Array, vocabulary: int) -> jax.Array:
    """Losses [B, S] from own logits [B, S, V/t] of the tokens `own` [V/t]. The backward keeps one array [B, S, V/t]."""
    return _cross_entropy_forward(logits, own, targets, vocabulary)[0]


def _cross_entropy_forward(
    logits: jax.Array, own: jax.Array, targets: jax.Array, vocabulary: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    logits = jnp.where(own < vocabulary, logits, jnp.finfo(logits.dtype).min)
    logits = logits - lax.pmax(jnp.max(logits, axis=-1), TENSOR)[..., None]
    target = jnp.sum(jnp.where(own == targets[..., None], logits, 0), axis=-1)
    shares = jnp.exp(logits)
    total, target = lax.psum((jnp.sum(shares, axis=-1), target), TENSOR)
    return jnp.log(total) - target, (shares / total[..., None], own, targets)


def _cross_entropy_backward(_: int, kept: tuple[jax.Array, ...], ct: jax.Array) -> tuple[jax.Array, None, None]:
    shares, own, targets = kept
    return (shares - (own == targets[..., None])) * ct[..., None], None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
