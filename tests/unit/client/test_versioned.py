"""`pw.versioned` and its rules: which version is sent, which is taken; `pw.retry`; `pw.utilization`."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.buffer import FAILED, PENDING, READY
from pathways_ray.client.utilization import shares
from pathways_ray.client.versioned import Versioned
from pathways_ray.client.versions import Act, Versions
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import DonationsDecided
from tests.unit.client.local import LocalSession, opened
from tests.unit.client.test_session import interrupted
from tests.unit.strategies import repeatable


@pytest.fixture
def session() -> Iterator[LocalSession]:
    found = opened()
    yield found
    found.close()


# --- versions ---------------------------------------------------------------------------------------------------------


def test_versions_in_between_are_never_sent() -> None:
    """
    1. Version 0 is under way. 1, 2 and 3 are pushed: each waits in place of the one before.
    2. 0 arrives: 3 is sent.
    """
    versions = Versions()
    assert [versions.push() for _ in range(4)] == [Act.SEND, Act.KEEP, Act.KEEP, Act.KEEP]
    assert versions.arrived(0) == 3
    assert (versions.skipped, versions.there, versions.under_way, versions.lag) == (2, 0, [3], 3)
    assert versions.arrived(3) == -1
    assert versions.lag == 0


def test_a_taker_gets_the_oldest_version_that_will_do() -> None:
    versions = Versions()
    versions.push()
    versions.arrived(0)
    versions.push()
    versions.push()
    assert [versions.take(lag) for lag in (None, 2, 1, 0)] == [0, 0, 1, 2]
    versions.lost()
    assert versions.take(None) == 1
    assert Versions().take(None) == -1


def test_what_is_under_way_counts_no_more_once_a_newer_version_has_to_be_sent() -> None:
    versions = Versions()
    for _ in range(4):
        versions.push()
        versions.release()
    assert versions.under_way == [3]
    versions.arrived(3)
    assert (versions.there, versions.lag) == (3, 0)


def test_the_last_version_is_sent_again_only_where_it_is_not() -> None:
    versions = Versions()
    versions.push()
    assert not versions.again()
    versions.arrived(0)
    assert not versions.again()
    versions.lost()
    assert versions.again()
    assert versions.under_way == [0]


@repeatable(200)
@given(st.lists(st.sampled_from(["push", "arrive", "fail", "lose", "again", "release"]), max_size=40))
def test_rules_of_versions(events: list[str]) -> None:
    """Whatever happens: one version waits at most, and only behind one that is under way; a taker is never further
    behind than it may be; and while nothing was lost there is always something to take."""
    versions, lost = Versions(), False
    for event in events:
        match event:
            case "push":
                versions.push()
            case "arrive" if versions.under_way:
                versions.arrived(versions.under_way[0])
            case "fail" if versions.under_way:
                versions.failed(versions.under_way[0])
                lost = True
            case "lose":
                versions.lost()
                lost = True
            case "again" if versions.pushed >= 0:
                versions.again()
            case "release":
                versions.release()
        assert versions.waits < 0 or versions.under_way
        assert versions.waits in (-1, versions.pushed)
        for lag in range(3):
            found = versions.take(lag)
            assert found == -1 or versions.pushed - lag <= found <= versions.pushed
            assert found >= 0 or lost or versions.pushed < 0


# --- pw.versioned -----------------------------------------------------------------------------------------------------


def states(tree: Any, state: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        leaf._buffer.record.state = state


def test_weights_move_by_one_launch_and_survive_donation(session: LocalSession) -> None:
    """
    1. A tree of two leaves is copied by one launch. While that is under way, the next version is kept as a copy, and
       its arrays are donated to an update.
    2. It is sent when the first one has arrived.
    """
    learner, sampler = session.virtual_slice((2,), ("t",)), session.virtual_slice((4,), ("x",))
    update = pw.compiled(
        lambda p: jax.tree.map(lambda v: v + 1, p), slice=learner, in_specs=P("t"), out_specs=P("t"), donate_argnums=0
    )
    params = pw.put({"w": np.zeros((4, 2), np.float32), "b": np.zeros(2, np.float32)}, learner, P("t"))
    weights = pw.versioned(params, slice=sampler, spec={"w": P("x"), "b": P()}, max_lag=1)
    assert len(session.launched) == 1
    states(weights._held.copies[0], PENDING)
    first = weights.latest()
    assert first.version == 0
    assert first.tree["w"].sharding.spec == P("x")
    params = update(params)
    assert weights.push(params) == 1
    params = update(params)
    assert (weights.version, weights.pushed, weights.lag) == (-1, 1, 2)
    states(first.tree, READY)
    assert weights.version == 0
    found = weights.latest()  # it was sent then, and launches of this session are over at once
    assert found.version == 1
    np.testing.assert_array_equal(np.asarray(found.tree["w"]), np.full((4, 2), 1.0))


def test_on_policy_is_never_behind(session: LocalSession) -> None:
    a, b = session.virtual_slice((1,), ("x",)), session.virtual_slice((2,), ("x",))
    weights = pw.versioned(pw.put(np.zeros(2), a), slice=b, max_lag=0)
    for k in range(1, 4):
        states(weights.latest().tree, PENDING)
        weights.push(pw.put(np.full(2, float(k)), a))
        found = weights.latest()
        assert found.version == k
        np.testing.assert_array_equal(np.asarray(found.tree), np.full(2, k))
    assert weights.skipped == 0


def test_a_loop_that_runs_ahead_holds_no_copies_that_nobody_gets(session: LocalSession) -> None:
    """No copy arrives, and each look wants a newer one. Only the last is held, beside the one that is there."""
    a, b = session.virtual_slice((1,), ("x",)), session.virtual_slice((2,), ("x",))
    weights = pw.versioned(pw.put(np.zeros(2), a), slice=b, max_lag=1)
    assert weights.version == 0
    for k in range(1, 9):
        weights.push(pw.put(np.full(2, float(k)), a))
        states([copy for number, copy in weights._held.copies.items() if number], PENDING)
        found = weights.latest()
        states(found.tree, READY if found.version == 0 else PENDING)
        assert found.version >= k - 1
        assert set(weights._held.copies) <= {0, found.version, k}
    states(found.tree, READY)
    assert weights.version == found.version


def test_a_version_that_was_lost_is_copied_again(session: LocalSession) -> None:
    a, b = session.virtual_slice((1,), ("x",)), session.virtual_slice((2,), ("x",))
    params = pw.put(np.arange(2.0), a)
    weights = pw.versioned(params, slice=b)
    states(weights.latest().tree, FAILED)
    with pytest.raises(pw.errors.BufferLost, match=r"was lost with its hosts.*call restore\(\)"):
        weights.latest()
    assert weights.lag == 1
    found = weights.restore()
    assert found.version == 0
    np.testing.assert_array_equal(np.asarray(found.tree), np.arange(2.0))
    launched = len(session.launched)
    assert weights.restore().version == 0
    assert len(session.launched) == launched, "it is there"
    states(found.tree, FAILED)
    params.delete()
    with pytest.raises(pw.errors.BufferDeleted, match="version 0 cannot be copied again"):
        weights.restore()


@pytest.mark.parametrize("arrived", [False, True])
def test_a_version_that_was_itself_donated_is_copied_again(session: LocalSession, arrived: bool) -> None:
    """A launch that took it, there or under way, has its memory; what was pushed is as it was."""
    a, b = session.virtual_slice((1,), ("x",)), session.virtual_slice((2,), ("x",))
    weights = pw.versioned(pw.put(np.arange(2.0), a), slice=b)
    states(weights._held.copies[0], READY if arrived else PENDING)
    found = weights.latest().tree
    assert weights.version == (0 if arrived else -1)
    pw.compiled(lambda v: v + 1, slice=b, donate_argnums=0)(found)
    assert found.is_deleted()
    assert weights.version == -1
    with pytest.raises(pw.errors.BufferLost, match=r"or deleted or donated, .*call restore\(\)"):
        weights.latest()
    again = weights.restore()
    assert again.version == weights.version == 0
    np.testing.assert_array_equal(np.asarray(again.tree), np.arange(2.0))


@pytest.mark.parametrize("taken", [False, True])
def test_a_version_that_was_donated_to_a_failed_launch_is_copied_once_that_is_decided(
    session: LocalSession, taken: bool
) -> None:
    """
    1. The copy is lost while an update is under way that the arrays were donated to; the update fails, and hosts are
       yet to say whether it took the memory.
    2. A restore waits for that. It did not: the version is copied again.
    """
    a, b = session.virtual_slice((1,), ("x",)), session.virtual_slice((2,), ("x",))
    params = pw.put(np.arange(2.0), a)
    weights = pw.versioned(params, slice=b, max_lag=0)
    states(weights.latest().tree, FAILED)
    record = params._buffer.record
    record.donate("it was donated to update")
    record.undecided = True
    decided = DonationsDecided((record.id,), (record.id,) * taken)
    timer = threading.Timer(0.05, session._driver.handle, [decided])
    timer.start()
    if taken:
        with pytest.raises(pw.errors.BufferDeleted, match="version 0 cannot be copied again, since its arrays are"):
            weights.restore()
    else:
        np.testing.assert_array_equal(np.asarray(weights.restore().tree), np.arange(2.0))
    assert not record.undecided
    timer.join()


def test_a_version_that_failed_says_why(session: LocalSession) -> None:
    """The one before it is still there, and serves those who may be behind."""
    a, b = session.virtual_slice((1,), ("x",)), session.virtual_slice((2,), ("x",))
    strict, loose = (pw.versioned(pw.put(np.arange(2.0), a), slice=b, max_lag=lag) for lag in (0, None))
    broken = pw.put(np.ones(2), a)
    broken._buffer.record.fail(Failure("ExecutionError", "divided by zero"))
    for weights in (strict, loose):
        weights.push(broken)
        states(weights._held.copies[1], FAILED)
    with pytest.raises(
        pw.errors.BufferLost, match=r"version 1 has failed where .*version 0.* max_lag=0 behind.*divided by zero"
    ):
        strict.latest()
    assert loose.latest().version == 0
    for weights in (strict, loose):
        with pytest.raises(pw.errors.BufferDeleted, match=r"version 1 cannot be copied again.*divided by zero"):
            weights.restore()
    strict.push(pw.put(np.full(2, 2.0), a))
    np.testing.assert_array_equal(np.asarray(strict.latest().tree), np.full(2, 2.0))


def refuse(*_: Any) -> Any:
    raise pw.errors.SessionSuspended("the session is suspended")


def test_a_push_that_is_refused_is_none(session: LocalSession) -> None:
    """
    1. A deleted array is pushed: behind a version that is under way, and once that is there. Nothing has changed.
    2. The next push has the next number.
    """
    a, b = session.virtual_slice((1,), ("x",)), session.virtual_slice((2,), ("x",))
    weights = pw.versioned(pw.put(np.zeros(2), a), slice=b, max_lag=0)
    gone = pw.put(np.ones(2), a)
    gone.delete()
    for state in (PENDING, READY):
        states(weights._held.copies[0], state)
        with pytest.raises(pw.errors.BufferDeleted):
            weights.push(gone)
        assert (weights.latest().version, weights.pushed) == (0, 0)
    assert weights.push(pw.put(np.full(2, 2.0), a)) == 1
    np.testing.assert_array_equal(np.asarray(weights.latest().tree), np.full(2, 2.0))


@pytest.mark.parametrize("lost", [False, True])
def test_a_version_that_cannot_be_sent_yet_is_sent_later(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """
    1. A version waits behind one that is under way, or it is there and is lost. The session is suspended.
    2. Who looks hears of it, again and again. When the session is back, the version is sent.
    """
    a, b = session.virtual_slice((1,), ("x",)), session.virtual_slice((2,), ("x",))
    weights = pw.versioned(pw.put(np.zeros(2), a), slice=b, max_lag=0)
    states(weights._held.copies[0], READY if lost else PENDING)
    weights.push(pw.put(np.ones(2), a))
    states(weights._held.copies[1 if lost else 0], FAILED if lost else READY)
    look = weights.restore if lost else weights.latest
    with monkeypatch.context() as suspended:
        suspended.setattr(session, "launch", refuse)
        for _ in range(2):
            with pytest.raises(pw.errors.SessionSuspended):
                look()
    assert look().version == 1
    np.testing.assert_array_equal(np.asarray(weights.latest().tree), np.ones(2))


def test_what_cannot_be_versioned(session: LocalSession) -> None:
    a = session.virtual_slice((1,), ("x",))
    v = pw.put(np.arange(2.0), a)
    trees: list[Any] = [np.arange(2), {}]
    for tree in trees:
        with pytest.raises(pw.errors.UsageError, match=r"pw.versioned copies"):
            pw.versioned(tree, slice=a)
    with pytest.raises(pw.errors.UsageError, match="max_lag= is a number of versions from 0 on"):
        pw.versioned(v, slice=a, max_lag=-1)
    with pytest.raises(pw.errors.UsageError, match=r"slice= takes what pw.virtual_slice returns"):
        pw.versioned(v, slice="a")  # type: ignore[arg-type]
    with pytest.raises(pw.errors.UsageError, match="another tree than the first version"):
        pw.versioned(v, slice=a).push([v])
    with pytest.raises(pw.errors.UsageError, match=r"float\d\d\[3\] in place of float\d\d\[2\], which the versions"):
        pw.versioned(v, slice=a).push(pw.put(np.arange(3.0), a))


# --- pw.retry ---------------------------------------------------------------------------------------------------------


def test_a_call_is_made_again_after_what_was_lost_is_rebuilt() -> None:
    done: list[str] = []

    @pw.retry(on=pw.errors.HostLost, rebuild=lambda: done.append("rebuild"))
    def step(value: int) -> int:
        done.append("call")
        if len(done) < 4:
            raise pw.errors.HostLost("host 3")
        return value

    assert step(7) == 7
    assert done == ["call", "rebuild", "call", "rebuild", "call"]
    assert step.__name__ == "step"


def test_a_method_may_be_called_again() -> None:
    class Sampler:
        calls = 0

        @pw.retry(attempts=np.int64(2))  # type: ignore[arg-type]
        def draw(self, value: int) -> int:
            self.calls += 1
            if self.calls < 2:
                raise pw.errors.HostLost("host 3")
            return value

    sampler = Sampler()
    assert sampler.draw(7) == 7
    assert sampler.calls == 2


def test_what_has_only_begun_when_it_returns_cannot_be_called_again() -> None:
    async def coroutine() -> None: ...

    def generator() -> Any:
        yield 1

    async def both() -> Any:
        yield 1

    for fun in (coroutine, generator, both):
        with pytest.raises(pw.errors.UsageError, match="has only begun by then"):
            pw.retry(fun)


def test_other_errors_and_the_last_attempt_come_out() -> None:
    def lost() -> None:
        raise pw.errors.BufferLost("gone")

    with pytest.raises(pw.errors.BufferLost, match="gone") as error:
        pw.retry(lost, attempts=2)()
    assert error.value.__notes__ == ["pw.retry called it 2 times"]
    with pytest.raises(pw.errors.BufferLost):
        pw.retry(lost, on=pw.errors.HostLost)()
    wrong: list[dict[str, Any]] = [{"on": 3}, {"attempts": 0}, {"rebuild": 1}]
    for options in wrong:
        with pytest.raises(pw.errors.UsageError, match=f"{next(iter(options))}= of pw.retry"):
            pw.retry(lost, **options)


# --- pw.utilization ---------------------------------------------------------------------------------------------------


def test_the_share_of_time_in_which_devices_computed() -> None:
    before, now = (10.0, {0: 4.0}), (14.0, {0: 8.0, 1: 100.0})
    assert shares(before, now, {0: 2, 1: 4, 2: 1}) == {0: 0.5, 1: 1.0, 2: 0.0}
    assert shares(now, now, {0: 2}) == {0: 0.0}


@pytest.mark.parametrize("call", ["push", "restore"])
def test_a_signal_handler_does_not_change_versions_amid_a_push(session: LocalSession, call: str) -> None:
    """The push would put its own table in the place of the handler's, whose version it has not seen."""
    a, b = session.virtual_slice((1,), ("x",)), session.virtual_slice((2,), ("x",))
    values = [pw.put(np.full(2, float(k)), a) for k in range(3)]
    refused: list[Exception] = []
    calls: dict[str, Callable[[], object]] = {"restore": lambda: weights.restore()}

    class Signalled(Versioned):
        def _settle(self) -> None:
            super()._settle()
            if self._held.versions.pushed == 0:
                signal.raise_signal(signal.SIGUSR1)

    def handle(*_: object) -> None:
        try:
            calls.get(call, lambda: weights.push(values[2]))()
        except pw.errors.UsageError as error:
            refused.append(error)

    weights = Signalled(values[0], b, None, 0)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        assert weights.push(values[1]) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "a signal handler or a destructor changes the pw.versioned" in str(refused[0])
    assert weights.push(values[2]) == 2
    np.testing.assert_array_equal(np.asarray(weights.latest().tree), np.full(2, 2.0))


