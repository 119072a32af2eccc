"""A decoder-only transformer, whole rows at once for the learner, token by token with a cache for the sampler.

Shapes: B rows, T tokens, M model, H heads, D head, F feed-forward, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from examples.rl.task import LENGTH, VOCABULARY

LAYERS, M, H, D, F = 2, 64, 4, 16, 256

Params = dict[str, Any]


class Cache(NamedTuple):
    """Keys and values of what a sampler has seen: [LAYERS, B, T, H, D]."""

    keys: jax.Array
    values: jax.Array


def init(seed: int) -> Params:
    """Parameters in NumPy."""
    draw = np.random.default_rng(seed)

    def matrix(*shape: int, inputs: int) -> np.ndarray:
        return (draw.standard_normal(shape) / np.sqrt(inputs)).astype(np.float32)

    def layer() -> Params:
        return {
            "attention_norm": np.ones(M, np.float32),
            "qkv": matrix(M, 3, H, D, inputs=M),
            "out": matrix(H, D, M, inputs=H * D),
            "mlp_norm": np.ones(M, np.float32),
            "up": matrix(M, F, inputs=M),
            "down": matrix(F, M, inputs=F),
        }

    return {
        "embedding": 0.3 * matrix(VOCABULARY, M, inputs=1),
        "positions": 0.3 * matrix(LENGTH, M, inputs=1),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": np.ones(M, np.float32),
        "head": matrix(M, VOCABULARY, inputs=M),
    }


def specs(axis: str) -> Params:
    """The layout of parameters whose heads and hidden units are partitioned along a mesh axis."""
    layer = {
        "attention_norm": P(),
        "qkv": P(None, None, axis),
        "out": P(axis),
        "mlp_norm": P(),
        "up": P(None, axis),
        "down": P(axis),
    }
    whole = {name: P() for name in ("embedding", "positions", "norm", "head")}
    return {**whole, "layers": [layer] * LAYERS}


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def _mlp(layer: Params, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(_norm(x, layer["mlp_norm"]) @ layer["up"]) @ layer["down"]


def logits(params: Params, tokens: jax.Array) -> jax.Array:
    """int32[B, T] -> float32[B, T, V]: what is expected behind each token."""
    count = tokens.shape[1]
    x = params["embedding"][tokens] + params["positions"][:count]
    causal = jnp.tril(jnp.ones((count, count), bool))
    for layer in params["layers"]:
        q, k, v = jnp.einsum("btm,mchd->cbthd", _norm(x, layer["attention_norm"]), layer["qkv"])
        scores = jnp.where(causal, jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D), -1e9)
        seen = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("bthd,hdm->btm", seen, layer["out"])
        x = x + _mlp(layer, x)
    return _norm(x, params["norm"]) @ params["head"]


def empty_cache(rows: int) -> Cache:
    """The cache of rows of which nothing has been seen."""
    zeros = jnp.zeros((LAYERS, rows, LENGTH, H, D), jnp.float32)
    return Cache(zeros, zeros)


def next_logits(params: Params, cache: Cache, at: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Cache]:
    """The logits behind token number `at` of each row, int32[B] -> float32[B, V], and the cache with that token."""
    x = params["embedding"][tokens] + params["positions"][at]
    seen = jnp.arange(LENGTH) <= at
    keys, values = cache
    for k, layer in enumerate(params["layers"]):
        q, key, value = jnp.einsum("bm,mchd->cbhd", _norm(x, layer["attention_norm"]), layer["qkv"])
        keys, values = keys.at[k, :, at].set(key), values.at[k, :, at].set(value)
        scores = jnp.where(seen, jnp.einsum("bhd,bshd->bhs", q, keys[k]) / np.sqrt(D), -1e9)
        mixed = jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores), values[k])
        x = x + jnp.einsum("bhd,hdm->bm", mixed, layer["out"])
        x = x + _mlp(layer, x)
    return _norm(x, params["norm"]) @ params["head"], Cache(keys, values)
