"""When each launch was on the devices of a host, for figures and for debugging. Off unless somebody asks.

The *dispatcher* thread says which launches come, *watchers* say when each has run. What was under way when the trace
began is left out. Times are seconds of `time.perf_counter`, which all processes of a machine share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pathways_ray.transport.messages import IslandLaunch, ToHost

LONGEST = 1 << 17
"""Entries kept, some 10 MB; older ones go first."""


class Ran(NamedTuple):
    """A launch, or the part of it before a gate.

    `start` is when the host took it up or, if that is later, when its devices ended what stood before it; `end` is when
    the host saw that it was over, which is late by as long as the watcher waited for a core.
    """

    sequence: int
    session: int
    start: float
    end: float


class Trace:
    """What ran since it was made."""

    def __init__(self) -> None:
        self.sessions: dict[int, int] = {}
        self.ran: deque[Ran] = deque(maxlen=LONGEST)

    def coming(self, messages: Sequence[ToHost]) -> None:
        """Notes whose launches these are."""
        for message in messages:
            if isinstance(message, IslandLaunch):
                self.sessions[message.sequence] = message.session

    def over(self, sequence: int, start: float, end: float, part: bool = False) -> None:
        """A launch has run; with `part`, up to a gate."""
        session = self.sessions.get(sequence)
        if session is None:
            return
        self.ran.append(Ran(sequence, session, start, end))
        if not part:
            self.sessions.pop(sequence, None)