@pytest.mark.parametrize("case", ["push", "push behind another", "take one that waits", "restore"])
def test_ctrl_c_at_any_step_leaves_versions_as_they_were_or_as_they_are_to_be(session: LocalSession, case: str) -> None:
    """
    1. A version is pushed, or one that waits is taken, or a lost one is restored; it is interrupted at each step of
       that in turn.
    2. All may be asked as before, and the next version comes.
    """
    a, b = session.virtual_slice((1,), ("x",)), session.virtual_slice((2,), ("x",))
    values = [pw.put(np.full(2, float(k)), a) for k in range(3)]
    functions = [*vars(Versioned).values(), *vars(Versions).values()]
    codes = [one.__code__ for one in functions if isinstance(one, FunctionType)]
    for step in itertools.count():
        weights = pw.versioned(values[0], slice=b, max_lag=0)
        if case in ("push behind another", "take one that waits"):
            states(weights._held.copies[0], PENDING)
        if case == "take one that waits":
            weights.push(values[1])
        if case == "restore":
            states(weights._held.copies[0], FAILED)
        calls: dict[str, Callable[[], Any]] = {"take one that waits": weights.latest, "restore": weights.restore}
        cut = interrupted(codes, step, calls.get(case, partial(weights.push, values[1])))
        assert weights.version <= weights.pushed
        assert weights.lag >= 0
        found = weights.restore()
        np.testing.assert_array_equal(np.asarray(found.tree), np.full(2, float(found.version)))
        assert weights.push(values[2]) == found.version + 1
        np.testing.assert_array_equal(np.asarray(weights.latest().tree), np.full(2, 2.0))
        if not cut:
            break
    assert step > 10
