"""Threads that wait for small values: one of them reads for all, and what ends a wait otherwise wakes it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from pathways_ray.client.local_reader import SEVERAL, LocalReader, Sleeper
from pathways_ray.transport.busy_poll import FEW, POLL_S

LIMIT_S = 20.0
NEVER_S = 3600.0


class Ends:
    """A reader of one socket, whose other end is the test's."""

    def __init__(self) -> None:
        self.reader = LocalReader()
        self.here, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.came: list[bytes] = []
        self.answers: dict[bytes, Answer] = {}
        self.reader.add(self.here, self.take)

    def take(self, message: bytes) -> None:
        """Takes a message, and wakes who waits for it."""
        self.came.append(message)
        if (answer := self.answers.get(message)) is not None:
            answer.sleeper.wake()
            self.reader.wake()

    def lead(self, count: int) -> threading.Thread:
        """A thread that leads until so many batches have come, or it is woken."""

        def run() -> None:
            with self.reader.leading:
                self.reader.lead(lambda: len(self.came) >= count, NEVER_S)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.here.close()
    made.there.close()


def ended(thread: threading.Thread) -> bool:
    thread.join(LIMIT_S)
    return not thread.is_alive()


def test_a_leader_that_looks_again_and_again_reads_all_and_sleeps_in_the_end(ends: Ends) -> None:
    """Once waits were short, what comes while it looks, and what comes when it sleeps, is taken alike."""
    for number in range(3 * FEW):
        ends.there.send(b"%d" % number)
        with ends.reader.leading:
            assert ends.reader.lead(lambda: len(ends.came) > number, NEVER_S)  # noqa: B023
    for number in range(3 * FEW, 3 * FEW + 3):
        leader = ends.lead(number + 1)
        leader.join(20 * POLL_S)
        assert leader.is_alive(), "nothing has come yet"
        ends.there.send(b"%d" % number)
        assert ended(leader)
    assert ends.came == [b"%d" % number for number in range(3 * FEW + 3)]


def test_who_waits_with_a_limit_waits_no_longer_while_answers_come_for_others(ends: Ends) -> None:
    """It leads, and reads these: each begins a look of its own."""
    over = threading.Event()

    def answer() -> None:
        while not over.wait(POLL_S):
            ends.there.send(b"for somebody else")

    answering = threading.Thread(target=answer, daemon=True)
    answering.start()
    limit_s = 0.1
    waiting = threading.Thread(
        target=lambda: ends.reader.wait(lambda: False, Sleeper(), NEVER_S, time.monotonic() + limit_s), daemon=True
    )
    waiting.start()
    try:
        assert ended(waiting)
        assert ends.came
    finally:
        over.set()
        assert ended(answering)


