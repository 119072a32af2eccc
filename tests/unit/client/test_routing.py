"""`pw.route` between programs, on devices of this process: parts and results beside NumPy's, whatever the rows."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import context, routed_rows
from tests.unit.client.local import LocalSession


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> LocalSession:
    made = LocalSession()
    monkeypatch.setattr(context, "sessions", [made])
    return made


def chosen(kind: str, count: int, slices: int) -> np.ndarray[Any, Any]:
    """Destinations: `even` ones by chance, `few` to the last slice, all to `one`, `none` to any, or `sorted`."""
    found = np.random.default_rng(count).integers(-1, slices, count).astype(np.int32)
    if kind == "few":
        found = np.where(np.arange(count) % 11 == 5, slices - 1, -1).astype(np.int32)
    if kind in ("one", "none"):
        found[:] = 1 if kind == "one" else -1
    return np.sort(found) if kind == "sorted" else found


def check(xs: list[Any], tos: list[Any], given: list[pw.Array], places: list[pw.VirtualSlice], **options: Any) -> Any:
    """Routes and combines, and compares with NumPy. Returns the handle."""
    x, to, capacity = np.concatenate(xs), np.concatenate(tos), options.get("capacity")
    parts, handle = pw.route(given, tos, places, **options)
    kept = np.zeros(len(x), bool)
    for k, part in enumerate(parts):
        mine = np.flatnonzero(to == k)[:capacity]
        kept[mine] = True
        assert part.count == len(mine)
        assert (part.rows is None) == (len(mine) == 0)
        if part.count:
            padded = np.zeros((part.rows.shape[0], *x.shape[1:]), x.dtype)
            padded[: len(mine)] = x[mine]
            np.testing.assert_array_equal(np.asarray(part.rows), padded)
    found = np.concatenate([np.asarray(one) for one in pw.combine(parts, handle)])
    np.testing.assert_array_equal(found, np.where(kept.reshape(-1, *(1,) * (x.ndim - 1)), x, np.zeros((), x.dtype)))
    return handle


@pytest.mark.parametrize(
    ("kind", "capacity"), [("even", 7), ("even", 12), ("few", None), ("one", None), ("none", 7), ("sorted", None)]
)
def test_rows_of_shards_lie_one_behind_the_other(session: LocalSession, kind: str, capacity: int | None) -> None:
    """Seven rows do not divide into the shards of the source, and twelve do."""
    here, places = session.virtual_slice((4,), ("x",)), [session.virtual_slice((1,), ("y",)) for _ in range(3)]
    x = np.random.default_rng(0).standard_normal((44, 3)).astype(np.float32)
    handle = check([x], [chosen(kind, 44, 3)], [pw.put(x, here, P("x"))], places, capacity=capacity)
    if capacity is not None:
        assert handle.sizes == [capacity * bool(count) for count in handle.counts[0]]


@pytest.mark.parametrize(
    ("dtype", "tail"), [("bfloat16", (2, 3)), ("int4", ()), ("bool", (3,)), ("complex64", ()), ("float32", (0,))]
)
def test_rows_may_be_of_any_type_and_rank(session: LocalSession, dtype: str, tail: tuple[int, ...]) -> None:
    here, there = session.virtual_slice((2,), ("x",)), session.virtual_slice((2,), ("y",))
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = np.random.default_rng(1).integers(0, 2, (24, *tail)).astype(kind)
    spec, part_spec = (P("x"), P("y")) if x.size else (P(), P())  # JAX itself partitions no array without elements
    check([x], [chosen("even", 24, 1)], [pw.put(x, here, spec)], [there], spec=part_spec)


@pytest.mark.parametrize("count", [routed_rows.FEW_ROWS, routed_rows.FEW_ROWS + 1000])
def test_the_order_of_many_rows_is_that_of_few(count: int) -> None:
    to = np.random.default_rng(3).integers(-1, 4, 2 * count).astype(np.int32)  # 3 is no slice
    order, bins, rank, said = (np.asarray(one) for one in routed_rows.ordered(to, 2, 3))
    for shard, mine in enumerate(to.reshape(2, -1)):
        places = [np.flatnonzero(mine == k) for k in range(3)]
        flat = np.concatenate(places)
        np.testing.assert_array_equal(order[shard, : len(flat)], flat)
        np.testing.assert_array_equal(bins[shard], np.where((mine < 0) | (mine == 3), 3, mine))
        np.testing.assert_array_equal(rank[shard, flat], np.concatenate([np.arange(len(one)) for one in places]))
        assert said[shard].tolist() == [*map(len, places), (mine == -1).sum(), (mine == 3).sum(), 3]


def test_rows_may_be_typed_keys_that_all_go_nowhere(session: LocalSession) -> None:
    where = session.virtual_slice((2,), ("x",))
    keys = pw.put(jax.random.split(jax.random.key(0), 4), where, P("x"))
    came = pw.combine(*pw.route(keys, np.full(4, -1), [where]))
    assert (came.dtype, came.sharding.spec) == (keys.dtype, P("x"))
    np.testing.assert_array_equal(jax.random.key_data(jax.device_get(came)), np.zeros((4, 2)))


def test_columns_and_rows_may_both_be_partitioned(session: LocalSession) -> None:
    here, there = session.virtual_slice((2, 2), ("x", "y")), session.virtual_slice((4,), ("z",))
    x = np.arange(160, dtype=np.float32).reshape(40, 4)
    for spec in (P("x", "y"), P(("x", "y")), P(("y", "x")), P(None, "x")):
        check([x], [chosen("even", 40, 1)], [pw.put(x, here, spec)], [there], spec=P(None, "z"))


def test_several_sources_meet_in_a_part(session: LocalSession) -> None:
    here, there = session.virtual_slice((4,), ("x",)), session.virtual_slice((2,), ("y",))
    xs = [np.random.default_rng(k).standard_normal((count, 2)).astype(np.float32) for k, count in enumerate((24, 7, 8))]
    tos = [chosen(kind, len(x), 1) for kind, x in zip(("even", "none", "even"), xs, strict=True)]
    given = [pw.put(xs[0], here, P("x")), pw.put(xs[1], there), pw.put(xs[2], there, P("y"))]
    for capacity in (None, 10, 14):
        check(xs, tos, given, [there], capacity=capacity, spec=P("y"))


def test_one_launch_moves_the_rows_of_all_shards(session: LocalSession) -> None:
    """Nothing is put together where they come. Pieces of the same size whose rows have less far to go are cut by the
    same function."""
    here, there = session.virtual_slice((4,), ("x",)), session.virtual_slice((4,), ("y",))
    x = np.random.default_rng(2).standard_normal((64, 2)).astype(np.float32)
    given = pw.put(x, here, P("x"))
    programs = []
    for first in (0, 48, 8, 48):  # 16 rows: of the first shard, of the last one, of two
        to = np.where((np.arange(64) >= first) & (np.arange(64) < first + 16), 0, -1).astype(np.int32)
        session.launched.clear()
        parts, _ = pw.route(given, to, [there], spec=P("y"))
        np.testing.assert_array_equal(np.asarray(parts[0].rows), x[first : first + 16])
        assert len(session.launched) == 2, "one says how many there are, and one moves them"
        programs.append(session.launched[-1])
    assert programs[0] is not programs[1]
    assert programs[1] is programs[2] is programs[3]


def test_rows_are_routed_in_the_session_of_their_slices(session: LocalSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was in the session made last, to which the rows are foreign."""
    here, places = session.virtual_slice((2,), ("x",)), [session.virtual_slice((1,), ("y",)) for _ in range(2)]
    monkeypatch.setattr(context, "sessions", [session, LocalSession()])
    x, to = np.arange(24, dtype=np.float32).reshape(8, 3), chosen("even", 8, 2)
    check([x], [to], [pw.put(x, here, P("x"))], places)
