"""Early launches: those that clients hand to a host themselves, before the scheduler sends them; and the log by which a
host that leads its island tells the others of it, on links of their own."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pathways_ray import limits
from pathways_ray.transport.launch_messages import InlineArguments, IslandLaunch
from pathways_ray.transport.message import Codec, Counted, Message


class LaunchEarly(Message, tag=59):
    """Client to host: a call of program `program`, by the controller's number for it. Result k is buffer `results + k`.
    The host may take it, or leave it to its scheduler. With a `request` it asks for result `asked` as `Fetch` does,
    early or not, and with `also` for further results, each with its request."""

    program: int
    arguments: Annotated[tuple[Counted, ...], msgspec.Meta(max_length=limits.MAX_NODES)]
    results: Counted
    inline: InlineArguments = ()
    request: int = 0
    devices: Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_FETCHED_SHARDS)] = ()
    asked: Counted = 0
    also: Annotated[tuple[tuple[int, Counted], ...], msgspec.Meta(max_length=limits.MAX_SIBLINGS)] = ()


class EarlyAllowed(Message, tag=62):
    """Host to client: whether it takes calls of this client now."""

    allowed: bool


class EarlyRefused(Message, tag=63):
    """Host to client: a call, by its first result, that it has left to its scheduler."""

    results: int


class ServeCall(Message, tag=67):
    """Client to host: a call of program `program`, whose results nobody keeps. The host answers with their values, that
    of result k on `devices[k]` as request `requests[k]`. Or it fails the first of these: then the call has to be
    launched."""

    program: int
    arguments: Annotated[tuple[Counted, ...], msgspec.Meta(max_length=limits.MAX_NODES)]
    requests: Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_SERVED)]
    devices: Annotated[
        tuple[Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_FETCHED_SHARDS)], ...],
        msgspec.Meta(max_length=limits.MAX_SERVED),
    ]
    inline: InlineArguments = ()


class AllowEarly(Message, tag=29):
    """Scheduler to hosts: clients of one tenant may hand calls to the host that leads the island. `tenant` stands for
    that one as in data tokens (`capabilities.tenant_mark`); with "", nobody may. Of several hosts, the others keep the
    leader's order in this `term` (`executor.run.leading`)."""

    tenant: str
    term: int = 0


class Led(Message, tag=64):
    """The leader has taken an early launch, and enqueues it now. In term `term` it stands behind `place` messages of
    their scheduler, and behind `count` launches, releases and aborts in all (`executor.run.journal`)."""

    term: int
    place: int
    count: int
    launch: IslandLaunch


class Passed(Message, tag=65):
    """The leader handles the scheduler's messages of a term up to number `place` now, with nothing between them."""

    term: int
    place: int


class LogClosed(Message, tag=66):
    """The leader has heard all of a scheduler that has died, and takes nothing early before it hears of the next."""


FromLeader = Led | Passed | LogClosed
"""Entries of the log, in the order of the leader."""

FROM_LEADER: Codec[FromLeader] = Codec(FromLeader)
