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
"""Arrays that wait for launches at a time: a MiB."""


def with_drops_joined(messages: list[Message]) -> list[Message]:
    """The same messages, with late drops behind the launches that follow them, and those of a session as one."""
    if LateDrop not in map(type, messages):
        return messages
    found: list[Message] = []
    late: dict[int, list[int]] = {}
    count = 0
    for message in messages:
        if isinstance(message, LateDrop):
            if count + len(message.buffers) > MAX_LATE:
                found += map(_drop, late.items())
                late, count = {}, 0
            late.setdefault(message.session, []).extend(message.buffers)
            count += len(message.buffers)
            continue
        # A number that is given again is dropped before: numbers grow, nearly always.
        if late and not (type(message) is IslandLaunch and message.results > max(late.get(message.session, _NONE))):
            found += map(_drop, late.items())
            late, count = {}, 0
        found.append(message)
    return [*found, *map(_drop, late.items())]


_NONE = (0,)


def _drop(late: tuple[int, list[int]]) -> Drop:
    session, buffers = late
    return Drop(session, tuple(buffers))
