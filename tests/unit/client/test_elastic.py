"""Elastic steps: what is made again after a loss, and what the user's handles have then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import pathways_ray as pw
from pathways_ray.client import elastic, history
from pathways_ray.client.buffer import PENDING, READY
from pathways_ray.client.elastic import MAX_UNDER_WAY, Elastic
from pathways_ray.client.history import KEPT
from pathways_ray.errors import (
    BufferLost,
    ControllerLost,
    ExecutionError,
    Failure,
    QuotaExceeded,
    SessionClosed,
    Unschedulable,
    UsageError,
)
from tests.unit.client.local import LocalSession, opened
from tests.unit.client.test_snapshots import islands, lose


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSession]:
    session = opened()
    monkeypatch.setattr(session, "status", lambda: islands("up", "up"), raising=False)
    yield session
    session.close()


class State(NamedTuple):
    """The state of a loop."""

    w: Any
    m: Any


class Loop:
    """A loop of a user, whose state and losses are `expected` without a loss. `made` has the numbers of all calls."""

    def __init__(self, every: int = 3, donate: bool = True) -> None:
        self.where = pw.virtual_slice((2,), ("x",), island=0)
        update = pw.compiled(
            lambda s, v: (s * 2 + v, (s * v).sum()), slice=self.where, donate_argnums=(0,) if donate else ()
        )
        self.made: list[int] = []

        def step(state: Any, number: int, batch: Any) -> Any:
            self.made.append(number)
            return update(state, batch)

        self.step: Elastic = pw.elastic(step, snapshot_every=every)  # type: ignore[assignment]
        self.state: Any = pw.put(np.ones(4, np.float32), self.where)
        self.expected, self.number = np.ones(4, np.float32), 0
        self.losses: list[tuple[Any, float]] = []

    def go(self, calls: int) -> None:
        for _ in range(calls):
            batch = np.full(4, self.number + 1, np.float32)
            self.state, loss = self.step(self.state, self.number, batch)
            self.losses.append((loss, float((self.expected * batch).sum())))
            self.expected = self.expected * 2 + batch
            batch[:] = np.nan  # the user's own, to be used again
            self.number += 1

    def check(self) -> None:
        np.testing.assert_array_equal(np.asarray(self.state), self.expected)
        assert all(float(loss) == expected for loss, expected in self.losses)


@pytest.mark.parametrize("kind", ["BufferLost", "ControllerLost"])
@pytest.mark.parametrize("donate", [True, False])
def test_a_loop_goes_on_after_a_loss_with_the_same_bits_and_the_same_handles(
    session: LocalSession, donate: bool, kind: str
) -> None:
    """
    1. A loop makes seven calls, with a snapshot before 0, 3 and 6.
    2. State and last loss are lost, or their launch was under way when the controller died. The loop calls on: call 6
       is made again, and then the next ones.
    3. A loss is looked at that was lost too, and was made before the last snapshot: from the one before on.
    """
    loop = Loop(donate=donate)
    loop.go(7)
    for array in (loop.state, loop.losses[-1][0]):
        lose(array, kind)
    loop.go(2)
    assert loop.made == [*range(7), 6, 7, 8]
    assert (loop.step.losses, loop.step.replayed) == (1, 1)
    loop.check()
    lose(loop.losses[4][0])
    loop.made.clear()
    loop.check()
    assert loop.made == [3, 4, 5, 6, 7, 8]


def test_a_read_makes_again_what_was_lost(session: LocalSession) -> None:
    loop = Loop()
    loop.go(2)
    lose(loop.state)
    assert loop.state.block_until_ready() is loop.state
    lose(loop.losses[1][0])
    loop.check()
    assert loop.step.losses == 2


def test_results_that_nobody_has_are_not_looked_at_again(session: LocalSession) -> None:
    """Each call looks at the results of all calls since the last snapshots, of which a loop keeps those of the last."""
    loop = Loop(every=100)
    loop.go(9)
    looked_at = {number: len(call._results) for number, call in loop.step._calls.items()}
    assert looked_at == dict.fromkeys(range(7), 1) | {7: 2, 8: 2}  # 7: its state, until the next call has looked
    del loop.losses[:]
    loop.go(1)
    assert [len(call._results) for call in loop.step._calls.values()] == [0] * 8 + [1, 2]
    loop.check()


def test_other_failures_and_arrays_of_others_raise(session: LocalSession) -> None:
    loop = Loop()
    loop.go(1)
    other = pw.put(np.ones(3), loop.where)
    lose(other)
    with pytest.raises(BufferLost):
        np.asarray(other)
    loop.state._buffer.record.fail(Failure("ExecutionError", "it divided by zero"))
    with pytest.raises(ExecutionError, match="divided by zero"):
        np.asarray(loop.state)
    assert loop.step.losses == 0


def test_a_state_that_the_user_has_changed_begins_anew(session: LocalSession) -> None:
    """What was before cannot be made again: it is not known what the user did."""
    loop = Loop()
    loop.go(2)
    loop.state = loop.state * 1.0
    loop.go(1)
    lose(loop.state)
    loop.check()
    assert loop.made == [0, 1, 2, 2]


def scaled(where: Any, seen: list[Any]) -> Elastic:
    """A step over a state that has a factor beside its array, and notes the structure of each state."""
    times = pw.compiled(lambda w, by: w * by, slice=where)

    def step(state: Any) -> Any:
        seen.append(sorted(state))
        return {"by": state["by"], "w": times(next(iter(v for k, v in state.items() if k != "by")), state["by"])}

    return pw.elastic(step, snapshot_every=100)  # type: ignore[return-value]


@pytest.mark.parametrize("in_place", [False, True])
def test_other_leaves_that_the_user_has_changed_are_in_what_is_made_again(
    session: LocalSession, in_place: bool
) -> None:
    where, seen = pw.virtual_slice((2,), ("x",), island=0), []  # type: ignore[var-annotated]
    step = scaled(where, seen)
    state = {"by": np.full((), 2, np.float32), "w": pw.put(np.ones(4, np.float32), where)}
    for number in range(4):
        if number == 2 and in_place:
            state["by"][...] = 3
        elif number == 2:
            state["by"] = np.full((), 3, np.float32)
        state = step(state)
    lose(state["w"])
    np.testing.assert_array_equal(np.asarray(state["w"]), np.full(4, 36, np.float32))
    assert (len(seen), step.losses) == (4 + 2, 1), "the calls since the change were made again"


def test_a_state_whose_structure_the_user_has_changed_begins_anew(session: LocalSession) -> None:
    where, seen = pw.virtual_slice((2,), ("x",), island=0), []  # type: ignore[var-annotated]
    step = scaled(where, seen)
    state = step({"by": 2.0, "w": pw.put(np.ones(4, np.float32), where)})
    state = step({"by": 2.0, "v": state["w"]})
    lose(state["w"])
    np.testing.assert_array_equal(np.asarray(state["w"]), np.full(4, 4, np.float32))
    assert seen == [["by", "w"], ["by", "v"], ["by", "v"]]


def test_what_is_lost_of_a_changed_state_is_made_again_first(session: LocalSession) -> None:
    where = pw.virtual_slice((2,), ("x",), island=0)
    step = scaled(where, [])
    state = step({"by": 2.0, "w": pw.put(np.ones(4, np.float32), where)})
    lose(state["w"])
    state = step({**state, "by": 3.0})
    np.testing.assert_array_equal(np.asarray(state["w"]), np.full(4, 6, np.float32))
    assert step.losses == 1


def test_a_step_that_failed_with_another_state_has_not_taken_the_loop_along(session: LocalSession) -> None:
    """The next call is given the state of before: it is not what the last snapshot was taken of."""
    where = pw.virtual_slice((2,), ("x",), island=0)
    step = scaled(where, [])
    state = step({"by": 2.0, "w": pw.put(np.ones(4, np.float32), where)})
    with pytest.raises(StopIteration):
        step({"by": state["w"] * 5})
    state = step(state)
    lose(state["w"])
    np.testing.assert_array_equal(np.asarray(state["w"]), np.full(4, 4, np.float32))


@pytest.mark.parametrize("use", ["operation", "program", "snapshot", "put"])
def test_a_lost_result_is_made_again_where_another_call_takes_it(session: LocalSession, use: str) -> None:
    loop = Loop()
    loop.go(2)
    lose(loop.state)
    if use == "operation":
        found = loop.state + 1
    elif use == "program":
        found = pw.program(lambda state: state + 1)(loop.state)
    elif use == "snapshot":
        found = pw.snapshot(loop.state).restore() + 1
    else:
        found = pw.put(loop.state, pw.virtual_slice((4,), ("x",), island=1)) + 1
    assert loop.step.losses == 1
    np.testing.assert_array_equal(np.asarray(found), loop.expected + 1)
    loop.check()


def test_a_callback_makes_nothing_again(session: LocalSession) -> None:
    """Others wait for the thread that runs it."""
    loop = Loop()
    loop.go(2)
    lose(loop.state)
    found: list[Any] = []

    def call(array: Any) -> None:
        found.append(array + 1)
        with pytest.raises(BufferLost):
            np.asarray(array)

    loop.state.add_done_callback(call)
    assert found[0]._buffer.record.failure is loop.state._buffer.record.failure
    assert loop.step.losses == 0
    loop.check()


@pytest.fixture
def losing(session: LocalSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made of a lost array is lost too. Nothing is tried for long."""
    launch = session.launch

    def launched(program: int, arguments: list[Any], *rest: Any) -> Any:
        made = launch(program, arguments, *rest)
        if any(record.failure is not None for record in arguments):
            for array in made:
                lose(array)
        return made

    monkeypatch.setattr(session, "launch", launched)
    monkeypatch.setattr(session, "wait", session._driver.wait)
    monkeypatch.setattr(elastic, "RECOVERY_LIMIT_S", 1.0)


