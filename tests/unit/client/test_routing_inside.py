"""`pw.route` and `pw.combine` in programs: their graphs, what these compute, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import routed_rows
from pathways_ray.client.routed_rows import RowCheck
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import GraphError, RoutingError, TraceError, UsageError
from pathways_ray.ir.graph import Transfer
from tests.unit.control_runs import Nowhere, opened, run

WIDTH = 3


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Nowhere:
    return opened(monkeypatch)


@pytest.fixture
def places(session: Nowhere) -> list[VirtualSlice]:
    return [session.slice(1, number) for number in (1, 2, 3)]


def rows(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def times(places: list[VirtualSlice]) -> list[Any]:
    """Slice k multiplies its rows by k + 2."""
    return [pw.compiled(lambda v, by=k + 2: v * by, slice=place) for k, place in enumerate(places)]


def expected(xs: list[np.ndarray], tos: list[np.ndarray], capacity: int, count: int) -> Any:
    """Parts, counts and results, row by row."""
    parts = [np.zeros((capacity, WIDTH), np.float32) for _ in range(count)]
    taken, results = [0] * count, [np.zeros_like(x) for x in xs]
    for x, to, result in zip(xs, tos, results, strict=True):
        for row, k, out in zip(x, to, result, strict=True):
            if 0 <= k < count and taken[k] < capacity:
                parts[k][taken[k]] = row
                taken[k] += 1
                out[:] = row * (k + 2)
    return parts, taken, results


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.long)])
def test_rows_come_to_their_slices_and_back(places: list[VirtualSlice], seed: int) -> None:
    random = np.random.default_rng(100 + seed)
    sizes = random.integers(1, 12, 1 + seed % 3)
    xs = [rows(seed + n, int(size)) for n, size in enumerate(sizes)]
    tos = [random.integers(-1, 4, len(x)).astype(np.int32) for x in xs]  # 3 is no slice
    capacity = int(random.integers(1, 14))

    def fun(xs: Any, tos: Any) -> Any:
        parts, handle = pw.route(xs, tos, places, capacity)
        made = [f(part.rows) for f, part in zip(times(places), parts, strict=True)]
        said = handle.counts, handle.dropped, handle.out_of_range
        return [p.rows for p in parts], [p.count for p in parts], pw.combine(made, handle), said

    lowered = pw.program(fun).lower(xs, tos)
    found = run(lowered, *xs, *tos)
    parts, taken, results = expected(xs, tos, capacity, len(places))
    for one, other in zip(found, [*parts, *taken, *results], strict=False):
        np.testing.assert_array_equal(one, other)
    counts, dropped, out_of_range = found[-3:]
    np.testing.assert_array_equal(counts, [[(to == k).sum() for k in range(3)] for to in tos])
    np.testing.assert_array_equal(dropped, np.maximum(counts.sum(0) - capacity, 0))
    assert out_of_range == sum((to == 3).sum() for to in tos)


def test_pieces_leave_by_transfers_from_where_the_rows_lie(session: Nowhere, places: list[VirtualSlice]) -> None:
    source = session.slice(2, 9)

    def fun(x: Any, to: Any) -> Any:
        parts, _ = pw.route(x, to, places, 4)
        return [part.rows for part in parts]

    x = pw.like(rows(0, 8), source, P("x"))
    graph = pw.program(fun).lower(x, np.zeros(8, np.int32)).graph
    moved = [node.layout.slice for node in graph.nodes if isinstance(node, Transfer)]
    assert sorted(set(moved)) == [place.id for place in places]


def test_rows_are_routed_in_branches_and_loops(places: list[VirtualSlice]) -> None:
    x, to = rows(1, 6), np.array([0, 2, -1, 1, 2, 0], np.int32)

    def exchanged(v: Any) -> Any:
        parts, handle = pw.route(v, to, places, 6)
        return pw.combine([f(part.rows) for f, part in zip(times(places), parts, strict=True)], handle)

    home = pw.compiled(lambda v: v + 0, slice=places[0])

    def fun(v: Any, go: Any) -> Any:
        v = pw.fori_loop(0, 2, lambda _, c: home(exchanged(c)), home(v))
        return pw.cond(go, lambda c: home(exchanged(c)), home, v)

    once = np.array([2, 4, 0, 3, 4, 2], np.float32)[:, None]
    lowered = pw.program(fun).lower(x, True)
    np.testing.assert_array_equal(run(lowered, x, np.True_)[0], x * once**3)
    np.testing.assert_array_equal(run(lowered, x, np.False_)[0], x * once**2)


def test_a_routed_exchange_has_a_derivative(places: list[VirtualSlice]) -> None:
    x, to = rows(2, 5), np.array([1, 1, 0, -1, 1], np.int32)

    def loss(x: Any) -> Any:
        parts, handle = pw.route(x, to, places, 2)
        y = pw.combine([f(part.rows) for f, part in zip(times(places), parts, strict=True)], handle)
        return jnp.sum(y * y)

    kept = np.array([3, 3, 2, 0, 0], np.float32)[:, None]  # the third row for slice 1 is one too many
    found = run(pw.program(jax.grad(loss)).lower(x), x)[0]
    np.testing.assert_allclose(found, 2 * kept**2 * x, rtol=1e-6)


def test_errors_are_those_of_the_counts(places: list[VirtualSlice]) -> None:
    def fun(x: Any, to: Any) -> Any:
        parts, _ = pw.route(x, to, places, 2, overflow="error")
        return parts[0].rows

    lowered = pw.program(fun).lower(rows(3, 4), np.zeros(4, np.int32))
    (reported,) = lowered.program._built.reported
    assert isinstance(reported.report, RowCheck)
    assert "test_routing_inside.py" in reported.where

    def said(to: list[int]) -> None:
        found = run(lowered, rows(3, 4), np.array(to, np.int32))
        reported.report.check([found[k] for k in reported.results], reported.name, reported.where)

    said([0, 0, 1, -1])
    with pytest.raises(
        RoutingError, match=r"slices \[1\] get more rows than capacity=2: \[0, 3, 0\].*test_routing_ins"
    ):
        said([1, 1, 1, -1])
    with pytest.raises(
        RoutingError, match=r"1 rows have destinations such as 7; there are slices 0 to 2.*test_routing"
    ):
        said([0, 7, 1, 1])


@pytest.mark.parametrize("width", [0, 2])
def test_destinations_may_be_a_list_and_rows_empty(places: list[VirtualSlice], width: int) -> None:
    def fun(x: Any) -> Any:
        parts, handle = pw.route(x, [1, 2**32, -1, 0], places, np.int64(4))  # type: ignore[arg-type]
        return pw.combine([part.rows for part in parts], handle), handle.out_of_range

    x = np.ones((4, width), np.float32)
    found, wrong = run(pw.program(fun).lower(x), x)
    np.testing.assert_array_equal(found, x * np.array([1, 0, 0, 1], np.float32)[:, None])
    assert wrong == 1, "2**32 is no slice"


@pytest.mark.parametrize(("dtype", "count"), [("int8", 127), ("int8", 200), ("uint8", 255)])
def test_destinations_of_few_bits_may_have_as_many_slices_as_they_can_say(dtype: str, count: int) -> None:
    largest = int(np.iinfo(dtype).max)
    to = np.array([largest, 0, largest - 1, 1], dtype)
    order, bins, rank, said = routed_rows.ordered(to, 1, count)
    inside = largest < count
    np.testing.assert_array_equal(bins, [[largest if inside else count, 0, largest - 1, 1]])
    np.testing.assert_array_equal(order, [[1, 3, 2, 0]])
    np.testing.assert_array_equal(rank, [[0] * 4])
    assert said.shape == (1, count + 3)
    assert said[0, :count].sum() == 3 + inside
    assert said[0, count + 1] == (not inside)
    assert inside or said[0, -1] == largest


def test_what_a_program_cannot_route_is_refused(session: Nowhere, places: list[VirtualSlice]) -> None:
    wide = session.slice(2, 9)
    x, to = rows(4, 4), np.zeros(4, np.int32)

    def check(fun: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            pw.program(fun).lower(x, to)

    check(lambda x, to: pw.route(x, to, places), UsageError, "in a program takes capacity=")
    check(
        lambda x, to: pw.route(x, to[:2], places, 2), UsageError, r"a whole number for each of 4 rows, not int32\(2,\)"
    )
    check(lambda x, to: pw.route(x, x[:, 0], places, 2), UsageError, r"not float32\(4,\)")
    check(lambda x, to: pw.route(x, to, places, 0), UsageError, "at least 1")
    check(lambda x, to: pw.route(x, to, places, 1 << 30), UsageError, "at most 715827882")
    check(lambda x, to: pw.route(x, to, [wide], 3, spec=P("x")), UsageError, "3 rows do not divide into 2 parts")
    check(lambda x, to: pw.combine([x], pw.route(x, to, places, 2)[1]), UsageError, "takes 3 parts")
    check(lambda x, to: pw.combine([x] * 3, pw.route(x, to, places, 2)[1]), UsageError, r"part 0 has 2 rows")
    check(lambda x, to: x if pw.route(x, to, places, 2)[0][0].count else to, TraceError, "bool")

    def looped(x: Any, to: Any) -> Any:
        def body(_: Any, c: Any) -> Any:
            parts, handle = pw.route(c, to, places, 4, overflow="error")
            return pw.combine([part.rows for part in parts], handle)

        return pw.fori_loop(0, 2, body, x)

    check(looped, GraphError, "overflow='error' in a branch or a loop")
    with pytest.raises(UsageError, match="in a traced function"):
        jax.jit(lambda x: pw.route(x, to, places, 2)[0][0].rows)(x)
