"""Messages about sessions that give way to others."""

from __future__ import annotations

from pathways_ray.transport.message import Message


class GiveWay(Message, tag=219):
    """The session is to suspend itself, since another one finds no memory, or, with `back`, to come back: there is room
    for it, or its turn. Said again until it has."""

    back: bool


class Vacate(Message, tag=197):
    """These slices have to move: their island is drained, lost or gone. Said again until they have."""

    slices: tuple[int, ...]
