"""Arrivals: launches that wait at barriers for data of other hosts or for Python beside the devices, and the one thread
that looks whether it is there.

Values that announce their end (`looks_called`) have it look when they are there. At others it looks again and again,
since data of a peer that falls silent never comes: a thread that blocked on it would wait for ever. A launch that is
told to give up is simply not looked at any more.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from pathways_ray.executor.run.parts import PendingCall
from pathways_ray.observe.ring import Ring
from pathways_ray.waits import slice_s

SHORTEST_PAUSE_S = 50e-6
LONGEST_PAUSE_S = 1e-3
PAUSE_SHARE = 0.05
"""The pause between two looks, as a part of the time that the youngest launch has waited: so looking makes no wait much
longer, and costs little while nothing comes."""


NO_LAUNCH = -(1 << 62)
"""No launch has this number."""

CALLS = 1 << 14
"""Waits for host functions that are noted: these take milliseconds, so they are few."""


class _Waiting(NamedTuple):
    """A launch at a barrier. `left` are the values that were not there at the last look."""

    barrier: int
    values: list[Any]
    left: list[Any]
    since: float


class Arrivals:
    """Launches that wait for values.

    Args:
        arrived: is called with the launch, the barrier and the values once all are there, or failed.
    """

    def __init__(self, arrived: Callable[[int, int, list[Any]], None]) -> None:
        self._arrived = arrived
        self._changes: queue.SimpleQueue[tuple[int, _Waiting | None]] = queue.SimpleQueue()
        self._waiting: dict[int, _Waiting] = {}
        self.waits = Ring("qdd")
        """Waits for data that are over: number of the launch, start, end."""
        self.python = Ring("qdd", CALLS)
        """Those for host functions."""

    def add(self, sequence: int, barrier: int, values: list[Any]) -> None:
        """Looks for the values of a launch from now on."""
        self._changes.put((sequence, _Waiting(barrier, values, list(values), time.perf_counter())))

    def drop(self, sequence: int) -> None:
        """Looks for those of a launch no longer, if it does."""
        self._changes.put((sequence, None))

    def look(self) -> None:
        """Looks now: something has come. For any thread."""
        self._changes.put((NO_LAUNCH, None))

    def run(self) -> None:
        """Looks without end; for a thread of its own."""
        while True:
            pause = slice_s() if self._waiting else None
            silent = [one.since for one in self._waiting.values() if not looks_called(one.left[-1])]
            if silent:
                pause = min(max(PAUSE_SHARE * (time.perf_counter() - max(silent)), SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
            self._take_changes(pause)
            self._look()

    def _look(self) -> None:
        # Apart from the loop that waits: what its variables name would stay in memory until something comes.
        for sequence, one in list(self._waiting.items()):
            while one.left and is_there(one.left[-1]):
                one.left.pop()
            if not one.left:
                del self._waiting[sequence]
                ring = self.python if any(isinstance(value, PendingCall) for value in one.values) else self.waits
                ring.add(sequence, one.since, time.perf_counter())
                self._arrived(sequence, one.barrier, one.values)

    def _take_changes(self, pause: float | None) -> None:
        """Takes what came; waits for it up to `pause` seconds, or, without one, until there is something."""
        try:
            sequence, one = self._changes.get(timeout=pause)
            while True:
                if one is not None:
                    self._waiting[sequence] = one
                else:
                    self._waiting.pop(sequence, None)
                sequence, one = self._changes.get_nowait()
        except queue.Empty:
            return


def looks_called(value: Any) -> bool:
    """Whether who waits for a value is called when it is there, or has failed."""
    return bool(getattr(value, "looks_called", False))


def is_there(value: Any) -> bool:
    """Whether a value has arrived, or is a failure."""
    try:
        return not hasattr(value, "is_ready") or bool(value.is_ready())
    except RuntimeError:  # its memory is gone already
        return True
