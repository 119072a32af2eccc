"""Frees that follow each other leave as one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from pathways_ray.transport.messages import Free, Message

MAX_FREED = 256
"""Buffers of one message, which the controller takes as a whole: a fifteenth of what a session may do in a turn."""


def with_frees_joined(messages: Iterable[Message]) -> list[Message]:
    """The same messages, with frees that follow each other as one. Each is a message to controller, scheduler and
    hosts, and who takes a tree for the one before frees all its leaves."""
    found: list[Message] = []
    for is_free, group in groupby(messages, _is_free):
        if not is_free:
            found += group
            continue
        freed = [buffer for message in group if isinstance(message, Free) for buffer in message.buffers]
        found += [Free(tuple(freed[k : k + MAX_FREED])) for k in range(0, len(freed), MAX_FREED)]
    return found


def _is_free(message: Message) -> bool:
    return type(message) is Free
