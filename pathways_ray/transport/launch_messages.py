"""Launches on their way, from the client to the controller, and from there to islands and hosts; and their programs."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from pathways_ray import limits
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import Device
from pathways_ray.transport.message import Counted, Message

InlineArgument = tuple[Counted, bytes]
"""The number of an argument and its value, in C order. What it is a value of is known from the program."""

InlineArguments = Annotated[tuple[InlineArgument, ...], msgspec.Meta(max_length=limits.MAX_INLINE)]


class Launch(Message, tag=2):
    """One call. Result k becomes buffer `results + k`; both ids are made by the client. No number of a buffer is
    negative: those are the controller's own. None is 0, which stands in the place of an argument that comes along. That
    of the launch fits into a record of it (`observe.recorder`), also with a sign. Most have no `priority`, carry no
    arguments `inline`, and `covers` no early ones."""

    launch: Counted
    program: int
    arguments: Annotated[tuple[Counted, ...], msgspec.Meta(max_length=limits.MAX_NODES)]
    results: Counted
    priority: ClassVar[int] = 0
    inline: ClassVar[tuple[InlineArgument, ...]] = ()
    covers: ClassVar[tuple[int, ...]] = ()


class PrioritizedLaunch(Launch, tag=6):
    """A call that may pass others of its session, or let them pass."""

    priority: Annotated[int, msgspec.Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] = 0
    inline: InlineArguments = ()


class InlineLaunch(Launch, tag=8):
    """A call that carries some of its arguments, each of which has the number 0: no buffer is made of them."""

    inline: InlineArguments = ()


class EarlyLaunch(InlineLaunch, tag=7):
    """Client to controller: a call that was handed to its host as well. It takes the way of every launch, which decides
    everything about it; a host that has it already says then what became of it. Several calls that leave as one launch
    were handed over one by one: it `covers` these, by their first results, in their order."""

    covers: Annotated[tuple[Counted, ...], msgspec.Meta(max_length=limits.MAX_COVERED)] = ()


def launch_of(
    launch: int,
    program: int,
    arguments: tuple[int, ...],
    results: int,
    priority: int = 0,
    inline: tuple[InlineArgument, ...] = (),
) -> Launch:
    """A call, with its priority and the arguments that it carries, if it has such."""
    if priority:
        return PrioritizedLaunch(launch, program, arguments, results, priority, inline)
    if inline:
        return InlineLaunch(launch, program, arguments, results, inline)
    return Launch(launch, program, arguments, results)


def early_of(launch: Launch) -> EarlyLaunch:
    """The same call, that is handed to its host as well."""
    return EarlyLaunch(launch.launch, launch.program, launch.arguments, launch.results, launch.inline)


def inline_bytes(launch: Launch) -> int:
    """Bytes of the arguments that a call carries."""
    return sum([len(data) for _, data in launch.inline]) if launch.inline else 0


class Following(msgspec.Struct, frozen=True, array_like=True):
    """A launch that comes next if a value says so: host `host` may begin it before it is sent. It goes from the
    controller to the host of the value, and from there to that one."""

    host: int
    session: int
    program: int
    arguments: tuple[int, ...]
    results: int


class IslandLaunch(Message, tag=22):
    """One launch on one island: `gangs` gangs from number `first` on, or all of them when `gangs` is 0. One that was
    `cancelled` computes nothing: its values are that failure. `launch` is its client's number of it, 0 where it makes
    only a part of what that one is to give. `inline` are arguments whose number is 0, in the first message of it.
    `follows` has what comes next by the value that it makes: number k for the value k. It `covers` the early
    launches that left as this one."""

    sequence: int
    session: int
    program: int
    arguments: tuple[int, ...]
    results: int
    first: int = 0
    gangs: int = 0
    cancelled: Failure | None = None
    launch: int = 0
    inline: tuple[InlineArgument, ...] = ()
    follows: tuple[Following | None, ...] = ()
    covers: tuple[int, ...] = ()


class PrioritizedIslandLaunch(Message, tag=28):
    """Controller to schedulers: a launch that may pass others of its session, or let them pass."""

    launch: IslandLaunch
    priority: int


class Abort(Message, tag=60):
    """Launches that have ended in `failure` elsewhere, each with its program: nothing that they wait for will come, and
    nobody takes what they offer."""

    launches: tuple[tuple[int, int], ...]
    failure: Failure


class BarrierReleased(Message, tag=26):
    """Scheduler to hosts: all have reached input barrier `barrier` of a launch with its inputs, or one failed."""

    sequence: int
    barrier: int
    failure: Failure | None = None


class Program(Message, tag=21):
    """A plan to prepare; the functions are those it names. Hosts compile for one tenant after the other.

    `trusted` programs are the operator's, or a tenant's whom the operator trusts: hosts check their functions for less.
    The rest is for the scheduler: the program's name, the devices of the island that it uses, whether its launches run
    on other islands too, the computations that a launch puts on one device's queue (`computations`), whether it `calls`
    host functions there, for which it leaves its devices to others; how many `results` its launches have, and of which
    of their arguments they may take the memory (`donated`); and on how many `islands` they run.
    """

    program: int
    plan: bytes
    functions: dict[str, bytes]
    name: str = ""
    devices: tuple[Device, ...] = ()
    cross_island: bool = False
    computations: int = 1
    tenant: str = ""
    trusted: bool = False
    calls: bool = False
    results: int = 0
    donated: tuple[int, ...] = ()
    islands: int = 1
