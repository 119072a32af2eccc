"""Rows by destination, as JAX functions: who goes where, pieces cut and joined, and results back in order.

`pw.route` and `pw.combine` are made of these between programs (`routing`) and in them (`routing_inside`). `shards` are
parts of the rows of one array that are taken apart by themselves; `bins` [shards, m] the destination of each row, or
the number of destinations for none; `rank` its place among the rows of its shard and bin; `said` [shards,
destinations + 3] how many rows each destination has, how many go nowhere and how many are out of range, and one
destination that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pathways_ray.errors import RoutingError

NOWHERE = -1
"""The destination of a row that goes to no slice."""

BLOCK = 64
"""Places that are summed up in one loop."""

FEW_ROWS = 4096
"""Rows of which the sums take no time to speak of; their code is compiled sooner in XLA's own way."""


def narrowed(destination: Any) -> Any:
    """Destinations with 32 bits. Of longer numbers that are with the client JAX would keep the lower bits, and take
    2**32 for slice 0: what is out of range stays so."""
    is_long = isinstance(destination, np.ndarray) and destination.dtype.kind in "iu" and destination.dtype.itemsize > 4
    if not is_long:
        return destination
    largest = np.iinfo(np.int32)
    low = 0 if destination.dtype.kind == "u" else largest.min
    return destination.clip(low, largest.max).astype(np.int32)


def ordered(destination: Any, shards: int, count: int) -> tuple[Any, Any, Any, Any]:
    """The rows of each shard in order of destination; their bins and ranks; and what is said of them.

    Nothing is compared but with the few destinations: sums over the rows take a tenth of the time of a sort. Behind the
    rows that go somewhere the order has nothing to say.
    """
    given = destination.reshape(shards, -1)
    if given.dtype.itemsize < 4:
        given = given.astype(jnp.int32)  # `count + 1` may be too large for the type that they came in
    inside = (given >= 0) & (given < count)
    nowhere = jnp.zeros_like(inside) if jnp.issubdtype(given.dtype, jnp.unsignedinteger) else given == NOWHERE
    bins = jnp.where(inside, given, count).astype(jnp.int32)
    sums = _running_sums(bins[:, None, :] == jnp.arange(count)[:, None])
    counts = sums[:, :, -1]
    known = jnp.minimum(bins, count - 1)
    rank = jnp.where(inside, jnp.take_along_axis(sums, known[:, None, :], 1)[:, 0] - 1, 0)
    row = jnp.arange(given.shape[1], dtype=jnp.int32)
    starts = jnp.take_along_axis(jnp.cumsum(counts, 1) - counts, known, 1)
    place = jnp.where(inside, starts + rank, given.shape[1])
    order = jax.vmap(lambda at: jnp.zeros_like(row).at[at].set(row, mode="drop"))(place)
    wrong = jnp.where(inside | nowhere, jnp.iinfo(given.dtype).min, given).max(1, keepdims=True)
    wrong = jnp.minimum(wrong, min(jnp.iinfo(given.dtype).max, jnp.iinfo(jnp.int32).max)).astype(jnp.int32)
    others = [which.sum(1, keepdims=True, dtype=jnp.int32) for which in (nowhere, ~inside & ~nowhere)]
    return order, bins, rank, jnp.concatenate([counts, *others, wrong], 1)


def _running_sums(which: Any) -> Any:
    """Counts of what is true up to each place of the last axis, as int32. XLA's own way on CPU takes twice as long: it
    halves and interleaves the whole axis again and again; within blocks sums of shifted ones are one loop."""
    length = which.shape[-1]
    if length <= FEW_ROWS:
        return jnp.cumsum(which.astype(jnp.int32), -1)
    room = [(0, 0)] * (which.ndim - 1)
    sums = jnp.pad(which, [*room, (0, -length % BLOCK)]).reshape(*which.shape[:-1], -1, BLOCK).astype(jnp.int32)
    shift = 1
    while shift < BLOCK:
        sums = sums + jnp.pad(sums, [*room, (0, 0), (shift, 0)])[..., :BLOCK]
        shift *= 2
    blocks = sums[..., -1]
    sums = sums + (jnp.cumsum(blocks, -1) - blocks)[..., None]
    return sums.reshape(*which.shape[:-1], -1)[..., :length]


def cut(x: Any, order: Any, said: Any, admitted: Any, number: int, rows: int) -> Any:
    """The first `admitted` [shards] rows for destination `number`, at most `rows`, and zeros: [shards, rows, ...]."""
    apart = x.reshape(*order.shape, *x.shape[1:])
    places = jnp.minimum(said[:, :number].sum(1)[:, None] + jnp.arange(rows), apart.shape[1] - 1)
    taken = jnp.take_along_axis(order, places, 1)
    pieces = jax.vmap(lambda shard, which: shard[which])(apart, taken)
    return _filled(pieces, jnp.arange(rows) < admitted[:, None])


