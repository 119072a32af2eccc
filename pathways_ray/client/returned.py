"""The state that an elastic step returned, by which a state that the user has changed since is told."""

from __future__ import annotations

import weakref
from typing import Any

import jax
import numpy as np

from pathways_ray.client.array import Array


class Returned:
    """A tree as it was returned. Of arrays it has no handle, which would keep their memory; of other leaves the bits,
    since NumPy arrays may be changed in place."""

    def __init__(self, tree: Any) -> None:
        self._tree: Any
        leaves, self._tree = jax.tree.flatten(tree)
        self._leaves = [weakref.ref(one._buffer) if isinstance(one, Array) else owned(one) for one in leaves]

    def is_same(self, tree: Any) -> bool:
        """Whether a tree is this one: the same structure, the same arrays, and other leaves of the same bits."""
        leaves, structure = jax.tree.flatten(tree)
        try:
            if structure != self._tree:
                return False
        except Exception:  # what a user's class of pytrees says beside its children cannot be compared
            return False
        return all(map(_is_same, self._leaves, leaves))


def state_of(result: Any) -> Any:
    """The state among what a step returned."""
    return result[0] if type(result) is tuple and result else result  # a named tuple is a state by itself


def owned(leaf: Any) -> Any:
    """A leaf that nobody else changes."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _is_same(kept: Any, leaf: Any) -> bool:
    if isinstance(leaf, Array):
        return isinstance(kept, weakref.ref) and kept() is leaf._buffer
    if kept is leaf:
        return True
    if type(kept) is not type(leaf):
        return False
    try:
        if not isinstance(leaf, np.ndarray | np.generic | jax.Array | float | complex):
            return bool(kept == leaf)
        one, other = np.asarray(kept), np.asarray(leaf)  # -0 is not 0, and a NaN is itself
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    except Exception:  # what cannot be compared counts as changed
        return False
