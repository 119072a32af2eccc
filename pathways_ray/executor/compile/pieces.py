"""The functions that cut shards into pieces and put shards together from pieces, for arrays on their way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax

from pathways_ray.ir.regions import Box, box_shape
from pathways_ray.ir.types import ArrayType

Cut = tuple[int, Box]
"""A piece to be cut: the number of the shard that has it, and its box there."""

Placed = tuple[int, int, Box]
"""A piece to be put into a shard: the number of the array that has it, where it starts there (or -1: it is all of it),
and its box in the shard."""

Arrays = tuple[jax.Array, ...]


def packing(packs: Sequence[Sequence[Cut]]) -> Callable[..., Arrays]:
    """A function that cuts boxes out of shards: those of a pack end to end, flat; a lone one as it is."""

    def run(*shards: jax.Array) -> Arrays:
        made = []
        for pack in packs:
            cuts = [jax.lax.slice(shards[k], [a for a, _ in box], [b for _, b in box]) for k, box in pack]
            made.append(cuts[0] if len(cuts) == 1 else _end_to_end(cuts))
        return tuple(made)

    return run


def _end_to_end(cuts: Sequence[jax.Array]) -> jax.Array:
    """The elements of all, flat. Those of one row shape are put together as rows: XLA's CPU compiler finds the place of
    each element of a flattened cut by divisions, which takes five times as long."""
    if len({cut.shape[1:] for cut in cuts}) > 1 or any(not cut.ndim for cut in cuts):
        cuts = [cut.reshape(-1) for cut in cuts]
    return jax.numpy.concatenate(cuts).reshape(-1)


def unpacking(shards: Sequence[tuple[ArrayType, Sequence[Placed]]]) -> Callable[..., Arrays]:
    """A function that puts shards of these types together from what has arrived."""

    def piece_of(array: jax.Array, start: int, box: Box) -> jax.Array:
        shape = box_shape(box)
        return array if start < 0 else array[start : start + math.prod(shape)].reshape(shape)

    def run(*arrived: jax.Array) -> Arrays:
        made = []
        for kind, parts in shards:
            pieces = [piece_of(arrived[number], start, box) for number, start, box in parts]
            if len(pieces) == 1 and pieces[0].shape == kind.shape:
                made.append(pieces[0])
                continue
            shard = jax.numpy.zeros(kind.shape, pieces[0].dtype)
            for piece, (_, _, box) in zip(pieces, parts, strict=True):
                shard = jax.lax.dynamic_update_slice(shard, piece, [a for a, _ in box])
            made.append(shard)
        return tuple(made)

    return run
