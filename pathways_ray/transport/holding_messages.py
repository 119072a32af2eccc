"""Messages about what hosts hold: uploads that have arrived, and all of it."""

from __future__ import annotations

import msgspec

from pathways_ray.errors import Failure
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.transport.launch_messages import Abort, BarrierReleased, IslandLaunch, Program
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


class Heard(msgspec.Struct, frozen=True, array_like=True):
    """The talk of a host among several with its scheduler, which has died: `count` launches, releases of barriers
    and aborts in all, the `last` of them, with the programs between them, and the launches that are `active` there. The
    leader of the island has closed its log `closed` times, as far as this one knows."""

    count: int = 0
    last: tuple[IslandLaunch | BarrierReleased | Abort | Program, ...] = ()
    active: tuple[IslandLaunch, ...] = ()
    closed: int = 0


class Holds(msgspec.Struct, frozen=True, array_like=True):
    """The holdings of a host that has lost its scheduler, or the controller: buffers by session, also those that
    launches have yet to store, programs by key, what it said of the last uploads, which may be lost, and the highest
    number of a launch that it has seen. Of those up to `since` it has seen none, as a controller has said; None where
    none has. A host among several that has lost its scheduler says what it has `heard`. The `offered` launches, each
    with its program, are the last ones that have something for other hosts, whether that has been taken or not."""

    buffers: dict[int, tuple[int, ...]]
    programs: tuple[int, ...]
    uploads: tuple[Stored, ...] = ()
    sequence: int = 0
    heard: Heard | None = None
    since: int | None = None
    offered: tuple[tuple[int, int], ...] = ()


class IslandOutcome(msgspec.Struct, frozen=True, array_like=True):
    """A launch under a controller that has died, as one of its `islands` knows it: its client's number of it, 0 for a
    part of one, and that of the cluster (`sequence`). It waits or `runs`, or is over there; then `failure` says what it
    came to."""

    session: int
    launch: int
    sequence: int
    program: int
    islands: int
    runs: bool
    failure: Failure | None = None


class IslandOutcomes(Message, tag=217):
    """Scheduler to the successor of a controller: the launches that it has, and the last that it had."""

    outcomes: tuple[IslandOutcome, ...]


class Recount(Message, tag=215):
    """Scheduler to hosts: another controller has come. The answer is `HostUp` with what the host holds. `waiting` are
    launches of the one before that the scheduler has yet to send, by session and first result."""

    waiting: tuple[tuple[int, int], ...] = ()


class CatchUp(Message, tag=216):
    """Scheduler to hosts that its predecessor has left: the launches, releases and aborts behind the `first` ones,
    which not all have heard. Each takes those that it lacks, once the leader has closed its log for the `closed`-th
    time as far as it knows. The answer is that to `Recount`."""

    first: int
    messages: tuple[IslandLaunch | BarrierReleased | Abort | Program, ...]
    closed: int = 0
