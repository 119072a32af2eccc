"""`pw.padded`: a function of batches of any size that is compiled for a few sizes."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from types import EllipsisType
from typing import Any, cast

import jax
import numpy as np
from jax.tree_util import tree_flatten

from pathways_ray.client import prng
from pathways_ray.client.argument_types import extended_dtype, to_numpy
from pathways_ray.client.array import Array
from pathways_ray.client.codes import jax_settings
from pathways_ray.client.compiled import CompiledFunction
from pathways_ray.client.joined_calls import Call, JoinedCalls
from pathways_ray.client.methods import Method, deep_copy
from pathways_ray.client.numbers import whole
from pathways_ray.client.priorities import PRIORITY
from pathways_ray.client.program import Program
from pathways_ray.client.slice_array import SliceArray
from pathways_ray.errors import UsageError

_KEPT_TIMES = 4
"""Rows of a batch that keep more memory than so many times their own are copied out of it."""

_flatten: Callable[[Any], tuple[list[Any], Any]] = tree_flatten  # without `jax.tree.flatten` around it


class Padded(Method):
    """The result of `pw.padded`."""

    def __init__(self, fun: Any, sizes: Sequence[int], in_axes: Any, out_axes: Any, join_calls: bool = False) -> None:
        self.fun = fun
        self.sizes = tuple(sorted(set(sizes)))
        self.in_axes, self.out_axes = in_axes, out_axes
        self._known: dict[Any, list[int | None]] = {}
        self._ask = fun.ask if isinstance(fun, CompiledFunction | Program) and _are_axes(out_axes) else fun
        self._joined = JoinedCalls(self._together, self.sizes[-1]) if join_calls else None
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any) -> Any:
        """Calls the function for the next size; waits for the results, and returns them without the padding."""
        if self._joined is None:
            return self._alone(args)
        leaves, tree, axes, count = self._batch(args)
        batches = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
        if any(isinstance(leaf, SliceArray) or extended_dtype(leaf) is not None for leaf in batches):
            return self._alone(args)  # to be joined, it would have to be fetched, or is no NumPy array
        kinds = [
            id(leaf) if axis is None else (np.asarray(leaf).dtype, _is_weak(leaf), _rest(leaf, axis))
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        # The thread of another call may have other settings of JAX, or another priority.
        return self._joined.outcome(Call((tree, jax_settings(), PRIORITY.get(), *kinds), count, leaves))

    def _together(self, calls: Sequence[Call]) -> list[Any]:
        """The results of calls of one kind, computed as one batch."""
        (tree, *_), first = cast(tuple[Any, ...], calls[0].kind), calls[0].arguments
        axes = self._axes_of("in_axes", tree, first)
        joined = [
            first[k] if axis is None else _concatenated([call.arguments[k] for call in calls], axis)
            for k, axis in enumerate(axes)
        ]
        out = self._alone(jax.tree.unflatten(tree, joined))
        leaves, made = _flatten(out)
        out_axes = self._axes_of("out_axes", made, leaves)
        ends = list(itertools.accumulate(call.rows for call in calls))
        parts = [
            _copies(leaf, len(calls)) if axis is None else list(map(_detached, np.split(leaf, ends[:-1], axis)))
            for leaf, axis in zip(leaves, out_axes, strict=True)
        ]
        return [made.unflatten([part[k] for part in parts]) for k in range(len(calls))]

    def _alone(self, args: tuple[Any, ...]) -> Any:
        # Loops, and not many functions: beside other processes each one that a call goes through is read from memory.
        leaves, tree, axes, count = self._batch(args)
        size = self.sizes[bisect_left(self.sizes, count)]
        if size > count:
            for k, axis in enumerate(axes):
                if axis is not None:
                    leaves[k] = self._pad(leaves[k], axis, size - count)
            args = tree.unflatten(leaves)
        leaves, tree = _flatten(self._ask(*args))
        for k, axis in enumerate(self._axes_of("out_axes", tree, leaves)):
            if axis is not None:
                leaves[k] = _cut(_value(leaves[k]), axis, size, count)
        return tree.unflatten(leaves)

    def __deepcopy__(self, memo: Any) -> Any:
        made = deep_copy(self, memo, _known={}, _joined=None)
        if self._joined is not None:
            made._joined = JoinedCalls(made._together, self.sizes[-1])
        return made

    def calls(self, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """The types of the calls for all sizes, given those of a call of some size."""
        leaves, tree = jax.tree.flatten(args)
        axes = self._axes_of("in_axes", tree, leaves)
        self._check_axes(leaves, axes)
        return [
            jax.tree.unflatten(
                tree,
                [leaf if axis is None else _sized(leaf, axis, size) for leaf, axis in zip(leaves, axes, strict=True)],
            )
            for size in self.sizes
        ]

    def _axes_of(self, what: str, tree: Any, leaves: Sequence[Any]) -> list[int | None]:
        """The axis of each leaf of a tree of arguments or results."""
        try:
            found = self._known.get((what, tree))
        except Exception:  # from what a user's class of pytrees says beside its children
            found = None
        if found is None:
            axes = self.in_axes if what == "in_axes" else self.out_axes
            found = _axes(axes, jax.tree.unflatten(tree, leaves), what)
            with contextlib.suppress(Exception):
                self._known[what, tree] = found
        return found

    def _batch(self, args: tuple[Any, ...]) -> tuple[list[Any], Any, list[int | None], int]:
        """The leaves of the arguments, their tree, the axis of each, and how many rows there are."""
        leaves, tree = _flatten(args)
        axes = self._axes_of("in_axes", tree, leaves)
        counts: set[int] = set()
        try:
            for leaf, axis in zip(leaves, axes, strict=True):
                if axis is not None:
                    counts.add(leaf.shape[axis] if type(leaf) is np.ndarray else self._shape(leaf)[axis])
        except IndexError:
            self._check_axes(leaves, axes)
            raise
        if not counts:
            raise UsageError(
                f"{self._name} is given no batch: no argument has an array where in_axes={self.in_axes} has an axis"
            )
        if len(counts) != 1:
            raise UsageError(
                f"{self._name} takes batches of one size, not of {sorted(counts)} (in_axes={self.in_axes})"
            )
        (count,) = counts
        if count > self.sizes[-1]:
            raise UsageError(f"a batch of {count} is larger than the largest of sizes={self.sizes} of {self._name}")
        return leaves, tree, axes, count

    def _shape(self, leaf: Any) -> tuple[int, ...]:
        if isinstance(leaf, np.ma.MaskedArray):
            to_numpy(leaf, f"an argument of {self._name}")  # raises: filled up or joined, it would lose its mask
        return np.shape(leaf)

    def _pad(self, leaf: Any, axis: int, missing: int) -> Any:
        if isinstance(leaf, SliceArray):
            raise UsageError(
                f"{self._name} pads batches that come from this process; {leaf!r} lies on a slice, where each size "
                "would be compiled"
            )
        if type(leaf) is not np.ndarray and extended_dtype(leaf) is not None:
            return prng.from_data(self._pad(prng.to_data(leaf), axis % leaf.ndim, missing), leaf)
        if _is_weak(leaf):
            shape = list(leaf.shape)
            shape[axis] = missing
            return _concatenated([leaf, jax.lax.full_like(leaf, 0, shape=tuple(shape))], axis)
        value = np.asarray(leaf)
        shape = list(value.shape)
        shape[axis] += missing
        filled = np.zeros(shape, value.dtype)  # np.pad takes ten times as long for a small batch
        filled[_first(axis, value.shape[axis])] = value
        return filled

    def _check_axes(self, leaves: Sequence[Any], axes: Sequence[int | None]) -> None:
        """Raises `UsageError` for an argument without the axis that its batch is to lie along."""
        for leaf, axis in zip(leaves, axes, strict=True):
            if axis is not None and not -np.ndim(leaf) <= axis < np.ndim(leaf):
                raise UsageError(
                    f"an argument of {self._name} is of type {type(leaf).__name__} and shape {np.shape(leaf)}, without "
                    f"an axis {axis} for a batch; say which have one with in_axes= (in_axes={self.in_axes})"
                )

    @property
    def _name(self) -> str:
        return str(getattr(self.fun, "__name__", "the function"))

    def __repr__(self) -> str:
        return f"pw.padded({self._name}, sizes={self.sizes})"


def padded(
    fun: Callable[..., Any] | None = None,
    *,
    sizes: Sequence[int],
    in_axes: Any = 0,
    out_axes: Any = 0,
    join_calls: bool = False,
) -> Any:
    """Makes a function of batches one that is compiled for a few sizes only.

        serve = pw.padded(serve, sizes=(1, 8, 32), in_axes=(None, 0))
        pw.warmup(serve, (params, np.zeros((1, 64), np.float32)))
        y = serve(params, rows)  # 1 to 32 rows

    A batch is filled up with zeros to the next of the sizes. So the rows of a batch must not depend on each other.

    Args:
        fun: a `pw.compiled`, `pw.program` or `pw.jit` function of positional arguments.
        sizes: of batches, positive.
        in_axes: for each argument the axis of its batch, or None for one that has none; a pytree prefix, as in
            `jax.vmap`.
        out_axes: the same for the results. Those with an axis are fetched, and returned as NumPy arrays.
        join_calls: has calls of several threads that come while others are under way be computed as one batch, up to
            the largest of the sizes. Arguments without a batch have to be the same objects, and `pw.priority` the same.
            The last bits of a row may then depend on how many rows it was computed with, as they do on the size; an
            error is that of all calls that were joined.

    Raises:
        UsageError: an option of the wrong kind. When called: a batch larger than all sizes, batches of several sizes,
            one that lies on a slice, or an argument or result without such an axis.
    """
    if fun is None:
        return lambda f: padded(f, sizes=sizes, in_axes=in_axes, out_axes=out_axes, join_calls=join_calls)
    if not callable(fun):
        raise UsageError(f"pw.padded takes a function, not {fun!r}")
    numbers = [whole(size, 1) for size in sizes] if isinstance(sizes, Iterable) else []
    given = [number for number in numbers if number is not None]
    if not given or len(given) < len(numbers):
        raise UsageError(f"sizes= of pw.padded are positive numbers of rows, not {sizes!r}")
    return Padded(fun, given, in_axes, out_axes, join_calls)


def _copies(leaf: Any, count: int) -> list[Any]:
    """A result that is not of a batch, for each of several callers: who deletes or donates it has it for himself."""
    return [leaf, *(copy.copy(leaf) for _ in range(count - 1))]


def _is_weak(leaf: Any) -> bool:
    return type(leaf) is not np.ndarray and bool(getattr(leaf, "weak_type", False))


def _concatenated(leaves: Sequence[Any], axis: int) -> Any:
    """Batches as one, of a weak type if they have one, which NumPy's have not."""
    if _is_weak(leaves[0]):
        return jax.lax.concatenate(leaves, axis % leaves[0].ndim)
    return np.concatenate(leaves, axis)


