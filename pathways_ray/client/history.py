"""The history of an elastic step: which calls were made since which snapshot, and which are made again. Pure."""

from __future__ import annotations

import math
from enum import Enum

KEPT = 2
"""Whole snapshots that are kept: what was made before the last one may be asked for a little later."""

LONG, TOO_LONG = 10, 20
"""Snapshots that were due since the first that is kept, where something is wrong: usually it is `KEPT`, and those under
way."""

LONG_S, TOO_LONG_S = 3.0, 10.0
"""The history is that long for this time as well: a loop may make many calls until the next attempt."""


class Place(Enum):
    """The place of the next snapshot: on other islands than the state; `BESIDE` it, on its own devices; or `NOWHERE`,
    and what is kept is to be forgotten."""

    APART = "apart"
    BESIDE = "beside"
    NOWHERE = "nowhere"


class History:
    """The calls of a step, numbered from 0, and the snapshots of its state, each named by the call that follows it.

    Args:
        every: calls between two snapshots.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.calls = 0
        self.snapshots: dict[int, bool] = {}
        """Whether each is known to be whole."""
        self._long_since = math.inf

    @property
    def due(self) -> bool:
        """Whether a snapshot is to be taken before the next call."""
        return not self.snapshots or self.calls - max(self.snapshots) >= self.every

    def place(self, now: float) -> Place:
        """The place of snapshots at a time, in seconds. While none can be had on other islands, calls are kept since
        the last one, ever more of them; then copies beside the state take its place, and where these fail too, none."""
        rounds = (self.calls - self.first) / self.every
        self._long_since = min(self._long_since, now) if rounds >= LONG else math.inf
        if rounds >= TOO_LONG and now - self._long_since >= TOO_LONG_S:
            return Place.NOWHERE
        return Place.BESIDE if now - self._long_since >= LONG_S else Place.APART

    def forget(self) -> None:
        """Forgets all snapshots, and so all calls."""
        self.snapshots.clear()

    def taken(self) -> int:
        """A snapshot was taken; returns its name."""
        self.snapshots[self.calls] = False
        return self.calls

    def usable(self, name: int) -> None:
        """A snapshot is whole, while others before it may be needed yet."""
        self.snapshots[name] = True

    def whole(self, name: int) -> list[int]:
        """A snapshot is whole; returns those that are not needed any more."""
        self.snapshots[name] = True
        kept = sorted((one for one, whole in self.snapshots.items() if whole), reverse=True)[:KEPT]
        gone = [one for one in self.snapshots if one < kept[-1]]
        for one in gone:
            del self.snapshots[one]
        return gone

    def lost(self, name: int) -> None:
        """A snapshot is gone."""
        self.snapshots.pop(name, None)

    @property
    def first(self) -> int:
        """The first call that may have to be made again; those before it are forgotten."""
        return min(self.snapshots, default=self.calls)

    def start(self, needed: int) -> int | None:
        """The snapshot from which what call number `needed` made is made again; None where it cannot be."""
        return max((one for one, whole in self.snapshots.items() if whole and one <= needed), default=None)
