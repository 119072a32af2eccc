"""Ctrl-C at each step of what a session does: nothing is left half done, and the next call finds all as it was."""

from __future__ import annotations

import itertools
import signal
import threading
from types import CodeType
from typing import Any

import pytest

from pathways_ray.client.buffer import BufferRecord
from pathways_ray.client.core import ClientCore
from pathways_ray.client.driver import Driver
from pathways_ray.client.events import Registered
from pathways_ray.client.renewals import Renewals
from pathways_ray.client.session import Session
from pathways_ray.client.session_slices import SliceCalls
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import CloseSession, Free, Launch, Register
from tests.unit.client.offline import LIMIT_S, Background, Offline
from tests.unit.client.test_session import V, interrupted
from tests.unit.helpers import Sketch

QUEUE = (
    Driver.release_queue.__code__,
    Driver.do.__code__,
    ClientCore.head.__code__,
    ClientCore._registering.__code__,
    Renewals.filled.__code__,
)

# --- the queue --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", QUEUE, ids=lambda code: code.co_name)
def test_no_launch_of_the_queue_is_lost_or_leaves_twice(code: CodeType) -> None:
    """Three launches wait for an upload, which has arrived; the first of them takes its program along."""
    for step in itertools.count():
        offline = Offline()
        x = offline.session.put(V, offline.where, ())
        renewals = offline.session._core.renewals
        renewals.registered(registered(1))
        offline.controller.take()
        held = [offline.session.launch(1, [x._buffer.record], (offline.kind,)) for _ in range(3)]
        assert x._buffer.record.upload is not None
        x._buffer.record.upload.done = True
        cut = interrupted((code,), step, offline.session._driver.release_queue)
        offline.session._driver.release_queue()
        sent = offline.controller.take()
        assert [message.launch for message in sent if isinstance(message, Launch)] == [1, 2, 3], f"step {step}"
        assert isinstance(sent[0], Register), "before the first launch of its program"
        assert (renewals.stale, len(held)) == (set(), 3)
        if not cut:
            break
    assert step


@pytest.mark.parametrize("code", QUEUE, ids=lambda code: code.co_name)
def test_no_function_counts_as_sent_that_has_not_left(code: CodeType) -> None:
    """The user calls the same function again, which is another program then."""
    for step in itertools.count():
        offline = Offline()

        def call(program: int, offline: Offline = offline) -> None:
            offline.session._driver.call(registered(program))

        cut = interrupted((code,), step, lambda: call(1))
        call(2)
        sent = [message for message in offline.controller.take() if isinstance(message, Register)]
        assert sent[-1].program == 2, f"step {step}"
        assert set().union(*(message.functions for message in sent)) == {"f", "g"}, f"step {step}"
        if not cut:
            break
    assert step


def registered(program: int) -> Any:
    sketch = Sketch("p")
    where = sketch.slice("0.0")
    graph = sketch.graph(sketch.call("f", sketch.argument(where), slice=where))
    return Registered(program, graph, b"graph", {"f": b"F", "g": b"G"})


# --- destructors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_freed", [False, True])
def test_ctrl_c_in_a_destructor_comes_once_more_and_the_array_is_freed(is_freed: bool) -> None:
    """It comes before the array is freed, or behind."""
    offline = Offline()
    (y,) = offline.session.launch(1, [], (offline.kind,))
    free = offline.session.free

    def interrupted_free(record: BufferRecord) -> None:
        offline.session.free = free
        if is_freed:
            free(record)
        raise KeyboardInterrupt

    offline.session.free = interrupted_free
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    held = [y]
    del y
    try:
        with pytest.raises(KeyboardInterrupt):
            held.clear() or threading.Event().wait(LIMIT_S)
    finally:
        signal.signal(signal.SIGINT, before)
    assert Free((1,)) in offline.controller.take()


# --- slices -----------------------------------------------------------------------------------------------------------


def test_a_default_slice_whose_making_was_interrupted_is_made_by_another_thread() -> None:
    for step in itertools.count():
        offline = Offline()
        cut = interrupted((SliceCalls.default_slice.__code__,), step, offline.session.default_slice)
        made = Background(offline.session.default_slice).end()
        assert offline.session.default_slice() is made
        if not cut:
            break
    assert step


# --- the end ----------------------------------------------------------------------------------------------------------


def test_closing_that_is_interrupted_at_any_step_ends_the_session_at_the_latest_by_the_next_call() -> None:
    for step in itertools.count():
        offline = Offline()
        offline.session._core.resume_tag = "tag"
        codes = Session.close.__code__, Session._hang_up.__code__
        cut = interrupted(codes, step, offline.session.close)
        offline.session.close()
        assert offline.controller.closed, f"step {step}"
        assert offline.hosts.failure == Failure("SessionClosed", "the session ended: it was shut down")
        if not cut:
            break
    assert step > 10


def test_who_waits_no_longer_for_the_answer_of_a_session_s_end_has_it_closed() -> None:
    offline = Offline()

    def ctrl_c(_: CloseSession) -> None:
        raise KeyboardInterrupt

    offline.controller.answers[CloseSession] = ctrl_c
    with pytest.raises(KeyboardInterrupt):
        offline.session.close()
    assert offline.controller.closed
    assert offline.session.closed_because == "it was shut down"
    offline.session.close()
    assert offline.controller.calls == [CloseSession(7)]
