"""`pw.route` and `pw.combine`: rows go to slices that the data choose, and what came of them comes back.

Each source sorts its rows by destination and says how many there are of each: all that this process hears of them.
`ir.routing.Progress` says which source sends what where, and which destination has all. Each of these is a launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pathways_ray.client import prng, routed_rows
from pathways_ray.client.array import Array
from pathways_ray.client.compiled import compiled
from pathways_ray.client.completion import as_completed
from pathways_ray.client.context import tracing
from pathways_ray.client.numbers import whole
from pathways_ray.client.placement import put_at, reshard
from pathways_ray.client.program import Program
from pathways_ray.client.routing_inside import Part, RoutedInside, combine_inside, route_inside
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.specs import spec_from_user
from pathways_ray.client.tracer import is_outside
from pathways_ray.errors import UsageError
from pathways_ray.ir.routing import Progress, Send, Start, hops_of, rounded
from pathways_ray.ir.types import Spec
from pathways_ray.jax_types import partition_spec

MOST_ROWS = (1 << 31) - 1
"""Rows of all parts of an exchange: their places are int32."""


@dataclass
class _Source:
    """Rows of one array: `x` [n, ...] with `destination` [n], in `shards` parts along its rows.

    `order` [shards, m] has the rows sorted by destination, `bins` [shards, m] the destination of each (or the number of
    destinations, for none), `rank` its place among those of its shard. `counts` [shards, destinations] and `admitted`
    are rows, `before` those that a destination gets from earlier shards and sources.
    """

    x: Array
    where: VirtualSlice
    axes: tuple[str, ...]
    shards: int
    order: Array
    bins: Array
    rank: Array
    said: Array
    counts: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    admitted: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    before: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros((0, 0), np.int32))


@dataclass
class Routed:
    """The way that rows have taken, for `pw.combine`.

    Attributes:
        counts: [sources, destinations]: the rows that chose each destination.
        dropped: for each destination, the rows beyond its capacity.
        sizes: for each destination, the rows of its part with those that pad it; 0 where nothing came.
    """

    counts: np.ndarray[Any, Any]
    dropped: list[int]
    sizes: list[int]
    _sources: list[_Source]
    _single: bool


def route(
    x: Any,
    destination: Any,
    slices: Sequence[VirtualSlice],
    capacity: int | None = None,
    *,
    spec: Any = None,
    overflow: Literal["count", "error"] = "count",
) -> tuple[list[Part], Any]:
    """Sends each row of an array to the slice that the data choose for it.

        parts, handle = pw.route(tokens, expert, slices)
        made = [f(part.rows) if part.count else None for f, part in zip(experts, parts)]
        y = pw.combine(made, handle)

    Only rows move, and only slices that get some take part. The sizes of parts follow from how many rows there are, up
    to a quarter more (8 at least), of a few sizes; so the call waits until it knows that: one small value from each
    source. It does not wait for the rows.

    In a `pw.program` it takes a capacity, waits for nothing, and all slices take part: each gets `capacity` rows, zeros
    behind those that came. Counts are values of the program then (`part.count`, `handle.counts`, `handle.dropped`), so
    there is no `if part.count`; parts and results have the bits of those outside.

    Args:
        x: an array [n, ...] on a slice, perhaps partitioned along its rows; or several, on any slices.
        destination: whole numbers [n], an array or a list: for each row the number of its slice, or -1, it goes
            nowhere. As many of them as `x` has arrays.
        capacity: rows that each slice takes at most, those of earlier arrays and rows first; all parts then have this
            size. Left out, nothing is dropped.
        spec: the layout of a part on its slice.
        overflow: whether rows beyond the capacity are counted (`handle.dropped`) or an error. In a program "count"
            also counts destinations that are no slice (`handle.out_of_range`), whose rows go nowhere; with "error" a
            call of the program waits for the counts, and raises.

    Returns:
        A `Part` for each slice, and what `pw.combine` takes.

    Raises:
        RoutingError: a destination is not the number of a slice, or there are more rows than the capacity.
        UsageError: in a program without a capacity, or in another traced function; or arguments of the wrong kind.
    """
    inside = tracing.is_inside
    if not inside and not is_outside():
        raise UsageError(
            "pw.route was called in a traced function: it stands between programs, or in a pw.program; inside of a "
            "slice use jax.lax.ragged_dot or a sort"
        )
    single = not isinstance(x, list | tuple)
    arrays, chosen = ([x], [destination]) if single else (list(x), list(destination))
    _check_options(arrays, chosen, slices, capacity, overflow)
    chosen = [np.asarray(one) if isinstance(one, list | tuple) else one for one in chosen]
    capacity = whole(capacity, 1)
    specs = [spec_from_user(spec, where.axes) for where in slices]
    for where, layout in zip(slices, specs, strict=True):
        parts = _multiple(where, layout)
        if capacity is not None and capacity % parts:
            raise UsageError(f"capacity={capacity} rows do not divide into {parts} parts on {where}; take a multiple")
    if not inside:
        return _Routing(arrays, chosen, slices, capacity, specs, overflow, single).run()
    if capacity is None:
        raise UsageError(
            "pw.route in a program takes capacity=: shapes are known there before values, so each slice gets as many "
            "rows as there may be. Without a capacity call it outside, between programs"
        )
    return route_inside(arrays, chosen, slices, specs, capacity, overflow == "error", single)


def _check_options(arrays: Sequence[Any], chosen: Sequence[Any], slices: Any, capacity: Any, overflow: str) -> None:
    if not arrays or len(arrays) != len(chosen):
        raise UsageError(f"pw.route takes as many destinations as arrays; got {len(chosen)} and {len(arrays)}")
    if not isinstance(slices, Sequence) or not slices or not all(isinstance(s, VirtualSlice) for s in slices):
        raise UsageError(f"slices= takes what pw.virtual_slice returns, at least one, not {slices!r}")
    most = MOST_ROWS // len(slices)
    if capacity is not None and whole(capacity, 1, most) is None:
        raise UsageError(f"capacity= is a number of rows, at least 1 and at most {most}, or None, not {capacity!r}")
    if overflow not in ("count", "error"):
        raise UsageError(f"overflow= is 'count' or 'error', not {overflow!r}")


def _multiple(where: VirtualSlice, spec: Spec) -> int:
    """The number of parts that the rows of a part lie in."""
    return math.prod(where.type.axis_size(axis) for axis in (spec[0] if spec else ()))


class _Routing:
    """One call of `route` between programs."""

    def __init__(
        self,
        arrays: Sequence[Any],
        chosen: Sequence[Any],
        slices: Sequence[VirtualSlice],
        capacity: int | None,
        specs: list[Spec],
        overflow: str,
        single: bool,
    ) -> None:
        self.slices, self.capacity, self.overflow = list(slices), capacity, overflow
        self.specs, self.single = specs, single
        self.sources = [_sorted(array, to, len(slices)) for array, to in zip(arrays, chosen, strict=True)]
        self.progress = Progress(len(self.sources), len(slices), capacity)
        self.pieces: dict[tuple[int, int], Array] = {}
        self.parts = [Part(None, 0) for _ in slices]
        self.heard: list[np.ndarray[Any, Any]] = []

    def run(self) -> tuple[list[Part], Routed]:
        waiting = {id(source.said): number for number, source in enumerate(self.sources)}
        for said in as_completed([source.said for source in self.sources]) if len(waiting) > 1 else [None]:
            number = waiting[id(said)] if said is not None else 0
            self._hear(number)
            pending: list[Send | Start] = list(
                self.progress.announce(number, self.sources[number].counts.sum(0).tolist())
            )
            for command in pending:  # grows meanwhile
                if isinstance(command, Send):
                    self._send(command)
                    pending += self.progress.left(*command)
                else:
                    self.parts[command.destination] = self._start(command)
        counts = np.stack([source.counts.sum(0) for source in self.sources])
        sizes = [part.rows.shape[0] if part.count else 0 for part in self.parts]
        if self.overflow == "error":
            routed_rows.check(np.concatenate(self.heard), self.capacity)
        before = np.zeros(len(self.slices), np.int64)
        for number, source in enumerate(self.sources):
            source.admitted = self._admitted(number)
            source.before = before + np.cumsum(source.admitted, 0) - source.admitted
            before = before + source.admitted.sum(0)
        return self.parts, Routed(counts, list(self.progress.dropped), sizes, self.sources, self.single)

    def _hear(self, number: int) -> None:
        source = self.sources[number]
        said = np.asarray(source.said)
        source.counts = said[:, : len(self.slices)].astype(np.int64)
        self.heard.append(said)
        routed_rows.check(said, None)

    def _admitted(self, number: int) -> np.ndarray[Any, Any]:
        """The rows of each shard of a source that each destination takes: the first ones."""
        counts = self.sources[number].counts
        rows = np.array([max(self.progress.admitted(k)[number], 0) for k in range(len(self.slices))])
        return np.clip(rows - (np.cumsum(counts, 0) - counts), 0, counts)

    def _send(self, send: Send) -> None:
        source, k = self.sources[send.source], send.destination
        given = self._admitted(send.source)[:, k]
        limits = np.cumsum([0, *given]).astype(np.int32)
        rows = self._size(k, send.rows, len(self.sources) == 1)
        move = _mover(source, self.slices[k], self.specs[k], k, rows, hops_of(given.tolist(), rows))
        self.pieces[send.source, k] = move(source.x, source.order, source.said, limits)

    def _size(self, k: int, rows: int, is_part: bool = True) -> int:
        """The size of a part, or of a piece of it, that has some rows."""
        if self.capacity is not None and is_part:
            return self.capacity
        return rounded(rows, _multiple(self.slices[k], self.specs[k]))

    def _start(self, start: Start) -> Part:
        """A destination that has all: the one piece is its part, of several it is put together there."""
        k = start.destination
        if len(self.sources) == 1:
            return Part(self.pieces.pop((0, k)), start.rows)
        came = [number for number in range(len(self.sources)) if (number, k) in self.pieces]
        pieces = [self.pieces.pop((number, k)) for number in came]
        limits = np.cumsum([0, *(self.progress.admitted(k)[number] for number in came)]).astype(np.int32)
        join = _joiner(self.slices[k], self.specs[k], self._size(k, start.rows))
        return Part(join(limits, *pieces), start.rows)


def combine(parts: Sequence[Any], handle: Routed | RoutedInside) -> Any:
    """The rows that came of `pw.route`'s parts, in the order of those that went; in a program of a handle from there.

        y = pw.combine(made, handle)

    Args:
        parts: for each slice an array [rows of its part, ...] or a `Part`, of one type but for rows; None: nothing came

    Returns:
        An array [n, ...] on the slice that the rows came from, partitioned as they were (in a program as their
        destinations were); as many as there were. Rows that went nowhere, or were dropped, are zeros.

    Raises:
        UsageError: the parts are not those of the handle.
    """
    if not isinstance(parts, Sequence) or not isinstance(handle, Routed | RoutedInside):
        raise UsageError(f"pw.combine takes what came of pw.route's parts, and its handle; not {parts!r}, {handle!r}")
    arrays = [part.rows if isinstance(part, Part) else part for part in parts]
    if len(arrays) != len(handle.sizes):
        raise UsageError(f"pw.combine takes {len(handle.sizes)} parts, one for each slice; got {len(arrays)}")
    for k, (array, size) in enumerate(zip(arrays, handle.sizes, strict=True)):
        is_array = isinstance(array, Array | jax.core.Tracer)
        if (array is None) != (size == 0) or (size and (not is_array or array.shape[:1] != (size,))):
            found = "nothing" if array is None else f"{getattr(array, 'dtype', type(array))}{np.shape(array)}"
            raise UsageError(f"part {k} has {size} rows, with those that pad it; got {found}")
    kinds = {(array.shape[1:], array.dtype) for array in arrays if array is not None}
    if len(kinds) > 1:
        raise UsageError(f"the parts have rows of different types: {sorted(map(str, kinds))}")
    made: list[Any]
    if isinstance(handle, RoutedInside):
        made = [combine_inside(source, arrays) for source in handle._sources]
    else:
        starts = np.cumsum([0, *handle.sizes])
        made = [_combined(source, arrays, starts) for source in handle._sources]
    return made[0] if handle._single else made


def _combined(source: _Source, arrays: Sequence[Any], starts: np.ndarray[Any, Any]) -> Array:
    given = [k for k in range(len(arrays)) if source.admitted[:, k].any()]
    if not given:
        kind = next(((a.shape[1:], a.dtype) for a in arrays if a is not None), (source.x.shape[1:], source.x.dtype))
        made = jax.ShapeDtypeStruct((source.x.shape[0], *kind[0]), kind[1])
        data = prng.data_type(made)
        zeros = prng.from_data(np.zeros(data.shape, data.dtype), made)
        return put_at(zeros, source.where, (source.axes,) if source.axes else ())
    offsets = np.zeros((2, *source.admitted.shape), np.int32)
    offset = 0
    for k in given:
        offsets[0][:, k] = offset + source.before[:, k]
        offset += int(starts[k + 1] - starts[k])
    offsets[1] = source.admitted
    gather = _gatherer(source)
    found: Array = gather(source.bins, source.rank, offsets, *(arrays[k] for k in given))
    return found


# --- the functions, kept with the slice that they run on --------------------------------------------------------------


def _sorted(x: Any, destination: Any, count: int) -> _Source:
    if not isinstance(x, Array) or not x.shape:
        raise UsageError(f"pw.route takes an array with rows, on a slice (pw.put places one), not {x!r}")
    if not x.shape[0]:
        raise UsageError(f"pw.route takes arrays of at least one row, and {x!r} has none: leave it out")
    if np.shape(destination) != x.shape[:1] or not jnp.issubdtype(destination.dtype, jnp.integer):
        found = f"{getattr(destination, 'dtype', type(destination))}{np.shape(destination)}"
        raise UsageError(f"destination= has a whole number for each of {x.shape[0]} rows, not {found}")
    where, spec = x._type.slice, x._type.spec
    assert where is not None
    axes = spec[0] if spec else ()
    shards = math.prod(where.type.axis_size(axis) for axis in axes)
    rows: Spec = (axes,) if axes else ()
    key = ("route sort", axes, count)
    if key not in where.functions:
        by_row = partition_spec(rows)
        sort = compiled(routed_rows.ordered, slice=where, in_specs=by_row, out_specs=by_row, static_argnums=(1, 2))
        where.functions[key] = sort
    order, bins, rank, said = where.functions[key](
        put_at(routed_rows.narrowed(destination), where, rows), shards, count
    )
    return _Source(x, where, axes, shards, order, bins, rank, said)


def _mover(source: _Source, target: VirtualSlice, layout: Spec, number: int, rows: int, hops: tuple[int, int]) -> Any:
    """Cuts a piece of `rows` rows for destination `number`, and takes it to its slice, in the layout of a part. The
    function also takes where the rows of each shard begin in it, and where the last ones end. What was made for some
    hops serves for fewer."""
    where, axes, spec, shards = source.where, source.axes, source.x._type.spec, source.shards
    key = ("route cut", spec, target, layout, number, rows)
    (least, most), move = where.functions.get(key, (hops, None))
    hops = min(least, hops[0]), max(most, hops[1])
    if move is None or hops != (least, most):
        by_row = partition_spec((axes,) if axes else ())
        taken = (partition_spec(spec), by_row, by_row, partition_spec(()))
        in_mesh = tuple(axis for axis in where.axes if axis in axes)
        sizes = [where.type.axis_size(axis) for axis in axes]
        lying = np.arange(shards).reshape(sizes).transpose([axes.index(axis) for axis in in_mesh]).ravel().tolist()

        def cut_shards(x: Any, order: Any, said: Any, limits: Any) -> Any:
            return routed_rows.compacted(x, order, said, limits, number, rows, hops, in_mesh, lying)

        def cut(x: Any, order: Any, said: Any, limits: Any) -> Any:
            if shards == 1:
                return routed_rows.cut(x, order, said, limits[1:], number, rows)[0]
            made = partition_spec((axes, *spec[1:]))
            run = jax.shard_map(cut_shards, mesh=where.mesh, in_specs=taken, out_specs=made)
            return run(x, order, said, limits)[:rows]

        made = partition_spec((axes if rows % shards == 0 else (), *spec[1:]))
        here = compiled(cut, slice=where, in_specs=taken, out_specs=made)
        to = partition_spec(layout)
        move = Program(lambda *given: reshard(here(*given), target, to), "route", slice=where)
        where.functions[key] = hops, move
    return move


def _joiner(where: VirtualSlice, spec: Spec, size: int) -> Any:
    """Puts pieces together as one part: what came of each source, without what padded it."""
    key = ("route join", spec, size)
    if key not in where.functions:

        def join(limits: Any, *pieces: Any) -> Any:
            return routed_rows.joined(limits, pieces, size)

        where.functions[key] = compiled(join, slice=where, out_specs=partition_spec(spec))
    return where.functions[key]


def _gatherer(source: _Source) -> Any:
    """Takes each row's result from the parts."""
    where, axes = source.where, source.axes
    key = ("route gather", axes)
    if key not in where.functions:

        def gather(bins: Any, rank: Any, offsets: Any, *parts: Any) -> Any:
            return routed_rows.gathered(bins, rank, offsets[0], offsets[1], parts)

        by_row = partition_spec((axes,) if axes else ())

        def specs(count: int) -> Any:
            return compiled(gather, slice=where, in_specs=(by_row, by_row, None, *(None,) * count), out_specs=by_row)

        made: dict[int, Any] = {}

        def run(bins: Any, rank: Any, offsets: Any, *parts: Any) -> Any:
            if len(parts) not in made:
                made[len(parts)] = specs(len(parts))
            return made[len(parts)](bins, rank, offsets, *parts)

        where.functions[key] = run
    return where.functions[key]
