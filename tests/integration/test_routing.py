"""`pw.route` and `pw.combine` on the real runtime: rows go where the data say, and come back in their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

ROWS, WIDTH = 48, 6


@pytest.fixture(scope="module")
def places(cluster) -> Iterator[list[pw.VirtualSlice]]:
    made = [
        cluster.virtual_slice((2,), ("x",), island=0, name="r0"),
        cluster.virtual_slice((1,), ("x",), island=1, name="r1"),
        cluster.virtual_slice((2, 2), ("x", "y"), island=1, name="r2"),
    ]
    yield made
    for one in made:
        one.release()


def rows(seed: int, count: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def worked(parts: list[Any]) -> list[Any]:
    """Slice k multiplies its rows by k + 1."""
    return [part.rows * np.float32(k + 1) if part.count else None for k, part in enumerate(parts)]


def expected(x: np.ndarray, to: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
    found = x * (to[:, None] + 1).astype(np.float32)
    found[to < 0] = 0
    return found if kept is None else np.where(kept[:, None], found, 0)


@pytest.mark.parametrize(
    ("spec", "part_spec"), [(P(), None), (P("x"), P("x")), (P(None, "x"), None)], ids=["whole", "rows", "columns"]
)
def test_rows_come_to_their_slices_and_back(session, slices, places, spec, part_spec) -> None:
    x, to = rows(1), np.random.default_rng(2).integers(-1, 3, ROWS).astype(np.int32)
    here = slices.b2
    parts, handle = pw.route(pw.put(x, here, spec), to, places, spec=part_spec)
    for k, part in enumerate(parts):
        assert part.count == handle.counts[0, k] == (to == k).sum()
        assert part.rows.slice is places[k]
        np.testing.assert_array_equal(np.asarray(part.rows)[: part.count], x[to == k])
        assert not np.asarray(part.rows)[part.count :].any()
    y = pw.combine(worked(parts), handle)
    assert y.slice is here
    np.testing.assert_array_equal(np.asarray(y), expected(x, to))


def test_who_gets_nothing_takes_no_part(session, slices, places) -> None:
    x, to = rows(3), np.where(np.arange(ROWS) < 4, 1, -1)
    parts, handle = pw.route(pw.put(x, slices.a1), to, places)
    assert [part.count for part in parts] == [0, 4, 0]
    assert [part.rows is None for part in parts] == [True, False, True]
    assert parts[1].rows.shape == (8, WIDTH)
    np.testing.assert_array_equal(np.asarray(pw.combine(worked(parts), handle)), expected(x, to))
    parts, handle = pw.route(pw.put(x, slices.a1), np.full(ROWS, -1), places)
    assert not np.asarray(pw.combine([None] * 3, handle)).any()


def test_several_sources_meet_in_the_parts(session, slices, places) -> None:
    """Of two arrays, on two islands; one is partitioned along its rows."""
    xs = [rows(4), rows(5, 20)]
    tos = [np.arange(ROWS) % 3, np.full(20, 2)]
    given = [pw.put(xs[0], slices.a4, P("x")), pw.put(xs[1], slices.b2)]
    parts, handle = pw.route(given, tos, places)
    assert [part.count for part in parts] == [16, 16, 36]
    np.testing.assert_array_equal(np.asarray(parts[2].rows)[:36], np.concatenate([xs[0][tos[0] == 2], xs[1]]))
    for y, x, to in zip(pw.combine(worked(parts), handle), xs, tos, strict=True):
        np.testing.assert_array_equal(np.asarray(y), expected(x, to))


def test_beyond_a_capacity_rows_are_counted_or_an_error(session, slices, places) -> None:
    """The first rows stay; what is dropped comes back as zeros."""
    x, to = rows(6), np.where(np.arange(ROWS) < 30, 0, 1)
    source = pw.put(x, slices.a4, P("x"))
    parts, handle = pw.route(source, to, places, capacity=20)
    assert [(part.count, part.rows is not None and part.rows.shape[0]) for part in parts] == [
        (20, 20),
        (18, 20),
        (0, False),
    ]
    assert handle.dropped == [10, 0, 0]
    kept = (to == 1) | (np.arange(ROWS) < 20)
    np.testing.assert_array_equal(np.asarray(pw.combine(worked(parts), handle)), expected(x, to, kept))
    with pytest.raises(pw.errors.RoutingError, match=r"slices \[0\] get more rows than capacity=20: \[30, 18, 0\]"):
        pw.route(source, to, places, capacity=20, overflow="error")


def test_destinations_are_taken_as_they_are(session, slices, places) -> None:
    """Lists; numbers longer than JAX keeps, which are no slice; rows without columns."""
    for width in (WIDTH, 0):
        x = np.ones((3, width), np.float32)
        source = pw.put(x, slices.a1)
        parts, handle = pw.route(source, [2, 0, 2], places, capacity=np.int64(4))  # type: ignore[arg-type]
        np.testing.assert_array_equal(np.asarray(pw.combine(worked(parts), handle)), expected(x, np.array([2, 0, 2])))
    for far in (np.full(3, 2**32), np.full(3, 2**64 - 1, np.uint64), np.full(3, 2**32 - 1, np.uint32)):
        with pytest.raises(
            pw.errors.RoutingError, match="3 rows have destinations such as 2147483647; there are slices"
        ):
            pw.route(source, far, places)
    with pytest.raises(pw.errors.UsageError, match="at least 1 and at most 715827882, or None, not 1099511627776"):
        pw.route(source, [0, 0, 0], places, capacity=1 << 40)


def test_what_cannot_be_routed_is_refused(session, slices, places) -> None:
    source = pw.put(rows(7), slices.a1)
    with pytest.raises(pw.errors.RoutingError, match=r"2 rows have destinations such as 3; there are slices 0 to 2"):
        pw.route(source, np.where(np.arange(ROWS) < 2, 3, 0), places)
    with pytest.raises(pw.errors.RoutingError, match="destinations such as -2"):
        pw.route(source, np.full(ROWS, -2), places)
    with pytest.raises(pw.errors.UsageError, match=r"a whole number for each of 48 rows, not int64\(3,\)"):
        pw.route(source, np.zeros(3, np.int64), places)
    with pytest.raises(pw.errors.UsageError, match="between programs"):
        pw.program(lambda v: pw.route(v, v, places))(source)
    parts, handle = pw.route(source, np.zeros(ROWS, np.int32), places)
    with pytest.raises(pw.errors.UsageError, match=r"part 0 has 48 rows, with those that pad it; got float32\(5, 6\)"):
        pw.combine([parts[0].rows[:5], None, None], handle)
    with pytest.raises(pw.errors.UsageError, match="takes 3 parts"):
        pw.combine([parts[0]], handle)


@pytest.mark.parametrize("spec", [P(), P("x")], ids=["whole", "rows"])
def test_in_a_program_rows_take_the_same_way_with_the_same_bits(session, slices, places, spec) -> None:
    """One source and two, on two islands, with a capacity that one slice's rows exceed."""
    x, to = rows(8), np.random.default_rng(9).integers(-1, 3, ROWS).astype(np.int32)
    given = [pw.put(x, slices.a4, spec), pw.put(rows(10, 20), slices.b2)]
    tos = [to, np.arange(20, dtype=np.int32) % 3]
    factors = [pw.compiled(lambda v, by=k + 1: v * np.float32(by), slice=place) for k, place in enumerate(places)]

    @pw.program
    def exchange(xs, tos):
        parts, handle = pw.route(xs, tos, places, capacity=14)
        made = [f(part.rows) for f, part in zip(factors, parts, strict=True)]
        return parts, pw.combine(made, handle), handle.dropped

    for count in (1, 2):
        parts, ys, dropped = exchange(given[:count], tos[:count])
        outside, handle = pw.route(given[:count], tos[:count], places, capacity=14)
        np.testing.assert_array_equal(np.asarray(dropped), handle.dropped)
        for part, other, place in zip(parts, outside, places, strict=True):
            assert part.rows.slice is place
            assert int(part.count) == other.count
            np.testing.assert_array_equal(np.asarray(part.rows), np.asarray(other.rows))
        for y, other in zip(ys, pw.combine(worked(outside), handle), strict=True):
            assert y.slice is other.slice
            np.testing.assert_array_equal(np.asarray(y), np.asarray(other))


def test_a_call_of_a_program_raises_what_its_rows_deserve(session, slices, places) -> None:
    @pw.program
    def exchange(x, to):
        parts, _ = pw.route(x, to, places, capacity=20, overflow="error")  # the line that is named
        return [part.rows for part in parts]

    source = pw.put(rows(11), slices.a1)
    assert np.asarray(exchange(source, np.arange(ROWS) % 3)[2]).shape == (20, WIDTH)
    with pytest.raises(pw.errors.RoutingError, match=r"slices \[0\] get more rows than capacity=20.*test_routing.py:"):
        exchange(source, np.zeros(ROWS, np.int32))
    with pytest.raises(pw.errors.RoutingError, match=r"2 rows have destinations such as 3;.*test_routing.py:"):
        exchange(source, np.where(np.arange(ROWS) < 2, 3, np.arange(ROWS) % 3))
