"""Waiting for the first of several arrays, callbacks and coroutines, on a session in the hands of the test."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import os
import signal
import threading
import time
import weakref
from typing import Any

import jax
import numpy as np
import pytest

import pathways_ray as pw
from pathways_ray.client import completion, driver, session_questions
from pathways_ray.client.buffer import BufferRecord
from pathways_ray.errors import BufferDeleted, ExecutionError, Failure, SessionClosed, UsageError, WaitTimeout
from pathways_ray.transport.messages import Completed, LaunchFailed
from tests.unit.client.offline import LIMIT_S, Background, Offline
from tests.waiting import until

BROKEN = Failure("ExecutionError", "f divided by zero")


@pytest.fixture
def offline() -> Offline:
    return Offline()


def launched(offline: Offline, count: int) -> list[Any]:
    return [offline.session.launch(3, [], (offline.kind,))[0] for _ in range(count)]


def test_arrays_come_in_the_order_in_which_they_are_computed(offline: Offline) -> None:
    a, b, c = launched(offline, 3)
    found: list[Any] = []
    waiting = Background(lambda: [found.append(one) for one in pw.as_completed([a, b, c], timeout=LIMIT_S)])
    for launch, count in ((2, 1), (3, 2), (1, 3)):
        offline.say(Completed((launch,)))
        until(lambda count=count: len(found) == count)  # type: ignore[misc]
    waiting.end()
    assert [x is y for x, y in zip(found, [b, c, a], strict=True)] == [True] * 3
    assert offline.session._driver.watchers == []


@pytest.mark.parametrize(("launches", "asked"), [(completion.FEW_LAUNCHES, True), (completion.FEW_LAUNCHES + 1, False)])
def test_hosts_are_asked_for_the_results_of_a_few_launches_that_are_all_waited_for(
    offline: Offline, monkeypatch: pytest.MonkeyPatch, launches: int, asked: bool
) -> None:
    """Not where some are enough, or what is there already."""
    arrays = launched(offline, launches + 1)
    offline.say(Completed((1,)))
    came: list[tuple[int, bool]] = []

    def come(record: BufferRecord, until: float | None) -> bool:
        came.append((record.id, until is None))
        if until is None:
            offline.say(Completed((record.launch,)))
        return until is None

    monkeypatch.setattr(offline.session._driver, "wait_there", come)
    assert pw.wait(arrays, count=1)[0] == arrays[:1]
    assert pw.wait(arrays[:1]) == (arrays[:1], [])
    assert came == []
    if not asked:
        waiting = Background(lambda: pw.wait(arrays))
        until(lambda: offline.session._driver.watchers)
        offline.say(Completed(tuple(range(2, launches + 2))))
        waiting.end()
    assert pw.wait(arrays) == (arrays, [])
    assert came == ([(number, True) for number in range(2, launches + 2)] if asked else [])
    pending = launched(offline, 1)
    assert pw.wait(pending, timeout=0.01) == ([], pending)
    assert came[-1:] == [(launches + 2, False)]


@pytest.mark.parametrize("wait", [pw.wait, lambda arrays: list(pw.as_completed(arrays))])
def test_in_a_fork_no_wait_is_without_an_end(offline: Offline, wait: Any) -> None:
    """Nobody reads there what comes."""
    arrays = launched(offline, 3)
    offline.session.leave_to_parent()
    with pytest.raises(SessionClosed, match="fork"):
        Background(lambda: wait(arrays)).end()


@pytest.mark.parametrize("wait", [lambda arrays: pw.wait(arrays)[0], lambda arrays: list(pw.as_completed(arrays))])
def test_a_session_that_closes_amid_a_wait_for_another_ones_ends_none(offline: Offline, wait: Any) -> None:
    other = Offline()
    arrays = [*launched(offline, 1), *launched(other, 1)]
    offline.say(Completed((1,)))
    waiting = Background(lambda: wait(arrays))
    offline.session.close()
    time.sleep(0.05)
    assert waiting.waits
    other.say(Completed((1,)))
    assert waiting.end() == arrays


def test_a_fork_asks_no_host_by_the_streams_of_its_parent(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = launched(offline, 1)
    asked: list[Any] = []
    monkeypatch.setattr(driver, "await_there", lambda *given: asked.append(given) or False)
    assert pw.wait(arrays, timeout=0.01) == ([], arrays)
    assert len(asked) == 1
    offline.session.leave_to_parent()
    assert pw.wait(arrays, timeout=0.01) == ([], arrays)
    assert len(asked) == 1


def test_an_array_that_comes_twice_is_looked_at_once_for_each_and_comes_twice(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed between two looks."""
    (a,) = launched(offline, 1)
    shown, looks = BufferRecord.shown, itertools.count()

    def look(record: BufferRecord) -> Any:
        found = shown.__get__(record)
        if next(looks) == 0:
            offline.say(Completed((1,)))
        return found

    monkeypatch.setattr(BufferRecord, "shown", property(look))
    assert [one is a for one in pw.as_completed([a, a], timeout=LIMIT_S)] == [True, True]


