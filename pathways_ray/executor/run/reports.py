"""What has run on a host, on its way to the scheduler: many launches in one message while more of them are under way.

A launch that stands alone is reported at once. In a stream of small ones a message for each would cost more than they
do, on both ends; so what has ended is gathered, for `GATHERED_S` at most.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from pathways_ray.transport.messages import Done, IslandLaunchFailed, Message

GATHERED_S = 0.002
"""Longest time that what has ended stays here while more is under way."""

AT_ONCE = 32
"""Launches that are reported without waiting for more."""


class Reports:
    """The launches that have ended, in the order in which they are added; safe from any thread.

    Args:
        send: puts a message on the stream to the scheduler.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._sequences: list[int] = []
        self._micros: list[int] = []
        self._gathering: queue.SimpleQueue[None] = queue.SimpleQueue()

    def done(self, sequence: int, device_us: int, more: bool) -> None:
        """A launch has run.

        Args:
            device_us: on the devices.
            more: others will be done shortly, by what is known here; they may be told of together.
        """
        with self._lock:
            first = not self._sequences
            self._sequences.append(sequence)
            self._micros.append(device_us)
            if not more or len(self._sequences) >= AT_ONCE:
                self._flush()
            elif first:
                self._gathering.put(None)

    def failed(self, message: IslandLaunchFailed) -> None:
        """A launch has failed; what has ended before it is told first."""
        with self._lock:
            self._flush()
            self._send(message)

    def flush(self) -> None:
        """Nothing more is under way just now."""
        if self._sequences:
            with self._lock:
                self._flush()

    def run(self) -> None:
        """Sees to it that nothing stays longer than it may; for a thread of its own."""
        while True:
            self._gathering.get()
            time.sleep(GATHERED_S)
            self.flush()

    def _flush(self) -> None:
        if self._sequences:
            self._send(Done(tuple(self._sequences), tuple(self._micros)))
            self._sequences, self._micros = [], []
