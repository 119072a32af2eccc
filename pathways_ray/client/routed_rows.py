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

    Nothing is compared but with the few destinations: sums over the rows take a fifth of the time of a sort.
    """
    given = destination.reshape(shards, -1)
    if given.dtype.itemsize < 4:
        given = given.astype(jnp.int32)  # `count + 1` may be too large for the type that they came in
    inside = (given >= 0) & (given < count)
    nowhere = jnp.zeros_like(inside) if jnp.issubdtype(given.dtype, jnp.unsignedinteger) else given == NOWHERE
    bins = jnp.where(inside, given, jnp.where(nowhere, count, count + 1)).astype(jnp.int32)
    sums = jnp.cumsum((bins[:, None, :] == jnp.arange(count + 2)[:, None]).astype(jnp.int32), axis=2)
    counts = sums[:, :, -1]
    rank = jnp.take_along_axis(sums, bins[:, None, :], 1)[:, 0] - 1
    place = jnp.take_along_axis(jnp.cumsum(counts, 1) - counts, bins, 1) + rank
    row = jnp.arange(given.shape[1], dtype=jnp.int32)
    order = jax.vmap(lambda at: jnp.zeros_like(row).at[at].set(row, unique_indices=True))(place)
    wrong = jnp.where(inside | nowhere, jnp.iinfo(given.dtype).min, given).max(1, keepdims=True)
    wrong = jnp.minimum(wrong, min(jnp.iinfo(given.dtype).max, jnp.iinfo(jnp.int32).max)).astype(jnp.int32)
    return order, jnp.minimum(bins, count), rank, jnp.concatenate([counts, wrong], 1)


def cut(x: Any, order: Any, said: Any, admitted: Any, number: int, rows: int) -> Any:
    """The first `admitted` [shards] rows for destination `number`, at most `rows`, and zeros: [shards, rows, ...]."""
    apart = x.reshape(*order.shape, *x.shape[1:])
    places = jnp.minimum(said[:, :number].sum(1)[:, None] + jnp.arange(rows), apart.shape[1] - 1)
    taken = jnp.take_along_axis(order, places, 1)
    pieces = jax.vmap(lambda shard, which: shard[which])(apart, taken)
    return _filled(pieces, jnp.arange(rows) < admitted[:, None])


def joined(limits: Any, pieces: Sequence[Any], size: int) -> Any:
    """Pieces [shards, rows, ...] as one part of `size` rows: of shard s what is to lie from `limits[s]` on, up to
    `limits[s + 1]`, and zeros."""
    flat = jnp.concatenate([jax.lax.collapse(piece, 0, 2) for piece in pieces])
    lengths = [piece.shape[1] for piece in pieces for _ in range(piece.shape[0])]
    bases = np.cumsum([0, *lengths[:-1]]).astype(np.int32)
    row = jnp.arange(size, dtype=jnp.int32)
    shard = jnp.minimum((row[:, None] >= limits[1:]).sum(1), len(lengths) - 1)
    there = row < limits[-1]
    return _filled(flat[jnp.where(there, jnp.asarray(bases)[shard] + row - limits[shard], 0)], there)


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
    return jnp.where(there.reshape(*there.shape, *(1,) * (rows.ndim - there.ndim)), rows, jnp.zeros((), rows.dtype))


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
