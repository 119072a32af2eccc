"""Drops of small arrays as they leave for an island: behind the launches of their batch, as one. Pure.

A stream of calls, each of which takes the result of the one before, frees an array with each. To scheduler and hosts a
drop is a message like a launch, and a tenth of the stream's time. For some launches more, the memory of a small array
is worth less. What the controller counts as room it has from the free on, so its hosts hold some small arrays more than
it knows of.
"""

from __future__ import annotations

from pathways_ray.transport.messages import Drop, IslandLaunch, LateDrop, Message

SMALL_BYTES = 1 << 12
"""Bytes on all devices up to which an array is dropped late."""

MAX_LATE = 256
"""Fewer arrays than this wait for launches at a time: less than a MiB."""


def with_drops_joined(messages: list[Message]) -> list[Message]:
    """The same messages, with late drops behind the launches that follow them, and those of a session as one."""
    if LateDrop not in map(type, messages):
        return messages
    found: list[Message] = []
    late: dict[int, list[int]] = {}
    newest: dict[int, int] = {}
    count = 0
    for message in messages:
        if isinstance(message, LateDrop):
            session, buffers = message.session, message.buffers
            late.setdefault(session, []).extend(buffers)
            newest[session] = max((newest.get(session, 0), *buffers))
            count += len(buffers)
            may_wait = count < MAX_LATE
        else:
            # A number that is given again is dropped before: clients count up.
            may_wait = type(message) is IslandLaunch and message.results > newest.get(message.session, 0)
        if late and not may_wait:
            found += map(_drop, late.items())
            late, newest, count = {}, {}, 0
        if not isinstance(message, LateDrop):
            found.append(message)
    return [*found, *map(_drop, late.items())]


def _drop(late: tuple[int, list[int]]) -> Drop:
    session, buffers = late
    return Drop(session, tuple(buffers))
