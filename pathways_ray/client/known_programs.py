"""The programs that were made of one function, and are kept for calls to come, by session and types of arguments.

A function may outlive its sessions, and the slices that it was called for. What was made for them goes with them:
all that it has of a session when that is closed, and what takes arguments on a slice once that was released and no
array lies there any more, since nobody can call it then.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.buffer import BufferRecord
from pathways_ray.client.slices import VirtualSlice


class KnownPrograms:
    """The programs of one function that were `lowered`, and what was `traced` for them. The first part of each key is
    the session; among the others are the types of the arguments. Under that of calls which say no session, a program
    may be of another one: of the `owners` by types of arguments, which have the first slice that the function named."""

    __slots__ = ("__weakref__", "lowered", "owners", "traced")

    def __init__(self) -> None:
        self.lowered: dict[Any, Any] = {}
        self.traced: dict[Any, Any] = {}
        self.owners: dict[Any, Any] = {}

    def forget_session(self, session: Any) -> None:
        """A session is closed."""
        for table in (self.lowered, self.traced):
            for key in [key for key in list(table) if key[0] is session]:
                table.pop(key, None)
        for key in [key for key, program in list(self.lowered.items()) if program.session is session]:
            self.lowered.pop(key, None)
        for key in [key for key, owner in list(self.owners.items()) if owner is session]:
            self.owners.pop(key, None)

    def forget_slices(self, gone: Set[VirtualSlice]) -> None:
        """Nobody can have an argument on these slices any more."""
        for key in [key for key in list(self.lowered) if not gone.isdisjoint(_slices_in(key))]:
            self.lowered.pop(key, None)

    def placed(self) -> set[int]:
        """The buffers that the programs have placed for themselves."""
        return {number for program in list(self.lowered.values()) for number in program.placed()}


def _slices_in(key: Iterable[Any]) -> set[VirtualSlice]:
    return {part.slice for part in key if type(part) is ArgumentType and part.slice is not None}


def unused(released: Iterable[VirtualSlice], buffers: Iterable[BufferRecord]) -> set[VirtualSlice]:
    """Those of the released slices on which none of these buffers lies."""
    used = {id(record.kind.slice) for record in buffers if record.kind is not None}
    return {where for where in released if id(where) not in used}