@pytest.mark.parametrize("way", ["as_completed", "wait"])
def test_many_trees_are_flattened_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes by itself, so what is left is looked at again and again."""
    offline = Offline(max_launches=64)
    trees = [{"x": array} for array in launched(offline, 20)]
    flattened: list[Any] = []
    leaves = jax.tree.leaves
    monkeypatch.setattr(jax.tree, "leaves", lambda tree: flattened.append(tree) or leaves(tree))
    rings = iter(range(1, 21))
    monkeypatch.setattr(completion._Bell, "wait", lambda *_: offline.say(Completed((next(rings),))))
    found = [*pw.as_completed(trees)] if way == "as_completed" else pw.wait(trees)[0]
    assert [one is tree for one, tree in zip(found, trees, strict=True)] == [True] * 20
    assert len(flattened) == 20


def test_a_tree_comes_when_all_of_it_is_there_and_a_failure_counts(offline: Offline) -> None:
    a, b, c = launched(offline, 3)
    offline.say(Completed((1,)), LaunchFailed(3, BROKEN))
    done, left = pw.wait([{"x": a, "y": b}, c], count=1)
    assert (done[0] is c, len(done), len(left)) == (True, 1, 1)
    with pytest.raises(ExecutionError, match="divided by zero"):
        done[0].block_until_ready()


def test_waiting_returns_what_there_is_at_its_limit(offline: Offline) -> None:
    a, b = launched(offline, 2)
    offline.say(Completed((2,)))
    done, left = pw.wait([a, b], timeout=0.01)
    assert (done[0] is b, left[0] is a, len(done), len(left)) == (True, True, 1, 1)
    with pytest.raises(WaitTimeout, match=r"1 of 1 were not computed within 0\.01 s"):
        list(pw.as_completed([a], timeout=0.01))


def test_a_limit_of_a_second_says_why_and_a_wait_is_shown_once(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pw.progress()` has one wait for the first array while that is not there, and then one for the next."""
    a, b = launched(offline, 2)
    shown_for: list[Any] = []
    monkeypatch.setattr(type(offline.session), "lasting", lambda _, r: shown_for.append(r) or contextlib.nullcontext())
    monkeypatch.setattr(type(offline.session), "why", lambda *_: "host 0 compiles 'f'")
    monkeypatch.setattr(completion, "SLICE_S", 0.01)
    monkeypatch.setattr(session_questions, "EXPLAINED_FROM_S", 0.05)
    with pytest.raises(WaitTimeout) as caught:
        list(pw.as_completed([a, b], timeout=0.1))
    assert caught.value.__notes__ == ["host 0 compiles 'f'"]
    assert shown_for == [a._buffer.record]
    offline.say(Completed((1,)))
    assert pw.wait([a, b], timeout=0.05)[0][0] is a
    assert shown_for == [a._buffer.record, b._buffer.record]


def test_what_cannot_be_waited_for(offline: Offline) -> None:
    with pytest.raises(UsageError, match=r"only pw\.Arrays"):
        pw.wait([3])
    with pytest.raises(UsageError, match="from 0 to that of the arrays, 1; not 2"):
        pw.wait(launched(offline, 1), count=2)
    with pytest.raises(UsageError, match="from 0 to that of the arrays, 1; not True"):
        pw.wait(launched(offline, 1), count=True)
    (a,) = launched(offline, 1)
    wrong: list[Any] = [math.nan, "1", True]
    for timeout in wrong:
        for waiting in (
            lambda t: pw.wait([a], timeout=t),
            lambda t: list(pw.as_completed([a], t)),
            a.block_until_ready,
        ):
            with pytest.raises(UsageError, match=f"timeout= is seconds, or None for no limit; not {timeout!r}"):
                waiting(timeout)


