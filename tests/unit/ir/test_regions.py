"""Which box each device holds, and which shards a box meets."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.ir.regions import (
    Holders,
    block_of,
    box_shape,
    intersect,
    place_of,
    relative,
    shard_boxes,
    shard_shape,
)
from pathways_ray.ir.types import ArrayType, SliceType, Spec
from tests.unit.helpers import spec
from tests.unit.strategies import repeatable, specs

MESH = SliceType(1, (2, 2), ("x", "y"))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ArrayType, SliceType, Spec]:
    """An array of 0 to 3 dimensions, a mesh of 1 to 3 axes, and a spec that fits both."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3))
    mesh = SliceType(1, tuple(sizes), ("x", "y", "z")[: len(sizes)])
    array = ArrayType(tuple(draw(st.lists(st.sampled_from([0, 6, 12, 36]), max_size=3))), "uint8")
    return array, mesh, draw(specs(array, mesh))


def test_devices_are_counted_in_row_major_order_of_the_mesh() -> None:
    array = ArrayType((4, 4), "uint8")
    assert shard_boxes(array, spec("x y"), MESH) == [
        ((0, 2), (0, 2)),
        ((0, 2), (2, 4)),
        ((2, 4), (0, 2)),
        ((2, 4), (2, 4)),
    ]


def test_the_first_axis_of_a_dimension_is_the_slower_one() -> None:
    array = ArrayType((8,), "uint8")
    assert shard_boxes(array, spec("x+y"), MESH) == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),)]
    assert shard_boxes(array, spec("y+x"), MESH) == [((0, 2),), ((4, 6),), ((2, 4),), ((6, 8),)]


def test_boxes_make_a_block_where_none_is_between_them() -> None:
    assert block_of([((0, 2), (0, 2)), ((2, 4), (0, 2)), ((0, 2), (0, 2))]) == ((0, 4), (0, 2))
    assert block_of([((0, 2),), ((4, 6),)]) is None
    assert block_of([(), ()]) == ()


def test_an_axis_that_cuts_nothing_makes_replicas() -> None:
    array = ArrayType((4,), "uint8")
    assert shard_boxes(array, spec("y"), MESH) == [((0, 2),), ((2, 4),)] * 2
    assert shard_boxes(array, spec(""), MESH) == [((0, 4),)] * 4
    assert shard_boxes(ArrayType((), "uint8"), (), MESH) == [()] * 4


@repeatable(200)
@given(layouts())
def test_boxes_are_equal_or_apart_and_cover_the_array(case: tuple[ArrayType, SliceType, Spec]) -> None:
    array, mesh, cut = case
    boxes = shard_boxes(array, cut, mesh)
    assert len(boxes) == mesh.size
    assert {box_shape(box) for box in boxes} == {shard_shape(array, cut, mesh)}
    for a in boxes:
        for b in boxes:
            assert intersect(a, b) in (None, a) or a == b
    assert sum(math.prod(box_shape(box)) for box in set(boxes)) == math.prod(array.shape)


def test_boxes_meet_where_they_overlap() -> None:
    assert intersect(((0, 4), (2, 6)), ((1, 9), (0, 3))) == ((1, 4), (2, 3))
    assert intersect(((0, 4),), ((4, 8),)) is None
    assert intersect((), ()) == (), "an array without dimensions is all in one place"
    assert relative(((5, 7), (2, 3)), ((4, 8), (2, 6))) == ((1, 3), (0, 1))


def test_the_shards_that_a_box_meets_are_counted_off() -> None:
    """An array of 8 x 4 in 4 x 2 shards of 2 x 2, each on two devices: replicas are found under their shard."""
    boxes = shard_boxes(ArrayType((8, 4), "uint8"), spec("x y"), SliceType(1, (4, 2, 2), ("x", "y", "z")))
    holders = Holders(boxes)
    assert holders.shards(((1, 3), (2, 4))) == [((0, 2), (2, 4)), ((2, 4), (2, 4))]
    assert holders.shards(((2, 4), (0, 2))) == [((2, 4), (0, 2))]
    assert holders.of[(0, 2), (2, 4)] == [2, 3]


@repeatable(200)
@given(layouts(), st.data())
def test_the_shards_of_a_box_are_those_that_meet_it(
    case: tuple[ArrayType, SliceType, Spec], data: st.DataObject
) -> None:
    array, mesh, cut = case
    if not math.prod(array.shape):
        return
    corners = [sorted(data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in array.shape]
    wanted = tuple((low, max(high, low + 1)) for low, high in corners)
    boxes = shard_boxes(array, cut, mesh)
    assert Holders(boxes).shards(wanted) == sorted({box for box in boxes if intersect(wanted, box) is not None})


def test_an_array_without_dimensions_is_one_shard() -> None:
    assert Holders([(), ()]).shards(()) == [()]


@given(layouts())
def test_a_box_lies_in_its_array_as_its_place_says(layout: tuple[ArrayType, SliceType, Spec]) -> None:
    array, mesh, one = layout
    numbers = np.arange(math.prod(array.shape)).reshape(array.shape)
    for box in shard_boxes(array, one, mesh):
        held = numbers[tuple(slice(a, b) for a, b in box)]
        first, run, leading = place_of(box, array.shape)
        if held.size == 0:
            continue
        runs = held.reshape(-1, run)
        assert runs[0, 0] == first
        assert (np.diff(runs) == 1).all()
        assert len(runs) == math.prod(box_shape(box)[:leading])
        assert len(runs) == 1 or (np.diff(runs[:, 0]) > run).any() or leading == 0
