"""Buffers that clients upload and free. They are counted per logical array, by the session's own numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from pathways_ray.controller import quotas
from pathways_ray.controller.programs import BufferType
from pathways_ray.controller.state import Buffer, Send, SendClient, SendIsland, Session, Tables
from pathways_ray.errors import GraphError
from pathways_ray.ir.types import check_layout
from pathways_ray.transport.messages import BuffersLost, Drop, Put


def put(tables: Tables, session: Session, message: Put) -> list[Send]:
    """Enters a buffer. One whose type or slice is invalid is not made; a launch with it says so."""
    place = session.places.get(message.slice)
    if place is None:
        return []
    with contextlib.suppress(GraphError):
        check_layout(message.type, message.spec, place.mesh, "put")
        kind = BufferType.on(place.mesh, message.type, message.spec)
        if session.lives(message.buffer):
            return []  # clients count their buffers up; what the hosts have there now is this session's own trouble
        failure = quotas.buffers(session, tables.buffers, 1, f"{message.type} to put") or quotas.device_bytes(
            session, tables.sessions.values(), kind.charged_bytes, f"{message.type} to put"
        )
        if failure is not None:
            session.refuse(message.buffer, 1, failure)
            return [
                SendIsland(place.island, Drop(session.id, (message.buffer,))),
                SendClient(session.id, BuffersLost((message.buffer,), failure)),
            ]
        session.keep(message.buffer, Buffer(kind, 0))
    return []


def free(session: Session, numbers: Iterable[int]) -> list[Send]:
    """Forgets buffers; their islands drop them after the launches before."""
    dropped: dict[int, list[int]] = {}
    for number in numbers:
        buffer = session.forget(number)
        if buffer is not None:
            dropped.setdefault(session.places[buffer.type.slice].island, []).append(number)
    return [SendIsland(island, Drop(session.id, tuple(found))) for island, found in dropped.items()]
