"""Rings: the last records of a process at next to no cost, and counts of durations.

A record is a few numbers that are packed into one block of memory, one behind the other: nothing is allocated and
nothing is freed on the way of a launch, and the processor's caches see a stream. (Of a `deque` of as many tuples each
that leaves it lies somewhere else, see `story`.) One thread writes; any may read.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_left
from typing import Any

RECORDS = 1 << 17
"""Records of a ring: at 2,000 launches a second the last minute; 5 MB at most."""

LATENCIES_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of a histogram of launches, in seconds."""


class Ring:
    """The last records of one kind.

    Args:
        kinds: of the numbers of a record, as `struct` writes them: "q" whole numbers, "d" others.
        records: how many are kept.
    """

    def __init__(self, kinds: str, records: int = RECORDS) -> None:
        self._packer = struct.Struct("<" + kinds)
        self._size = self._packer.size
        # The kernel gives memory, all zeros, page by page as it is first written: a ring that stays empty takes none.
        self._block = mmap.mmap(-1, self._size * records, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pack = self._packer.pack_into
        self._end = len(self._block)
        self._at = 0
        self._laps = 0

    def add(self, *numbers: float) -> None:
        """Writes a record in place of the oldest one; on the hot path."""
        at = self._at
        self._pack(self._block, at, *numbers)
        at += self._size
        if at == self._end:
            at, self._laps = 0, self._laps + 1
        self._at = at

    @property
    def added(self) -> int:
        """Records that were ever added."""
        return (self._laps * self._end + self._at) // self._size

    def records(self) -> list[tuple[Any, ...]]:
        """The records, oldest first. One that is written meanwhile may be missing or half new."""
        return self.last(self._end)

    def last(self, count: int) -> list[tuple[Any, ...]]:
        """The same of the last ones, as many as are wanted: of a full ring all take a tenth of a second."""
        at, block = self._at, self._block
        begin = at - min(count * self._size, self._end if self._laps else at)
        found = block[begin:at] if begin >= 0 else block[begin:] + block[:at]
        return list(self._packer.iter_unpack(found))


class Histogram:
    """Counts of durations by bucket, and their sum. There is one more bucket, for what is longer than all bounds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCIES_S) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Counts a duration; on the hot path."""
        self.counts[bisect_left(LATENCIES_S, seconds)] += 1
        self.total += seconds

    def cumulated(self) -> list[tuple[str, float]]:
        """Upper bound and count of all up to it, as Prometheus has it."""
        found, count = [], 0
        for bound, here in zip((*map(repr, LATENCIES_S), "+Inf"), self.counts, strict=True):
            count += here
            found.append((bound, float(count)))
        return found
