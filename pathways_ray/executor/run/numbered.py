"""Values and buffers by their numbers, many in one step: one for each of them would take as long as a launch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any


def row_of(slots: Sequence[int]) -> slice | None:
    """The slots as a slice, where they are in a row, as plans number them."""
    first = min(slots, default=0)
    row = range(first, first + len(slots))
    return slice(row.start, row.stop) if tuple(slots) == tuple(row) else None


def shifter(numbers: Sequence[int]) -> Callable[[int], Sequence[int]]:
    """Makes what adds a number to each of these."""
    count = len(numbers)
    if tuple(numbers) == tuple(range(count)):  # most are
        return lambda first: range(first, first + count)
    return lambda first: [first + number for number in numbers]


def taker(slots: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Makes what takes the values of slots, in a third of the time that a loop does."""
    if len(slots) > 1:
        return itemgetter(*slots)
    if not slots:
        return lambda values: ()
    (slot,) = slots
    return lambda values: (values[slot],)
