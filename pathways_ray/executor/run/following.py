"""Launches that follow a value: the host that makes it tells the host that may begin them, before the controller sends
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pathways_ray.executor.run.early import EarlyLaunches
from pathways_ray.executor.run.instructions import Handed
from pathways_ray.transport.messages import Following, LaunchEarly


class Near(Protocol):
    """The way to other hosts."""

    def hand_over(self, host: int, following: Following) -> None:
        """Tells a host what it may begin, if there is a short way to it."""


class FollowingLaunches:
    """The launches that follow values which this host makes, and those that follow here. For any thread.

    Args:
        ended: whether a session has ended.
        hand: takes a launch that may begin to the host's core.
    """

    def __init__(
        self,
        host: int,
        early: EarlyLaunches,
        near: Near,
        ended: Callable[[int], bool],
        hand: Callable[[Handed], Any],
    ) -> None:
        self._host, self._early, self._near = host, early, near
        self._ended, self._hand = ended, hand

    def decided(self, sequence: int, value: int) -> None:
        """A launch has made the value by which its program decides."""
        following = self._early.decided(sequence, value)
        if following is None:
            return
        if following.host == self._host:
            self.take(following)
        else:
            self._near.hand_over(following.host, following)

    def take(self, following: Following) -> None:
        """A host has made a value after which a launch follows here."""
        if not self._ended(following.session):
            message = LaunchEarly(following.program, following.arguments, following.results)
            self._hand(Handed(following.session, "", message))