def compacted(
    x: Any,
    order: Any,
    said: Any,
    limits: Any,
    number: int,
    rows: int,
    hops: tuple[int, int],
    axes: tuple[str, ...],
    lying: Sequence[int],
) -> Any:
    """This shard's part of a piece of `rows` rows for destination `number`, in which the rows of all shards lie one
    behind the other: a function for `jax.shard_map`. What lies there already is copied once.

    Args:
        limits: [shards + 1]: where the rows of each shard begin in the piece, and where the last ones end.
        hops: rows come from shards so far on at least, and at most.
        axes: those that the rows are partitioned along, in the order of the mesh: so `jax.lax.ppermute` counts devices.
        lying: the shard that lies at each of their places.
    """
    shards = len(lying)
    size, place_of = -(-rows // shards), np.argsort(lying)
    me = jnp.asarray(lying, jnp.int32)[jax.lax.axis_index(axes)]
    first = said[0, :number].sum(dtype=jnp.int32)
    row = jnp.arange(size, dtype=jnp.int32)

    def own(begin: Any) -> Any:
        """Rows of this shard, from a place in the piece on."""
        at = first + jnp.maximum(begin - limits[me] + row, 0)
        return x[order[0, jnp.minimum(at, order.shape[1] - 1)]]

    here = me * size
    places = here + row
    found = _filled(own(here), (places >= limits[me]) & (places < limits[me + 1]))
    for hop in range(hops[0], hops[1] + 1):
        if not hop:
            continue
        givers = range(max(hop, 0), min(shards + hop, shards))
        ways = [(int(place_of[shard]), int(place_of[shard - hop])) for shard in givers]
        came = jax.lax.ppermute(own(jnp.maximum(limits[me], here - hop * size)), axes, ways)
        giver = jnp.clip(me + hop, 0, shards - 1)
        begin = jnp.maximum(limits[giver], here)
        there = (giver == me + hop) & (places >= begin) & (places < limits[giver + 1])
        found = jnp.where(_wide(there, came.ndim), came[jnp.clip(places - begin, 0, size - 1)], found)
    return found


def joined(limits: Any, pieces: Sequence[Any], size: int) -> Any:
    """Pieces [rows, ...] as one part of `size` rows: of number s what is to lie from `limits[s]` on, up to
    `limits[s + 1]`, and zeros."""
    flat = jnp.concatenate(pieces)
    bases = jnp.asarray(np.cumsum([0, *(piece.shape[0] for piece in pieces[:-1])]), jnp.int32)
    row = jnp.arange(size, dtype=jnp.int32)
    piece = jnp.minimum((row[:, None] >= limits[1:]).sum(1), len(pieces) - 1)
    there = row < limits[-1]
    return _filled(flat[jnp.where(there, bases[piece] + row - limits[piece], 0)], there)


def gathered(bins: Any, rank: Any, starts: Any, admitted: Any, parts: Sequence[Any]) -> Any:
    """Each row's result from the parts, one behind the other; zeros for rows that are in none.

    Args:
        starts: [shards, destinations]: where the rows of a shard begin.
        admitted: [shards, destinations]: how many of them are there.
    """
    flat = jnp.concatenate(parts)
    inside = jnp.minimum(bins, starts.shape[1] - 1)
    base, room = (jnp.take_along_axis(table, inside, 1) for table in (starts, admitted))
    there = (bins < starts.shape[1]) & (rank < room)
    found = _filled(flat[jnp.where(there, base + rank, 0)], there)
    return jax.lax.collapse(found, 0, 2)


def _filled(rows: Any, there: Any) -> Any:
    """Rows where they are there, and zeros in place of the others."""
    return jnp.where(_wide(there, rows.ndim), rows, jnp.zeros((), rows.dtype))


def _wide(there: Any, rank: int) -> Any:
    """A mask of rows for arrays of a rank."""
    return there.reshape(*there.shape, *(1,) * (rank - there.ndim))


# --- what is refused --------------------------------------------------------------------------------------------------


def check(said: np.ndarray[Any, Any], capacity: int | None, at: str = "") -> None:
    """Raises `RoutingError` about rows that are out of range or, where there is a capacity, beyond it.

    Args:
        said: of the shards of one source or several.
        at: where they were routed.
    """
    count = said.shape[1] - 3
    behind = f" ({at})" if at else ""
    wrong = said[:, -2]
    if wrong.any():
        raise RoutingError(
            f"{wrong.sum()} rows have destinations such as {said[:, -1][wrong > 0][0]}; there are slices 0 to "
            f"{count - 1}, and {NOWHERE} for rows that go nowhere{behind}"
        )
    totals = said[:, :count].sum(0)
    over = [k for k, rows in enumerate(totals) if capacity is not None and rows > capacity]
    if over:
        raise RoutingError(
            f"slices {over} get more rows than capacity={capacity}: {totals.tolist()}; raise it, or count them by "
            f"overflow='count'{behind}"
        )


@dataclass(frozen=True, eq=False)
class RowCheck:
    """The check of rows that a program routes: it adds to the results what is said of them."""

    capacity: int
    count: int = 1

    def check(self, results: Sequence[np.ndarray[Any, Any]], name: str, where: str) -> None:
        """Raises `RoutingError`. `name` is that of the node, `where` the user's line."""
        check(results[0], self.capacity, where)