def test_numbers_of_numpy_are_numbers(offline: Offline) -> None:
    (a,) = launched(offline, 1)
    assert pw.wait([a], count=np.int64(1), timeout=np.float32(0.01)) == ([], [a])  # type: ignore[arg-type]
    with pytest.raises(WaitTimeout):
        a.block_until_ready(timeout=np.float32(0.01))


def test_callbacks_are_called_once_with_the_array(offline: Offline, caplog: pytest.LogCaptureFixture) -> None:
    (a,) = launched(offline, 1)
    called: list[Any] = []
    a.add_done_callback(called.append)
    with caplog.at_level(logging.ERROR):
        a.add_done_callback(lambda _: 1 / 0)
        assert called == []
        offline.say(Completed((1,)))
        offline.say(Completed(()))
        offline.session.callbacks.flush()
    assert len(called) == 1
    assert called[0] is a
    assert "ZeroDivisionError" in caplog.text
    a.add_done_callback(called.append)
    assert len(called) == 2
    a.delete()
    with pytest.raises(BufferDeleted):
        a.add_done_callback(called.append)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()])
def test_a_callback_raises_what_it_likes(
    offline: Offline, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """The thread that calls it calls those behind it, too."""
    (a,) = launched(offline, 1)
    called: list[Any] = []

    def call(_: Any) -> None:
        raise error

    a.add_done_callback(call)
    a.add_done_callback(called.append)
    with caplog.at_level(logging.ERROR):
        Background(lambda: offline.say(Completed((1,)))).end()
        offline.session.callbacks.flush()
    assert called == [a]
    assert type(error).__name__ in caplog.text


def test_a_callback_launches_where_the_session_is_full() -> None:
    """Were it called by the thread that reads outcomes, it would wait for an outcome that nobody reads."""
    offline = Offline(max_launches=2)
    a, _ = launched(offline, 2)
    made: list[Any] = []
    a.add_done_callback(lambda _: made.extend(launched(offline, 2)))
    Background(lambda: offline.say(Completed((1,)), Completed((2,)))).end()
    until(lambda: len(made) == 2)
    assert {array._buffer.record.state.value for array in made} == {"pending"}


def test_a_callback_launches_where_the_array_was_cancelled_behind_its_upload(offline: Offline) -> None:
    """It ends in the thread that cancels, which has the lock of what is sent."""
    given = offline.session.upload(np.ones(2, np.float32), offline.kind)
    (a,) = offline.session.launch(3, [given._buffer.record], (offline.kind,))
    made: list[Any] = []
    a.add_done_callback(lambda _: made.extend(launched(offline, 1)))
    assert a.cancel()
    until(lambda: len(made) == 1)


def test_callbacks_of_one_session_are_called_in_turn_by_one_thread(offline: Offline) -> None:
    arrays = launched(offline, 16)
    called: list[Any] = []
    for k, array in enumerate(arrays):
        array.add_done_callback(lambda _, k=k: called.append((k, threading.current_thread())))
    threads = [Background(lambda k=k: offline.say(Completed((k,)))) for k in range(1, 9)]  # type: ignore[misc]
    for one in threads:
        one.end()
    offline.say(Completed(tuple(range(9, 17))))
    offline.session.callbacks.flush()
    assert sorted(k for k, _ in called) == [*range(16)]
    assert [k for k, _ in called[8:]] == [*range(8, 16)]
    assert len({thread for _, thread in called}) == 1
    assert called[0][1] is not threading.current_thread()


def test_callbacks_are_called_at_the_end_of_the_session_and_their_thread_ends_with_it(offline: Offline) -> None:
    a, b = launched(offline, 2)
    called: list[Any] = []

    def look(array: Any) -> None:
        time.sleep(0.05)
        called.append((array, offline.session.closed))

    a.add_done_callback(look)
    b.add_done_callback(look)
    offline.say(Completed((1,)))
    offline.session.close()
    assert called == [(a, False), (b, True)]
    thread = offline.session.callbacks._thread
    assert thread is not None
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_callback_may_end_the_session(offline: Offline) -> None:
    a, b = launched(offline, 2)
    called: list[Any] = []
    a.add_done_callback(lambda _: offline.session.close())
    b.add_done_callback(called.append)
    offline.say(Completed((1,)))
    until(lambda: called == [b])
    assert offline.session.closed


def test_coroutines_do_not_wait_for_callbacks(offline: Offline) -> None:
    """A value is handed on by the thread that hears of it."""
    a, b = launched(offline, 2)
    goes_on = threading.Event()
    a.add_done_callback(lambda _: goes_on.wait(LIMIT_S))
    offline.say(Completed((1,)))

    async def waiting() -> Any:
        task = asyncio.create_task(_await(b))
        await asyncio.sleep(0)
        offline.say(Completed((2,)))
        return await task

    assert asyncio.run(asyncio.wait_for(waiting(), LIMIT_S / 2)) is b
    goes_on.set()


@pytest.mark.parametrize("way", ["await", "callback"])
def test_an_array_goes_with_its_handle_once_it_was_waited_for(offline: Offline, way: str) -> None:
    """Without Python's collector, which comes late: hosts keep the array until then."""

    async def waits(array: Any) -> None:
        await array

    gc.disable()
    try:
        (a,) = launched(offline, 1)
        kept = weakref.ref(a._buffer)
        if way == "await":
            threading.Timer(0.05, offline.say, (Completed((1,)),)).start()
            asyncio.run(waits(a))
        else:
            called: list[int] = []
            a.add_done_callback(lambda _: called.append(1))
            offline.say(Completed((1,)))
            until(lambda: called == [1])
        del a
        until(lambda: kept() is None)
        assert kept() is None
    finally:
        gc.enable()


def test_a_cancellation_in_a_fork_waits_for_no_thread_of_its_parent(offline: Offline) -> None:
    (a,) = launched(offline, 1)
    with offline.session._driver.sending:
        child = os.fork()
        if not child:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(int(LIMIT_S))
                offline.session.leave_to_parent()
                os._exit(0 if a.cancel() is False else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fork_calls_what_it_deletes_by_itself(offline: Offline) -> None:
    """It has no thread for that."""
    a, b = launched(offline, 2)
    called: list[Any] = []
    a.add_done_callback(called.append)
    b.add_done_callback(called.append)
    offline.say(Completed((1,)))
    until(lambda: called == [a])
    child = os.fork()
    if not child:
        try:
            b.delete()
            os._exit(0 if called == [a, b] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_control_c_in_a_callback_ends_the_call_of_the_main_thread(offline: Offline) -> None:
    (a,) = launched(offline, 1)
    offline.say(Completed((1,)))
    with pytest.raises(KeyboardInterrupt):
        a.add_done_callback(lambda _: signal.raise_signal(signal.SIGINT))


def test_who_is_to_be_called_does_not_wait_for_others_to_leave_with(offline: Offline) -> None:
    """Its launch was handed to its host, so that what is sent of it is not urgent by itself."""
    (a,) = launched(offline, 1)
    hurried: list[bool] = []
    offline.controller.hurry = lambda: hurried.append(True)  # type: ignore[method-assign]
    offline.session._core.early.handed[1] = 3
    a.add_done_callback(lambda _: None)
    assert hurried == [True]


def test_who_waits_for_several_sessions_has_what_waits_in_each_leave(offline: Offline) -> None:
    other, hurried = Offline(), list[str]()
    for one, name in ((offline, "first"), (other, "second")):
        one.controller.hurry = lambda name=name: hurried.append(name)  # type: ignore[method-assign, misc]
        one.session._core.early.handed[1] = 3
    arrays = [*launched(offline, 1), *launched(other, 1)]
    assert pw.wait(arrays, count=1, timeout=0.3) == ([], arrays)
    assert set(hurried) == {"first", "second"}


def test_coroutines_await_arrays(offline: Offline) -> None:
    a, b = launched(offline, 2)

    async def both() -> Any:
        first = asyncio.create_task(_await(a))
        await asyncio.sleep(0)
        offline.say(Completed((1,)), LaunchFailed(2, BROKEN))
        with pytest.raises(ExecutionError, match="divided by zero"):
            await b
        return await first

    assert asyncio.run(both()) is a


def test_a_loop_that_is_closed_by_then_waits_no_more(offline: Offline, caplog: pytest.LogCaptureFixture) -> None:
    (a,) = launched(offline, 1)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(_await(a), 0.01))
    with caplog.at_level(logging.ERROR):
        offline.say(Completed((1,)))
    assert caplog.text == ""


async def _await(array: Any) -> Any:
    return await array
