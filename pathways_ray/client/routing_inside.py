"""`pw.route` and `pw.combine` in a program: shapes are known before values, so each slice gets a part of `capacity`
rows, whatever the data say.

Each step is a node. The rows of a source are ordered and cut where they lie, as an operation of JAX would run there;
pieces and counts leave by transfers; where there are several sources, a slice joins what came. Nobody waits for counts,
unless an error is asked for beyond the capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pathways_ray.client import routed_rows
from pathways_ray.client.compiled import CompiledFunction, compiled
from pathways_ray.client.export import Exported
from pathways_ray.client.jit import jit
from pathways_ray.client.placement import reshard
from pathways_ray.client.routed_rows import RowCheck
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.tracer import operand
from pathways_ray.errors import UsageError
from pathways_ray.ir.types import Spec
from pathways_ray.jax_types import partition_spec


class Part(NamedTuple):
    """The rows that came to a slice: the first `count` ones of `rows`, zeros behind them.

    Outside of programs `rows` is None where nothing came. In a program both are traced.
    """

    rows: Any
    count: Any


class Ordered(NamedTuple):
    """The rows of a source, as `routed_rows` says, on its slice; each source is one shard.

    `admitted` [1, destinations] are the rows that each slice takes, `before` those that it takes of earlier sources.
    """

    bins: Any
    rank: Any
    said: Any
    admitted: Any
    before: Any


@dataclass
class RoutedInside:
    """The way that rows have taken in a program, for `pw.combine`.

    Attributes:
        counts: int32 [sources, destinations]: the rows that chose each destination.
        dropped: int32 [destinations]: the rows beyond the capacity.
        out_of_range: int32 []: the rows whose destination is no slice, nor -1. They go nowhere.
        sizes: for each destination the capacity.
    """

    counts: Any
    dropped: Any
    out_of_range: Any
    sizes: list[int]
    _sources: list[Ordered]
    _single: bool


def route_inside(
    arrays: Sequence[Any],
    destinations: Sequence[Any],
    slices: Sequence[VirtualSlice],
    specs: Sequence[Spec],
    capacity: int,
    checked: bool,
    single: bool,
) -> tuple[list[Part], RoutedInside]:
    """Adds a routed exchange to the program that is traced; the arguments are those of `pw.route`, looked at.

    Args:
        checked: whether rows out of range, or beyond the capacity, are an error of the call.
    """
    values = [operand(array, "pw.route", 0) for array in arrays]
    chosen = [operand(routed_rows.narrowed(array), "pw.route", 1) for array in destinations]
    for value, choice in zip(values, chosen, strict=True):
        _check_rows(value, choice)
    count = len(slices)
    found = [_order(value, choice, count) for value, choice in zip(values, chosen, strict=True)]
    said = [one[3] for one in found]
    if checked:
        _RowCheck(slices[0], capacity)(*said)
    sources, pieces = [], []
    for number, (value, (order, bins, rank, own)) in enumerate(zip(values, found, strict=True)):
        admitted, before = _admit(own, *said[:number], capacity=capacity)
        sources.append(Ordered(bins, rank, own, admitted, before))
        rows = capacity if len(values) == 1 else min(capacity, value.shape[0])
        pieces.append(_cut(value, order, own, admitted, rows))
    parts = [_part(slices[k], specs[k], capacity, [one[k] for one in pieces]) for k in range(count)]
    counts, dropped, wrong = _sums(*said, capacity=capacity)
    return parts, RoutedInside(counts, dropped, wrong, [capacity] * count, sources, single)


def combine_inside(source: Ordered, parts: Sequence[Any]) -> Any:
    """The rows of a source that came of the parts."""
    return _gather(source.bins, source.rank, source.admitted, source.before, *parts)


def _check_rows(value: Any, choice: Any) -> None:
    if not value.shape or not value.shape[0]:
        raise UsageError(f"pw.route takes an array with rows, not {jax.typeof(value)}")
    if choice.shape != value.shape[:1] or not jnp.issubdtype(choice.dtype, jnp.integer):
        raise UsageError(
            f"destination= has a whole number for each of {value.shape[0]} rows, not {choice.dtype}{choice.shape}"
        )


def _part(where: VirtualSlice, spec: Spec, capacity: int, pieces: Sequence[tuple[Any, Any]]) -> Part:
    """The part of a slice, of the piece [rows, ...] of each source, which has so many rows for it."""
    layout = partition_spec(spec)
    if len(pieces) == 1:
        return Part(*reshard(pieces[0], where, (layout, partition_spec(()))))
    key = ("route join inside", spec, capacity)
    if key not in where.functions:

        def route_join(pieces: Any) -> Any:
            limits = jnp.cumsum(jnp.stack([jnp.int32(0), *(count for _, count in pieces)]))
            return routed_rows.joined(limits, [piece for piece, _ in pieces], capacity), limits[-1]

        where.functions[key] = compiled(route_join, slice=where, out_specs=(layout, partition_spec(())))
    return Part(*where.functions[key](list(pieces)))


# --- nodes on the slice of a source -----------------------------------------------------------------------------------


def route_order(x: Any, destination: Any, count: int) -> Any:
    """The order of rows, as `routed_rows.ordered` has it. `x` is there to say where."""
    return routed_rows.ordered(destination, 1, count)


def route_cut(x: Any, order: Any, said: Any, admitted: Any, rows: int) -> list[tuple[Any, Any]]:
    """A piece [rows, ...] for each destination, and how many of its rows are there."""
    count = admitted.shape[1]
    return [(routed_rows.cut(x, order, said, admitted[:, k], k, rows)[0], admitted[0, k]) for k in range(count)]


def route_admit(said: Any, *earlier: Any, capacity: int) -> tuple[Any, Any]:
    """The rows of a source that each destination takes, and those that it takes of earlier ones."""
    count = said.shape[1] - 3
    before = sum((one[:, :count] for one in earlier), jnp.zeros((1, count), jnp.int32))
    return jnp.clip(capacity - before, 0, said[:, :count]), jnp.minimum(before, capacity)


def route_sums(*said: Any, capacity: int) -> tuple[Any, Any, Any]:
    """The figures of a routed exchange: counts, dropped rows, those out of range."""
    counts = jnp.concatenate([one[:, :-3] for one in said])
    return counts, jnp.maximum(counts.sum(0, dtype=jnp.int32) - capacity, 0), sum(one[0, -2] for one in said)


def route_gather(bins: Any, rank: Any, admitted: Any, before: Any, *parts: Any) -> Any:
    """The result of each row of a source."""
    sizes = np.array([part.shape[0] for part in parts], np.int32)
    starts = jnp.asarray(np.cumsum(sizes) - sizes, jnp.int32) + before
    return routed_rows.gathered(bins, rank, starts, admitted, parts)


_order = jit(route_order, static_argnums=(2,))
_cut = jit(route_cut, static_argnums=(4,))
_admit = jit(route_admit, static_argnames=("capacity",))
_sums = jit(route_sums, static_argnames=("capacity",))
_gather = jit(route_gather)


# --- errors that were asked for ---------------------------------------------------------------------------------------


class _RowCheck(CompiledFunction):
    """Has a call of the program hear what is said of rows, and raise what they deserve: a node without results."""

    def __init__(self, slice: VirtualSlice, capacity: int) -> None:
        super().__init__(lambda *said: jnp.concatenate(said), slice, None, None, (), ())
        self.__name__ = "route_check"
        self.capacity = capacity

    def _export(self, *arguments: Any) -> Exported:
        return replace(
            super()._export(*arguments),
            results=(),
            output_tree=jax.tree.structure(()),
            reports=(RowCheck(self.capacity),),
            effects=frozenset(jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().effects),
            run=lambda *_: (),
        )
