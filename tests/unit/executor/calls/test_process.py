"""The process of host functions: what it gives back of functions that work, raise, print, hang and end it."""

from __future__ import annotations

import hashlib
import os
import queue
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest

from pathways_ray.errors import Failure
from pathways_ray.executor.calls import reaper
from pathways_ray.executor.calls.calls import HostCalls, Pending, _Asked
from pathways_ray.executor.calls.process import CallFailed, FunctionProcess
from pathways_ray.ir.plan import NodeLabel
from tests.waiting import until

LIMIT_S = 60.0


class Called:
    """A process with what its functions have printed."""

    def __init__(self) -> None:
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process = FunctionProcess(self.lines.put)

    def call(self, function: Callable[..., Any], *arrays: Any, limit_s: float = LIMIT_S) -> Any:
        """What a function of arrays gives: one array, of the type of the first argument."""
        code = cloudpickle.dumps((function, (tuple(range(len(arrays))), {}), 0))
        digest = hashlib.sha256(code).hexdigest()
        inputs = [np.asarray(array) for array in arrays]
        outputs = [(inputs[0].dtype.name, inputs[0].shape)]
        return self.process.call("f", digest, code, inputs, outputs, limit_s)[0]


@pytest.fixture
def called() -> Iterator[Called]:
    found = Called()
    yield found
    found.process.close()


V = np.arange(4, dtype=np.float32)


def test_a_function_keeps_its_process_and_what_it_left_there(called: Called) -> None:
    def total(v: Any) -> Any:
        import builtins

        builtins.total = getattr(builtins, "total", 0) + v  # type: ignore[attr-defined]
        return builtins.total  # type: ignore[attr-defined]

    np.testing.assert_array_equal(called.call(total, V), V)
    pid = called.process.pid
    np.testing.assert_array_equal(called.call(total, V), 2 * V)
    assert called.process.pid == pid


def test_what_is_raised_comes_back_with_its_line_and_traceback(called: Called) -> None:
    def inner(v: Any) -> Any:
        raise ValueError(f"bad token {v[3]:g}")

    with pytest.raises(CallFailed) as failed:
        called.call(lambda v: inner(v), V)
    failure = failed.value.failure
    assert failure.kind == "HostFunctionError"
    assert failure.message.startswith("f raised ValueError: bad token 3 (test_process.py:")
    assert failure.story[0] == "Traceback (most recent call last):"
    assert any("in inner" in line for line in failure.story)
    assert not any("main.py" in line for line in failure.story)
    np.testing.assert_array_equal(called.call(lambda v: v, V), V)


def test_a_users_file_may_be_named_as_one_of_the_runtime(called: Called) -> None:
    found: dict[str, Any] = {}
    exec(compile("def wrong(v):\n    raise ValueError('no')\n", "/app/calls/main.py", "exec"), found)
    with pytest.raises(CallFailed) as failed:
        called.call(found["wrong"], V)
    assert failed.value.failure.message == "f raised ValueError: no (main.py:2)"


def test_a_fork_that_comes_back_answers_nothing(called: Called) -> None:
    """Otherwise the next call would get its answer."""

    def forks(v: Any) -> Any:
        import os

        return v + (os.fork() == 0)

    for _ in range(2):
        np.testing.assert_array_equal(called.call(forks, V), V)
        np.testing.assert_array_equal(called.call(lambda v: 10 * v, V), 10 * V)


def test_errors_that_cannot_be_told_are_named(called: Called) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("nothing")

    def raises(error: Exception) -> Any:
        def function(v: Any) -> Any:
            raise error

        return function

    for error, text in (
        (Mute(), "f raised Mute: (its text failed: RuntimeError)"),
        (KeyError("\ud800"), "f raised Key"),
    ):
        with pytest.raises(CallFailed) as failed:
            called.call(raises(error), V)
        assert failed.value.failure.message.startswith(text)


