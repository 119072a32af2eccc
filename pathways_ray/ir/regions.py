"""The part of a logical array on each device of a slice, and the pieces that move when the layout changes.

A `Box` is one (start, stop) pair per dimension. Devices are counted in row-major order of the slice's mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from pathways_ray.ir.types import ArrayType, SliceType, Spec

Box = tuple[tuple[int, int], ...]


def shard_boxes(array: ArrayType, spec: Spec, mesh: SliceType) -> list[Box]:
    """The box of every device of `mesh`, in row-major order; replicas get equal boxes."""
    cuts = []
    for dimension, width in enumerate(shard_shape(array, spec, mesh)):
        axes = spec[dimension] if dimension < len(spec) else ()
        cuts.append(([mesh.axes.index(axis) for axis in axes], width))
    boxes = []
    for at in itertools.product(*map(range, mesh.shape)):
        box = []
        for places, width in cuts:
            index = 0
            for place in places:
                index = index * mesh.shape[place] + at[place]
            box.append((index * width, (index + 1) * width))
        boxes.append(tuple(box))
    return boxes


def shard_shape(array: ArrayType, spec: Spec, mesh: SliceType) -> tuple[int, ...]:
    """The shape of one shard (all are alike, since sharded dimensions divide evenly)."""
    shape = list(array.shape)
    for dimension, axes in enumerate(spec):
        shape[dimension] //= math.prod(mesh.axis_size(axis) for axis in axes)
    return tuple(shape)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None. An array without dimensions has one box, (), which meets itself."""
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def block_of(boxes: Sequence[Box]) -> Box | None:
    """The box that these boxes of one layout make together; None where others are between them."""
    box = tuple((min(start for start, _ in cuts), max(stop for _, stop in cuts)) for cuts in zip(*boxes, strict=True))
    return box if sum(math.prod(box_shape(one)) for one in set(boxes)) == math.prod(box_shape(box)) else None


def relative(inner: Box, outer: Box) -> Box:
    """`inner` in coordinates that count from the start of `outer`."""
    return tuple((p[0] - q[0], p[1] - q[0]) for p, q in zip(inner, outer, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def strides_of(shape: tuple[int, ...]) -> list[int]:
    """For each dimension of an array in C order the elements from one index to the next."""
    return [math.prod(shape[k + 1 :]) for k in range(len(shape))]


def place_of(box: Box, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The place of a box in an array of this shape in C order.

    Returns:
        The number of the first element; how many follow each other both in the box and in the array; and how many of
        the dimensions, from the first on, count such runs. 0 of a box that is in one piece.
    """
    run, leading = 1, len(shape)
    while leading and run == math.prod(shape[leading:]):
        leading -= 1
        run *= box[leading][1] - box[leading][0]
    if run == math.prod(box_shape(box)):
        leading = 0
    return sum(a * stride for (a, _), stride in zip(box, strides_of(shape), strict=True)), run, leading


class Holders:
    """The devices that hold each part of an array in one layout.

    Shards of a layout form a grid: equal boxes side by side. So the shards that a box meets are counted off from its
    corners, and no device is looked at that holds nothing of it.

    Args:
        boxes: of all devices of the slice, as `shard_boxes` gives them; none of them empty.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = boxes
        self.widths = box_shape(boxes[0])
        self.of: dict[Box, list[int]] = {}
        for ordinal, box in enumerate(boxes):
            self.of.setdefault(box, []).append(ordinal)

    def shards(self, wanted: Box) -> list[Box]:
        """The shards that have a part of `wanted`, in row-major order."""
        ranges = []
        for (start, stop), width in zip(wanted, self.widths, strict=True):
            first = start - start % width
            ranges.append([(at, at + width) for at in range(first, stop, width)])
        return list(itertools.product(*ranges))
