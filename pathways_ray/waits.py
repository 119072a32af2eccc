"""The times after which a wait looks again though nobody woke it, and a switch that makes them an hour.

Whatever waits is woken by what it waits for. The slice of a wait is for what nobody thought of: it bounds the harm. So
that no wait comes to rest on its slice, tests run with slices of an hour, where a waiter that is not woken hangs.

The clocks of the control plane, which look for what is over its limit, have a switch of their own: without ticks no
limit is kept, but nothing else may wait for one.
"""

from __future__ import annotations

import os
import queue
from typing import TypeVar

T = TypeVar("T")

VARIABLE = "PATHWAYS_LONG_WAITS"
"""The environment variable: "slices", "ticks" or "slices,ticks" are an hour then, in every process that inherits it."""

LONG_S = 3600.0


def _is_long(what: str) -> bool:
    return what in os.environ.get(VARIABLE, "").split(",")


def slice_s() -> float:
    """Seconds after which a wait looks again."""
    return LONG_S if _is_long("slices") else 0.5


def get_within(source: queue.SimpleQueue[T], seconds: float) -> T:
    """The next item of a queue that only the caller takes from. Raises `queue.Empty` where none has come in time.

    `SimpleQueue.get(timeout=...)` of Python 3.11 and 3.12 may wait for ever. While the queue's own lock is free, as it
    is before the first call and behind an item that nobody had to wait for, a call takes it first and then works out
    how long to wait. A thread that loses the processor there until its time is over comes to a negative number, which
    is no limit at all. A call that does not wait leaves the lock taken.
    """
    try:
        return source.get_nowait()
    except queue.Empty:
        return source.get(timeout=max(seconds, 0.0))


def tick_s(usual: float) -> float:
    """Seconds between two ticks of a clock."""
    return LONG_S if _is_long("ticks") else usual
