"""Arrivals: launches that wait at barriers for data of other hosts or for Python beside the devices.

Values that announce their end (`looks_called`) have those look who brought them. At others one thread looks again and
again, since data of a peer that falls silent never comes: one that blocked on it would wait for ever. A launch that is
told to give up is simply not looked at any more.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pathways_ray.errors import Failure
from pathways_ray.executor.data.failure_texts import failure_in
from pathways_ray.executor.run.parts import is_call
from pathways_ray.observe.ring import Ring
from pathways_ray.waits import get_within, slice_s

SHORTEST_PAUSE_S = 50e-6
LONGEST_PAUSE_S = 1e-3
PAUSE_SHARE = 0.05
"""The pause between two looks, as a part of the time that the youngest launch has waited: so looking makes no wait much
longer, and costs little while nothing comes."""


CALLS = 1 << 14
"""Waits for host functions that are noted: these take milliseconds, so they are few."""


class _Waiting(NamedTuple):
    """A launch at a barrier. `left` are the values that were not there at the last look."""

    barrier: int
    values: list[Any]
    left: list[Any]
    since: float


class Arrivals:
    """Launches that wait for values; for any thread.

    Args:
        arrived: is called with the launch, the barrier and the values once all are there, or failed: by the thread that
            brought the last one, or found it there.
    """

    def __init__(self, arrived: Callable[[int, int, list[Any]], None]) -> None:
        self._arrived = arrived
        self._changing = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._silent: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.waits = Ring("qdd")
        """Waits for data that are over: number of the launch, start, end."""
        self.python = Ring("qdd", CALLS)
        """Those for host functions."""

    def add(self, sequence: int, barrier: int, values: list[Any]) -> None:
        """Has a launch wait for values."""
        with self._changing:
            self._waiting[sequence] = _Waiting(barrier, values, list(values), time.perf_counter())
        self.look()  # for what has come since the caller's own look
        if not all(map(looks_called, values)) and self._silent.empty():  # else the thread has yet to look
            self._silent.put(None)

    def drop(self, sequence: int) -> None:
        """Has a launch wait no longer, if it does."""
        with self._changing:
            self._waiting.pop(sequence, None)

    def look(self) -> None:
        """Lets those launches go on whose values are all there."""
        for sequence, one in self._over():
            self._arrived(sequence, one.barrier, one.values)

    def _over(self) -> list[tuple[int, _Waiting]]:
        """Takes out the launches whose values are there."""
        with self._changing:
            for one in self._waiting.values():
                while one.left and is_there(one.left[-1]):
                    one.left.pop()
            over = [(sequence, one) for sequence, one in self._waiting.items() if not one.left]
            for sequence, one in over:
                del self._waiting[sequence]
                ring = self.python if any(map(is_call, one.values)) else self.waits
                ring.add(sequence, one.since, time.perf_counter())
        return over

    def run(self) -> None:
        """Looks without end for values that do not announce themselves; for a thread of its own."""
        while True:
            with contextlib.suppress(queue.Empty):
                get_within(self._silent, self._pause())
            self.look()

    def _pause(self) -> float:
        """Seconds until the next look."""
        with self._changing:
            silent = [one.since for one in self._waiting.values() if not all(map(looks_called, one.left))]
        if not silent:
            return slice_s()
        return min(max(PAUSE_SHARE * (time.perf_counter() - max(silent)), SHORTEST_PAUSE_S), LONGEST_PAUSE_S)


def looks_called(value: Any) -> bool:
    """Whether who waits for a value is called when it is there, or has failed."""
    return bool(getattr(value, "looks_called", False))


def is_there(value: Any) -> bool:
    """Whether a value has arrived, or is a failure."""
    try:
        return not hasattr(value, "is_ready") or bool(value.is_ready())
    except RuntimeError:  # its memory is gone already
        return True


def are_over(values: Sequence[Any]) -> bool:
    """Whether values are ready, and none failed."""
    try:
        for value in values:  # no generator: a client waits for what comes of it
            if isinstance(value, Failure) or not value.is_ready():
                return False
            value.block_until_ready()  # raises where it failed
            if getattr(value, "failure", None) is not None:
                return False
    except Exception:  # who waits for it finds out more
        return False
    return True


def failure_of(values: Sequence[Any], host: int) -> tuple[int, Failure | None]:
    """Waits for values of a host; returns the first failure among them and its place."""
    for k, value in enumerate(values):
        if isinstance(value, Failure):
            return k, value
        try:
            value.block_until_ready()
            if (failure := getattr(value, "failure", None)) is not None:
                return k, failure
        except Exception as error:
            # Of a value that no gang made, a later launch may have taken the memory.
            if hasattr(value, "is_deleted") and value.is_deleted():
                continue
            text = str(error) or type(error).__name__
            return k, failure_in(text) or Failure("ExecutionError", text, host=host)
    return -1, None
