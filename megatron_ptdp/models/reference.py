"""A second implementation of the models, for one device: a loop over layers, no parallelism, made to be read.

The results of the parallel models are compared with it. So it shares no code with them, spells out each formula, and
has other ways to the same numbers where there are any: one example at a time, attention one head at a time, experts one
token's choice at a time, targets picked from a table of log probabilities. It takes the whole tree of `split` and
computes in the tree's dtype: float64 under `jax_enable_x64`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log, pi, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatron_ptdp.models.config import ModelConfig
from megatron_ptdp.models.interface import Tree


def reference_loss(config: ModelConfig, tree: Tree, batch: Mapping[str, Any]) -> jax.Array:
    """The summed loss in nats of a batch of whole arrays: what all members' losses of the last stage add up to."""
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    return jnp.sum(jax.vmap(lambda example: _example_loss(config, tree, example))(arrays))


def _example_loss(config: ModelConfig, tree: Tree, example: Mapping[str, jax.Array]) -> jax.Array:
    tokens, targets = example["tokens"][:-1], example["tokens"][1:]
    if config.kind == "t5":
        x, balance = _t5(config, tree, example["encoder_tokens"], tokens)
    else:
        x, balance = _gpt(config, tree, tokens)
    logits = _norm(x, tree["final"]) @ tree["embedding" if config.tied else "head"]["tokens"].T
    if config.kind == "t5" and config.tied:
        logits = logits / sqrt(config.hidden)
    losses = -jax.nn.log_softmax(logits)[jnp.arange(len(targets)), targets]
    return jnp.sum((losses + config.balance * balance) * example.get("weights", 1.0))


def _gpt(config: ModelConfig, tree: Tree, tokens: jax.Array) -> tuple[jax.Array, Any]:
    x = tree["embedding"]["tokens"][tokens] + tree["embedding"]["positions"]
    return _stack(config, tree["layers"], x, causal=True)


def _t5(config: ModelConfig, tree: Tree, encoder_tokens: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Any]:
    table = tree["embedding"]["tokens"]
    seen, first = _stack(config, tree["encoder"], table[encoder_tokens], causal=False)
    x, second = _stack(config, tree["decoder"], table[tokens], causal=True, seen=_norm(seen, tree["encoder_final"]))
    return x, first + second


def _stack(
    config: ModelConfig, stack: Tree, x: jax.Array, *, causal: bool, seen: jax.Array | None = None
) -> tuple[jax.Array, Any]:
    """[S, H] through all layers, and the sum of their balances."""
    balance: Any = 0.0
    for i in range(len(stack["ffn_norm"]["scale"])):
        layer = _layer(stack, i)
        y = _norm(x, layer["attention_norm"])
        x = x + _attention(config, layer["attention"], y, y, causal, layer.get("relative"))
        if seen is not None:
            x = x + _attention(config, layer["cross"], _norm(x, layer["cross_norm"]), seen, False, None)
        y = _norm(x, layer["ffn_norm"])
        if config.experts:
            made, busy = _experts(config, layer["ffn"], y)
            x, balance = x + made, balance + busy
        else:
            x = x + _linear(_active(config, _linear(y, layer["ffn"]["in"])), layer["ffn"]["out"])
    return x, balance


def _layer(stack: Tree, i: int) -> Tree:
    return {name: _layer(part, i) if isinstance(part, dict) else part[i] for name, part in stack.items()}


def _linear(x: jax.Array, params: Tree) -> jax.Array:
    y = x @ params["weight"]
    return y + params["bias"] if "bias" in params else y


def _norm(x: jax.Array, params: Tree) -> jax.Array:
    if "bias" in params:
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * params["scale"] + params[
            "bias"
        ]
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params["scale"]


def _active(config: ModelConfig, x: jax.Array) -> jax.Array:
    if config.activation == "relu":
        return jnp.where(x > 0, x, 0)
    return 0.5 * x * (1 + jnp.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))


def _attention(
    config: ModelConfig, params: Tree, x: jax.Array, source: jax.Array, causal: bool, relative: jax.Array | None
) -> jax.Array:
    """[S, H] over [K, H], one head at a time."""

    def linear(of: jax.Array, part: Tree, *which: int) -> jax.Array:
        return _linear(of, {name: array[which] for name, array in part.items()})

    def one(query: Tree, key_value: Tree, out: jax.Array, bias: Any) -> jax.Array:
        scores = linear(x, query) @ linear(source, key_value, 0).T
        if config.kind == "gpt":
            scores = scores / sqrt(config.head_size)
        if relative is not None:
            scores = scores + bias[_kinds(len(x), causal)]
        if causal:
            scores = jnp.where(np.tri(len(x), dtype=bool), scores, -jnp.inf)
        return jax.nn.softmax(scores) @ linear(source, key_value, 1) @ out

    def by_head(part: Tree) -> Tree:
        """Heads first, [keys and values,] hidden, head size."""
        order = {"weight": lambda w: jnp.moveaxis(w, (-2, 0), (0, -2)), "bias": lambda b: jnp.moveaxis(b, -2, 0)}
        return {name: order[name](array) for name, array in part.items()}

    parts = by_head(params["query"]), by_head(params["key_value"]), params["out"]["weight"]
    total = jax.vmap(one, in_axes=(0, 0, 0, 1 if relative is not None else None))(*parts, relative).sum(0)
    return total + params["out"]["bias"] if "bias" in params["out"] else total


def _kinds(length: int, causal: bool) -> np.ndarray:
    """T5's kind of distance for each query and key, one pair at a time."""
    kinds = np.zeros((length, length), int)
    for query in range(length):
        for key in range(length):
            back, count = query - key, 32 if causal else 16
            kind = 0 if causal or back >= 0 else 16
            back = max(back, 0) if causal else abs(back)
            if back >= count // 2:
                back = min(count // 2 + int(log(2 * back / count) / log(256 / count) * (count // 2)), count - 1)
            kinds[query, key] = kind + back
    return kinds


def _experts(config: ModelConfig, params: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[S, H] and the balance: for each choice of each token, the chosen expert's matrices are fetched."""
    probabilities = jax.nn.softmax(x @ params["router"]["weight"])
    chosen = jnp.argsort(-probabilities, axis=-1)[:, : config.top_k]
    weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if config.top_k > 1:
        weights = weights / weights.sum(-1, keepdims=True)
    total = jnp.zeros_like(x)
    for choice in range(config.top_k):
        of = {name: {key: array[chosen[:, choice]] for key, array in params[name].items()} for name in ("in", "out")}
        y = _active(config, jnp.einsum("sh,shf->sf", x, of["in"]["weight"]) + of["in"].get("bias", 0.0))
        y = jnp.einsum("sf,sfh->sh", y, of["out"]["weight"]) + of["out"].get("bias", 0.0)
        total = total + weights[:, choice, None] * y
    shares = jnp.stack([(chosen == e).sum() / chosen.size for e in range(config.experts)])
    return total, config.experts * (shares * probabilities.mean(0)).sum()
