"""Liveness of peers: one rule for every process that watches another one.

A peer is lost when nothing was heard from it for longer than a limit. A watcher that did not run itself cannot judge
others: when its own clock shows a gap of half the limit between two looks, all its peers get their full time again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)


@dataclass
class Liveness(Generic[Peer]):
    """The time of each watched peer's last message.

    Args:
        limit_s: seconds of silence after which a peer counts as lost.
    """

    limit_s: float
    heard: dict[Peer, float] = field(default_factory=dict)
    looked: float | None = None

    def hear(self, peer: Peer, now: float) -> None:
        """Notes a sign of life at time `now`, in seconds; an unknown peer is watched from now on."""
        self.heard[peer] = now

    def forget(self, peer: Peer) -> None:
        """Stops watching a peer; an unknown one is ignored."""
        self.heard.pop(peer, None)

    def silent(self, now: float) -> list[Peer]:
        """The peers that count as lost at time `now`. They stay in the table until `forget` or `hear` is called."""
        paused = self.looked is not None and now - self.looked > self.limit_s / 2
        self.looked = now
        if paused:
            self.heard = dict.fromkeys(self.heard, now)
            return []
        return [peer for peer, heard in self.heard.items() if now - heard > self.limit_s]
