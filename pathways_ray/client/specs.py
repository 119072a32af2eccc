"""Partition specs as users write them, in the canonical form of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pathways_ray.errors import SpecError
from pathways_ray.ir.types import Spec, canonical_spec, check_spec


def spec_from_user(value: PartitionSpec | None, axes: tuple[str, ...]) -> Spec:
    """The canonical form of `value`; None means replicated.

    Raises:
        SpecError: an unknown axis, an axis used twice, or an entry that is no axis name.
    """
    if value is None:
        return ()
    entries: list[tuple[str, ...]] = []
    for entry in value:
        if entry is None:
            entries.append(())
        elif isinstance(entry, str):
            entries.append((entry,))
        elif isinstance(entry, tuple) and all(isinstance(axis, str) for axis in entry):
            entries.append(entry)
        else:
            raise SpecError(f"entry {entry!r} of {value} is no axis name; write a name, a tuple of names, or None")
    spec = canonical_spec(tuple(entries))
    check_spec(spec, axes)
    return spec


@dataclass(frozen=True)
class _Leaf:
    """A spec as an opaque leaf of a pytree."""

    spec: PartitionSpec | None


def is_spec(value: Any) -> bool:
    return value is None or isinstance(value, PartitionSpec)


def check_specs(specs: Any, axes: tuple[str, ...], what: str) -> None:
    """Raises `SpecError` unless every leaf of a pytree of specs is one, with known axes."""
    for leaf in jax.tree.leaves(specs, is_leaf=is_spec):
        if not is_spec(leaf):
            raise SpecError(f"{what} holds {leaf!r}; its leaves are jax.sharding.PartitionSpec or None")
        spec_from_user(leaf, axes)


def broadcast_specs(specs: Any, tree: Any, axes: tuple[str, ...], what: str) -> list[Spec]:
    """One spec for each leaf of `tree`, where `specs` is a pytree prefix of it (a single spec stands for all).

    Raises:
        SpecError: `specs` is no prefix of `tree`, or holds what is no spec.
    """
    # A None among the specs is one (replicated), a None among the values is no value: wrapped, they can be told apart.
    leaves, prefix = jax.tree.flatten(specs, is_leaf=is_spec)
    if wrong := [leaf for leaf in leaves if not is_spec(leaf)]:
        raise SpecError(f"{what} holds {wrong[0]!r}; its leaves are jax.sharding.PartitionSpec or None")
    wrapped = jax.tree.unflatten(prefix, [_Leaf(leaf) for leaf in leaves])
    try:
        full = jax.tree.leaves(jax.tree.broadcast(wrapped, tree))
    except ValueError as error:
        raise SpecError(f"{what} is no pytree prefix of the values it describes: {error}") from None
    return [spec_from_user(leaf.spec, axes) for leaf in full]
