"""Indexing of arrays on slices: one launch, however many steps JAX would take."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jax
import numpy as np

_ENTRIES = 64
"""Entries that one launch of an iteration makes."""

_TAKEN = object()


def take(array: Any, index: Any) -> Any:
    """`array[index]` as one operation: numbers and arrays in an index are its arguments, the rest is part of it."""
    if isinstance(index, list):
        raise TypeError(f"a list is no index of an array, in JAX as here; write x[np.array({index!r})]")
    parts = index if isinstance(index, tuple) else (index,)
    shape: list[Any] = []
    values: list[Any] = []
    for part in parts:
        if isinstance(part, list):
            part = np.asarray(part, None if part else np.int32)
        if isinstance(part, slice):
            shape.append(("slice", *(_bound(k, index) for k in (part.start, part.stop, part.step))))
        elif part is None or part is Ellipsis:
            shape.append(part)
        elif isinstance(part, bool | np.bool_) or str(getattr(part, "dtype", "")) == "bool":
            # The shape of the result depends on where it is true.
            shape.append(("mask", np.asarray(part).tobytes(), np.shape(part)))
        else:
            _check(part, index)
            shape.append(_TAKEN)
            values.append(part)
    return _taker(tuple(shape))(array, *values)


def _bound(bound: Any, index: Any) -> int | None:
    """A bound of a slice."""
    try:
        return None if bound is None else operator.index(bound)
    except TypeError:
        raise TypeError(f"bounds of slices are whole numbers or None; got {index!r}") from None


def _check(part: Any, index: Any) -> None:
    kind = getattr(part, "dtype", None)
    whole = jax.numpy.issubdtype(kind, np.integer) if kind is not None else hasattr(part, "__index__")
    if not whole:
        raise TypeError(
            "an index of an array is made of whole numbers, slices, None, ... and arrays of whole numbers or booleans; "
            f"got {index!r}"
        )


@lru_cache(1024)
def _taker(shape: tuple[Any, ...]) -> Any:
    def getitem(array: Any, *values: Any) -> Any:
        rest = iter(values)
        return array[tuple(next(rest) if part is _TAKEN else _part(part) for part in shape)]

    return jax.jit(getitem)


def _part(part: Any) -> Any:
    if not isinstance(part, tuple):
        return part
    if part[0] == "slice":
        return slice(*part[1:])
    return np.frombuffer(part[1], bool).reshape(part[2])


def entries(array: Any) -> Iterator[Any]:
    """The entries of the first dimension."""
    for start in range(0, len(array), _ENTRIES):
        yield from _split(array, start, min(start + _ENTRIES, len(array)))


def _unstacked(array: Any, start: int, stop: int) -> list[Any]:
    return [array[k] for k in range(start, stop)]


_split = jax.jit(_unstacked, static_argnums=(1, 2))
