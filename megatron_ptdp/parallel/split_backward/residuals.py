"""Residuals: arrays that a forward keeps for its backward. They leave `jax.shard_map` and come back with their types.

`jax.vjp` gives a function that is a pytree: its leaves are what the backward needs of the forward. Of these,

- arguments of the forward, above all the parameters, stay where they are, and the backward takes them again;
- every other leaf is kept once. Outside it has two dimensions more in front, one for each axis of the mesh, of the
  axis's size where its members differ, else of size 1. So a leaf that is alike on all members is kept once for all,
  and comes back with the type that autodiff knows it by.

The structure of the function (`Pullback`) stays with the client: it is found by tracing the forward once, and is the
same for all microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from megatron_ptdp.models.interface import DATA, TENSOR, Tree
from megatron_ptdp.models.layers import varying

AXES = (DATA, TENSOR)


@dataclass(frozen=True, eq=False)
class Pullback:
    """The function that `jax.vjp` gave, without its arrays.

    Attributes:
        tree: of the function
        leaves: where each of its leaves comes from: (True, number of the argument) or (False, number of the kept one)
        axes: for each kept array, the axes over which it differs
    """

    tree: Any
    leaves: tuple[tuple[bool, int], ...]
    axes: tuple[frozenset[str], ...]

    @classmethod
    def split(cls, function: Any, arguments: Tree) -> tuple[Pullback, list[Any]]:
        """The function without its arrays, and the residuals in the form in which they leave `jax.shard_map`."""
        leaves, tree = jax.tree.flatten(function)
        given = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(arguments))}
        kept: list[Any] = []
        numbers: dict[int, int] = {}
        sources = []
        for leaf in leaves:
            if id(leaf) in given:
                sources.append((True, given[id(leaf)]))
                continue
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(kept)
                kept.append(leaf)
            sources.append((False, numbers[id(leaf)]))
        made = cls(tree, tuple(sources), tuple(varying(leaf) for leaf in kept))
        return made, [leaf[None, None] for leaf in kept]

    def join(self, arguments: Tree, kept: Sequence[Any]) -> Callable[..., Any]:
        """The function again; the inverse of `split`."""
        given = jax.tree.leaves(arguments)
        leaves = [given[number] if argument else kept[number][0, 0] for argument, number in self.leaves]
        made: Callable[..., Any] = jax.tree.unflatten(self.tree, leaves)
        return made

    @property
    def specs(self) -> list[P]:
        """Specs of the residuals."""
        return specs_over(self.axes)


def specs_over(kinds: Sequence[frozenset[str]]) -> list[P]:
    """Specs of arrays with the two dimensions in front, from the axes over which each differs."""
    return [P(*(axis if axis in axes else None for axis in AXES)) for axes in kinds]
