"""Pieces of shards: cut and put end to end, and put together again."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import numpy as np
import pytest

from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.compile.cpu_backend import CpuBackend
from pathways_ray.executor.compile.pieces import packing, unpacking
from pathways_ray.ir.regions import Box
from pathways_ray.ir.types import ArrayType


@pytest.mark.parametrize("chained", [False, True])
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
        ([(4, 6), (8, 6)], [((0, 4), (0, 6)), ((0, 8), (0, 6))]),  # whole shards
    ],
)
def test_cuts_lie_end_to_end_and_come_out_as_they_were(
    shapes: list[tuple[int, ...]], boxes: list[Box], chained: bool
) -> None:
    shards = [np.random.default_rng(k).standard_normal(shape).astype(np.float32) for k, shape in enumerate(shapes)]
    cuts = [shard[tuple(slice(*side) for side in box)] for shard, box in zip(shards, boxes, strict=True)]
    (made,) = jax.jit(packing([list(enumerate(boxes))], chained))(*shards)
    assert np.asarray(made).tobytes() == b"".join(cut.tobytes() for cut in cuts)
    starts = [sum(cut.size for cut in cuts[:k]) for k in range(len(cuts))]
    kinds = [ArrayType(cut.shape, "float32") for cut in cuts]
    whole = [tuple((0, size) for size in cut.shape) for cut in cuts]
    placed = [(kind, [(0, start, box)]) for kind, start, box in zip(kinds, starts, whole, strict=True)]
    for found, cut in zip(jax.jit(unpacking(placed, chained))(made), cuts, strict=True):
        np.testing.assert_array_equal(found, cut)


def test_rows_of_one_shape_are_put_together_without_a_division_for_each_element() -> None:
    """XLA's CPU compiler makes the cuts and their places of one kernel, flattened ones slowly."""
    shards = [jax.ShapeDtypeStruct((64, 64), np.float32)] * 4
    boxes = [(k, ((0, 64), (0, 32))) for k in range(4)]
    compiled = jax.jit(packing([boxes])).lower(*shards).as_text()
    assert "concatenate" in compiled
    assert f"tensor<{math.prod((64, 32))}xf32>" not in compiled, "a cut is flattened"


LEAVES = 12


@pytest.mark.parametrize("side", [0, 1])
def test_small_leaves_are_a_chain_in_which_each_operation_waits_for_one(side: int) -> None:
    """So XLA's CPU runtime, which has more than eight of them begin in its pool, runs them in one thread."""
    leaves = [np.random.default_rng(k).standard_normal((4, 6)).astype(np.float32) for k in range(LEAVES)]
    halves: list[Box] = [((0, 2), (0, 6)), ((2, 4), (0, 6))] if side == 0 else [((0, 4), (0, 3)), ((0, 4), (3, 6))]
    pack = jax.jit(packing([[(k, box) for k in range(LEAVES)] for box in halves], chained=True))
    kind = ArrayType((4, 6), "float32")
    shards = [(kind, [(half, 12 * k, box) for half, box in enumerate(halves)]) for k in range(LEAVES)]
    unpack = jax.jit(unpacking(shards, chained=True))
    packed = pack(*leaves)
    for found, leaf in zip(unpack(*packed), leaves, strict=True):
        np.testing.assert_array_equal(found, leaf)
    for lowered in (pack.lower(*leaves), unpack.lower(*packed)):
        assert beginnings(lowered.compile().as_text() or "") <= 2


def test_leaves_of_which_all_is_cut_alike_are_put_together_before_they_are_cut() -> None:
    """That is an operation for each pack, and not for each leaf of each pack. Where little is cut, all of the leaves
    would be copied for it."""
    leaves = [np.random.default_rng(k).standard_normal((4 + k, 8)).astype(np.float32) for k in range(LEAVES)]

    def packs(columns: int) -> list[list[tuple[int, Box]]]:
        starts = range(0, columns, 2)
        return [[(k, ((0, 4 + k), (start, start + 2))) for k in range(LEAVES)] for start in starts]

    for columns, at_once in ((8, True), (4, False)):
        pack = jax.jit(packing(packs(columns), chained=True))
        for start, found in zip(range(0, columns, 2), pack(*leaves), strict=True):
            np.testing.assert_array_equal(found, np.concatenate([leaf[:, start : start + 2] for leaf in leaves]))
        assert ("dynamic_update_slice" not in pack.lower(*leaves).as_text()) == at_once


def beginnings(module: str) -> int:
    """The operations of a compiled computation that wait for no other one."""
    entry = module[module.index("ENTRY") :].splitlines()[1:]
    made = {line.split(" = ")[0].strip(): line.split(" = ")[1] for line in entry if " = " in line}
    real = {name: text for name, text in made.items() if not re.search(r" (parameter|constant|bitcast|tuple)\(", text)}
    return sum(not any(re.search(rf"{re.escape(other)}\b", text) for other in real) for text in real.values())


def test_a_shard_that_is_not_filled_begins_with_zeros() -> None:
    """Behind another one of its type, which a chain would begin it with."""
    kind = ArrayType((4,), "float32")
    full, half = (kind, [(0, 0, ((0, 4),))]), (kind, [(0, 4, ((1, 3),))])
    arrived = np.arange(1, 7, dtype=np.float32)
    split = (kind, [(0, 0, ((0, 2),)), (0, 2, ((2, 4),))])
    first, second, third = jax.jit(unpacking([split, half, full], chained=True))(arrived)
    np.testing.assert_array_equal(first, [1, 2, 3, 4])
    np.testing.assert_array_equal(second, [0, 5, 6, 0])
    np.testing.assert_array_equal(third, [1, 2, 3, 4])


@pytest.mark.parametrize(("rows", "expected"), [(51, True), (160, False)])
def test_cuts_of_a_tree_count_as_what_they_move(rows: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA counts a whole shard for each of its cuts, and would give less than a megabyte to other threads."""
    devices = jax.local_devices()[:1]
    compiler, as_it_is = Compiler(0, devices, {0: devices}), list[bool]()

    class Spy(CpuBackend):
        def prepare(self, compiled: Any, *given: Any) -> Any:
            as_it_is.append((made := super().prepare(compiled, *given)) is compiled)
            return made

    monkeypatch.setattr(compiler, "backend", Spy())
    leaves = [np.full((rows, 64), k, np.float32) for k in range(20)]
    packs = [[(k, ((0, rows), (first, first + 16))) for k in range(20)] for first in range(0, 64, 16)]
    made = compiler.pack([ArrayType((rows, 64), "float32")] * 20, packs, 0)(*leaves)
    assert as_it_is == [expected]
    for first, one in zip(range(0, 64, 16), made, strict=True):
        cuts = np.concatenate([leaf[:, first : first + 16] for leaf in leaves])
        np.testing.assert_array_equal(one, cuts)
