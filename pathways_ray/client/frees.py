"""Frees that follow each other leave as one. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pathways_ray.transport.messages import Free, Message

MAX_FREED = 256
"""Buffers of one message, which the controller takes as a whole: a fifteenth of what a session may do in a turn."""


def with_frees_joined(messages: Iterable[Message]) -> list[Message]:
    """The same messages, with frees that follow each other as one. Each is a message to controller, scheduler and
    hosts, and who takes a tree for the one before frees all its leaves."""
    found: list[Message] = []
    frees: list[Free] = []
    for message in messages:
        if type(message) is Free:
            frees.append(message)
            continue
        if frees:
            found += _joined(frees)
            frees = []
        found.append(message)
    return found + _joined(frees)


def _joined(frees: list[Free]) -> list[Free]:
    if len(frees) == 1 and 0 < len(frees[0].buffers) <= MAX_FREED:
        return frees
    freed = [buffer for message in frees for buffer in message.buffers]
    return [Free(tuple(freed[k : k + MAX_FREED])) for k in range(0, len(freed), MAX_FREED)]