@pytest.mark.parametrize("others", [0, SEVERAL - 1, SEVERAL])
def test_a_leader_looks_again_and_again_unless_several_others_wait(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """Once waits were short; on a busy machine some are not."""
    looks, count = list[int](), 0
    monkeypatch.setattr(os, "sched_yield", lambda: looks.append(count))
    ends.reader._asleep.update({Sleeper(): None for _ in range(others)})
    while count < 100 * FEW and not looks:
        for _ in range(2 * FEW):
            count += 1
            ends.there.send(b"%d" % count)
            with ends.reader.leading:
                assert ends.reader.lead(lambda: len(ends.came) == count, NEVER_S)  # noqa: B023
        ends.reader._polled(time.perf_counter(), POLL_S)
    assert bool(looks) is (others < SEVERAL)


def test_the_leader_reads_until_it_has_what_it_waits_for(ends: Ends) -> None:
    leader = ends.lead(2)
    ends.there.send(b"a")
    ends.there.send(b"b")
    assert ended(leader)
    assert ends.came == [b"a", b"b"]


def test_what_ends_a_wait_otherwise_wakes_the_leader(ends: Ends) -> None:
    leader = ends.lead(1)
    while ends.reader._leader == 0:
        pass
    ends.reader.wake()
    assert ended(leader)
    ends.reader.wake()  # nobody leads: the next leader does not wait for it
    ends.there.send(b"a")
    assert ended(ends.lead(1))


def test_what_was_read_when_ctrl_c_came_is_taken_by_the_next_leader(ends: Ends) -> None:
    def interrupted(_: bytes) -> None:
        raise KeyboardInterrupt

    take = ends.reader._sockets[ends.here.fileno()][1]
    ends.reader._sockets[ends.here.fileno()] = ends.here, interrupted
    ends.there.send(b"a")
    with ends.reader.leading, pytest.raises(KeyboardInterrupt):
        ends.reader.lead(lambda: False, NEVER_S)
    ends.reader._received[0] = ends.here, take, b"a"
    assert ended(ends.lead(1))
    assert ends.came == [b"a"]


def test_a_socket_that_was_closed_under_the_leader_does_not_keep_it_busy(ends: Ends) -> None:
    ends.here.close()
    leader = ends.lead(1)
    while ends.reader._sockets:
        pass
    while ends.reader._leader == 0:
        pass
    ends.reader.wake()
    assert ended(leader)


def test_a_host_that_hangs_up_is_read_no_more(ends: Ends) -> None:
    leader = ends.lead(1)
    ends.there.close()
    while ends.reader._sockets:
        pass
    other, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other, there:
        ends.reader.add(other, ends.came.append)
        there.send(b"a")
        assert ended(leader)


class Answer:
    """A thread that waits for one message, and how often it looked whether it has come."""

    def __init__(self, ends: Ends, message: bytes) -> None:
        self.sleeper, self.looks = Sleeper(), 0
        self._ends, self._message = ends, message
        ends.answers[message] = self
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        self._ends.reader.wait(self.has_come, self.sleeper, NEVER_S)

    def has_come(self) -> bool:
        self.looks += 1
        return self._message in self._ends.came

    def waits(self, leads: bool) -> None:
        """Returns once it reads for all, or sleeps."""
        while (self.thread.ident == self._ends.reader._leader) != leads or not (
            leads or self.sleeper in self._ends.reader._asleep
        ):
            assert self.thread.is_alive()


def test_an_answer_wakes_nobody_but_the_thread_that_waits_for_it(ends: Ends) -> None:
    """1. One thread leads, two sleep.
    2. The answer of one that sleeps ends its wait; the other one does not look.
    3. The answer of the leader has the other one lead.
    """
    first = Answer(ends, b"a")
    first.waits(leads=True)
    second, third = Answer(ends, b"b"), Answer(ends, b"c")
    for one in (second, third):
        one.waits(leads=False)
    while not third.looks:  # behind its entry
        pass
    looks = third.looks
    ends.there.send(b"b")
    assert ended(second.thread)
    assert third.looks == looks
    ends.there.send(b"a")
    assert ended(first.thread)
    third.waits(leads=True)
    ends.there.send(b"c")
    assert ended(third.thread)


def test_all_who_wait_look_when_something_else_has_happened(ends: Ends) -> None:
    """A failure ends two waits; a thread that goes on is left to read."""
    waits = [Answer(ends, message) for message in (b"a", b"b", b"c")]
    for one in waits:
        while not one.looks:
            pass
    ends.came += [b"a", b"b"]
    ends.reader.wake_all()
    assert all(ended(one.thread) for one in waits[:2])
    ends.there.send(b"c")
    assert ended(waits[2].thread)


class _Interrupted:
    """A lock whose release Ctrl-C comes right behind, once, in one thread."""

    def __init__(self) -> None:
        self._lock, self.thread = threading.RLock(), 0

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()
        if self.thread == threading.get_ident():
            self.thread = 0
            raise KeyboardInterrupt


def test_ctrl_c_right_behind_the_end_of_a_lead_hands_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, lock, over, leads = LocalReader(), _Interrupted(), threading.Event(), threading.Event()
    monkeypatch.setattr(reader, "leading", lock)

    def is_over() -> bool:
        if reader._leader == threading.get_ident():
            leads.set()
        return over.is_set()

    other = threading.Thread(target=reader.wait, args=(is_over, Sleeper(), LIMIT_S * 10), daemon=True)

    def first_is_over() -> bool:
        if not other.is_alive():
            other.start()
        return bool(reader._asleep)

    lock.thread = threading.get_ident()
    with pytest.raises(KeyboardInterrupt):
        reader.wait(first_is_over, Sleeper(), 0.01)
    assert leads.wait(LIMIT_S), "nobody reads"
    over.set()
    reader.wake_all()
    other.join(LIMIT_S)
    assert not other.is_alive()


def test_an_error_of_a_signal_handler_is_not_taken_for_the_end_of_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    class Received(deque[Any]):
        alarm = True

        def extend(self, came: Any) -> None:
            super().extend(came)
            if self.alarm:
                self.alarm = False
                raise TimeoutError("the alarm of the program")

    reader, came = LocalReader(), list[bytes]()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        reader.add(mine, came.append)
        monkeypatch.setattr(reader, "_received", Received())
        theirs.send(b"one")
        with pytest.raises(TimeoutError, match="alarm"):
            reader.wait(lambda: came, Sleeper(), LIMIT_S)
        theirs.send(b"two")
        reader.wait(lambda: len(came) == 2, Sleeper(), LIMIT_S, time.monotonic() + LIMIT_S)
        assert came == [b"one", b"two"]
        reader.remove(mine)