def _detached(rows: Any) -> Any:
    """Rows of a batch, as a copy where they would keep much more than themselves in memory."""
    kept, base = 0, getattr(rows, "base", None)  # keys have none
    while isinstance(base, np.ndarray):
        kept, base = base.nbytes, base.base
    if kept <= _KEPT_TIMES * rows.nbytes:
        return rows
    made = rows.copy()
    made.flags.writeable = rows.flags.writeable
    return made


def _axes(axes: Any, tree: Any, what: str) -> list[int | None]:
    """The axis of each leaf of a tree."""
    given, prefix = jax.tree.flatten(axes, is_leaf=lambda axis: axis is None)
    try:
        full = jax.tree.broadcast(jax.tree.unflatten(prefix, [_Box(axis) for axis in given]), tree)
    except ValueError as error:
        raise UsageError(f"{what} of pw.padded is no pytree prefix: {error}") from None
    found = [box.axis for box in jax.tree.leaves(full)]
    if not all(axis is None or isinstance(axis, int) for axis in found):
        raise UsageError(f"{what} of pw.padded are axes or None, not {axes!r}")
    return found


class _Box:
    """An axis as an opaque leaf of a pytree: None among axes is one."""

    def __init__(self, axis: Any) -> None:
        self.axis = axis


def _rest(leaf: Any, axis: int) -> tuple[int, ...]:
    """The shape of a leaf but for its batch."""
    shape = list(np.shape(leaf))
    del shape[axis]
    return tuple(shape)


