"""The load of this machine, for those who wait for other processes of it."""

from __future__ import annotations

import math
import os
import time
from functools import cache

RUNNABLE_PER_CORE = 10
"""Runnable threads for each core up to which a machine counts as quick. An answer of another process takes some twenty
turns on a core, its own threads and those of Ray; with so many before each turn, that is a second."""

STOLEN_WITHIN_S = 1.0
"""Time over which it is looked at how much of the cores a hypervisor gave to others."""

MOST_STOLEN = 20.0
"""The factor that counts at most for it: who says that it is slow, and hangs from then on, has to be found."""


@cache
def _cores() -> int:
    return os.cpu_count() or 1


def slowness() -> float:
    """The factor by which processes of this machine take longer now: 1 on one that is quick, or does not say.

    It is read from the kernel's count of threads that run or want to (`/proc/loadavg`). That follows the load at once,
    where an average takes a minute; who waits looks many times, so that it evens out. A virtual machine whose
    hypervisor gives its cores to others is slower by that as well.
    """
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            runnable = int(file.read().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        runnable = 0
    return max(1.0, runnable / (_cores() * RUNNABLE_PER_CORE)) * _stolen.factor(time.monotonic())


class StolenTime:
    """The time in which this machine's cores had something to do and its hypervisor ran others (`steal` of
    `/proc/stat`). Any thread may ask; two that do at once may see a second twice."""

    def __init__(self) -> None:
        self._looked = -math.inf
        self._counted: tuple[int, int] | None = None
        """Ticks since the machine began, at the last look: all, and those that were stolen."""
        self._factor = 1.0

    def factor(self, now: float) -> float:
        """The factor by which everything took longer than on cores of its own, in the last second or since it was last
        asked for; 1 at first, and `MOST_STOLEN` at most."""
        if now - self._looked < STOLEN_WITHIN_S:
            return self._factor
        self._looked, self._factor = now, 1.0
        try:
            with open("/proc/stat", encoding="ascii") as file:
                # user, nice, system, idle, iowait, irq, softirq, steal; what follows is in the first two already
                times = [int(ticks) for ticks in file.readline().split()[1:9]]
            counted = sum(times), times[7]
        except (OSError, ValueError, IndexError):
            return self._factor
        if self._counted is not None:
            passed, lost = (new - before for new, before in zip(counted, self._counted, strict=True))
            if lost > 0:
                self._factor = min(passed / max(passed - lost, 1), MOST_STOLEN)
        self._counted = counted
        return self._factor


_stolen = StolenTime()
