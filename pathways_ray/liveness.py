"""Liveness of peers: one rule for every process that watches another one. Slow is not dead.

A peer is lost when nothing was heard from it for longer than a limit, and only that part of its silence counts in which
it could have spoken:

- A watcher that did not run itself cannot judge others. A look that comes late counts as two periods at most, and after
  a gap of half the limit all peers get their full time again.
- On a machine on which many processes want the same cores, each of them takes longer for everything. A second there
  counts as a second divided by the *slowness* of the machine (`machine_load.slowness`): that of the watcher, which
  comes with each look, or that of the peer, which it says when it is heard; the higher one counts.

So a peer that is stopped or hangs is found within the limit on a machine that is not loaded, and later on one that is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)

RISING_PARTS = 4
"""A peer that says it is slower than before is believed by one part in this many, and at once when it is quicker. The
last thing it said stands for all of its silence, and may have been a bad moment."""

SILENCE_LIMIT_S = 8.0
"""Silence after which a process counts as lost, unless the operator says otherwise."""


@dataclass
class Liveness(Generic[Peer]):
    """The silence of each watched peer so far, in seconds that count.

    Args:
        limit_s: seconds of silence after which a peer counts as lost.
        period_s: seconds between two looks of a watcher that is on time.
    """

    limit_s: float
    period_s: float = math.inf
    silence: dict[Peer, float] = field(default_factory=dict)
    slowness: dict[Peer, float] = field(default_factory=dict)
    looked: float | None = None

    def __contains__(self, peer: Peer) -> bool:
        return peer in self.silence

    def hear(self, peer: Peer, now: float, slowness: float | None = None) -> None:
        """Notes a sign of life at time `now`, in seconds; an unknown peer is watched from now on.

        Args:
            slowness: of the peer's machine, as the peer says; None leaves it as it was.
        """
        if self.looked is None:
            self.looked = now
        self.silence[peer] = -min(now - self.looked, 2 * self.period_s)  # the next look counts from the last one
        if slowness is not None:
            known = self.slowness.get(peer, slowness)
            self.slowness[peer] = min(slowness, known + (slowness - known) / RISING_PARTS)

    def forget(self, peer: Peer) -> None:
        """Stops watching a peer; an unknown one is ignored."""
        self.silence.pop(peer, None)
        self.slowness.pop(peer, None)

    def silent(self, now: float, slowness: float = 1.0) -> list[Peer]:
        """The peers that count as lost at time `now`. They stay in the table until `forget` or `hear` is called.

        Args:
            slowness: of the watcher's machine.
        """
        gap = now - self.looked if self.looked is not None else 0.0
        self.looked = now
        if gap > self.limit_s / 2:
            self.silence = dict.fromkeys(self.silence, 0.0)
            return []
        counted = min(gap, 2 * self.period_s)
        for peer in self.silence:
            self.silence[peer] += counted / max(slowness, self.slowness.get(peer, 1.0))
        return [peer for peer, silence in self.silence.items() if silence > self.limit_s]
