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
    freed: list[int] = []
    for message in messages:
        if type(message) is Free:
            freed += message.buffers
            continue
        if freed:
            found += _frees_of(freed)
            freed = []
        found.append(message)
    return found + _frees_of(freed)


def _frees_of(freed: list[int]) -> list[Message]:
    if 0 < len(freed) <= MAX_FREED:
        return [Free(tuple(freed))]
    return [Free(tuple(freed[k : k + MAX_FREED])) for k in range(0, len(freed), MAX_FREED)]
