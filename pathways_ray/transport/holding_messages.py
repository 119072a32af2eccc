"""Messages about what hosts hold: uploads that have arrived, and all of it."""

from __future__ import annotations

import msgspec

from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.transport.message import Message


class Stored(Message, tag=61):
    """An array that a client uploaded lies on this host: its part of one of this type, on a slice, with a spec.

    `digests` are those of the boxes that other hosts hold as well, by the first position in the slice's mesh that has
    the box.
    """

    host: int
    session: int
    buffer: int
    slice: int
    type: ArrayType
    spec: Spec
    digests: dict[int, bytes] = msgspec.field(default_factory=dict)


class Holds(msgspec.Struct, frozen=True, array_like=True):
    """The holdings of a host that has lost its scheduler, or the controller: buffers by session, also those that
    launches have yet to store, programs by key, what it said of the last uploads, which may be lost, and the highest
    number of a launch that it has seen."""

    buffers: dict[int, tuple[int, ...]]
    programs: tuple[int, ...]
    uploads: tuple[Stored, ...] = ()
    sequence: int = 0


class Recount(Message, tag=215):
    """Scheduler to hosts: another controller has come. The answer is `HostUp` with what the host holds."""
