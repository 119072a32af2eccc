"""A controller that stood still. Pure.

A process that is stopped, or gets no core, answers no pings, and its clients end their streams after some seconds; one
that computes all the time answers them, by threads of gRPC (`transport.grpc_streams`). Once it runs again, it cannot
tell these from streams of clients that have died, whose sessions it would close, with all arrays. So it ends itself
sooner, and sessions go on with its successor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container

from pathways_ray.controller import events, returning
from pathways_ray.errors import PathwaysError
from pathways_ray.transport.messages import ResumeSession

LONG_S = 4.0
"""Time without a step and without computing, beyond that between two steps, that clients may not have waited for."""

AFTERMATH_S = 10.0
"""Streams that end within this time after it may have been ended for that."""

TELLING = events.StreamEnded, events.LinkEnded, events.Requested
"""Events that may come of clients which gave this process up."""


class Standstill:
    """The steps of a process by its clock, in seconds.

    Args:
        period_s: between two steps of one that runs.
        secret: signs the tags by which sessions are resumed.
        computed: seconds that all threads of the process have computed.
    """

    def __init__(self, period_s: float, secret: str, computed: Callable[[], float]) -> None:
        self._most = LONG_S + period_s
        self._secret, self._computed = secret, computed
        self._ran = self._until = -math.inf
        self._before = 0.0

    def ran(self, now: float) -> None:
        """The process takes a step."""
        computed = self._computed()
        if math.isfinite(self._ran) and now - self._ran - (computed - self._before) > self._most:
            self._until = now + AFTERMATH_S
        self._ran, self._before = now, computed

    def explains(self, event: events.Event, sessions: Container[int], now: float) -> bool:
        """Whether an event may come of clients that gave this process up, and not of their end.

        Args:
            sessions: those of this process that were not closed.
        """
        match event:
            case events.StreamEnded(session) | events.LinkEnded(session) if session in sessions:
                pass
            case events.Requested(caller=caller, request=ResumeSession() as request) if request.session in sessions:
                try:
                    returning.owner_of(request, caller, self._secret)
                except PathwaysError:  # it is refused as ever
                    return False
            case _:
                return False
        self.ran(now)
        return now < self._until
