"""Processes of this machine, told apart by when they began: a pid alone may be that of another process by now."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path


def started_at(pid: int) -> int:
    """The time at which a process began, in the kernel's ticks since it booted; 0 without such a process, or /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The second field, the command in parentheses, may have spaces and parentheses; the 22nd is the start.
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def kill(pid: int, started: int = 0, reason: str = "") -> None:
    """Kills a process, if it is the one that began at `started` (0: whichever it is), and prints the reason, if one is
    given. One that is gone is fine."""
    if started and started_at(pid) != started:
        return
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    if reason:
        with contextlib.suppress(OSError, ValueError):  # the log is full, or closed
            print(f"process {pid} is killed: {reason}", file=sys.stderr, flush=True)


def clock() -> tuple[str, float]:
    """The boot of this machine, and the seconds of the clock that all its processes share since then. (It is that of
    `time.monotonic` and, on Linux, of `time.perf_counter`.)"""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return boot, time.monotonic()
