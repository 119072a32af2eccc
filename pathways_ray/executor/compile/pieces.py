"""The functions that cut shards into pieces and put shards together from pieces, for arrays on their way.

XLA on CPUs gives the operations of a computation to its pool of threads, if there are more than eight and one need not
wait for another. Of a few microseconds each, that costs three times what they do. So where little is moved, what has
one row shape (cuts), or one type (shards), is a chain: each writes to the memory that the last one wrote to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax

from pathways_ray.ir.regions import Box, box_shape
from pathways_ray.ir.types import ArrayType

Cut = tuple[int, Box]
"""A piece to be cut: the number of the shard that has it, and its box there."""

Placed = tuple[int, int, Box]
"""A piece to be put into a shard: the number of the array that has it, the number of its first element there (or -1: it
is all of it), and its box in the shard."""

Arrays = tuple[jax.Array, ...]


MAX_CHAINED_BYTES = 1 << 20
"""What a device moves as a chain. Four times as much is sooner done by several threads."""


def packing(packs: Sequence[Sequence[Cut]], chained: bool = False) -> Callable[..., Arrays]:
    """A function that cuts boxes out of shards: those of a pack end to end, as `Pack.shape` has it; a lone one as it
    is. Those of one row shape may be put there `chained`; or, where all of the shards is cut so, as one cut of all."""

    def run(*shards: jax.Array) -> Arrays:
        size = sum(math.prod(box_shape(box)) for pack in packs for _, box in pack)
        at_once = chained and size >= sum(shard.size for shard in shards)
        return tuple(_end_to_end([(shards[k], box) for k, box in pack], chained, at_once) for pack in packs)

    return run


def _end_to_end(pack: Sequence[tuple[jax.Array, Box]], chained: bool, at_once: bool) -> jax.Array:
    """The cuts of a pack. Those of one row shape are put together as rows: XLA's CPU compiler finds the place of each
    element of a flattened cut by divisions, which takes five times as long."""
    (shard, box), *others = pack
    same = ((each, one.shape[1:]) == (((0, *one.shape[:1]), *box[1:]), shard.shape[1:]) for one, each in pack)
    if others and at_once and all(same):
        whole = jax.numpy.concatenate([one for one, _ in pack])
        return _cut(whole, ((0, whole.shape[0]), *box[1:]))
    cuts = [_cut(one, each) for one, each in pack]
    if not others:
        return cuts[0]
    rows = cuts[0].shape[1:]
    if any(not cut.ndim or cut.shape[1:] != rows for cut in cuts):
        return jax.numpy.concatenate([cut.reshape(-1) for cut in cuts])
    if not chained or all(cut.shape == one.shape for cut, (one, _) in zip(cuts, pack, strict=True)):
        return jax.numpy.concatenate(cuts)
    made = jax.numpy.zeros((sum(cut.shape[0] for cut in cuts), *rows), cuts[0].dtype)
    first = 0
    for cut in cuts:
        made = jax.lax.dynamic_update_slice(made, cut, (first, *(0 for _ in rows)))
        first += cut.shape[0]
    return made


def _cut(array: jax.Array, box: Box) -> jax.Array:
    return jax.lax.slice(array, [a for a, _ in box], [b for _, b in box])


def unpacking(shards: Sequence[tuple[ArrayType, Sequence[Placed]]], chained: bool = False) -> Callable[..., Arrays]:
    """A function that puts shards of these types together from what has arrived. Of a chain, each shard begins as the
    last one of its type, of which it keeps nothing."""

    def piece_of(array: jax.Array, start: int, box: Box) -> jax.Array:
        shape = box_shape(box)
        if start < 0:
            return array
        if shape and array.shape[1:] == shape[1:]:
            first = start // max(1, math.prod(shape[1:]))
            return array[first : first + shape[0]]
        return array[start : start + math.prod(shape)].reshape(shape)

    def run(*arrived: jax.Array) -> Arrays:
        made = []
        last: dict[ArrayType, jax.Array] = {}
        for kind, parts in shards:
            pieces = [piece_of(arrived[number], start, box) for number, start, box in parts]
            if len(pieces) == 1 and pieces[0].shape == kind.shape:
                made.append(pieces[0])
                continue
            full = sum(math.prod(box_shape(box)) for _, _, box in parts) == math.prod(kind.shape)
            begun = last.get(kind) if chained and full else None
            shard = jax.numpy.zeros(kind.shape, pieces[0].dtype) if begun is None else begun
            for piece, (_, _, box) in zip(pieces, parts, strict=True):
                shard = jax.lax.dynamic_update_slice(shard, piece, [a for a, _ in box])
            last[kind] = shard
            made.append(shard)
        return tuple(made)

    return run
