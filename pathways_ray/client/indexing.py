"""Indexing of arrays on slices: one launch, however many steps JAX would take.

What changes from one index to the next is an argument of the launch: numbers, arrays, and where a window begins, which
is what a slice of step 1 takes of a dimension. So `x[i : i + 8]` is one program, whatever `i` is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from pathways_ray.client.always_jitted import always_jitted

_ENTRIES = 64
"""Entries that one launch of an iteration makes."""

_MOST = np.iinfo(np.int32).max
"""Entries of a dimension whose windows begin at a number of 32 bits."""

_TAKEN = object()


def take(array: Any, index: Any) -> Any:
    """`array[index]` as one operation, whose arguments are numbers, arrays and starts of windows. The rest is part of
    it."""
    if isinstance(index, list):
        raise TypeError(f"a list is no index of an array, in JAX as here; write x[np.array({index!r})]")
    parts = index if isinstance(index, tuple) else (index,)
    shape: list[Any] = []
    values: list[Any] = []
    starts: list[int] = []
    dimensions = _dimensions(array, parts)
    for number, part in enumerate(parts):
        if isinstance(part, list | tuple):
            part = np.asarray(part, None if part else np.int32)
        if isinstance(part, slice):
            bounds = slice(*(_bound(k, index) for k in (part.start, part.stop, part.step)))
            start, size = _window(array, bounds, dimensions[number] if dimensions else -1)
            if size < 0:
                shape.append(("slice", bounds.start, bounds.stop, bounds.step))
            else:
                shape.append(("window", dimensions[number], size))
                starts.append(start)
        elif part is None or part is Ellipsis:
            shape.append(part)
        elif isinstance(part, bool | np.bool_) or str(getattr(part, "dtype", "")) == "bool":
            # The shape of the result depends on where it is true.
            shape.append(("mask", np.asarray(part).tobytes(), np.shape(part)))
        else:
            _check(part, index)
            shape.append(_TAKEN)
            # Compiled, JAX counts from the end in the type of the index: sizes may not fit into 8 or 16 bits.
            is_narrow = isinstance(part, np.generic) and part.dtype.itemsize < 4
            values.append(int(part) if is_narrow else part)
    return _taker(tuple(shape))(array, *starts, *values)


def _dimensions(array: Any, parts: tuple[Any, ...]) -> list[int]:
    """The dimension that each part of an index of slices, numbers, None and `...` is for; none for another index."""
    rest = [part for part in parts if part is not None and part is not Ellipsis]
    is_plain = all(isinstance(part, slice) or _is_number(part) for part in rest)
    if not is_plain or len(rest) > array.ndim or sum(part is Ellipsis for part in parts) > 1:
        return []
    found, dimension = [], 0
    for part in parts:
        found.append(dimension)
        dimension += array.ndim - len(rest) if part is Ellipsis else part is not None
    return found


def _is_number(part: Any) -> bool:
    kind = getattr(part, "dtype", None)
    whole = kind is not None and jax.numpy.issubdtype(kind, np.integer)
    return np.shape(part) == () if whole else isinstance(part, int) and not isinstance(part, bool)


def _window(array: Any, bounds: slice, dimension: int) -> tuple[int, int]:
    """The start of a slice of a dimension, and how many entries it takes; -1 where these are part of the program: it is
    of other steps, has all or none of the entries, or is of a dimension whose shards would have to be put together."""
    if dimension < 0 or bounds.step not in (None, 1):
        return 0, -1
    length, spec = array.shape[dimension], array._type.spec
    start, stop, _ = bounds.indices(length)
    is_partitioned = dimension < len(spec) and spec[dimension]
    if is_partitioned or length > _MOST or not 0 < stop - start < length:
        return 0, -1
    return start, stop - start


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
    windows = [part[1:] for part in shape if isinstance(part, tuple) and part[0] == "window"]

    def getitem(array: Any, *values: Any) -> Any:
        rest = iter(values)
        if windows:
            starts, sizes = [0] * array.ndim, [*array.shape]
            for (dimension, size), start in zip(windows, rest, strict=False):
                starts[dimension], sizes[dimension] = start, size
            array = jax.lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)
        return array[tuple(next(rest) if part is _TAKEN else _part(part) for part in shape)]

    return always_jitted(getitem)


def _part(part: Any) -> Any:
    if not isinstance(part, tuple):
        return part
    if part[0] == "window":
        return slice(None)
    if part[0] == "slice":
        return slice(*part[1:])
    return np.frombuffer(part[1], bool).reshape(part[2])


def entries(array: Any) -> Iterator[Any]:
    """The entries of the first dimension."""
    for start in range(0, len(array), _ENTRIES):
        count = min(_ENTRIES, len(array) - start)
        _, size = _window(array, slice(start, start + count), 0)
        yield from _split(array, start, count) if size < 0 else _split_window(array, start, count)


def _unstacked(array: Any, start: int, count: int) -> list[Any]:
    return [array[k] for k in range(start, start + count)]


def _unstacked_window(array: Any, start: Any, count: int) -> list[Any]:
    return _unstacked(jax.lax.dynamic_slice_in_dim(array, start, count, allow_negative_indices=False), 0, count)


_split = always_jitted(_unstacked, static_argnums=(1, 2))
_split_window = always_jitted(_unstacked_window, static_argnums=2)
