"""For debugging: what a host says of the order in which it enqueues gangs, and a host that ignores the island's order.

The second is for tests only. Without it nobody could show that the order is what keeps tenants' collectives apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pathways_ray.transport.messages import IslandLaunch, ToHost


class Ordering(NamedTuple):
    """Whether hosts report the order in which they enqueue gangs, and whether they ignore the scheduler's."""

    checked: bool = False
    ignored: bool = False


KEPT = Ordering()


def ignoring_order(messages: Sequence[ToHost], place: int) -> list[ToHost]:
    """What a host at an odd place of its island does with a batch when orders are ignored: launches of the session with
    the higher number first, at even places of the one with the lower. Each session keeps its own order."""
    runs = [k for k, message in enumerate(messages) if isinstance(message, IslandLaunch)]
    sessions = sorted({m.session for m in messages if isinstance(m, IslandLaunch)}, reverse=place % 2 == 1)
    if len(sessions) < 2:
        return list(messages)
    first, last = runs[0], runs[-1]
    middle = messages[first : last + 1]
    kept = [m for session in sessions for m in middle if getattr(m, "session", None) == session]
    others = [m for m in middle if getattr(m, "session", None) not in sessions]
    return [*messages[:first], *others, *kept, *messages[last + 1 :]]
