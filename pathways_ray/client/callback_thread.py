"""The thread of a session that calls what users gave to `add_done_callback`, in the order in which arrays were done.

Arrays get their outcomes in threads that must not wait: those that read messages, and those that send, with the lock
for that. A callback may launch, and so wait for room, or for the session to come back to its devices.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from pathways_ray.client.interrupted import new_lock

_FLUSH_LIMIT_S = 5.0
"""Seconds that the end of a session waits for callbacks: for those of before, and for those of arrays that fail with
it."""


class CallbackThread:
    """The callbacks of one session. The thread starts with the first one, and ends with the session."""

    def __init__(self) -> None:
        # Takes no lock of Python's: a destructor may put something while its thread does.
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = new_lock()
        self._ended = False

    def start(self) -> None:
        """Starts the thread, unless it runs."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pathways-callbacks", daemon=True)
                try:
                    self._thread.start()
                except BaseException:  # the system has none; or Ctrl-C, at whatever step
                    if not self._thread.is_alive():
                        self._thread = None
                    raise

    def put(self, call: Callable[[], None]) -> None:
        """Has the thread make a call, which raises nothing. Waits for no lock."""
        self._waiting.put(call)
        if self._ended or self._thread is None or not self._thread.is_alive():  # as in a fork
            self._make_all()

    def flush(self) -> None:
        """Waits a little for the calls before."""
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            made = threading.Event()
            self.put(made.set)
            made.wait(_FLUSH_LIMIT_S)

    def close(self) -> None:
        """Waits a little for the calls before. The thread ends behind them."""
        self._waiting.put(None)
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            thread.join(_FLUSH_LIMIT_S)

    def _run(self) -> None:
        while (call := self._waiting.get()) is not None:
            call()
            del call  # it has the array
        self._ended = True  # before the last look: who puts something behind that makes it
        self._make_all()

    def _make_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._waiting.get_nowait()
                if call is not None:
                    call()
