"""The limit of what one thread does again and again, watched by another.

A timer for each call would be a thread for each call. Here one thread sleeps while calls begin and end: it looks when
the first call that it knew of would be late, and is woken only for one that would be so earlier. Where it then finds
nothing under way it ends, and with `close` at once.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator


class Limit:
    """Calls `end` when what is under way takes longer than it may. For one thread at a time.

    Args:
        end: may be called by another thread, while nothing begins or ends.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._changing = threading.Condition()
        self._due = math.inf
        self._looks = math.inf
        self.is_over = False
        """Whether what is under way, or was last, took too long."""

    @contextlib.contextmanager
    def of(self, seconds: float) -> Iterator[None]:
        """Surrounds what may take so long."""
        with self._changing:
            self.is_over = False
            self._due = time.monotonic() + seconds
            if self._looks == math.inf:
                threading.Thread(target=self._watch, name="limit", daemon=True).start()
                self._looks = self._due
            elif self._due < self._looks:
                self._looks = self._due
                self._changing.notify()
        try:
            yield
        finally:
            with self._changing:
                self._due = math.inf

    def close(self) -> None:
        """Ends the watch, or its sleep would keep a thread and what `end` belongs to. What begins later has another."""
        with self._changing:
            self._due = math.inf
            if self._looks < math.inf:
                self._looks = -math.inf
                self._changing.notify()

    def _watch(self) -> None:
        with self._changing:
            try:
                while True:
                    now = time.monotonic()
                    if now >= self._due:
                        self.is_over, self._due = True, math.inf
                        self._end()
                    if now >= self._looks:
                        self._looks = self._due
                    if self._looks == math.inf:
                        return
                    self._changing.wait(min(self._looks - now, threading.TIMEOUT_MAX))
            finally:
                self._looks = math.inf  # where `end` raised too: what begins later has another watch
