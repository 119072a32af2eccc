"""Finished launches are reported in few messages, in order, and soon."""

from __future__ import annotations

import queue
import threading

import msgspec
import pytest

from pathways_ray.errors import Failure
from pathways_ray.executor.run.reports import MAX_GATHERED, MAX_GATHERED_S, Reports
from pathways_ray.transport.messages import Done, IslandLaunchFailed, Message

LIMIT_S = 10.0
FAILED = IslandLaunchFailed(7, Failure("ExecutionError", "it broke"), ())


@pytest.fixture
def sent() -> queue.SimpleQueue[Message]:
    return queue.SimpleQueue()


@pytest.fixture
def reports(sent: queue.SimpleQueue[Message]) -> Reports:
    """Nobody looks after what is gathered, unless a test does."""
    return Reports(sent.put)


def test_what_stands_alone_is_told_at_once(reports: Reports, sent: queue.SimpleQueue[Message]) -> None:
    reports.done(1, 20, behind=0)
    assert sent.get_nowait() == Done((1,), (20,))


@pytest.mark.parametrize("over", [True, False])
def test_what_was_sent_as_one_took_what_all_of_it_took(
    over: bool, reports: Reports, sent: queue.SimpleQueue[Message]
) -> None:
    """Those before the last one are over; that one may be yet to end, or to be heard of."""
    for number in (-1, -2):
        reports.done(number, 20, behind=0)
    if over:
        reports.done(-3, 5, behind=0)
    reports.sent(-3, 7, 0, others=(-1, -2))
    if not over:
        assert sent.empty()
        reports.done(-3, 5, behind=0)
    assert sent.get_nowait() == Done((7,), (45,))
    reports.done(7, 5, behind=0)
    assert sent.get_nowait() == Done((7,), (5,)), "it is counted once"
    assert len(reports.early) == 0


def test_what_was_sent_as_one_fails_as_the_last_of_it(reports: Reports, sent: queue.SimpleQueue[Message]) -> None:
    reports.done(-1, 20, behind=0)
    reports.failed(msgspec.structs.replace(FAILED, sequence=-2))
    reports.sent(-2, 7, 0, others=(-1,))
    assert sent.get_nowait() == FAILED
    reports.done(7, 5, behind=0)
    assert sent.get_nowait() == Done((7,), (5,)), "nothing is kept of it"
    assert len(reports.early) == 0


def test_launches_that_follow_each_other_are_told_together(reports: Reports, sent: queue.SimpleQueue[Message]) -> None:
    reports.done(1, 20, behind=9)
    reports.done(2, 5, behind=8)
    reports.done(3, 5, behind=7)
    assert sent.empty()
    reports.done(4, 30, behind=0)
    assert sent.get_nowait() == Done((1, 2, 3, 4), (20, 5, 5, 30))


def test_what_waits_is_told_when_nothing_more_is_under_way(reports: Reports, sent: queue.SimpleQueue[Message]) -> None:
    reports.done(1, 20, behind=9)
    reports.flush()
    reports.flush()
    assert sent.get_nowait() == Done((1,), (20,))
    assert sent.empty(), "there is no message about nothing"


def test_many_are_not_kept(reports: Reports, sent: queue.SimpleQueue[Message]) -> None:
    for sequence in range(2 * MAX_GATHERED):
        reports.done(sequence, 1, behind=1000)
    assert [len(sent.get_nowait().sequences) for _ in range(2)] == [MAX_GATHERED, MAX_GATHERED]  # type: ignore[attr-defined]


def test_what_is_queued_here_lasts_until_more_has_come(reports: Reports, sent: queue.SimpleQueue[Message]) -> None:
    """Of 28 launches, as many as a device may have, a third is reported while the others still run."""
    for sequence in range(28):
        reports.done(sequence, 1, behind=27 - sequence)
    told = [len(sent.get_nowait().sequences) for _ in range(sent.qsize())]  # type: ignore[attr-defined]
    assert told[0] == 10
    assert sum(told) == 28
    assert len(told) < 10


