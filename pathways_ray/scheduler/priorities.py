"""Priorities of launches within a session: which of those that wait a later one passes.

A launch counts as called one second earlier for each level of its priority (`AGEING_S`, as between tenants under the
policy "priority"), and goes before those that count as called later. So what waits is passed for as many seconds as
there are levels between them, and then by none: nothing starves.

It passes only what it has nothing to do with: not what makes or uploads its arguments, nor what reads an array whose
memory it takes. And never, at an island's scheduler, a launch that runs on other islands too: its place in the
controller's sequence is that of all islands and all tenants. The controller applies the rule before it numbers them. A
drop stays behind the launches that were called before it, as these only go forward. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

from pathways_ray.scheduler.policies import AGEING_S

MAX_PASSED = 1024
"""Calls that a launch looks at to find its place: as many launches as a session may have without an outcome."""

MAX_COMPARED = 16 * MAX_PASSED
"""Arguments of those calls that a launch which takes the memory of some compares with its own: less than 1 ms."""

T = TypeVar("T")


class Accesses(NamedTuple):
    """The rank of a call, in seconds, the buffers that it takes and makes, and the positions of the arguments that it
    takes the memory of: they decide its place."""

    rank: float
    arguments: Sequence[int]
    results: range
    donated: Sequence[int] = ()


class Fixed(Enum):
    """Calls whose place others do not change: one that nothing passes, and one that follows what it stands behind."""

    BARRIER = "barrier"
    FOLLOWS = "follows"


def rank_of(called: float, priority: int) -> float:
    """The time at which a launch counts as called, in seconds."""
    return called - priority * AGEING_S


def passing(later: Accesses) -> Callable[[Accesses], bool]:
    """The test of whether a launch goes before one that was called before it. The launch's own buffers are looked at
    once, not for each call."""
    arguments = sorted(later.arguments)
    donated = {later.arguments[k] for k in later.donated if k < len(arguments)}

    def passes(ahead: Accesses) -> bool:
        if later.rank >= ahead.rank:
            return False
        first = bisect_left(arguments, ahead.results.start)
        takes_result = first < len(arguments) and arguments[first] < ahead.results.stop
        return not takes_result and (not donated or donated.isdisjoint(ahead.arguments))

    return passes


def place_of(later: Accesses, waiting: Sequence[T], accesses_of: Callable[[T], Accesses | Fixed]) -> int:
    """The index at which a launch enters the calls that wait: just before the first of those that it passes.

    Args:
        waiting: in their order. Calls behind a launch that follow it stay there.

    The launch passes no more once it has looked at `MAX_PASSED` calls, or would compare more than `MAX_COMPARED`
    arguments.
    """
    place, passes, left = len(waiting), passing(later), MAX_COMPARED
    for index in range(len(waiting) - 1, max(-1, len(waiting) - 1 - MAX_PASSED), -1):
        ahead = accesses_of(waiting[index])
        if ahead is Fixed.BARRIER:
            break
        if isinstance(ahead, Accesses):
            left -= len(ahead.arguments) if later.donated else 0
            if left < 0 or not passes(ahead):
                break
            place = index
    return place