@pytest.mark.usefixtures("losing")
@pytest.mark.parametrize("donate", [True, False])
def test_a_step_that_takes_its_own_lost_results_makes_these_again_too(session: LocalSession, donate: bool) -> None:
    """Each call takes the second result of the one before. All that is there is lost, with handles to what was donated,
    or to the last ones alone."""
    where = pw.virtual_slice((2,), ("x",), island=0)
    update = pw.compiled(lambda s, v: (s * 2, s + v), slice=where, donate_argnums=(1,) if donate else ())
    step: Any = pw.elastic(update, snapshot_every=100)
    state, last = step(pw.put(np.ones(4, np.float32), where), np.zeros(4, np.float32))
    kept = [last]
    for _ in range(3):
        state, last = step(state, last)
        kept.append(last)
    for array in (state, *(kept[-1:] if donate else kept)):
        lose(array)
    np.testing.assert_array_equal(np.asarray(last), np.full(4, 15, np.float32))
    assert (step.losses, step.replayed) == (1, 4)
    if not donate:
        assert [np.asarray(one).max() for one in kept] == [1, 3, 7, 15]
    lose(last)
    del kept
    state, last = step(state, last)
    np.testing.assert_array_equal(np.asarray(last), np.full(4, 31, np.float32))


def test_a_named_tuple_is_a_state(session: LocalSession) -> None:
    """It is not one that a tuple of results begins with: the loop would begin with each call."""
    where = pw.virtual_slice((2,), ("x",), island=0)
    step: Any = pw.elastic(pw.compiled(lambda s: State(s.w * 2, s.m + s.w), slice=where), snapshot_every=100)
    state = State(*(pw.put(np.ones(4, np.float32), where) for _ in range(2)))
    for _ in range(3):
        state = step(state)
    lose(state.w)
    np.testing.assert_array_equal(np.asarray(state.m), np.full(4, 8, np.float32))
    np.testing.assert_array_equal(np.asarray(state.w), np.full(4, 8, np.float32))
    assert (step.losses, step.replayed) == (1, 3)


