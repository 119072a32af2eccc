"""Versions of values that are copied again and again to where they are used: which is sent, which is taken. Pure.

A *push* makes a version, numbered from 0. One copy is under way at a time, and at most one version waits behind it: a
newer one takes its place, so versions in between are never sent. The newest version that has arrived is *there*; a
taker that may not be so far behind gets the one under way, or the one that waits, which is sent then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Act(Enum):
    """A version that was pushed is sent now, or kept until what is under way has arrived."""

    SEND = "send"
    KEEP = "keep"


@dataclass
class Versions:
    """The versions of one value. -1 stands for none."""

    pushed: int = -1
    under_way: list[int] = field(default_factory=list)
    waits: int = -1
    there: int = -1
    skipped: int = 0

    def push(self) -> Act:
        """Another version; its number is `pushed`."""
        self.pushed += 1
        if self.under_way:
            self.skipped += self.waits >= 0
            self.waits = self.pushed
            return Act.KEEP
        self.under_way.append(self.pushed)
        return Act.SEND

    def arrived(self, version: int) -> int:
        """A version is there. Returns the one that is to be sent now, or -1."""
        self.under_way.remove(version)
        self.there = max(self.there, version)
        return self.release() if not self.under_way else -1

    def failed(self, version: int) -> int:
        """The copy of a version has failed: it comes to nothing. Returns the one that is to be sent now, or -1."""
        self.under_way.remove(version)
        return self.release() if not self.under_way else -1

    def lost(self) -> None:
        """The version that was there is not, any more."""
        self.there = -1

    def again(self) -> bool:
        """The last version is wanted once more; returns whether it has to be sent for that."""
        if self.pushed in (self.there, self.waits, *self.under_way):
            return False
        self.under_way.append(self.pushed)
        return True

    def release(self) -> int:
        """Sends the version that waits; returns it, or -1. What is under way then is too old for who takes it, and
        for all later takers: it counts no more, or many copies would take memory that nobody gets."""
        sent, self.waits = self.waits, -1
        if sent >= 0:
            self.under_way = [sent]
        return sent

    def take(self, max_lag: int | None) -> int:
        """The version for somebody who may be `max_lag` versions behind (None: any number), the oldest that does: it
        is there, under way, or waits and has to be released first. -1 where nothing was pushed, or all of it was lost.
        """
        oldest = 0 if max_lag is None else self.pushed - max_lag
        for version in (self.there, *self.under_way, self.waits):
            if version >= max(oldest, 0):
                return version
        return -1

    @property
    def lag(self) -> int:
        """Versions by which what is there is behind; that of nothing is behind all."""
        return self.pushed - self.there
