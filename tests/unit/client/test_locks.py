"""Locks of a client that Ctrl-C, a destructor, a fork or another thread must not leave taken, or want of each other."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest

import pathways_ray as pw
from pathways_ray.client.array_pieces import THERE, Fetching
from pathways_ray.client.completion import _Awaited, _Bell
from pathways_ray.client.data_link import DataLink
from pathways_ray.client.interrupted import is_mine
from pathways_ray.client.local_reader import LocalReader, Sleeper
from pathways_ray.client.moving import Hold, Release, Step
from pathways_ray.client.questions import Question
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.suspension import Suspension
from pathways_ray.errors import Failure, UsageError
from pathways_ray.transport.messages import Completed, Fetch, FetchPart, Free, Held, HeldBuffer, HostAddress, ListHeld
from pathways_ray.transport.messages import encode as encoded
from pathways_ray.transport.thread_links import Outbox, is_writing
from tests.unit.client.local import opened
from tests.unit.client.offline import LIMIT_S, Background, Offline
from tests.unit.client.test_snapshots import islands, lose
from tests.unit.helpers import placed
from tests.waiting import until

ONES = np.ones(4, np.float32)
INTERRUPTS = 1000


def interrupted_often(work: Callable[[], Any], check: Callable[[], None]) -> None:
    """Does something again and again, and has a signal end that at any step of it, many times."""
    raised = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise KeyboardInterrupt

    def interrupt_soon() -> None:
        nonlocal raised
        raised = False
        # Again after a while: CPython may forget a signal that comes as it looks whether one has come.
        signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 6e-5), 0.05)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(INTERRUPTS):
            try:
                interrupt_soon()
                while True:
                    work()
                    if raised:  # in a destructor, where it ends nothing
                        interrupt_soon()
            except KeyboardInterrupt:
                pass
            check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ready(offline: Offline) -> Any:
    (array,) = offline.session.launch(1, [], (offline.kind,))
    offline.say(Completed((1,)))
    return array


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_a_wait_leaves_the_lock_of_all_waits_free() -> None:
    """Else the thread that hears of outcomes would wait for it without end."""
    offline = Offline()
    record, driver = ready(offline)._buffer.record, offline.session._driver

    def check() -> None:
        assert not is_mine(driver.changing)

    interrupted_often(lambda: driver.wait(record), check)
    Background(driver.wake_all).end()


def test_ctrl_c_in_a_fetch_leaves_no_reader_that_a_move_would_wait_for() -> None:
    offline = Offline()
    array, driver = ready(offline), offline.session._driver

    def check() -> None:
        assert driver.readers == 0

    interrupted_often(lambda: offline.session.fetch(array), check)


def test_ctrl_c_in_who_reads_for_all_leaves_that_to_others() -> None:
    reader, sleeper = LocalReader(), Sleeper()

    def check() -> None:
        assert not is_mine(reader.leading)
        assert not reader._leader

    interrupted_often(lambda: reader.wait(lambda: is_mine(reader.leading), sleeper, 0.01), check)


def test_ctrl_c_in_who_sends_leaves_the_link_to_others() -> None:
    outbox = Outbox()
    outbox.attach(lambda data, wait: True, True)

    def check() -> None:
        assert not outbox._writing.locked()
        outbox._batcher.clear()  # what was not written the thread of the link would write, and senders leave to it

    interrupted_often(lambda: outbox.send(Free((1,))), check)


def test_ctrl_c_in_a_move_leaves_the_calls_of_the_session_free() -> None:
    offline = Offline()
    mover, driver = offline.session._mover, offline.session._driver

    def steps() -> Generator[Step, Any, None]:
        yield Hold()
        yield Release()

    def check() -> None:
        assert not is_mine(driver.sending)
        assert not driver.held

    interrupted_often(lambda: mover._carry_out(steps(), "it was not moved", {}), check)


def test_ctrl_c_in_a_call_that_waited_for_the_session_leaves_the_mover_its_lock() -> None:
    """
    1. A session has given way, and a call of it waits.
    2. A mover brings the session back, and keeps its calls meanwhile.
    3. Ctrl-C ends the call; the mover keeps them as before.
    """
    offline, over = Offline(), threading.Event()
    driver = offline.session._driver
    driver.suspend(Suspension((), {}, gives_way=True), lambda number: None)

    def bring_back() -> bool:
        until(lambda: driver.changed._waiters)  # type: ignore[attr-defined]
        with driver.sending:
            driver.suspend(None, lambda number: None)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            over.wait(LIMIT_S)
            return is_mine(driver.sending)

    mover = Background(bring_back)
    with pytest.raises(KeyboardInterrupt):
        offline.session.launch(1, [], (offline.kind,))
    over.set()
    assert mover.end()


# --- signal handlers --------------------------------------------------------------------------------------------------


def test_a_signal_handler_may_wait_in_the_midst_of_a_wait_of_its_thread() -> None:
    """The thread that waits reads for all. What comes for the handler is read there, in its place."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader, came = LocalReader(), list[bytes]()
    handled = threading.Event()

    def handler(*_: object) -> None:
        there.send(b"for the handler")
        reader.wait(lambda: b"for the handler" in came, Sleeper(), 5.0)
        handled.set()
        there.send(b"for the main program")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with here, there:
            reader.add(here, came.append)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            reader.wait(lambda: b"for the main program" in came, Sleeper(), 5.0)
            reader.remove(here)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert handled.is_set()
    assert came == [b"for the handler", b"for the main program"]