def test_a_launch_that_was_under_way_for_long_stays_longer(
    reports: Reports, sent: queue.SimpleQueue[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others that run for as long are reported with it; the next one does not wait for the time that it had."""
    monkeypatch.setattr("pathways_ray.executor.run.reports.MOST_GATHERED_S", 8 * LIMIT_S)
    threading.Thread(target=reports.run, daemon=True).start()
    reports.done(1, 20, behind=1000, under_way_s=64 * LIMIT_S)
    reports.done(2, 20, behind=1000)
    reports.flush()
    assert sent.get_nowait() == Done((1, 2), (20, 20))
    reports.done(3, 20, behind=1000)
    assert sent.get(timeout=LIMIT_S) == Done((3,), (20,))


@pytest.mark.parametrize("first", range(1, 9))
def test_hosts_report_up_to_the_same_launches(
    first: int, sent: queue.SimpleQueue[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they begin to gather. Six launches are over within the time that one may be kept, so four go together,
    which is a power of two."""
    reports = Reports(sent.put, multi_host=True)
    monkeypatch.setattr("pathways_ray.executor.run.reports.MOST_GATHERED_S", 6 * LIMIT_S)
    for sequence in range(first, 17):
        reports.done(sequence, int(1e6 * LIMIT_S), behind=1000, under_way_s=1000 * LIMIT_S)
    told = [sent.get_nowait().sequences for _ in range(sent.qsize())]  # type: ignore[attr-defined]
    assert [sequences[-1] for sequences in told] == [k for k in (4, 8, 12, 16) if k >= first]
    assert [one for sequences in told for one in sequences] == [*range(first, 17)]


@pytest.mark.parametrize("part", [0.45, 0.6])
def test_what_is_not_followed_by_another_in_time_waits_for_none(
    part: float, reports: Reports, sent: queue.SimpleQueue[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is reported at once where it took more than half of the time for which it may be kept; else both are kept.
    The thread that looks after them is not woken for what has left."""
    monkeypatch.setattr("pathways_ray.executor.run.reports.MOST_GATHERED_S", LIMIT_S)
    for sequence in (1, 2):
        reports.done(sequence, int(1e6 * part * LIMIT_S), behind=1000, under_way_s=1000 * LIMIT_S)
    assert sent.qsize() == (2 if part > 0.5 else 0)
    assert reports._gathering.qsize() == (0 if part > 0.5 else 1)


def test_nobody_is_woken_who_looks_in_time(reports: Reports, sent: queue.SimpleQueue[Message]) -> None:
    """Only where something is to leave before."""
    for sequence, under_way_s in enumerate((1.0, 1000.0, 0.0)):
        reports.done(sequence, 1, behind=1000, under_way_s=under_way_s * LIMIT_S)
        reports.done(sequence, 1, behind=1000, under_way_s=under_way_s * LIMIT_S)
        reports.flush()
    assert sent.qsize() == 3
    assert reports._gathering.qsize() == 2


def test_a_failure_comes_behind_what_ended_before_it(reports: Reports, sent: queue.SimpleQueue[Message]) -> None:
    reports.done(6, 20, behind=9)
    reports.failed(FAILED)
    assert [sent.get_nowait(), sent.get_nowait()] == [Done((6,), (20,)), FAILED]


def test_a_launch_that_nobody_waits_for_is_told_with_the_next_one(
    reports: Reports, sent: queue.SimpleQueue[Message]
) -> None:
    assert reports.left_s() is None
    reports.done(1, 20, behind=0, later=True)
    left = reports.left_s()
    assert left is not None
    assert left <= MAX_GATHERED_S
    reports.done(2, 5, behind=0, later=True)
    assert sent.empty()
    reports.done(3, 5, behind=0)
    assert sent.get_nowait() == Done((1, 2, 3), (20, 5, 5))
    assert reports.left_s() is None, "nothing waits any more"


def test_early_launches_that_are_sent_in_a_batch_are_told_behind_it(
    reports: Reports, sent: queue.SimpleQueue[Message]
) -> None:
    """By the thread that has the batch, which wakes no other one."""
    for number in (-1, -2):
        reports.done(number, 20, behind=0)
        reports.sent(number, 5 - number, behind=1000)
    assert sent.empty()
    assert reports.left_s() is not None
    reports.flush()
    assert sent.get_nowait() == Done((6, 7), (20, 20))


def test_nothing_waits_for_a_launch_that_does_not_end(reports: Reports, sent: queue.SimpleQueue[Message]) -> None:
    """A launch that is to follow may take as long as it likes."""
    threading.Thread(target=reports.run, daemon=True).start()
    for sequence in range(3):
        reports.done(sequence, 1, behind=9)
        assert sent.get(timeout=LIMIT_S) == Done((sequence,), (1,))


def test_a_thread_that_looks_while_another_one_flushes_gets_an_answer(sent: queue.SimpleQueue[Message]) -> None:
    """It looks at the time once: what is due may have left before it looks again."""

    class Flushed(Reports):
        """Reports that leave as soon as somebody has looked at when they are due."""

        _found: float | None = None

        @property
        def _due(self) -> float | None:
            found, self._found = self._found, None
            return found

        @_due.setter
        def _due(self, due: float | None) -> None:
            self._found = due

    reports = Flushed(sent.put)
    reports._due = 0.0
    left = reports.left_s()
    assert left is not None
    assert left < 0
    assert reports.left_s() is None
