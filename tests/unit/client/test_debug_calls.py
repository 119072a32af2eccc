"""The threads that make debug calls: they end with their sessions, and `jax.effects_barrier` waits for all of them."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from pathways_ray.client.debug_calls import DebugCalls
from pathways_ray.client.debugging import DebugCall, Reported
from tests.waiting import until

WHERE: Any = SimpleNamespace(devices=())
CALLED = [np.ones((), np.int32)]


def calls(call: Any) -> list[Reported]:
    """A program with one debug call."""
    primitive = SimpleNamespace(impl=call)
    return [Reported(DebugCall(primitive, {}, (), "here"), "f", WHERE, "here", (0,))]


def test_a_thread_ends_with_its_session_and_makes_what_was_called_before() -> None:
    made: list[int] = []
    gone = []
    for k in range(5):
        one = DebugCalls()
        one.made(calls(lambda k=k: made.append(k)), CALLED)
        one.close()
        thread = one._thread
        assert thread is not None
        thread.join(20)
        assert not thread.is_alive()
        gone.append(weakref.ref(one))
        del one, thread
    gc.collect()
    assert made == [*range(5)]
    assert [one() for one in gone] == [None] * 5


def test_a_thread_that_has_much_to_do_ends_behind_that() -> None:
    """The queue is full when the session is closed, which does not wait for it."""
    made: list[int] = []
    goes_on = threading.Event()
    one = DebugCalls()
    one.flush = lambda limit_s=None: None  # type: ignore[method-assign]  # it would wait for 5 s
    one.made(calls(lambda: goes_on.wait(20)), CALLED)
    until(one._waiting.empty)
    for k in range(one._waiting.maxsize):
        one.made(calls(lambda k=k: made.append(k)), CALLED)
    one.close()
    goes_on.set()
    assert one._thread is not None
    one._thread.join(20)
    assert not one._thread.is_alive()
    assert len(made) == one._waiting.maxsize


def test_a_barrier_waits_for_the_calls_of_all_sessions_however_many_there_were() -> None:
    for _ in range(1000):
        one = DebugCalls()
        one.made(calls(lambda: None), CALLED)
        one.close()
    made: list[int] = []
    several = [DebugCalls() for _ in range(3)]
    for k, one in enumerate(several):
        one.made(calls(lambda k=k: [time.sleep(0.01), made.append(k)]), CALLED)
    jax.effects_barrier()
    assert sorted(made) == [0, 1, 2]
    for one in several:
        one.close()


def test_a_barrier_raises_what_the_first_call_of_a_session_raised(caplog: pytest.LogCaptureFixture) -> None:
    """It was logged and dropped: a program whose callback failed went on as if it had not."""

    def bad(name: str, kind: type[BaseException]) -> Any:
        def call() -> None:
            raise kind(name)

        return call

    made: list[int] = []
    one, other = DebugCalls(), DebugCalls()
    for call in (bad("exit", SystemExit), bad("first", KeyError), bad("second", KeyError), lambda: made.append(1)):
        one.made(calls(call), CALLED)
    other.made(calls(bad("third", ValueError)), CALLED)
    found = []
    for kind in (KeyError, ValueError):  # that of each session
        with pytest.raises(kind) as raised:
            jax.effects_barrier()
        found.append((*raised.value.args, *raised.value.__notes__))
    note = "a debug call of f (here) raised it"
    assert found == [("first", note), ("third", note)]
    assert made == [1]
    jax.effects_barrier()  # each is raised once
    said = [record.getMessage() for record in caplog.records]
    assert [sum(name in one for one in said) for name in ("exit", "first", "second", "third")] == [1] * 4
    for session in (one, other):
        session.close()


def test_a_barrier_waits_and_raises_in_any_thread() -> None:
    """It did in the one alone that had imported the client: JAX's tokens are those of a thread."""
    made: list[int] = []
    found: list[str] = []
    goes_on = threading.Event()

    def slow() -> None:
        goes_on.wait(20)
        made.append(1)
        raise KeyError("slow")

    def barrier() -> None:
        try:
            jax.effects_barrier()
        except KeyError as error:
            found.extend(error.args * len(made))

    one = DebugCalls()
    one.made(calls(slow), CALLED)
    thread = threading.Thread(target=barrier)
    thread.start()
    goes_on.set()
    thread.join(20)
    assert found == ["slow"]
    one.close()


def test_what_nobody_asked_for_does_not_stop_what_jax_does_at_exit() -> None:
    """Its end begins with a barrier, which raised it."""
    script = """
from tests.unit.client.test_debug_calls import CALLED, DebugCalls, calls

def bad():
    raise KeyError("bad")

one = DebugCalls()
one.made(calls(bad), CALLED)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "a debug call of f (here) raised KeyError('bad')" in ended.stderr
    assert "atexit" not in ended.stderr


def test_what_a_call_raised_does_not_hold_the_values_of_its_launch() -> None:
    def bad() -> None:
        raise KeyError("x")

    class Value:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.ones((), np.int32)

    one, value = DebugCalls(), Value()
    gone = weakref.ref(value)
    one.made(calls(bad), [value])
    del value
    one.flush(20)
    until(lambda: gone() is None)
    with pytest.raises(KeyError):
        jax.effects_barrier()
    one.close()


def test_calls_are_made_once_a_thread_can_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made: list[int] = []
    one = DebugCalls()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            one.made(calls(lambda: made.append(1)), CALLED)
    one.made(calls(lambda: made.append(2)), CALLED)
    one.flush(20)
    assert made == [2]
    one.close()
