"""The load of this machine, for those who wait for other processes of it."""

from __future__ import annotations

import os
from functools import cache

RUNNABLE_PER_CORE = 10
"""Runnable threads for each core up to which a machine counts as quick. An answer of another process takes some twenty
turns on a core, its own threads and those of Ray; with so many before each turn, that is a second."""


@cache
def _cores() -> int:
    return os.cpu_count() or 1


def slowness() -> float:
    """The factor by which processes of this machine take longer now: 1 on one that is quick, or does not say.

    It is read from the kernel's count of threads that run or want to (`/proc/loadavg`). That follows the load at once,
    where an average takes a minute; who waits looks many times, so that it evens out.
    """
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            runnable = int(file.read().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return 1.0
    return max(1.0, runnable / (_cores() * RUNNABLE_PER_CORE))