def _are_axes(out_axes: Any) -> bool:
    """Whether all results have an axis, and so are fetched."""
    return all(axis is not None for axis in jax.tree.leaves(out_axes, is_leaf=lambda axis: axis is None))


def _value(leaf: Any) -> Any:
    """The value of a result. `jax.device_get` gives it after a dozen calls more, and gives typed keys."""
    if type(leaf) is np.ndarray:
        return leaf
    return leaf.__array__() if type(leaf) is Array and leaf._type.extended is None else jax.device_get(leaf)


def _cut(value: np.ndarray[Any, Any], axis: int, size: int, count: int) -> np.ndarray[Any, Any]:
    if not -value.ndim <= axis < value.ndim or value.shape[axis] != size:
        raise UsageError(
            f"a result of shape {value.shape} has no batch of {size} along axis {axis}; say which have one with "
            "out_axes="
        )
    return _detached(value[_first(axis, count)])


def _first(axis: int, count: int) -> tuple[slice | EllipsisType, ...]:
    """The index of the first `count` rows along an axis. `np.moveaxis` would take a tenth of a small call."""
    if axis < 0:
        return (..., slice(count), *(slice(None),) * (-1 - axis))
    return (*(slice(None),) * axis, slice(count))


def _sized(leaf: Any, axis: int, size: int) -> jax.ShapeDtypeStruct:
    shape = list(np.shape(leaf))
    shape[axis] = size
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    if extended_dtype(leaf) is None:
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type=_is_weak(leaf))
