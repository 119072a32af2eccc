"""When each launch was on the devices of a host, for figures and for debugging. Off unless somebody asks.

The *dispatcher* thread says which launches come, *watchers* say when each has run. What was under way when the trace
began is left out. Times are seconds of `time.perf_counter`, which all processes of a machine share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pathways_ray.transport.messages import Run, ToHost

LONGEST = 1 << 17
"""Entries kept, some 10 MB; older ones go first."""


class Ran(NamedTuple):
    """One gang, or the part of a launch before a gate, or a chain of `launches` that ran as one computation.

    `start` is when it was enqueued (what ran within that call: when the host took it up) or, if that is later, when its
    devices ended what stood before it; `end` is when the host saw that it was over, which is late by as long as the
    watcher waited for a core.
    """

    sequence: int
    launches: int
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
            if isinstance(message, Run):
                self.sessions[message.sequence] = message.session

    def over(self, sequences: Sequence[int], start: float, end: float, part: bool = False) -> None:
        """Launches that were enqueued as one have run; with `part`, one of them has up to a gate."""
        session = self.sessions.get(sequences[0])
        if session is None:
            return
        self.ran.append(Ran(sequences[0], len(sequences), session, start, end))
        if not part:
            for sequence in sequences:
                self.sessions.pop(sequence, None)