def test_calls_are_made_again_under_the_settings_that_they_had(session: LocalSession) -> None:
    where = pw.virtual_slice((2,), ("x",), island=0)
    draw = pw.compiled(lambda s, key: s + jax.random.uniform(key, (4,)), slice=where)
    expected, values = np.zeros(4, np.float32), []
    step: Any = pw.elastic(draw, snapshot_every=100)
    state = pw.put(expected, where)
    for number in range(4):
        with jax.threefry_partitionable(number % 2 == 0):
            key = jax.random.key_data(jax.random.key(number))
            state = step(state, key)
            values.append(np.asarray(jax.jit(lambda k: jax.random.uniform(k, (4,)))(key)))
    for value in values:
        expected = expected + value
    lose(state)
    np.testing.assert_array_equal(np.asarray(state), expected)
    assert step.replayed == 4


@pytest.mark.usefixtures("losing")
def test_an_input_that_the_step_returns_as_it_is_and_that_is_lost_is_said(session: LocalSession) -> None:
    """It is a result, and nothing makes it again."""
    where = pw.virtual_slice((2,), ("x",), island=0)
    update = pw.compiled(lambda s, v: s * 2 + v, slice=where)
    step: Any = pw.elastic(lambda state, batch: (update(state, batch), batch))
    batch = pw.put(np.ones(4, np.float32), where)
    state, batch = step(pw.put(np.ones(4, np.float32), where), batch)
    state, batch = step(state, batch)
    for array in (state, batch):
        lose(array)
    with pytest.raises(BufferLost, match="and so is an input with which they would be made again"):
        np.asarray(state)


