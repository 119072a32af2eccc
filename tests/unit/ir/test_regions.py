"""Which box each device holds, and which pieces make up a wanted box."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.ir.regions import (
    Box,
    Piece,
    box_shape,
    intersect,
    pieces_for,
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


HALVES: list[Box] = [((0, 4),), ((4, 8),)]


def test_a_box_that_one_source_holds_comes_in_one_piece() -> None:
    assert pieces_for(((4, 8),), HALVES, [0, 1]) == [Piece(1, ((4, 8),))]
    assert pieces_for(((5, 6),), HALVES, [0, 1]) == [Piece(1, ((5, 6),))]


def test_the_preferred_one_of_several_holders_gives_it() -> None:
    sources = HALVES * 2
    assert pieces_for(((0, 4),), sources, [3, 2, 1, 0]) == [Piece(2, ((0, 4),))]
    assert pieces_for(((0, 8),), sources, [3, 0, 1, 2]) == [Piece(0, ((0, 4),)), Piece(3, ((4, 8),))]


def test_a_whole_is_preferred_to_parts_that_are_nearer() -> None:
    sources = [*HALVES, ((0, 8),)]
    assert pieces_for(((0, 8),), sources, [0, 1, 2]) == [Piece(2, ((0, 8),))]


def test_sources_that_leave_a_gap_are_an_error() -> None:
    with pytest.raises(ValueError, match="cover 4 of the elements"):
        pieces_for(((0, 8),), HALVES, [0])
