"""Which part of a logical array each device of a slice holds, and which pieces must move when the layout changes.

A `Box` is one (start, stop) pair per dimension. Devices are counted in row-major order of the slice's mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pathways_ray.ir.types import ArrayType, SliceType, Spec

Box = tuple[tuple[int, int], ...]


def shard_boxes(array: ArrayType, spec: Spec, mesh: SliceType) -> list[Box]:
    """The box of every device of `mesh`, in row-major order; replicas get equal boxes."""
    return [_box_at(array, spec, mesh, _coordinates(mesh.shape, k)) for k in range(mesh.size)]


def shard_shape(array: ArrayType, spec: Spec, mesh: SliceType) -> tuple[int, ...]:
    """The shape of one shard (all are alike, since cut dimensions divide evenly)."""
    shape = list(array.shape)
    for dimension, axes in enumerate(spec):
        shape[dimension] //= math.prod(mesh.axis_size(axis) for axis in axes)
    return tuple(shape)


def _coordinates(shape: Sequence[int], index: int) -> tuple[int, ...]:
    at = []
    for size in reversed(shape):
        index, remainder = divmod(index, size)
        at.append(remainder)
    return tuple(reversed(at))


def _box_at(array: ArrayType, spec: Spec, mesh: SliceType, at: tuple[int, ...]) -> Box:
    box = []
    for dimension, size in enumerate(array.shape):
        index, parts = 0, 1
        for axis in spec[dimension] if dimension < len(spec) else ():
            axis_size = mesh.axis_size(axis)
            index = index * axis_size + at[mesh.axes.index(axis)]
            parts *= axis_size
        width = size // parts
        box.append((index * width, (index + 1) * width))
    return tuple(box)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None. An array without dimensions has one box, (), which meets itself."""
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def relative(inner: Box, outer: Box) -> Box:
    """`inner` in coordinates that count from the start of `outer`."""
    return tuple((p[0] - q[0], p[1] - q[0]) for p, q in zip(inner, outer, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


@dataclass(frozen=True)
class Piece:
    """One box that leaves a source device for the hosts that need it."""

    source: int
    box: Box


def pieces_for(wanted: Box, sources: Sequence[Box], prefer: Sequence[int]) -> list[Piece]:
    """The pieces that make up `wanted`, each from one holder.

    `prefer` lists source devices, best first (nearest to the receiver, then spread). A source that holds the whole of
    it alone wins, so that an unchanged shard moves in one piece. Replicas are used once.

    Raises:
        ValueError: the sources do not cover `wanted`; a layout of this module always does.
    """
    for k in prefer:
        if intersect(wanted, sources[k]) == wanted:
            return [Piece(k, wanted)]
    found: dict[Box, int] = {}
    for k in prefer:
        common = intersect(wanted, sources[k])
        if common is not None:
            found.setdefault(common, k)
    covered = sum(math.prod(box_shape(box)) for box in found)
    if covered != math.prod(box_shape(wanted)):
        raise ValueError(f"sources cover {covered} of the elements of {wanted}")
    return [Piece(k, box) for box, k in sorted(found.items())]