def test_a_result_that_does_not_fit_says_so(called: Called) -> None:
    said = r"f did not return what its result= says: result 0 has shape \(2,\), and should have \(4,\) on this host"
    with pytest.raises(CallFailed, match=said) as failed:
        called.call(lambda v: v[:2], V)
    assert failed.value.failure.story == ()


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_a_call_goes_to_another_process_where_this_one_no_longer_takes_it(called: Called, size: int) -> None:
    """Its reaper has yet to see the end of it, so it looks as if it ran."""

    def own(v: Any) -> Any:
        import os

        return v * 0 + os.getpid()

    before = int(called.call(own, np.zeros(4))[0])
    process = psutil.Process(called.process.pid)
    process.suspend()
    until(lambda: process.status() == psutil.STATUS_STOPPED)
    os.kill(before, signal.SIGKILL)
    assert called.process._calls is not None
    pipe = select.poll()
    pipe.register(called.process._calls, 0)
    assert pipe.poll(1000 * LIMIT_S) == [(called.process._calls.fileno(), select.POLLERR)]  # all its threads are gone
    assert int(called.call(own, np.zeros(size))[0]) != before
    assert called.process.pid != process.pid


def test_a_process_that_ends_amid_a_call_is_not_called_again(called: Called, tmp_path: Path) -> None:
    """Nobody knows what it has done."""
    notes = str(tmp_path / "notes")

    def ends(v: Any) -> Any:
        import os

        with open(notes, "a") as file:
            file.write("x")
        os._exit(3)

    called.call(lambda v: v, V)
    with pytest.raises(CallFailed, match=r"the process of f ended \(exit status 3\) before it returned"):
        called.call(ends, V)
    assert Path(notes).read_text() == "x"


def test_a_function_that_hangs_is_killed_with_what_it_started(called: Called) -> None:
    def hang(v: Any) -> Any:
        import subprocess

        print("hanging", flush=True)
        subprocess.run(["sleep", "1000"], check=False)

    called.call(lambda v: v, V)  # the limit does not count the start
    with pytest.raises(CallFailed) as failed:
        called.call(hang, V, limit_s=0.3)
    assert failed.value.failure.kind == "HostFunctionTimeout"
    assert "did not return within 0.3 s" in failed.value.failure.message
    assert called.lines.get(timeout=10) == "hanging"
    np.testing.assert_array_equal(called.call(lambda v: v + 1, V), V + 1)


def test_a_function_that_ends_its_process_ends_no_other(called: Called) -> None:
    def leave(v: Any) -> Any:
        import os

        os._exit(3)

    with pytest.raises(CallFailed, match=r"the process of f ended \(exit status 3\) before it returned"):
        called.call(leave, V)
    with pytest.raises(CallFailed, match="f raised SystemExit"):
        called.call(lambda v: exit(1), V)
    np.testing.assert_array_equal(called.call(lambda v: v, V), V)


def test_what_a_function_leaves_ends_with_its_process(called: Called) -> None:
    """
    1. A daemon in a session of its own goes on when the call is over.
    2. Another call ends the process: the next one has a new one, and the daemon is gone.
    """

    def leaves(v: Any) -> Any:
        import os
        import time

        reads, writes = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(writes, str(os.getpid()).encode())
                time.sleep(1000)
            os._exit(0)
        return v * 0 + int(os.read(reads, 20))

    (pid,) = set(map(int, called.call(leaves, np.zeros(4, np.int64))))
    assert psutil.pid_exists(pid)
    with pytest.raises(CallFailed, match=r"the process of f ended \(SIGKILL\)"):
        called.call(lambda v: os.kill(os.getpid(), signal.SIGKILL), V)
    assert not psutil.pid_exists(pid)
    np.testing.assert_array_equal(called.call(lambda v: v, V), V)


def test_a_function_that_stops_its_reaper_has_its_limit_all_the_same(called: Called) -> None:
    def stops(v: Any) -> Any:
        import os
        import signal
        import time

        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(20)  # and not for ever: what this is about would keep the test waiting
        return v

    called.call(lambda v: v, V)
    with pytest.raises(CallFailed, match=r"did not return within 0.3 s"):
        called.call(stops, V, limit_s=0.3)
    np.testing.assert_array_equal(called.call(lambda v: v, V), V)


