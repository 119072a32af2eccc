"""Progress of a routed exchange, by counts: which rows may go where, and when nothing more can come.

Several sources send rows to several destinations; which ones, the data say. Each source announces once how many rows it
has for each destination; its pieces may leave from then on, in any order. Nothing else tells a destination that it has
all: it may start when every source has announced and as many rows have left for it as were announced (so Naiad counts
messages that are yet to come, and MillWheel holds a watermark). A destination for which all announce nothing takes no
part. Sizes of pieces are rounded up to a few, so that few shapes are compiled.

Pure: events in, commands out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pathways_ray.errors import GraphError

MIN_ROWS = 8
"""Rows of the smallest piece."""


class Send(NamedTuple):
    """Source `source` sends `rows` rows to `destination`, its first ones."""

    source: int
    destination: int
    rows: int


class Start(NamedTuple):
    """Nothing more can come to `destination`, which has got `rows` rows, at least one."""

    destination: int
    rows: int


@dataclass
class _Destination:
    """Rows of each source: announced, admitted, left; those that are not known yet are -1."""

    announced: list[int]
    admitted: list[int]
    left: list[int]
    is_over: bool = False


class Progress:
    """One routed exchange.

    Args:
        capacity: rows that a destination takes at most; they are admitted in the order of the sources, so it does not
            matter who announces first. None: all.

    Attributes:
        dropped: for each destination, the rows beyond its capacity.
    """

    def __init__(self, sources: int, destinations: int, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.dropped = [0] * destinations
        self._announced: set[int] = set()
        self._at = [_Destination([-1] * sources, [-1] * sources, [-1] * sources) for _ in range(destinations)]

    def announce(self, source: int, counts: Sequence[int]) -> list[Send | Start]:
        """A source says how many rows it has for each destination.

        Raises:
            GraphError: it has said so before, or not for each destination.
        """
        if source in self._announced or len(counts) != len(self._at) or min(counts, default=0) < 0:
            raise GraphError(f"source {source} announces {list(counts)} rows for {len(self._at)} destinations")
        self._announced.add(source)
        commands: list[Send | Start] = []
        for number, (at, count) in enumerate(zip(self._at, counts, strict=True)):
            at.announced[source] = count
            commands += self._admit(number, at)
            commands += self._start(number, at)
        return commands

    def left(self, source: int, destination: int, rows: int) -> list[Start]:
        """The rows of a `Send` have left: the destination gets them, or a failure in their place.

        Raises:
            GraphError: they are not what was admitted, or have left before.
        """
        at = self._at[destination]
        if at.admitted[source] != rows or at.left[source] >= 0 or rows < 1:
            raise GraphError(
                f"{rows} rows of source {source} leave for destination {destination}, which takes "
                f"{at.admitted[source]} of them and has {at.left[source]}"
            )
        at.left[source] = rows
        return self._start(destination, at)

    def admitted(self, destination: int) -> list[int]:
        """The rows that a destination gets from each source; -1 where that is not known yet."""
        return list(self._at[destination].admitted)

    @property
    def is_over(self) -> bool:
        """Whether every destination has started, or gets nothing."""
        return all(at.is_over for at in self._at)

    def _admit(self, number: int, at: _Destination) -> list[Send | Start]:
        commands: list[Send | Start] = []
        before = 0
        for source, count in enumerate(at.announced):
            if count < 0 and self.capacity is not None:
                break  # what is left for later sources depends on this one
            if count < 0:
                continue
            if at.admitted[source] < 0:
                room = count if self.capacity is None else max(self.capacity - before, 0)
                at.admitted[source] = min(count, room)
                self.dropped[number] += count - at.admitted[source]
                if at.admitted[source]:
                    commands.append(Send(source, number, at.admitted[source]))
            before += count
        return commands

    def _start(self, number: int, at: _Destination) -> list[Start]:
        if at.is_over or any(rows < 0 for rows in at.admitted):
            return []
        if any(left < 0 < rows for rows, left in zip(at.admitted, at.left, strict=True)):
            return []
        at.is_over = True
        total = sum(at.admitted)
        return [Start(number, total)] if total else []


def rounded(rows: int, multiple: int = 1) -> int:
    """The size of a piece of `rows` rows, a multiple of `multiple`: at most a quarter, and the multiple, larger."""
    size = MIN_ROWS
    while 2 * size < rows:
        size *= 2
    quarters = 4 if rows <= size else -(-4 * rows // size)
    return -(-quarters * size // 4 // multiple) * multiple


def hops_of(given: Sequence[int], rows: int) -> tuple[int, int]:
    """The way of rows within their source, whose shards give some each, where these lie one shard's behind the other's
    in a piece of `rows` rows that is partitioned as the source: the fewest and most shards down. In each direction
    that is 0, 1, or as far as there is: for each range the way is compiled."""
    mine = -(-rows // len(given))
    hops, start = {0}, 0
    for shard, count in enumerate(given):
        if count:
            hops |= {shard - start // mine, shard - (start + count - 1) // mine}
        start += count
    farthest = len(given) - 1
    least, most = min(hops), max(hops)
    return least if least >= -1 else -farthest, most if most <= 1 else farthest
