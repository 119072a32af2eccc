"""Virtual time: a queue of events, each a function to call at a time. Nothing ever sleeps.

Events of one time run in the order in which they were made, so a run depends on its seed alone.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Act = Callable[..., None]


class Clock:
    """`now` is the time of the event that runs, in seconds since the beginning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Act, tuple[Any, ...]]] = []
        self._made = 0

    def at(self, time: float, act: Act, *arguments: Any) -> None:
        """Calls `act` at a time; one that is past means at once, behind what is due already."""
        self._made += 1
        heappush(self._events, (max(time, self.now), self._made, act, arguments))

    def after(self, delay: float, act: Act, *arguments: Any) -> None:
        self._made += 1
        heappush(self._events, (self.now + delay, self._made, act, arguments))

    @property
    def events(self) -> int:
        """Events made so far."""
        return self._made

    def run(self, until: float, over: Callable[[], bool] = lambda: False) -> None:
        """Runs events up to a time, or until `over` says so."""
        events = self._events
        while events and events[0][0] <= until and not over():
            self.now, _, act, arguments = heappop(events)
            act(*arguments)
        if not over():
            self.now = max(self.now, until)
