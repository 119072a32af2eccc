"""Launches on their way: from the client to the controller, and from there to islands and hosts."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pathways_ray import limits
from pathways_ray.errors import Failure
from pathways_ray.transport.message import Counted, Message


class Launch(Message, tag=2):
    """One call. Result k becomes buffer `results + k`; both ids are made by the client. No number of a buffer is
    negative: those are the controller's own."""

    launch: int
    program: int
    arguments: Annotated[tuple[Counted, ...], msgspec.Meta(max_length=limits.MAX_NODES)]
    results: Counted


class PrioritizedLaunch(Launch, tag=6):
    """A call that may pass others of its session, or let them pass."""

    priority: Annotated[int, msgspec.Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] = 0


class EarlyLaunch(Launch, tag=7):
    """Client to controller: a call that was handed to its host as well. It takes the way of every launch, which decides
    everything about it; a host that has it already says then what became of it."""


def launch_of(
    launch: int, program: int, arguments: tuple[int, ...], results: int, priority: int = 0
) -> Launch | PrioritizedLaunch:
    """A call, with its priority if it has one."""
    if priority:
        return PrioritizedLaunch(launch, program, arguments, results, priority)
    return Launch(launch, program, arguments, results)


class IslandLaunch(Message, tag=22):
    """One launch on one island: `gangs` gangs from number `first` on, or all of them when `gangs` is 0. One that was
    `cancelled` computes nothing: its values are that failure."""

    sequence: int
    session: int
    program: int
    arguments: tuple[int, ...]
    results: int
    first: int = 0
    gangs: int = 0
    cancelled: Failure | None = None


class PrioritizedIslandLaunch(Message, tag=28):
    """Controller to schedulers: a launch that may pass others of its session, or let them pass."""

    launch: IslandLaunch
    priority: int
