"""The thread of a session that makes debug calls, once the values of a launch have come.

They are made in the order of the launches, and in each in the order of the program. `jax.effects_barrier()` waits for
them, as in JAX, and raises what the first of a session raised.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from pathways_ray import jax_hooks
from pathways_ray.client.debugging import DebugCall, Reported
from pathways_ray.client.weak import living
from pathways_ray.errors import PathwaysError

_log = logging.getLogger(__name__)

_MAX_WAITING = 1024
"""Launches whose debug calls are not made yet. One more waits, so that their values do not fill the devices."""

_CLOSE_LIMIT_S = 5.0
"""Seconds that the end of a session waits for debug calls of launches before."""


_all: weakref.WeakValueDictionary[int, DebugCalls] = weakref.WeakValueDictionary()
"""Those that have a thread, each under its `id`."""


def _flush_all() -> None:
    """Waits for the debug calls of all sessions, and raises what one raised, of a session's the first."""
    found = living(_all)
    for one in found:
        one.flush()
    for one in found:
        error, one.raised = one.raised, None
        if error is not None:
            raise error


jax_hooks.at_effects_barrier(_flush_all)


@atexit.register  # behind JAX's, so that it is called before
def _flush_at_exit() -> None:
    """Waits for the debug calls of all sessions, and drops what they raised, which is in the log: JAX's own end begins
    with a barrier, and would stop there."""
    for one in living(_all):
        one.flush()
        one.raised = None


class DebugCalls:
    """The debug calls of one session. Its thread ends with it. `raised` is what the first that failed raised, until
    somebody has looked."""

    def __init__(self) -> None:
        self.raised: Exception | None = None
        self._waiting: queue.Queue[tuple[Sequence[Reported], list[Any]]] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = self._ended = False

    def made(self, reported: Sequence[Reported], results: list[Any]) -> None:
        """Takes the results of a launch.

        Raises:
            FloatingPointError: under `jax_debug_nans`: an operation made such a value. That is waited for.
            RoutingError: rows that a program routes cannot go where they are to go, and it was to say so.
        """
        calls = [one for one in reported if isinstance(one.report, DebugCall)]
        if calls:
            self._start()
            self._waiting.put((calls, results))
        for one in reported:
            if not isinstance(one.report, DebugCall):
                one.report.check(_values(one, results), f"{one.name} on {one.slice}", one.where)

    def flush(self, limit_s: float | None = None) -> None:
        """Waits until the debug calls of all launches before are made."""
        thread = self._thread
        if thread is None or threading.current_thread() is thread:
            return
        deadline = None if limit_s is None else time.monotonic() + limit_s
        with self._waiting.all_tasks_done:
            while self._waiting.unfinished_tasks:
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or self._ended or not thread.is_alive():
                    return
                self._waiting.all_tasks_done.wait(left)

    def close(self) -> None:
        """Waits a little for what is under way. The thread ends behind that."""
        self.flush(_CLOSE_LIMIT_S)
        self._closed = True
        with contextlib.suppress(queue.Full):  # else it has something to do, and looks behind it
            self._waiting.put_nowait(((), []))

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pathways-debug-calls", daemon=True)
                try:
                    self._thread.start()
                except BaseException:  # the system has none; or Ctrl-C, at whatever step
                    if not self._thread.is_alive():
                        self._thread = None
                    raise
                _all[id(self)] = self

    def _run(self) -> None:
        while not (self._closed and self._waiting.empty()):
            reported, results = self._waiting.get()
            try:
                for one in reported:
                    try:
                        self._make(one, results)
                    except BaseException as error:  # SystemExit too: the thread has those of later launches to make
                        self._failed(one, error)
            finally:
                del reported, results
                self._waiting.task_done()
        with self._waiting.all_tasks_done:
            self._ended = True  # what `close` puts there now nobody takes out
            self._waiting.all_tasks_done.notify_all()

    def _make(self, one: Reported, results: list[Any]) -> None:
        assert isinstance(one.report, DebugCall)
        try:
            values = _values(one, results)
        except PathwaysError as error:  # the launch failed: who looks at its results reads why
            _log.info("no debug call of %s (%s): %s", one.name, one.report.where, error)
            return
        one.report.make(values, one.slice.devices)

    def _failed(self, one: Reported, error: BaseException) -> None:
        """Keeps what a debug call raised. The log says no more than that it did: JAX writes how it came to it."""
        assert isinstance(one.report, DebugCall)
        what = f"a debug call of {one.name} ({one.report.where}) raised"
        _log.error("%s %r", what, error)
        if isinstance(error, Exception) and self.raised is None:
            traceback.clear_frames(error.__traceback__)  # they hold the values
            error.add_note(f"{what} it")
            self.raised = error


def _values(one: Reported, results: list[Any]) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(results[k]) for k in one.results]
