"""Busy polling: whether a thread that waits looks again and again before it sleeps, and for how long. Pure.

A core that slept, or that another process had, runs the same code at half its speed for a while, and to wake a thread
takes as long as a small launch. So it pays to look again where what is waited for comes soon, again and again. Between
two looks a thread yields its core: it takes no time from those that have something to do. But who yields goes behind
them, where who sleeps goes before them once it is woken: on cores that are busy with something else it does not pay.
"""

from __future__ import annotations

import os
from collections.abc import Callable

POLL_S = 0.0006
"""Time for which a thread looks."""

FEW, MANY, LATE = 8, 32, 4
"""Waits in a row that were shorter: as many as `FEW` have to be before a thread looks; more than `MANY` count no more.
A longer one takes `LATE` of them back."""

LOST_S = 0.002
"""Time between two looks that is too long for those that this thread waits for: another program computes there."""

FIRST_REST_S, LONGEST_REST_S = 0.002, 1.28
"""A thread that has lost its core so looks no more for this time: at first, and twice as long each time that follows,
up to the longest."""

RECOVERY = 0.97
"""The same time, behind each wait that ends while it looks, as a part of what it was."""


class BusyPoll:
    """The waits of one thread, by a clock in seconds: `begins`, then `goes_on` before each look, then `came`.

    Args:
        may: whether nothing else of the process wants its cores.
    """

    def __init__(self, may: Callable[[], bool] = lambda: True) -> None:
        self._may = may
        self._soon = 0
        self._began = self._looked = self._rests_until = 0.0
        self._rest_s = FIRST_REST_S
        self._looks = False
        self._came: float | None = None
        self._possible = len(os.sched_getaffinity(0)) > 1

    def begins(self, now: float) -> bool:
        """A wait begins: whether to look again and again."""
        if (came := self._came) is not None:
            self._came = None
            self._ended(came)
        self._began = self._looked = now
        self._looks = self._possible and self._soon >= FEW and now >= self._rests_until and self._may()
        return self._looks

    def goes_on(self, now: float) -> bool:
        """Nothing has come yet: whether to look once more."""
        self._looked_at(now)
        self._looks &= now < self._began + POLL_S and self._may()
        return self._looks

    def came(self, now: float) -> None:
        """The wait has ended, whether the thread looked or slept. What follows from that is found out as the next one
        begins: until then somebody waits for what has come."""
        self._came = now

    def _ended(self, now: float) -> None:
        soon = now < self._began + POLL_S
        if not soon:
            self._soon = max(self._soon - LATE, 0)
        elif self._soon < MANY:
            self._soon += 1
        if self._looks:
            self._looked_at(now)
        if self._looks and soon and self._rest_s > FIRST_REST_S:
            self._rest_s = max(FIRST_REST_S, RECOVERY * self._rest_s)

    def _looked_at(self, now: float) -> None:
        if now - self._looked > LOST_S:
            self._looks = False
            self._rests_until = now + self._rest_s
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        self._looked = now
