"""A mixture of experts in place of a layer's feed-forward part: members of TENSOR share the experts.

Every token goes through its `top_k` experts, however many tokens chose the same one: nothing is dropped and there is no
capacity, so results do not depend on how the batch is cut. The price: a member computes each of its experts for all
tokens and weights them with zero where they were not chosen. Weights are the router's probabilities, with `top_k` above
1 divided by their sum (GShard; with 1 as in the Switch Transformer).

The loss that keeps experts busy is that of the Switch Transformer (Fedus et al. 2021, eq. 4), of each example alone:
experts times the sum over experts of (share of the example's tokens that chose it / top_k) × (mean probability). Of
each example, so that it too adds up over microbatches and replicas; 1 when experts are equally busy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from megatron_ptdp.models.config import Compute, ModelConfig
from megatron_ptdp.models.interface import Tree
from megatron_ptdp.models.layers import activate, leave, own_part, wide


def experts(x: jax.Array, params: Tree, config: ModelConfig, compute: Compute) -> tuple[jax.Array, jax.Array]:
    """A block's input [B, S, H] through its experts; out of the block, with the balance loss of each example [B].

    Every member routes all tokens for itself, with a router that is typed as varying: its gradient is a partial sum, as
    a member's experts need a part of the weights only. So the balance is the same on all, and typed as different.
    """
    weights, balance = route(wide(x) @ wide(params["router"]["weight"]), config.top_k)
    own = own_part(weights, 2).astype(x.dtype)
    y = jnp.einsum("bsh,ehf->besf", x, params["in"]["weight"])
    if config.bias:
        y = y + params["in"]["bias"][:, None, :]
    y = activate(y, config.activation) * jnp.swapaxes(own, 1, 2)[..., None]
    y = jnp.einsum("besf,efh->bsh", y, params["out"]["weight"])
    if config.bias:
        y = y + own @ params["out"]["bias"]
    return leave(y, compute), balance


def route(logits: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Weights of experts for each token [B, S, E], zero if not chosen, and the balance [B], from logits [B, S, E]."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    count = logits.shape[-1]
    left, chosen = probabilities, jnp.zeros_like(probabilities)
    for _ in range(top_k):  # of equal ones the first
        best = jax.nn.one_hot(jnp.argmax(left, axis=-1), count, dtype=probabilities.dtype)
        left, chosen = jnp.where(best > 0, -1.0, left), chosen + best
    weights = probabilities * chosen
    if top_k > 1:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    busy = jnp.mean(chosen, axis=1) / top_k
    return weights, count * jnp.sum(busy * jnp.mean(probabilities, axis=1), axis=-1)
