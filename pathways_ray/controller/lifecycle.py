"""The life of a launch at the controller, as one table.

    WAITING ──────────────┐
    WAITING_FOR_MEMORY ───┤
    DEFERRED ─────────────┼─→ IN_FLIGHT ─→ FAILED_WAITING_FOR_CAUSE ─→ ENDED
    QUEUED_FOR_ISLANDS ───┘

`admission` applies the first four rows, `outcomes` the others.
"""

from __future__ import annotations

from enum import StrEnum


class LaunchState(StrEnum):
    """A launch before its outcome.

    WAITING: behind other calls of its session, or its session has as many launches in flight as it may.
    WAITING_FOR_MEMORY: its results do not fit beside the buffers that are on its devices.
    DEFERRED: its hosts are away, or have not compiled its program, or lack an argument that was uploaded; or parts of
        it are on their islands, and a value has yet to decide what comes next; or it would pass one of these that it
        has to do with, or leaves no memory. Later calls may pass it.
    QUEUED_FOR_ISLANDS: it runs on several islands, and one of them has as many of such launches as it takes.
    IN_FLIGHT: every island it touches has its `IslandLaunch`.
    FAILED_WAITING_FOR_CAUSE: it failed, and a launch that it consumes from has no outcome yet.
    """

    WAITING = "waiting"
    WAITING_FOR_MEMORY = "waiting for memory"
    DEFERRED = "deferred"
    QUEUED_FOR_ISLANDS = "queued for its islands"
    IN_FLIGHT = "in flight"
    FAILED_WAITING_FOR_CAUSE = "failed and waits for the cause"
    ENDED = "ended"


class LaunchEvent(StrEnum):
    """Events in the life of a launch."""

    ADMITTED = "admitted"
    REFUSED = "refused"
    HOSTS_ABSENT = "hosts absent"
    ARGUMENTS_ABSENT = "arguments absent"
    UNDECIDED = "undecided"
    MEMORY_FULL = "memory full"
    ISLANDS_FULL = "islands full"
    SESSION_CLOSED = "session closed"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CAUSE_UNKNOWN = "cause unknown"


_S, _E = LaunchState, LaunchEvent

_BEFORE_ADMISSION = {
    _E.ADMITTED: _S.IN_FLIGHT,
    _E.REFUSED: _S.ENDED,
    _E.HOSTS_ABSENT: _S.DEFERRED,
    _E.ARGUMENTS_ABSENT: _S.DEFERRED,
    _E.UNDECIDED: _S.DEFERRED,
    _E.ISLANDS_FULL: _S.QUEUED_FOR_ISLANDS,
    _E.MEMORY_FULL: _S.WAITING_FOR_MEMORY,
    _E.SESSION_CLOSED: _S.ENDED,
}

LAUNCH_LIFE: dict[LaunchState, dict[LaunchEvent, LaunchState]] = {
    _S.WAITING: _BEFORE_ADMISSION,
    _S.WAITING_FOR_MEMORY: _BEFORE_ADMISSION,
    _S.DEFERRED: _BEFORE_ADMISSION,
    _S.QUEUED_FOR_ISLANDS: _BEFORE_ADMISSION,
    _S.IN_FLIGHT: {
        _E.SUCCEEDED: _S.ENDED,
        _E.FAILED: _S.ENDED,
        _E.CAUSE_UNKNOWN: _S.FAILED_WAITING_FOR_CAUSE,
    },
    _S.FAILED_WAITING_FOR_CAUSE: {
        _E.FAILED: _S.ENDED,
        _E.CAUSE_UNKNOWN: _S.FAILED_WAITING_FOR_CAUSE,  # of another producer
    },
    _S.ENDED: {},
}


def after(state: LaunchState, event: LaunchEvent) -> LaunchState:
    """The state after an event. Raises `AssertionError` for an event that cannot happen in this state."""
    try:
        return LAUNCH_LIFE[state][event]
    except KeyError:
        raise AssertionError(f"a launch that is {state} cannot be: {event}") from None
