"""Pieces of shards: cut and put end to end, and put together again."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from pathways_ray.executor.compile.pieces import packing, unpacking
from pathways_ray.ir.regions import Box
from pathways_ray.ir.types import ArrayType


@pytest.mark.parametrize(
    ("shapes", "boxes"),
    [
        ([(4, 6), (8, 6)], [((0, 4), (2, 5)), ((2, 8), (0, 3))]),  # rows of one shape
        ([(4, 6), (8, 6)], [((0, 4), (2, 5)), ((2, 8), (0, 4))]),
        ([(2, 3, 4), (3, 4), (5,)], [((0, 1), (0, 3), (1, 4)), ((0, 3), (1, 4)), ((1, 5),)]),
        ([(2, 3, 4), (5, 3, 4)], [((0, 2), (1, 3), (1, 4)), ((4, 5), (0, 2), (0, 3))]),
        ([(5,), (), (3,)], [((1, 4),), (), ((0, 3),)]),
        ([(), ()], [(), ()]),
        ([(4, 0), (3, 0)], [((0, 4), (0, 0)), ((1, 3), (0, 0))]),
    ],
)
def test_cuts_lie_end_to_end_and_come_out_as_they_were(shapes: list[tuple[int, ...]], boxes: list[Box]) -> None:
    shards = [np.random.default_rng(k).standard_normal(shape).astype(np.float32) for k, shape in enumerate(shapes)]
    cuts = [shard[tuple(slice(*side) for side in box)] for shard, box in zip(shards, boxes, strict=True)]
    (made,) = jax.jit(packing([list(enumerate(boxes))]))(*shards)
    assert np.asarray(made).tobytes() == b"".join(cut.tobytes() for cut in cuts)
    starts = [sum(cut.size for cut in cuts[:k]) for k in range(len(cuts))]
    kinds = [ArrayType(cut.shape, "float32") for cut in cuts]
    whole = [tuple((0, size) for size in cut.shape) for cut in cuts]
    placed = [(kind, [(0, start, box)]) for kind, start, box in zip(kinds, starts, whole, strict=True)]
    for found, cut in zip(jax.jit(unpacking(placed))(made), cuts, strict=True):
        np.testing.assert_array_equal(found, cut)


def test_rows_of_one_shape_are_put_together_without_a_division_for_each_element() -> None:
    """XLA's CPU compiler makes the cuts and their places of one kernel, flattened ones slowly."""
    shards = [jax.ShapeDtypeStruct((64, 64), np.float32)] * 4
    boxes = [(k, ((0, 64), (0, 32))) for k in range(4)]
    compiled = jax.jit(packing([boxes])).lower(*shards).as_text()
    assert "concatenate" in compiled
    assert f"tensor<{math.prod((64, 32))}xf32>" not in compiled, "a cut is flattened"
