"""Waits of tests for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], what: str = "", within_s: float = 20.0) -> None:
    """Waits until something holds; fails, with `what` is wrong then, where it does not in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, what or f"not within {within_s:g} s"
        time.sleep(0.005)
