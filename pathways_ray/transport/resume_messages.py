"""The request of a client to the successor of a controller that has died."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pathways_ray import limits
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.transport.message import Counted, Message


class KnownSlice(msgspec.Struct, frozen=True, array_like=True):
    """A slice that a client has a handle to, on the devices that it knows: the `tag` shows that a controller gave it to
    the session there. With `within`, it is a part of that one."""

    placed: PlacedSlice
    tag: str
    name: str = ""
    within: int = 0


class KeptBuffers(msgspec.Struct, frozen=True, array_like=True):
    """Arrays of one type that a client has handles to. They are on their hosts, or, `arriving`, on the way to processes
    of these `epochs`, by host, or were there so lately that the hosts may not have said so."""

    slice: int
    type: ArrayType
    spec: Spec
    numbers: Annotated[tuple[Counted, ...], msgspec.Meta(max_length=limits.MAX_SESSION_BUFFERS)]
    arriving: bool = False
    epochs: Annotated[dict[int, int], msgspec.Meta(max_length=limits.MAX_HOSTS)] = msgspec.field(default_factory=dict)


class Unanswered(msgspec.Struct, frozen=True, array_like=True):
    """A launch that was sent to a controller that has died, and has no outcome: the `numbers` of its results, and those
    that there is a handle to."""

    launch: Counted
    numbers: Annotated[tuple[Counted, ...], msgspec.Meta(max_length=limits.MAX_SESSION_BUFFERS)]
    results: Annotated[tuple[KeptBuffers, ...], msgspec.Meta(max_length=limits.MAX_SESSION_BUFFERS)] = ()


class ResumeSession(Message, frozen=True, tag=213):
    """A client that has lost its controller comes to the successor, with its token, and its session's `resume_tag`.

    `slices` are those that it has a handle to, or, where it is `suspended`, those that it had, `kept` its arrays.
    Buffers from number `next_buffer` on are newer. `gives_way` is as in `Suspend`. `unanswered` are launches whose
    outcome may be known to schedulers.
    """

    version: int
    session: int
    resume_tag: str
    name: str
    slices: Annotated[tuple[KnownSlice, ...], msgspec.Meta(max_length=limits.MAX_PLACES)]
    kept: Annotated[tuple[KeptBuffers, ...], msgspec.Meta(max_length=limits.MAX_SESSION_BUFFERS)]
    next_buffer: Counted
    suspended: bool = False
    gives_way: bool = False
    unanswered: Annotated[tuple[Unanswered, ...], msgspec.Meta(max_length=limits.MAX_LAUNCHES_IN_FLIGHT)] = ()
