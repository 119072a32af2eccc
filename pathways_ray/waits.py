"""The times after which a wait looks again though nobody woke it, and a switch that makes them an hour.

Whatever waits is woken by what it waits for. The slice of a wait is for what nobody thought of: it bounds the harm. So
that no wait comes to rest on its slice, tests run with slices of an hour, where a waiter that is not woken hangs.

The clocks of the control plane, which look for what is over its limit, have a switch of their own: without ticks no
limit is kept, but nothing else may wait for one.
"""

from __future__ import annotations

import os

VARIABLE = "PATHWAYS_LONG_WAITS"
"""The environment variable: "slices", "ticks" or "slices,ticks" are an hour then, in every process that inherits it."""

LONG_S = 3600.0


def _is_long(what: str) -> bool:
    return what in os.environ.get(VARIABLE, "").split(",")


def slice_s(usual: float = 0.5) -> float:
    """Seconds after which a wait looks again."""
    return LONG_S if _is_long("slices") else usual


def tick_s(usual: float) -> float:
    """Seconds between two ticks of a clock."""
    return LONG_S if _is_long("ticks") else usual
