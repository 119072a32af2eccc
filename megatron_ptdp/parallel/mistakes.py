"""Mistakes that are made in training steps like this one, to be planted on purpose: a proof of parity must find each.

Only for that proof. `build_step(..., mistakes=frozenset({"stale-tied"}))` makes a step that computes wrong numbers.
What each needs to show is said beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from megatron_ptdp.errors import ConfigError
from megatron_ptdp.models import layers
from megatron_ptdp.models.interface import TENSOR, Tree
from megatron_ptdp.parallel.residuals import varying

MISTAKES: Mapping[str, str] = {
    "dropped-all-reduce": "a block's output is one member's partial sum (tensor 2 or more)",
    "mean-twice": "the loss is divided by the number of microbatches once more (2 microbatches or more)",
    "stale-tied": "stages that share the embedding keep their own gradient of it (tied, 2 stages or more)",
    "norm-unsummed": "gradients of norms are one member's (sequence parallel)",
    "replica-missing": "the first replica is left out of the sum of gradients (data 2 or more)",
    "replicated-counted-twice": "what all members of TENSOR hold counts as often in the norm (tensor 2 or more)",
    "microbatch-twice": "the last microbatch's gradient of the first stage is added twice",
    "wrong-activation": "a backward takes what the microbatch before left (2 microbatches or more)",
    "padding-counted": "the padding of the vocabulary is among what the loss is normalised by (padded)",
    "positions-unshifted": "all members add the first part of the positions (sequence parallel, positions)",
    "tied-counted-twice": "what two stages both hold counts as often in the norm (tied, 2 stages or more)",
    "early-update": "gradients are reduced before the last backward of a stage has added its own",
}
"""By name: what is wrong, and what sizes it needs to matter."""


def checked(names: frozenset[str]) -> frozenset[str]:
    """Raises `ConfigError` for a name that there is not."""
    for name in names:
        if name not in MISTAKES:
            raise ConfigError.unknown("mistake", name, MISTAKES)
    return names


@contextlib.contextmanager
def planted(names: frozenset[str]) -> Iterator[None]:
    """Plants those of the model for as long as it is traced."""
    kept = layers.leave, layers.token_losses, layers.own_part
    if "dropped-all-reduce" in names:
        layers.leave = lambda x, compute: kept[0](_only_first(x), compute)
    if "padding-counted" in names:
        layers.token_losses = lambda x, table, targets, vocabulary: kept[1](x, table, targets, vocabulary << 20)
    if "positions-unshifted" in names:
        layers.own_part = lambda x, dimension: _first_part(x) if dimension == 0 else kept[2](x, dimension)
    try:
        yield
    finally:
        layers.leave, layers.token_losses, layers.own_part = kept


def loosened(params: Tree, names: frozenset[str]) -> Tree:
    """Parameters of norms typed as if members of TENSOR had different ones, so that autodiff does not sum over them."""
    if "norm-unsummed" not in names:
        return params
    return jax.tree_util.tree_map_with_path(
        lambda path, array: (
            jax.lax.pcast(array, TENSOR, to="varying") if _is_norm(path) and TENSOR not in varying(array) else array
        ),
        params,
    )


def tightened(gradients: Tree, names: frozenset[str]) -> Tree:
    """Their gradients, of one member each."""
    if "norm-unsummed" not in names:
        return gradients
    return jax.tree_util.tree_map_with_path(
        lambda path, array: jax.lax.psum(_only_first(array), TENSOR) if _is_norm(path) else array, gradients
    )


def _is_norm(path: Any) -> bool:
    return any("norm" in str(key.key) or key.key == "final" for key in path)


def _first_part(x: Any) -> Any:
    return layers.vary(x, TENSOR)[: x.shape[0] // jax.lax.axis_size(TENSOR)]


def _only_first(x: Any) -> Any:
    return jnp.where(jax.lax.axis_index(TENSOR) == 0, x, jnp.zeros_like(x))
