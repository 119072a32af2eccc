"""The client's part of a trace: when its launches were called, and when their outcomes came."""

from __future__ import annotations

from collections.abc import Sequence

from pathways_ray.observe.timeline import Interval

MAX_LAUNCHES = 1 << 17
"""Launches of a session that a trace keeps: the last ones, as those of other processes."""


class ClientTrace:
    """The launches of a session while it is traced, whose numbers follow one another. `called` and `ended` are on the
    hot path, and may come from several threads."""

    def __init__(self) -> None:
        self.now = 0.0
        """The time of the call that is made."""
        self.calls: dict[int, float] = {}
        self.ends: dict[int, float] = {}

    def called(self, launch: int) -> None:
        self.calls[launch] = self.now
        self.calls.pop(launch - MAX_LAUNCHES, None)
        self.ends.pop(launch - MAX_LAUNCHES, None)

    def ended(self, launches: Sequence[int], now: float) -> None:
        calls = self.calls
        self.ends.update({launch: now for launch in launches if launch in calls})

    def intervals(self) -> list[Interval]:
        """Launches with call and outcome, failed ones too. Coalesced ones show as the one that left for them."""
        ends = dict(self.ends)
        return [Interval(launch, at, ends[launch]) for launch, at in list(self.calls.items()) if launch in ends]
