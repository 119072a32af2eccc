"""Snapshots: where copies go, how they lie, and what comes back when some are lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.buffer import PENDING
from pathways_ray.client.slices import chosen, of_its_tenant
from pathways_ray.client.snapshots import spread
from pathways_ray.errors import (
    BufferLost,
    ControllerLost,
    Failure,
    ForeignArray,
    QuotaExceeded,
    Unschedulable,
    UsageError,
)
from pathways_ray.ir.types import ArrayType
from tests.unit.client.local import LocalSession, opened


def islands(*states: str) -> dict[str, Any]:
    """A status with islands of four devices in these states."""
    return {
        "islands": [
            {"island": k, "state": state, "platform": "cpu", "hosts": [{"devices": [{}] * 4}]}
            for k, state in enumerate(states)
        ]
    }


def lose(array: pw.Array, kind: str = "BufferLost") -> None:
    """Its host is gone."""
    array._buffer.record.fail(Failure(kind, "host 1 is gone", host=1))


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSession]:
    session = opened()
    monkeypatch.setattr(session, "status", lambda: islands("up", "up", "up"), raising=False)
    yield session
    session.close()


def test_a_snapshot_says_what_it_has_and_whether_it_is_there(session: LocalSession) -> None:
    a = pw.virtual_slice((4,), ("x",), island=0)
    safe = pw.snapshot({"w": pw.put(np.ones(512, np.float32), a), "step": 3}, copies=2)
    assert repr(safe) == "pw.Snapshot(1 array, 4.0 KiB on islands [1, 2], whole)"
    first, second = (copy._buffer.record for copies in safe._copies for copy in copies)
    first.state = PENDING
    assert repr(safe).endswith("under way)")
    for record in (first, second):
        record.fail(Failure("HostLost", "host 1 is gone"))
    assert repr(safe).endswith("lost in part)")


def test_a_tree_comes_back_as_it_was_after_its_arrays_were_donated_and_lost(session: LocalSession) -> None:
    a, b = pw.virtual_slice((4,), ("x",), island=0), pw.virtual_slice((2,), ("x",), island=1)
    host = np.arange(3)
    tree = {"w": pw.put(np.arange(8.0), a, P("x")), "v": pw.put(np.ones((3, 4)), b), "host": host, "step": 3}
    safe = pw.snapshot(tree)
    host[:] = 0
    assert [copy.slice.island for copies in safe._copies for copy in copies] == [2, 1]
    assert safe.nbytes == 8 * 4 + 12 * 4
    tree["w"].delete()
    lose(tree["v"])
    back = safe.restore()
    assert (back["w"].slice, back["w"].sharding.spec, back["v"].slice) == (a, P("x"), b)
    np.testing.assert_array_equal(np.asarray(back["w"]), np.arange(8.0))
    np.testing.assert_array_equal(np.asarray(back["v"]), np.ones((3, 4)))
    assert (back["host"].tolist(), back["step"]) == ([0, 1, 2], 3)


def test_one_of_two_copies_is_enough_and_without_any_the_snapshot_says_so(session: LocalSession) -> None:
    a = pw.virtual_slice((4,), ("x",), island=1)
    value = pw.put(np.arange(8.0), a, P("x"))
    safe = pw.snapshot(value, copies=2)
    (copies,) = safe._copies
    assert [copy.slice.island for copy in copies] == [2, 0]
    lose(copies[0])
    assert safe.is_whole()
    np.testing.assert_array_equal(np.asarray(safe.restore()), np.arange(8.0))
    lose(copies[1])
    assert not safe.is_whole()
    with pytest.raises(BufferLost):
        safe.restore()


def test_a_snapshot_is_exposed_where_an_array_has_no_copy_on_another_island(session: LocalSession) -> None:
    a, b = pw.virtual_slice((4,), ("x",), island=0), pw.virtual_slice((2,), ("x",), island=1)
    tree = {"w": pw.put(np.arange(8.0), a, P("x")), "v": pw.put(np.ones((3, 4)), b), "step": 3}
    safe = pw.snapshot(tree, copies=2, local=True)
    assert [[copy.slice.island for copy in copies] for copies in safe._copies] == [[], [1, 2, 0], [0, 1, 2]]
    assert not safe.is_exposed()
    lose(safe._copies[2][1])
    assert not safe.is_exposed()
    a.placed = pw.virtual_slice((4,), ("x",), island=2).placed
    assert safe.is_whole()
    assert safe.is_exposed(), "w's other copy is on island 2 too"
    safe._copies[1][2]._buffer.record.state = PENDING
    assert not safe.is_exposed(), "it is not over"


def test_copies_on_their_own_devices_serve_where_the_others_are_lost(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pw.virtual_slice((4,), ("x",), island=0), pw.virtual_slice((2,), ("x",), island=1)
    tree = {"w": pw.put(np.arange(8.0), a, P("x")), "v": pw.put(np.ones((3, 4)), b), "u": pw.put(np.zeros(2), a)}
    taken: list[Any] = []
    launch = session.launch
    monkeypatch.setattr(session, "launch", lambda p, given, *rest: (taken.append(given), launch(p, given, *rest))[1])
    safe = pw.snapshot(tree, local=True)
    assert len(session.launched) == 2, "one launch for the copies here, one for those elsewhere"
    beside = [copies[0] for copies in safe._copies]
    assert taken[-1] == [copy._buffer.record for copy in beside], "what is donated next is not read by others"
    for name, copies in zip(sorted(tree), safe._copies, strict=True):
        assert (copies[0].slice, copies[0].sharding.spec) == (tree[name].slice, tree[name].sharding.spec)
        tree[name].delete()
    lose(safe._copies[0][1])  # u's on island 1, and the others with it
    lose(safe._copies[2][1])
    lose(safe._copies[1][0])  # v's on its own devices
    back = safe.restore()
    assert (back["v"].slice, back["w"].slice, back["w"].sharding.spec) == (b, a, P("x"))
    np.testing.assert_array_equal(np.asarray(back["w"]), np.arange(8.0))
    np.testing.assert_array_equal(np.asarray(back["v"]), np.ones((3, 4)))


def test_values_of_a_snapshot_need_no_slice_of_before(session: LocalSession) -> None:
    a = pw.virtual_slice((4,), ("x",), island=0)
    safe = pw.snapshot({"w": pw.put(np.arange(8.0), a, P("x")), "step": 3})
    (shadow,) = [copy.slice for copies in safe._copies for copy in copies]
    session.shadows.release(a)
    assert shadow.released, "nobody needs it any more"
    found = safe.values()
    assert type(found["w"]) is np.ndarray
    np.testing.assert_array_equal(found["w"], np.arange(8.0))
    assert found["step"] == 3
    lose(safe._copies[1][0])
    with pytest.raises(BufferLost):
        safe.values()


def test_values_of_typed_keys_are_keys(session: LocalSession) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    a = pw.virtual_slice((4,), ("x",), island=0)
    found = pw.snapshot(pw.put(keys, a, P("x"))).values()
    assert (type(found), found.dtype) == (type(keys), keys.dtype)
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))


def test_the_next_snapshot_uses_the_same_slices_until_one_is_lost_or_in_the_wrong_place(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = pw.virtual_slice((4,), ("x",), island=0)
    value = pw.put(np.arange(8.0), a, P("x"))

    def shadow() -> Any:
        return pw.snapshot(value)._copies[0][0]

    first, second = shadow(), shadow()
    assert first.slice is second.slice
    assert len(session.launched) == 2
    assert session.launched[0] is session.launched[1], "the program was registered once"
    lose(second)
    monkeypatch.setattr(session, "status", lambda: islands("up", "lost", "up"))
    third = shadow()
    assert (third.slice.island, first.slice.released) == (2, True)
    a.placed = pw.virtual_slice((4,), ("x",), island=2).placed  # it has moved to where its copies are
    monkeypatch.setattr(session, "status", lambda: islands("up", "up", "up"))
    assert shadow().slice.island == 0


def test_islands_that_tenants_have_for_themselves_take_no_copies_of_others(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's sessions see them, and get no slices there."""
    seen = islands("up", "up", "up")
    for one, tenant in zip(seen["islands"], ("", "bob", ""), strict=True):
        one["tenant"] = tenant
    monkeypatch.setattr(session, "status", lambda: seen)
    a = pw.virtual_slice((4,), ("x",), island=0)
    safe = pw.snapshot(pw.put(np.arange(8.0), a, P("x")))
    assert safe._copies[0][0].slice.island == 2
    assert a.refuges() == []
    seen["islands"].append({**seen["islands"][2], "island": 3})
    assert a.refuges() == [3]
    assert [one["island"] for one in of_its_tenant(seen["islands"], 1)] == [1]
    assert [one["island"] for one in of_its_tenant(seen["islands"])] == [0, 2, 3]
    assert of_its_tenant([]) == []


