"""Which launches over several islands may start: the policy's hold on what islands may not reorder.

Islands keep cross-island launches in the controller's sequence, so the sequence is where tenants get their shares of them.
Only so many of them are on an island at a time; the others wait here, one for each session, and go in the policy's
order as those before them end. One that waits for room on an island holds back those behind it that want the same
island, so that it gets its turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pathways_ray.scheduler.policies import Candidate, Policy, Usage, fifo

CROSS_ISLAND_WINDOW = 64
"""Crossing launches on one island without an outcome: half of what an island takes, so that the rest has room too."""


@dataclass
class CrossIslandWindow:
    """Crossing launches under way, by island, and the sessions whose next one waits."""

    policy: Policy = fifo
    window: int = CROSS_ISLAND_WINDOW
    under_way: dict[int, int] = field(default_factory=dict)
    held: dict[int, tuple[Candidate, tuple[int, ...]]] = field(default_factory=dict)
    arrivals: int = 0
    turn: int = 0

    def may_start(self, session: int, usage: Usage, islands: tuple[int, ...], now: float) -> bool:
        """Whether the next launch of a session may go to its islands; if not, it is held until `in_turn` names it."""
        in_turn, self.turn = self.turn == session, 0
        if self._has_room(islands) and (in_turn or self._nobody_waits(session, islands)):
            self.held.pop(session, None)
            return True
        if session not in self.held:
            self.arrivals += 1
            self.held[session] = (Candidate(usage, self.arrivals, now), islands)
        return False

    def in_turn(self, now: float) -> int | None:
        """The session that goes next and has room, or None; `may_start` lets it pass those that are held still."""
        reserved: set[int] = set()
        for session, (_, islands) in sorted(self.held.items(), key=lambda item: self.policy(item[1][0], now)):
            if reserved.isdisjoint(islands) and self._has_room(islands):
                del self.held[session]
                self.turn = session
                return session
            reserved.update(islands)
        return None

    def _nobody_waits(self, session: int, islands: tuple[int, ...]) -> bool:
        """Whether no other session is held that wants one of these islands."""
        return all(s == session or set(wanted).isdisjoint(islands) for s, (_, wanted) in self.held.items())

    def _has_room(self, islands: Iterable[int]) -> bool:
        return all(self.under_way.get(island, 0) < self.window for island in islands)

    def start(self, islands: Iterable[int]) -> None:
        for island in islands:
            self.under_way[island] = self.under_way.get(island, 0) + 1

    def end(self, islands: Iterable[int]) -> None:
        for island in islands:
            self.under_way[island] -= 1
