"""Limits of calls: who watches them, and when it is woken."""

from __future__ import annotations

import threading

import pytest

from pathways_ray.executor.calls.limit import Limit

SOON, LATE = 0.02, 3600.0


def watching() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "limit"}


def test_what_takes_longer_than_it_may_is_ended() -> None:
    ended = threading.Event()
    limit = Limit(ended.set)
    with limit.of(SOON):
        assert ended.wait(60)
    assert limit.is_over


def test_one_thread_watches_all_that_is_done_in_turn() -> None:
    limit, before = Limit(lambda: None), watching()
    for _ in range(100):
        with limit.of(LATE):
            pass
    assert len(watching() - before) == 1
    assert not limit.is_over


def test_a_shorter_limit_than_the_one_before_is_kept() -> None:
    """1. A call with an hour ends: its watch sleeps. 2. One with less begins, and takes longer than that."""
    ended = threading.Event()
    limit = Limit(ended.set)
    with limit.of(LATE):
        pass
    with limit.of(SOON):
        assert ended.wait(60)


def test_a_watch_that_has_ended_leaves_nothing_unwatched() -> None:
    """1. A call is too long, or the watch finds nothing under way: it ends. 2. The next one is watched all the same."""
    ended = threading.Semaphore(0)
    limit = Limit(lambda: ended.release())
    before = watching()
    for _ in range(3):
        with limit.of(SOON):
            assert ended.acquire(timeout=60)
        assert limit.is_over
        with limit.of(SOON):
            pass
        for thread in watching() - before:
            thread.join(60)
        assert not limit.is_over


def test_a_closed_limit_has_no_watch_until_something_begins() -> None:
    """1. A call with an hour ends: its watch sleeps. 2. It is closed: the watch ends. 3. The next call has another."""
    ended = threading.Event()
    limit, before = Limit(ended.set), watching()
    limit.close()
    for _ in range(2):
        with limit.of(LATE):
            pass
        (watch,) = watching() - before
        limit.close()
        watch.join(60)
        assert not watch.is_alive()
    with limit.of(SOON):
        assert ended.wait(60)


def test_what_begins_before_a_closed_watch_has_ended_keeps_it() -> None:
    ended = threading.Event()
    limit, before = Limit(ended.set), watching()
    with limit.of(LATE):
        watches = watching() - before
    with limit._changing:  # the watch cannot end meanwhile
        limit.close()
        with limit.of(LATE):
            assert watching() - before == watches
    with limit.of(SOON):
        assert ended.wait(60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_end_that_fails_leaves_later_calls_their_limit() -> None:
    ended = threading.Semaphore(0)

    def end() -> None:
        ended.release()
        raise OSError("it may not be killed")

    limit, before = Limit(end), watching()
    for _ in range(2):
        with limit.of(SOON):
            assert ended.acquire(timeout=60)
        for thread in watching() - before:
            thread.join(60)
        assert limit.is_over
