"""Busy polling begins where waits are short, ends with them, and rests where others need the core."""

from __future__ import annotations

import os

import pytest

from pathways_ray.transport.busy_poll import (
    FEW,
    FIRST_REST_S,
    LATE,
    LONGEST_REST_S,
    LOST_S,
    MANY,
    POLL_S,
    RECOVERY,
    BusyPoll,
)

SHORT_S, LOOK_S = POLL_S / 8, POLL_S / 64


class Thread:
    """A thread and its clock."""

    def __init__(self, poll: BusyPoll | None = None) -> None:
        self.poll = poll if poll is not None else BusyPoll()
        self.now = 100.0
        self.slept = 0

    def waits(self, seconds: float, away_s: float = 0.0) -> bool:
        """Waits for what comes after so long. Its core is another one's for `away_s` of that, from the first look on.
        Returns whether it looked until then."""
        end, looks = self.now + seconds, self.poll.begins(self.now)
        while looks:
            self.now += away_s or LOOK_S
            away_s = 0.0
            if self.now >= end:
                break
            looks = self.poll.goes_on(self.now)
        self.now = max(self.now, end)
        self.poll.came(self.now)
        return looks


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


def that_looks() -> Thread:
    thread = Thread()
    for _ in range(MANY):
        thread.waits(SHORT_S)
    return thread


def test_a_thread_looks_once_its_waits_are_short() -> None:
    thread = Thread()
    assert [thread.waits(SHORT_S) for _ in range(FEW + 2)] == [False] * FEW + [True] * 2


def test_it_looks_no_longer_than_it_pays() -> None:
    thread = that_looks()
    began = thread.now
    assert thread.poll.begins(began)
    while thread.poll.goes_on(thread.now):
        thread.now += LOOK_S
    assert began + POLL_S <= thread.now < began + POLL_S + 2 * LOOK_S
    assert not thread.poll.goes_on(thread.now)


def test_long_waits_end_it_and_one_among_many_does_not() -> None:
    thread = that_looks()
    thread.waits(1.0)
    assert thread.waits(SHORT_S)
    for _ in range(MANY // LATE):
        thread.waits(1.0)
    assert not thread.waits(SHORT_S)


def test_a_sleep_behind_a_poll_is_no_lost_core() -> None:
    thread = that_looks()
    assert not thread.waits(1.0)
    assert thread.waits(SHORT_S)


def test_a_thread_that_loses_its_core_rests_for_longer_each_time() -> None:
    thread = that_looks()
    rests = []
    for _ in range(14):
        thread.waits(2 * LOST_S, away_s=2 * LOST_S)
        began = thread.now
        while not thread.waits(SHORT_S):
            thread.now += SHORT_S
            assert thread.now < began + 2 * LONGEST_REST_S
        rests.append(thread.now - began)
    assert rests == sorted(rests)
    assert FIRST_REST_S <= rests[0] < 2 * FIRST_REST_S
    assert RECOVERY * LONGEST_REST_S <= rests[-1] < 1.1 * LONGEST_REST_S


def test_rests_are_short_again_once_the_core_is_its_own() -> None:
    thread = that_looks()
    for _ in range(6):
        thread.waits(2 * LOST_S, away_s=2 * LOST_S)
        thread.now += LONGEST_REST_S
    for _ in range(200):
        thread.waits(SHORT_S)
    thread.waits(2 * LOST_S, away_s=2 * LOST_S)
    thread.now += FIRST_REST_S
    assert thread.waits(SHORT_S)


def test_others_on_the_core_for_a_moment_are_those_that_are_waited_for() -> None:
    thread = that_looks()
    thread.waits(POLL_S / 2, away_s=POLL_S / 4)
    assert thread.waits(SHORT_S)


def test_a_thread_alone_on_one_core_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert not that_looks().waits(SHORT_S)


def test_it_does_not_look_while_its_process_needs_the_cores() -> None:
    busy = [False]
    thread = Thread(BusyPoll(lambda: not busy[0]))
    for _ in range(MANY):
        thread.waits(SHORT_S)
    assert thread.poll.begins(thread.now)
    busy[0] = True
    assert not thread.poll.goes_on(thread.now)
    thread.poll.came(thread.now)
    assert not thread.poll.begins(thread.now)
