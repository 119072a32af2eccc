"""Partition specs as users write them, in the canonical form of the graph."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pathways_ray.client import leaves, source_info
from pathways_ray.errors import SpecError
from pathways_ray.ir.types import Spec, canonical_spec, check_spec, plain_name


def spec_from_user(value: PartitionSpec | None, axes: tuple[str, ...], rank: int | None = None) -> Spec:
    """The canonical form of `value`; None means replicated.

    Args:
        rank: the number of dimensions of the array, where it is known.

    Raises:
        SpecError: an unknown axis, an axis used twice, an entry that is no axis name, or more entries than dimensions.
    """
    if value is None:
        return ()
    if rank is not None and len(value) > rank:
        raise SpecError(
            f"{value} has {len(value)} entries, and the array has {rank} dimensions; give one entry for each dimension "
            "at most"
        )
    entries: list[tuple[str, ...]] = []
    for entry in value:
        if entry is None:
            entries.append(())
        elif isinstance(entry, str):
            entries.append((plain_name(entry),))
        elif isinstance(entry, tuple) and all(isinstance(axis, str) for axis in entry):
            entries.append(tuple(map(plain_name, entry)))
        else:
            raise SpecError(f"entry {entry!r} of {value} is no axis name; write a name, a tuple of names, or None")
    spec = canonical_spec(tuple(entries))
    check_spec(spec, axes)
    return spec


def warn_of_memory(target: Any) -> None:
    """Warns, once for each, of a memory kind in what an array is put to: slices have the memory of their devices."""
    kind = target if isinstance(target, jax.memory.Space) else getattr(target, "memory_kind", None)
    if kind not in (None, "device", jax.memory.Space.Device, jax.memory.Space.Any):
        _warn_of_kind(str(kind))


@functools.cache
def _warn_of_kind(kind: str) -> None:
    text = (
        f"{kind} is left out: arrays on slices lie in the memory of the slice's devices, whatever memory is asked for"
    )
    warnings.warn(text, UserWarning, stacklevel=source_info.stacklevel())


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


def ranks_of(values: Sequence[Any]) -> list[int | None]:
    """The number of dimensions of each array; None for what does not say."""
    return [len(shape) if isinstance(shape := getattr(value, "shape", None), tuple) else None for value in values]


def _broadcast(specs: Any, tree: Any, what: str) -> list[PartitionSpec | None]:
    """The spec for each leaf of `tree`, as it was given."""
    # A None among the specs is one (replicated), a None among the values is no value: wrapped, they can be told apart.
    given, prefix = jax.tree.flatten(specs, is_leaf=is_spec)
    if wrong := [leaf for leaf in given if not is_spec(leaf)]:
        raise SpecError(f"{what} holds {wrong[0]!r}; its leaves are jax.sharding.PartitionSpec or None")
    wrapped = jax.tree.unflatten(prefix, [_Leaf(leaf) for leaf in given])
    try:
        full: list[_Leaf] = jax.tree.leaves(jax.tree.broadcast(wrapped, tree))
    except ValueError as error:
        raise SpecError(f"{what} is no pytree prefix of the values it describes: {error}") from None
    return [leaf.spec for leaf in full]


def broadcast_specs(
    specs: Any, tree: Any, axes: tuple[str, ...], what: str, ranks: Sequence[int | None] | None = None
) -> list[Spec]:
    """One spec for each leaf of `tree`, where `specs` is a pytree prefix of it (a single spec stands for all).

    Args:
        ranks: the number of dimensions of each leaf.

    Raises:
        SpecError: `specs` is no prefix of `tree`, or holds what is no spec.
    """
    full = _broadcast(specs, tree, what) if ranks is None or not is_spec(specs) else [specs] * len(ranks)
    found: list[Spec] = []
    before: tuple[PartitionSpec | None, int | None] | None = None
    for number, one in enumerate(full):
        given_here = one, ranks[number] if ranks is not None else None
        if before is not None and before[0] is given_here[0] and before[1] == given_here[1]:
            found.append(found[-1])  # one spec for many leaves is read once
            continue
        try:
            found.append(spec_from_user(given_here[0], axes, given_here[1]))
        except SpecError as error:
            at = leaves.path(tree, number)
            raise SpecError(f"{what}{f', leaf {at}' if at else ''}: {error}") from None
        before = given_here
    return found