@pytest.mark.parametrize("use", ["launch", "put", "wait", "fetch"])
def test_a_signal_handler_that_would_wait_for_what_it_has_interrupted_is_refused(use: str) -> None:
    """It comes while its thread sends, or has what a thread that reads wants: who waits there would wait without end.
    The session goes on."""
    offline = Offline()
    session, driver = offline.session, offline.session._driver
    array = ready(offline)
    calls: dict[str, Callable[[], object]] = {
        "launch": lambda: session.launch(1, [], (offline.kind,)),
        "put": lambda: session.put(np.zeros(3, np.float32), offline.where, ()),
        "wait": array.block_until_ready,
        "fetch": lambda: np.asarray(array),
    }
    for lock in driver.locks:
        with lock, pytest.raises(UsageError, match="a signal handler or a destructor"):
            calls[use]()
    session.launch(1, [], (offline.kind,))

    refused: list[UsageError] = []

    def write(_data: bytes, _wait: bool) -> bool:
        with pytest.raises(UsageError, match="a signal handler or a destructor") as found:
            calls[use]()
        refused.append(found.value)
        assert session.server_of(1) is None
        return True

    outbox = Outbox()
    outbox.attach(write, direct=True)
    outbox.send(Free((1,)))
    assert refused
    assert not is_writing()
    session.launch(1, [], (offline.kind,))


# --- destructors, forks -----------------------------------------------------------------------------------------------


def test_a_destructor_may_ring_the_bell_of_its_own_thread() -> None:
    """The collector runs wherever memory is asked for, also while the bell is looked at."""
    offline = Offline()
    (array,) = offline.session.launch(1, [], (offline.kind,))
    bell = _Bell([_Awaited(array, [array])])
    assert not isinstance(bell.rung, threading.Event)
    with bell:
        offline.session._driver.wake_all()
        Background(lambda: bell.rung.sleep(LIMIT_S)).end()


def test_a_fork_leaves_its_parent_what_it_has_suspended(tmp_path: Path) -> None:
    offline = Offline()
    array = ready(offline)
    held = HeldBuffer(array._buffer.id, 1, offline.kind.array, ())
    offline.controller.answers[ListHeld] = Held((held,))
    offline.session._mover._slices[1] = offline.where
    offline.hosts.fetch_to_keep = lambda *_: np.zeros(2, np.float32)  # type: ignore[attr-defined]
    offline.session.suspend(tmp_path / "saved")
    before = sorted(path.name for path in (tmp_path / "saved").iterdir())
    if not (pid := os.fork()):
        offline.session.leave_to_parent()
        del array
        os._exit(0)
    os.waitpid(pid, 0)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == before


# --- threads ----------------------------------------------------------------------------------------------------------


