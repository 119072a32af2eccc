"""Frees that follow each other leave as one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, groupby
from operator import attrgetter

from pathways_ray.transport.messages import Free, Message

MAX_FREED = 256
"""Buffers of one message, which the controller takes as a whole: a fifteenth of what a session may do in a turn."""

_BUFFERS = attrgetter("buffers")


def with_frees_joined(messages: Iterable[Message]) -> list[Message]:
    """The same messages, with frees that follow each other as one. Each is a message to controller, scheduler and
    hosts, and who takes a tree for the one before frees all its leaves."""
    found: list[Message] = []
    for kind, group in groupby(messages, type):
        if kind is not Free:
            found += group
            continue
        freed = tuple(chain.from_iterable(map(_BUFFERS, group)))
        while freed:
            found.append(Free(freed[:MAX_FREED]))
            freed = freed[MAX_FREED:]
    return found
