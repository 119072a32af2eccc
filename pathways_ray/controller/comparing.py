"""The holdings of a host beside what the controller knows: what nobody wants there, and what is missing.

A host that has lost its scheduler has heard a part of what was sent to it, and what it said may be lost. Its own list
says what came of that, so nothing has to be remembered for such a case.
"""

from __future__ import annotations

from typing import NamedTuple

from pathways_ray.controller.state import HostState, Tables
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import Abort, Drop, DropProgram, DropSession, Holds

Unwanted = Abort | Drop | DropSession | DropProgram


class Difference(NamedTuple):
    """Messages for a host about what nobody wants, and the buffers that it should have and has not, by session."""

    unwanted: list[Unwanted]
    missing: dict[int, list[int]]


def compared(tables: Tables, host: HostState, holds: Holds) -> Difference:
    """Compares what a host holds with what it should hold. No launch is on its way to it."""
    unwanted: list[Unwanted] = []
    missing: dict[int, list[int]] = {}
    # All that are remembered: a host has the oldest of those that were under way, and has never heard of the newest.
    failed = [(sequence, p.key) for sequence, p in tables.failed.items() if host.island in p.islands]
    if failed:
        unwanted.append(Abort(tuple(failed), Failure("HostLost", "its scheduler ended", host=host.host)))
    for number, buffers in holds.buffers.items():
        session = tables.sessions.get(number)
        if session is None:
            unwanted.append(DropSession(number))
        elif stray := [b for b in buffers if not session.lives(b) and b not in session.early]:
            unwanted.append(Drop(number, tuple(stray)))
    for session in tables.sessions.values():
        there = set(holds.buffers.get(session.id, ()))
        absent = [
            number
            for number, buffer in session.buffers.items()
            if buffer.failure is None
            and not buffer.producer
            and number not in session.arriving
            and host.host in session.places[buffer.type.slice].hosts
            and number not in there
        ]
        if absent:
            missing[session.id] = absent
    unwanted += [DropProgram(0, key) for key in holds.programs if key not in tables.programs]
    return Difference(unwanted, missing)