def test_a_question_whose_stream_ends_while_it_is_sent_has_one_end() -> None:
    said: list[bool] = []

    class Link:
        dead = None
        fetches: dict[int, Fetching] = {}  # noqa: RUF012

        def send_local(self, _: Any) -> bool:
            for fetching in list(self.fetches.values()):
                fetching.failure = Failure("HostLost", "gone")
                assert fetching.told is not None
                fetching.told()
            return False

    question = Question(Link(), 1, said.append)  # type: ignore[arg-type]
    fetching = Fetching(None, 0, THERE, lambda: question.end(fetching.failure is None))
    assert question.ask(Fetch(1, 1, ()), fetching)
    assert said == [False]


def test_a_message_that_makes_no_sense_ends_its_stream_and_no_other() -> None:
    """It came by a local socket, which threads that wait for other hosts read too."""

    class Owner:
        session, token, trust, early, reader = 7, "", None, None, LocalReader()

        def wake(self) -> None:
            pass

    class Refusing:
        def take(self, host: int, part: FetchPart) -> bool:
            raise ValueError("it does not belong there")

    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        link = DataLink(cast(Any, Owner()), HostAddress(0, 1, "127.0.0.1:1"))
        Owner.reader.add(here, link._take_local)
        link.fetches[1] = Fetching(Refusing(), 0, {0: 8}, lambda: None)  # type: ignore[arg-type]
        there.send(b"\x91" + encoded(FetchPart(1, 0, 0, 4, b"abcd")))
        for _ in range(2):
            with Owner.reader.leading:
                Owner.reader.lead(lambda: False, 0.1)
        assert link.dead is not None
        Owner.reader.remove(here)


def test_what_a_host_says_of_early_calls_behind_the_end_of_a_stream_stays() -> None:
    """The next stream to it may be there as soon as the first one counts as dead."""
    said: list[tuple[bool, bool]] = []

    class Owner:
        session, token, trust, reader = 7, "", None, LocalReader()
        early: Any = None

        def wake(self) -> None:
            pass

    class Listener:
        def early_allowed(self, host: int, allowed: bool) -> None:
            said.append((allowed, link.dead is None))

    link = DataLink(cast(Any, Owner()), HostAddress(0, 1, "127.0.0.1:1"))
    until(lambda: link.dead is not None)
    link.dead, Owner.early = None, Listener()
    link.end("its process was lost")
    link.end("its process was lost")
    assert said == [(False, True)]


def test_slices_may_be_made_while_the_session_says_which_it_has() -> None:
    """To the successor of its controller: what went wrong there would end the session."""
    offline = Offline()
    mover, over = offline.session._mover, threading.Event()
    made = [VirtualSlice(offline.session, placed(number, ["0.0"]), "") for number in range(400)]

    def look() -> int:
        looks = 0
        while not over.is_set():
            mover.slices_held(False)
            mover.place([])
            looks += 1
        return looks

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    looking = Background(look)
    try:
        for _ in range(100):
            for one in made:
                mover._slices[one.id] = one
            mover._slices.clear()
    finally:
        sys.setswitchinterval(before)
        over.set()
    assert looking.end() > 0


def test_two_elastic_steps_in_two_threads_look_at_what_they_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    1. Two loops of one session lose their states, and a copy of each.
    2. Each looks at its copy, from within its step: whoever can make that again is asked.
    """
    session = opened()
    monkeypatch.setattr(session, "status", lambda: islands("up", "up"), raising=False)
    where = pw.virtual_slice((2,), ("x",), island=0)
    update = pw.compiled(lambda s, v: s * 2 + v, slice=where)
    meeting = threading.Barrier(2)
    steps: list[Any] = [pw.elastic(lambda s, v: update(s, v), snapshot_every=3) for _ in range(2)]
    states = [step(pw.put(ONES, where), ONES) for step in steps]

    def meet(first: Callable[[float | None], None]) -> Callable[..., None]:
        once = [meeting.wait]

        def wait(timeout: float | None = None) -> None:
            if once:
                once.pop()(LIMIT_S)
            first(timeout)

        return wait

    for step, state in zip(steps, states, strict=True):
        lose(state)
        for taken in step._snapshots.values():
            lose(taken._copies[0][0])
            taken.wait = meet(taken.wait)
    both = [Background(lambda s=s, x=x: s(x, ONES)) for s, x in zip(steps, states, strict=True)]  # type: ignore[misc]
    found = [np.asarray(one.end()) for one in both]
    session.close()
    np.testing.assert_array_equal(found, [7 * ONES] * 2)