def test_a_reaper_that_is_asked_twice_ends_what_it_has_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request may come before the first has ended anything."""
    handlers: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.append((number, handler)))
    with pytest.raises(reaper._Asked):
        reaper._asked(signal.SIGTERM, None)
    assert handlers == [(signal.SIGTERM, signal.SIG_IGN)]


def test_a_function_may_close_what_it_prints_to(called: Called) -> None:
    np.testing.assert_array_equal(called.call(lambda v: (sys.stdout.close(), v)[1], V), V)
    with pytest.raises(CallFailed, match="f has closed the pipe by which its process is called"):
        called.call(lambda v: (os.close(int(sys.argv[1])), v)[1], V)
    np.testing.assert_array_equal(called.call(lambda v: v, V), V)


def test_what_is_printed_is_handed_on_line_by_line(called: Called) -> None:
    def speak(v: Any) -> Any:
        import sys

        print("one\ntwo")
        print("three", file=sys.stderr)
        return v

    called.call(speak, V)
    assert [called.lines.get(timeout=10) for _ in range(3)] == ["one", "two", "three"]


def test_secrets_of_the_host_are_not_in_the_environment(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("XLA_FLAGS", "--of_the_host")

    def found(v: Any) -> Any:
        import os

        return v * 0 + sum(name in os.environ for name in ("RAY_AUTH_TOKEN", "XLA_FLAGS"))

    np.testing.assert_array_equal(called.call(found, V), 0 * V)


def test_a_result_that_there_is_no_memory_for_is_not_taken_for_that_of_the_next_call(called: Called) -> None:
    def full(*_: Any) -> Any:
        raise MemoryError("no room")

    np.testing.assert_array_equal(called.call(lambda v: v + 1, V), V + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathways_ray.executor.calls.process.receive_array", full)
        with pytest.raises(MemoryError):
            called.call(lambda v: v + 2, V)
    np.testing.assert_array_equal(called.call(lambda v: v + 3, V), V + 3)


def test_a_closed_process_leaves_no_thread_that_watches_it() -> None:
    """The first call has an hour, which its watch would sleep through, for each session that a host had."""
    called, before = Called(), set(threading.enumerate())
    np.testing.assert_array_equal(called.call(lambda v: v + 1, V, limit_s=3600.0), V + 1)
    (watch,) = (thread for thread in set(threading.enumerate()) - before if thread.name == "limit")
    called.process.close()
    watch.join(LIMIT_S)
    assert not watch.is_alive()


def test_a_session_that_ends_while_a_call_waits_for_its_arguments_calls_nothing(called: Called) -> None:
    """There is no process to kill then. One that starts later would run, with whatever it does, for nobody."""
    waits, goes_on = threading.Event(), threading.Event()

    class Waiting:
        def run(self, process: FunctionProcess, inputs: Any) -> Any:
            waits.set()
            assert goes_on.wait(LIMIT_S)  # devices compute what it is given
            called.process = process
            return [called.call(lambda v: v, V)]

    calls, pending = HostCalls(0), Pending()
    calls._ask(1, _Asked(pending, Waiting(), NodeLabel("f", ""), []))  # type: ignore[arg-type]
    assert waits.wait(LIMIT_S)
    calls.end(1)
    goes_on.set()
    pending.block_until_ready()
    assert isinstance(pending.failure, Failure)
    assert pending.failure.kind == "SessionClosed"
    assert called.process.pid == 0


def test_what_has_ended_as_its_process_started_ends_that_as_well(
    called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, pids = called.process._start, []

    def start() -> None:
        called.process.end()
        starts()
        pids.append(called.process.pid)

    monkeypatch.setattr(called.process, "_start", start)
    with pytest.raises(CallFailed):
        called.call(lambda v: v, V)
    assert called.process.pid == 0
    assert not psutil.pid_exists(pids[0])
