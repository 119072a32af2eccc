"""Early launches: those that clients hand to a host themselves, before the scheduler sends them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pathways_ray import limits
from pathways_ray.transport.launch_messages import InlineArguments
from pathways_ray.transport.message import Counted, Message


class LaunchEarly(Message, tag=59):
    """Client to host: a call of program `program`, by the controller's number for it. Result k is buffer `results + k`.
    The host may take it, or leave it to its scheduler. With a `request` it asks for the first result as `Fetch` does,
    early or not."""

    program: int
    arguments: Annotated[tuple[Counted, ...], msgspec.Meta(max_length=limits.MAX_NODES)]
    results: Counted
    inline: InlineArguments = ()
    request: int = 0
    devices: tuple[int, ...] = ()


class EarlyAllowed(Message, tag=62):
    """Host to client: whether it takes calls of this client now."""

    allowed: bool


class EarlyRefused(Message, tag=63):
    """Host to client: a call, by its first result, that it has left to its scheduler."""

    results: int


class AllowEarly(Message, tag=29):
    """Scheduler to the only host of its island: clients of one tenant may hand it calls. `tenant` stands for that one
    as in data tokens (`capabilities.tenant_mark`); with "", nobody may."""

    tenant: str
