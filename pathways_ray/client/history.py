"""The history of an elastic step: which calls were made since which snapshot, and which are made again. Pure."""

from __future__ import annotations

KEPT = 2
"""Whole snapshots that are kept: what was made before the last one may be asked for a little later."""


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

    @property
    def due(self) -> bool:
        """Whether a snapshot is to be taken before the next call."""
        return not self.snapshots or self.calls - max(self.snapshots) >= self.every

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