def test_two_steps_that_take_results_of_each_other_do_not_wait_for_each_other(session: LocalSession) -> None:
    """While another thread has the lock of a step, who has that of another one goes on without what is lost of it."""
    one, other = Loop(), Loop()
    one.go(2)
    lose(one.state)
    got: list[Any] = []

    def use(state: Any) -> Any:
        got.append(one.state + 1)
        return state * 1.0

    step = pw.elastic(use)
    with one.step._lock:
        thread = threading.Thread(target=step, args=(other.state,))
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    assert got[0]._buffer.record.failure is not None
    one.check()


def test_an_array_that_the_step_captures_and_that_is_lost_is_said(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts that fail with other losses go on: the host may be on its way back."""
    monkeypatch.setattr(session, "wait", session._driver.wait)
    monkeypatch.setattr(elastic, "PAUSE_S", 0.0)
    where = pw.virtual_slice((2,), ("x",), island=0)
    held = pw.put(np.ones(4, np.float32), where)
    add = pw.compiled(lambda s, v: s + v, slice=where)
    attempts: list[int] = []

    def update(state: Any) -> Any:
        made = add(state, held)
        if attempts and attempts[0] > 0:
            attempts[0] -= 1
            lose(made)
        return made

    step = pw.elastic(update)
    state = step(pw.put(np.zeros(4, np.float32), where))
    lose(state)
    attempts.append(5)
    np.testing.assert_array_equal(np.asarray(state), np.ones(4, np.float32))
    assert attempts == [0]
    for array in (state, held):
        lose(array)
    with pytest.raises(BufferLost, match=r"so is an array that the step captures \(host 1 is gone\)"):
        np.asarray(state)
    other = Loop()
    other.go(1)
    lose(other.state)
    monkeypatch.setattr(elastic, "RECOVERY_LIMIT_S", 0.0)
    with pytest.raises(BufferLost, match=r"^host 1 is gone$"):
        np.asarray(state)  # might be of the other step, which may make it again


def test_an_input_that_was_deleted_or_donated_is_named(session: LocalSession) -> None:
    where = pw.virtual_slice((2,), ("x",), island=0)
    for donate in (False, True):
        step = pw.elastic(pw.compiled(lambda s, v: s * 2 + v, slice=where, donate_argnums=(1,) if donate else ()))
        batch = pw.put(np.ones(4, np.float32), where)
        state = step(pw.put(np.ones(4, np.float32), where), batch)
        if not donate:
            batch.delete()
        lose(state)
        for _ in range(2):
            with pytest.raises(BufferLost, match="an input with which they would be made again was deleted or donated"):
                np.asarray(state)


@pytest.mark.usefixtures("losing")
def test_a_loss_of_an_input_is_one(session: LocalSession) -> None:
    """The array lay with the state: no attempt would bring it back, and none is waited for. Nor is it later."""
    where = pw.virtual_slice((2,), ("x",), island=0)
    step = pw.elastic(pw.compiled(lambda s, v: s * 2 + v, slice=where))
    batch = pw.put(np.ones(4, np.float32), where)
    state = step(pw.put(np.ones(4, np.float32), where), batch)
    for array in (state, batch):
        lose(array)
    for _ in range(2):
        with pytest.raises(BufferLost, match="and so is an input with which they would be made again"):
            np.asarray(state)
    with pytest.raises(BufferLost, match="NumPy arrays are kept in this process"):
        step(state, np.ones(4, np.float32))


def test_without_a_snapshot_a_loss_is_one(session: LocalSession) -> None:
    """State and copies are lost together: the loop hears of it, and goes on with a state of its own."""
    loop = Loop()
    loop.go(2)
    for taken in loop.step._snapshots.values():
        for copy in taken._copies[0]:
            lose(copy)
    lose(loop.state)
    with pytest.raises(BufferLost, match="and so is every snapshot from before it"):
        loop.go(1)
    loop.state, loop.expected = pw.put(np.ones(4, np.float32), loop.where), np.ones(4, np.float32)
    del loop.losses[:]
    loop.go(2)
    loop.check()


def ready_once_waited_for(session: LocalSession, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Has arrays be ready as soon as somebody waits for them; those that were not, in order."""
    waited: list[Any] = []

    def wait(record: Any, *_: Any) -> None:
        if record.state is PENDING:
            waited.append(record)
            record.state = READY

    monkeypatch.setattr(session, "wait", wait)
    return waited


def test_a_loss_waits_for_snapshots_under_way_and_drops_none(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop keeps all of its losses: what the last snapshot would make unneeded is needed for them."""
    loop = Loop()
    loop.go(7)
    copies = loop.step._snapshots[6]._copies[0]
    for copy in copies:
        copy._buffer.record.state = PENDING
    waited = ready_once_waited_for(session, monkeypatch)
    for array in (loop.state, *(loss for loss, _ in loop.losses)):
        lose(array)
    loop.check()
    assert waited == [copy._buffer.record for copy in copies]
    assert loop.made == [*range(7), *range(7)]
    loop.go(4)
    assert sorted(loop.step._snapshots) == [6, 9], "the older ones go with the next"
    loop.check()


def test_a_loop_that_runs_ahead_of_its_devices_waits_for_snapshots(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot is taken before each call, and none gets ready by itself. Each call waits for the oldest of those
    under way, once there are two; so few are held, and few calls are kept."""
    loop = Loop(every=1)
    waited = ready_once_waited_for(session, monkeypatch)
    taken: list[Any] = []
    for number in range(8):
        loop.go(1)
        for copy in loop.step._snapshots[number]._copies[0]:
            taken.append(copy._buffer.record)
            copy._buffer.record.state = PENDING
        assert len(loop.step._snapshots) <= MAX_UNDER_WAY + KEPT
        assert len(loop.step._calls) <= MAX_UNDER_WAY + KEPT
    assert waited == taken[: len(waited)]
    assert len(taken) - len(waited) <= 2 * MAX_UNDER_WAY
    loop.check()


def test_a_result_from_before_the_kept_snapshots_is_lost_and_nothing_else(session: LocalSession) -> None:
    loop = Loop()
    loop.go(8)
    assert sorted(loop.step._snapshots) == [3, 6]
    (old, _), *loop.losses = loop.losses
    for array in (loop.state, old, *(loss for loss, _ in loop.losses[2:])):
        lose(array)
    with pytest.raises(BufferLost, match="host 1 is gone"):
        float(old)
    loop.check()
    assert sorted(loop.step._snapshots) == [3, 6]


def test_a_lost_snapshot_is_taken_again_and_later_where_there_is_no_island(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "EXPOSED_PAUSE_S", 0.0)
    loop = Loop(every=100)
    loop.go(1)
    for copy in loop.step._snapshots[0]._copies[0]:
        lose(copy)
    monkeypatch.setattr(session, "status", lambda: islands("up", "away"))
    loop.go(2)
    assert not loop.step._snapshots
    monkeypatch.setattr(session, "status", lambda: islands("up", "up"))
    loop.go(1)
    lose(loop.state)
    loop.check()
    assert loop.made == [0, 1, 2, 3, 3]


def test_a_snapshot_over_a_quota_is_taken_later(session: LocalSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on meanwhile. At its beginning, the user hears of it."""

    def refused(*_: Any, **__: Any) -> Any:
        raise QuotaExceeded("over the quota of device bytes")

    monkeypatch.setattr(elastic, "EXPOSED_PAUSE_S", 0.0)
    loop = Loop(every=2)
    with monkeypatch.context() as patch:
        patch.setattr(elastic, "snapshot", refused)
        with pytest.raises(QuotaExceeded):
            loop.go(1)
    loop.go(1)
    with monkeypatch.context() as patch:
        patch.setattr(elastic, "snapshot", refused)
        loop.go(3)
        assert sorted(loop.step._snapshots) == [0]
    loop.go(1)
    assert sorted(loop.step._snapshots)[-1] == 4
    loop.check()


def lose_island(loop: Loop, island: int) -> None:
    """What lies on an island is lost: copies, and the loop's arrays where its slice is there."""
    copies = [copy for taken in loop.step._snapshots.values() for kept in taken._copies for copy in kept]
    for array in (loop.state, *(loss for loss, _ in loop.losses), *copies):
        if array.slice.island == island:
            lose(array)


@pytest.mark.parametrize("what", ["the slice moves", "the copies move", "the copies are lost"])
def test_a_snapshot_that_would_be_lost_with_the_state_is_taken_again_before_the_next_call(
    session: LocalSession, what: str
) -> None:
    """
    1. Before call 0 a snapshot is taken, of a slice on island 0, to island 1. The next one is due before call 100.
    2. The slice moves to the island of the copies, or they to its island, or that of the copies is lost.
    3. Before call 2 another snapshot is taken, and none before call 3. It outlives the loss of the state's island.
    """
    loop = Loop(every=100)
    loop.go(2)
    shadow = loop.step._snapshots[0]._copies[0][1].slice
    assert (loop.where.island, shadow.island) == (0, 1)
    if what == "the slice moves":
        loop.where.placed = pw.virtual_slice((2,), ("x",), island=1).placed
    elif what == "the copies move":
        shadow.placed = pw.virtual_slice((2,), ("copy",), island=0).placed
    else:
        lose_island(loop, 1)
    loop.go(2)
    assert sorted(loop.step._snapshots) == [0, 2]
    del loop.losses[:2]
    lose_island(loop, loop.where.island)
    loop.check()
    assert loop.made == [0, 1, 2, 3, 2, 3]


def test_where_no_snapshot_can_be_had_not_each_call_tries(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither asks the controller, while there is no other island; nor takes one after the other that fails."""
    loop = Loop(every=100)
    loop.go(1)
    asked: list[int] = []
    monkeypatch.setattr(session, "status", lambda: (asked.append(loop.number), islands("up", "away"))[1])
    monkeypatch.setattr(elastic, "EXPOSED_PAUSE_S", 1e6)
    lose_island(loop, 1)
    loop.go(5)
    assert asked == [1]
    loop.step._not_before = 0.0
    monkeypatch.setattr(session, "status", lambda: islands("up", "up"))
    for _ in range(3):
        loop.go(1)
        lose_island(loop, 1)
    assert sorted(loop.step._snapshots) == [0, 6]
    loop.check()


@pytest.fixture
def alone(session: LocalSession, monkeypatch: pytest.MonkeyPatch) -> Loop:
    """A loop that has made a call, and has lost the other island. Time passes quickly."""
    monkeypatch.setattr(elastic, "EXPOSED_PAUSE_S", 0.0)
    monkeypatch.setattr(history, "LONG_S", 0.0)
    monkeypatch.setattr(history, "TOO_LONG_S", 0.0)
    loop = Loop(every=2)
    loop.go(1)
    monkeypatch.setattr(session, "status", lambda: islands("up", "away"))
    lose_island(loop, 1)
    return loop


def kept_meanwhile(loop: Loop, calls: int) -> int:
    """The most calls that a loop keeps while it makes some."""
    most = 0
    for _ in range(calls):
        loop.go(1)
        most = max(most, len(loop.step._calls))
        del loop.losses[:]
    return most


def test_where_no_snapshot_outlives_the_island_copies_beside_the_state_have_few_calls_be_kept(
    session: LocalSession, alone: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """
    1. The other island is gone. Calls are kept since the last snapshot, until copies beside the state take its place.
    2. A launch is lost that took its state along: it comes back from these.
    3. There is another island: snapshots go there again.
    """
    assert kept_meanwhile(alone, 60) <= (history.LONG + KEPT + 1) * 2
    assert [record.getMessage() for record in caplog.records] == [
        "an elastic step finds no place for snapshots: until it does, a loss of its island is final"
    ]
    lose(alone.state, "ControllerLost")
    alone.check()
    assert alone.step.losses == 1
    monkeypatch.setattr(session, "status", lambda: islands("up", "up"))
    kept_meanwhile(alone, 4 * history.LONG)
    assert not any(taken.is_exposed() for taken in alone.step._snapshots.values())
    assert len(alone.step._calls) <= (KEPT + 1) * 2


def test_where_no_snapshot_can_be_had_at_all_calls_are_forgotten(alone: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Any) -> Any:
        raise QuotaExceeded("over the quota of device bytes")

    monkeypatch.setattr(elastic, "beside", refused)
    assert kept_meanwhile(alone, 60) <= history.TOO_LONG * 2 + 1
    assert not alone.step._calls.keys() - {alone.number - 1}
    lose(alone.state)
    with pytest.raises(BufferLost, match="and so is every snapshot from before it"):
        alone.go(1)


def test_a_change_of_the_state_while_no_snapshot_can_be_had_does_not_end_the_loop(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "EXPOSED_PAUSE_S", 0.0)
    where = pw.virtual_slice((2,), ("x",), island=0)
    step = scaled(where, [])
    state = step({"by": 2.0, "w": pw.put(np.ones(4, np.float32), where)})
    monkeypatch.setattr(session, "status", lambda: islands("up", "away"))
    lose(step._snapshots[0]._copies[1][1])
    state = step({**state, "by": 3.0})
    assert not step._snapshots
    monkeypatch.setattr(session, "status", lambda: islands("up", "up"))
    state = step(state)
    lose(state["w"])
    np.testing.assert_array_equal(np.asarray(state["w"]), np.full(4, 18, np.float32))


def test_an_elastic_step_is_refused_where_it_cannot_be_one(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    for every in (0, True, 1.5):
        with pytest.raises(UsageError, match="snapshot_every= is a number of calls from 1 up"):
            pw.elastic(snapshot_every=every)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="decorates a function"):
        pw.elastic(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"a state with pw\.Arrays as its first argument"):
        pw.elastic(lambda state: state)(np.ones(3))
    monkeypatch.setattr(session, "status", lambda: islands("up"))
    loop = Loop()
    for _ in range(2):  # a second call with the same state is no safer
        with pytest.raises(Unschedulable, match="takes as many other islands"):
            loop.go(1)


def test_a_step_that_spans_islands_survives_the_loss_of_the_island_of_the_copies(session: LocalSession) -> None:
    """The state went with the step that was lost: it is made again from the copy on its own devices."""
    loop = Loop()
    loop.go(2)
    for taken in loop.step._snapshots.values():
        lose(taken._copies[0][1])
    lose(loop.state)
    loop.go(2)
    loop.check()
    assert loop.step.losses == 1


def test_nothing_is_made_again_once_the_session_has_ended(session: LocalSession) -> None:
    loop = Loop()
    loop.go(2)
    lose(loop.state, "ControllerLost")
    session._driver.disconnected("the controller is gone")
    with pytest.raises(ControllerLost):
        np.asarray(loop.state)
    with pytest.raises(SessionClosed, match="the controller is gone"):
        loop.go(1)
    assert loop.made in ([0, 1], [0, 1, 2])
