"""The first SIGINT or SIGTERM asks for an end after the step that runs; a second one ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


LEAVE_LIMIT_S = 5.0
"""The time in which the process must end at once."""


class Stop:
    """The state of a request to end.

    Attributes:
        before_leaving: ends processes that would outlive this one, when it is ended at once
    """

    def __init__(self, said: Callable[[str], None], leave: Callable[[int], None] = os._exit) -> None:
        self.asked = False
        self.before_leaving: Callable[[], None] = lambda: None
        self._said, self._leave = said, leave

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """Handles a signal: the first asks for an end, the second ends the process."""
        name = signal.Signals(number).name
        if self.asked:
            last = threading.Thread(target=self.before_leaving, daemon=True)  # what it needs may be locked here
            last.start()
            last.join(LEAVE_LIMIT_S)
            self._leave(128 + number)
        self.asked = True
        self._said(f"{name}: ends after this step and a checkpoint; once more, and it ends at once")

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stop]:
        """Takes the signals while the block runs; only the main thread may."""
        before = {number: signal.signal(number, self.handle) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
