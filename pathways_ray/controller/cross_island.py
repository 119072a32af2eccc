"""The cross-island window: launches over several islands that may start, in the policy's order.

Islands keep cross-island launches in the controller's sequence, so the sequence is where tenants get their shares of
them. A limited number of them is on an island at a time; the others wait here, the next one of each session and those
of it that decide, and go in the policy's order as those before them end. One that waits for room on an island holds
back those behind it that want the same island, so that it gets its turn.

An island's scheduler keeps launches that call host functions back behind others of their session that do, and what is
behind them in that session with them. A cross-island launch would keep back there those of all tenants that come
behind it in the sequence. So it gets no number before all calls of its session are with the hosts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pathways_ray.scheduler.policies import Candidate, Policy, Usage, fifo
from pathways_ray.scheduler.queues import MAX_CALLING

CROSS_ISLAND_WINDOW = 64
"""Cross-island launches on one island without an outcome: half of what an island takes, so that others have room."""

NO_LAUNCH = 0, 0
"""What is chosen where no launch is."""


@dataclass
class CrossIslandWindow:
    """Cross-island launches under way, by island, and those that are `queued`, by session and number in it. `chosen` is
    the one whose turn it is. `calling` has the other launches under way that call host functions, by session and
    island."""

    policy: Policy = fifo
    window: int = CROSS_ISLAND_WINDOW
    under_way: dict[int, int] = field(default_factory=dict)
    queued: dict[tuple[int, int], tuple[Candidate, tuple[int, ...]]] = field(default_factory=dict)
    calling: dict[tuple[int, int], int] = field(default_factory=dict)
    arrivals: int = 0
    chosen: tuple[int, int] = NO_LAUNCH

    def may_start(self, session: int, launch: int, usage: Usage, islands: tuple[int, ...], now: float) -> bool:
        """Whether a launch of a session may go to its islands; if not, it is queued until it is its turn."""
        key = session, launch
        if chosen := self.chosen == key:
            self.chosen = NO_LAUNCH  # it may have further parts
        if self._has_room(islands) and (chosen or self._is_uncontended(session, islands)):
            self.queued.pop(key, None)
            return True
        if key not in self.queued:
            self.arrivals += 1
            self.queued[key] = (Candidate(usage, self.arrivals, now), islands)
        return False

    def next_session(self, now: float) -> int | None:
        """The session whose launch goes next and has room, or None; `may_start` lets that one pass those that are still
        queued."""
        reserved: set[int] = set()
        for key, (_, islands) in sorted(self.queued.items(), key=lambda item: self.policy(item[1][0], now)):
            if reserved.isdisjoint(islands) and self._has_room(islands):
                del self.queued[key]
                self.chosen = key
                return key[0]
            reserved.update(islands)
        return None

    @property
    def left(self) -> int:
        """The number of launches that were queued, and are so no more."""
        return self.arrivals - len(self.queued)

    def _is_uncontended(self, session: int, islands: tuple[int, ...]) -> bool:
        """Whether no other session is queued for one of these islands."""
        return all(s == session or set(wanted).isdisjoint(islands) for (s, _), (_, wanted) in self.queued.items())

    def _has_room(self, islands: Iterable[int]) -> bool:
        return all(self.under_way.get(island, 0) < self.window for island in islands)

    def start(self, islands: Iterable[int]) -> None:
        for island in islands:
            self.under_way[island] = self.under_way.get(island, 0) + 1

    def end(self, islands: Iterable[int]) -> None:
        for island in islands:
            self.under_way[island] -= 1

    def calls(self, session: int, islands: Iterable[int]) -> None:
        """A launch that calls host functions, on one island alone, has started."""
        for island in islands:
            self.calling[session, island] = self.calling.get((session, island), 0) + 1

    def answered(self, session: int, islands: Iterable[int]) -> None:
        """Such a launch has ended."""
        for island in islands:
            left = self.calling[session, island] = self.calling[session, island] - 1
            if not left:
                del self.calling[session, island]

    def is_behind_calls(self, session: int, islands: Iterable[int]) -> bool:
        """Whether some of a session's calls may wait at the scheduler of one of these islands."""
        return bool(self.calling) and any(self.calling.get((session, one), 0) > MAX_CALLING for one in islands)