def test_programs_of_copies_go_with_the_slices_that_they_name(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. Programs go to another island and back; that is lost, and its shadow takes two of them along.
    2. The slice is released. What comes back there later, from copies that are left, leaves no program either.
    """
    a = pw.virtual_slice((4,), ("x",), island=0)
    value = pw.put(np.arange(8.0), a, P("x"))
    known, dropped = lambda: set(session.shadows._programs.values()), session._core.dropped

    def there_and_back() -> pw.Snapshot:
        safe = pw.snapshot(value)
        np.testing.assert_array_equal(np.asarray(safe.restore()), np.arange(8.0))
        return safe

    (copy,) = there_and_back()._copies[0]
    first = known()
    lose(copy)
    monkeypatch.setattr(session, "status", lambda: islands("up", "lost", "up"))
    safe = there_and_back()
    assert (len(first), set(dropped)) == (2, first)
    second = known()
    assert len(second) == 2
    a.release()
    assert (known(), set(dropped)) == (set(), first | second)
    np.testing.assert_array_equal(np.asarray(safe.restore()), np.arange(8.0))
    assert known() == set()
    assert len(dropped) == 5


def test_shadows_go_with_slices_that_were_released_before_or_while_the_session_is_suspended(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = pw.virtual_slice((4,), ("x",), island=0)
    value = pw.put(np.arange(8.0), a, P("x"))
    (shadow,) = [copy.slice for copies in pw.snapshot(value)._copies for copy in copies]
    with monkeypatch.context() as patch:
        patch.setattr(session._driver, "suspension", object())
        a.release()
    assert shadow.released
    safe = pw.snapshot(value)
    assert [copy.slice.released for copies in safe._copies for copy in copies] == [True]
    np.testing.assert_array_equal(np.asarray(safe.restore()), np.arange(8.0))
    made: list[Any] = []
    make = session.virtual_slice
    monkeypatch.setattr(session, "virtual_slice", lambda *a, **k: (made.append(make(*a, **k)), made[-1])[1])
    with pytest.raises(Unschedulable):
        pw.snapshot(value, copies=3)
    assert [one.released for one in made] == [True, True]


def test_shadows_that_are_there_are_known_where_another_one_is_refused(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. The first of two is made, the second refused: the next snapshot takes the first.
    2. It fails, and the next one is refused: it was released, and is not handed out again.
    """
    a = pw.virtual_slice((4,), ("x",), island=0)
    value = pw.put(np.arange(8.0), a, P("x"))
    made: list[pw.VirtualSlice] = []
    room = 1

    def make(*args: Any, **options: Any) -> pw.VirtualSlice:
        if len(made) == room:
            raise QuotaExceeded("no more slices")
        made.append(LocalSession.virtual_slice(session, *args, **options))
        return made[-1]

    monkeypatch.setattr(session, "virtual_slice", make)
    with pytest.raises(QuotaExceeded):
        pw.snapshot(value, copies=2)
    safe = pw.snapshot(value)
    assert safe._copies[0][0].slice is made[0]
    lose(safe._copies[0][0])
    monkeypatch.setattr(session, "status", lambda: islands("up", "lost", "up"))
    with pytest.raises(QuotaExceeded):
        pw.snapshot(value)
    assert made[0].released
    room = 2
    assert pw.snapshot(value)._copies[0][0].slice is made[1]


@pytest.mark.parametrize("renewed", [False, True])
def test_shadows_that_could_not_be_released_are_released_by_the_next_call(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch, renewed: bool
) -> None:
    """Of two, with their slice; or for others, once their islands are lost and their copies with them."""
    a = pw.virtual_slice((4,), ("x",), island=0)
    value = pw.put(np.arange(8.0), a, P("x"))
    copies = pw.snapshot(value, copies=2)._copies[0]
    shadows, call = [copy.slice for copy in copies], session._connection.call

    def lost(*_: Any) -> None:
        raise ControllerLost("it does not answer")

    def again() -> None:
        pw.snapshot(value) if renewed else a.release()

    if renewed:
        list(map(lose, copies))
        monkeypatch.setattr(session, "status", lambda: islands("up", "lost", "lost", "up"))
    monkeypatch.setattr(session._connection, "call", lost)
    with pytest.raises(ControllerLost):
        again()
    assert [shadow.released for shadow in shadows] == [False, False]
    monkeypatch.setattr(session._connection, "call", call)
    again()
    assert [shadow.released for shadow in shadows] == [True, True]


def test_what_no_snapshot_can_be_taken_of_is_refused(session: LocalSession, monkeypatch: pytest.MonkeyPatch) -> None:
    a = pw.virtual_slice((4,), ("x",), island=0)
    value = pw.put(np.arange(8.0), a, P("x"))
    for copies in (0, True, "1"):
        with pytest.raises(UsageError, match="copies= is a number of islands from 1 up"):
            pw.snapshot(value, copies=copies)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"no pw\.Array in the tree"):
        pw.snapshot({"a": np.ones(3)})
    with pytest.raises(Unschedulable, match="copies=3 takes as many other islands that are up; there are 2"):
        pw.snapshot(value, copies=3)
    monkeypatch.setattr(session, "status", lambda: islands("up", "away", "draining"))
    with pytest.raises(Unschedulable, match="there are 0 beside island 0"):
        pw.snapshot(pw.put(np.ones(4), pw.virtual_slice((4,), ("x",), island=0)))
    other = opened()
    foreign = pw.put(np.ones(4), other.virtual_slice((1,), ("x",)))
    other.close()
    with pytest.raises(ForeignArray):
        pw.snapshot([value, foreign])


def test_a_copy_is_divided_over_its_devices_where_it_can_be() -> None:
    assert spread(ArrayType((3, 8), "float32"), 4) == ((), ("copy",))
    assert spread(ArrayType((3, 5), "float32"), 4) == spread(ArrayType((), "int32"), 4) == ()
    assert spread(ArrayType((8,), "float32"), 1) == spread(ArrayType((0, 5), "float32"), 4) == ()
    mixed = [{"island": k, "platform": platform} for k, platform in enumerate(["cpu", "gpu", "cpu", "cpu"])]
    assert chosen(mixed, 2, {2}) == [3, 0, 1]
