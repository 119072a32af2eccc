"""Reports of finished launches to the scheduler: many in one message while more of them are under way.

A single launch is reported at once, unless its client waits for the values and gets them from this host. In a stream
of small ones a message for each would cost more than they do, on both ends; so finished launches are gathered, for
`MAX_GATHERED_S` at most.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from pathways_ray.transport.messages import Decided, Done, IslandLaunchFailed, Message

MAX_GATHERED_S = 0.002
"""Longest time that a finished launch stays here while more are under way."""

MAX_GATHERED = 32
"""Finished launches that are reported without waiting for more."""


class Reports:
    """The finished launches, in the order in which they are added; safe from any thread.

    Args:
        send: puts a message on the stream to the scheduler.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._sequences: list[int] = []
        self._device_us: list[int] = []
        self._due: float | None = None
        self._gathering: queue.SimpleQueue[None] = queue.SimpleQueue()

    def left_s(self) -> float | None:
        """Seconds until the thread that says `later` has to `flush`; None while nothing waits for it."""
        due = self._due  # once: another thread may flush meanwhile
        return None if due is None else due - time.perf_counter()

    def done(self, sequence: int, device_us: int, more: bool, later: bool = False) -> None:
        """A launch has run.

        Args:
            device_us: on the devices.
            more: others will be done shortly, by what is known here; they may be reported in one batch.
            later: nobody waits for it. The caller flushes when it is time, as `left_s` says.
        """
        with self._lock:
            first = not self._sequences
            self._sequences.append(sequence)
            self._device_us.append(device_us)
            if not (more or later) or len(self._sequences) >= MAX_GATHERED:
                self._flush()
            elif later:
                if self._due is None:
                    self._due = time.perf_counter() + MAX_GATHERED_S
            elif first:
                self._gathering.put(None)

    def decided(self, message: Decided) -> None:
        """Values are known that somebody waits for; they are not gathered."""
        self._send(message)

    def failed(self, message: IslandLaunchFailed) -> None:
        """A launch has failed; those that finished before it are reported first."""
        with self._lock:
            self._flush()
            self._send(message)

    def flush(self) -> None:
        """Nothing more is under way just now."""
        if self._sequences:
            with self._lock:
                self._flush()

    def run(self) -> None:
        """Reports what has been here for as long as it may; for a thread of its own."""
        while True:
            self._gathering.get()
            time.sleep(MAX_GATHERED_S)
            self.flush()

    def _flush(self) -> None:
        if self._sequences:
            self._send(Done(tuple(self._sequences), tuple(self._device_us)))
            self._sequences, self._device_us, self._due = [], [], None
