"""Hosts that ignore the island's order: without them, nothing would show that the order keeps tenants' collectives
apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pathways_ray.executor.run.driver import HostDriver
from pathways_ray.transport.messages import IslandLaunch


def ignoring_order(events: Sequence[Any], place: int) -> list[Any]:
    """A batch as a host at a place of its island takes it: at odd places, launches of the session with the higher
    number first; at even places, of the one with the lower. Each session keeps its own order."""
    launches = [k for k, event in enumerate(events) if isinstance(event, IslandLaunch)]
    sessions = sorted({e.session for e in events if isinstance(e, IslandLaunch)}, reverse=place % 2 == 1)
    if len(sessions) < 2:
        return list(events)
    first, last = launches[0], launches[-1]
    middle = events[first : last + 1]
    kept = [e for session in sessions for e in middle if getattr(e, "session", None) == session]
    others = [e for e in middle if getattr(e, "session", None) not in sessions]
    return [*events[:first], *others, *kept, *events[last + 1 :]]


def ignore_order() -> None:
    """Has all hosts of this process ignore the order from now on."""
    handle_batch = HostDriver.handle_batch

    def disordered(self: HostDriver, events: Sequence[Any], now: float) -> None:
        handle_batch(self, ignoring_order(events, self.core.members.index(self.core.host)), now)

    HostDriver.handle_batch = disordered  # type: ignore[method-assign]
