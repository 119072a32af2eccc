"""Messages to an island and from it: between the controller, its scheduler, and hosts."""

from __future__ import annotations

import msgspec

from pathways_ray.errors import Failure
from pathways_ray.observe.views import Arriving, Stopped
from pathways_ray.transport.early_messages import AllowEarly
from pathways_ray.transport.holding_messages import CatchUp, Holds, IslandOutcomes, Recount, Stored
from pathways_ray.transport.joining import HostInfo
from pathways_ray.transport.launch_messages import (
    Abort,
    BarrierReleased,
    IslandLaunch,
    PrioritizedIslandLaunch,
    Program,
)
from pathways_ray.transport.message import Codec, Measured, Message

# --- controller → scheduler → hosts -----------------------------------------------------------------------------------


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """A host as other hosts reach it. What launches up to number `since` made there is gone: it was another epoch.
    Those of one `machine` reach each other by local connections; with "" none do. The leader of its island writes to it
    at `data_address`."""

    host: int
    epoch: int
    transfer_address: str
    since: int = 0
    machine: str = ""
    data_address: str = ""


class Peers(Message, tag=20):
    """The hosts of the whole cluster that are up."""

    peers: tuple[Peer, ...]


class Drop(Message, tag=23):
    """Buffers that are not needed behind the launches that came before; or by none at all, where they were `given` to
    one that has succeeded."""

    session: int
    buffers: tuple[int, ...]
    given: bool = False


class LateDrop(Drop, tag=23):
    """A drop of small arrays, which may leave behind launches that came after it. As it leaves it is a `Drop`."""


class DropSession(Message, tag=24):
    """Everything of a session."""

    session: int


class DropProgram(Message, tag=25):
    """A program that its session cannot launch any more."""

    session: int
    program: int


class Account(Message, tag=27):
    """Controller to schedulers: whose a session is, and what the operator gave that tenant; `launch_limit_s` is 0 where
    that of the runtime holds."""

    session: int
    tenant: str
    weight: float
    priority: int
    launch_limit_s: Measured = 0.0


class CancelLaunch(Message, tag=93):
    """Controller to schedulers: a launch is not needed any more. One that waits ends in `failure`, one that hosts have
    is answered with `Begun`."""

    sequence: int
    failure: Failure


class Inspect(Message, tag=190):
    """Controller to schedulers: somebody looks at the island. The answer is `Inspected`, with the places of these
    launches in the order and the events that concern them."""

    look: int
    launches: tuple[int, ...] = ()


class Examine(Message, tag=211):
    """Controller to schedulers to hosts: somebody asks what a program was compiled to, and, with `text`, for its code.
    Hosts that have a part in it answer `Examined`."""

    look: int
    program: int
    tenant: str = ""
    text: bool = False


class FunctionsAhead(Message, tag=220):
    """Controller to schedulers to hosts: functions of a program that is being planned. Hosts have them checked
    meanwhile; the program brings them once more, and is refused where one of them is."""

    tenant: str
    trusted: bool
    functions: dict[str, bytes]


class Dismissed(Message, tag=41):
    """Scheduler to hosts: there is no controller that knows what they hold, and they are to start again."""


ToHost = (
    Peers
    | Program
    | IslandLaunch
    | Drop
    | DropSession
    | DropProgram
    | BarrierReleased
    | Abort
    | Examine
    | FunctionsAhead
    | Recount
    | CatchUp
    | Dismissed
    | AllowEarly
)
ForOrder = (
    Program | IslandLaunch | PrioritizedIslandLaunch | Drop | DropSession | DropProgram | Account | CancelLaunch | Abort
)
"""Messages that have a place in an island's order, or set what the order goes by."""

ToIsland = ForOrder | Peers | Inspect | Examine | FunctionsAhead


# --- hosts → scheduler → controller -----------------------------------------------------------------------------------


class HostUp(Message, tag=30):
    """A host joins under a new epoch: first message of its stream. `crash` is the signal that its process before this
    one brought on itself, if it did.

    `memory` are the bytes of each device, or those that the devices of all hosts with this `pool` share; 0 is unknown.
    `info` is what the resource manager knows of it: the successor of one that dies hears that from the controller. One
    that `holds` something has come to the successor of its scheduler, or of the controller, under the epoch that it
    had. `machine` is as in `Peer`.
    """

    host: int
    epoch: int
    transfer_address: str
    data_address: str
    devices: int
    pid: int
    crash: str = ""
    memory: int = 0
    pool: str = ""
    info: HostInfo | None = None
    holds: Holds | None = None
    machine: str = ""


class HostDown(Message, tag=31):
    """The scheduler lost a host; `reason` says how it knew, `kind` names the error its launches get.

    `candidates` are the launches that were first in line on its devices, `compiling` the programs that it compiled: one
    of them may have been the cause. With `decided` it was, since the scheduler ended the host for what it did. `story`
    has the scheduler's last events that led to the loss. Both `story` and, with `decided`, `reason` are for the tenants
    of `launch` and of `compiling` alone: they name their programs.
    """

    host: int
    epoch: int
    reason: str
    kind: str = "HostLost"
    candidates: tuple[int, ...] = ()
    story: tuple[str, ...] = ()
    compiling: tuple[int, ...] = ()
    decided: bool = False
    launch: int = 0


class Ready(Message, tag=32):
    """A host prepared a program, or could not. Bytes are per device, the largest computation's. `queues`: whether a
    computation may be in a device's queue when the call that enqueues it returns; else it is over by then."""

    host: int
    program: int
    temporary_bytes: int
    failure: Failure | None = None
    queues: bool = True


class Done(Message, tag=33):
    """Launches whose part on this host (or island) is complete, without error.

    `device_us` is the time of each launch on the devices in microseconds, whatever their number; from a scheduler, the
    longest of its hosts' times.
    """

    sequences: tuple[int, ...]
    device_us: tuple[int, ...] = ()


class Served(msgspec.Struct, frozen=True, array_like=True):
    """Calls of a program that a host has served, and the microseconds that they took on each of its devices."""

    session: int
    program: int
    calls: int
    device_us: int


class ServedCalls(Message, tag=173):
    """Calls that a host has served since it last said so (`ServeCall`), which are no launches."""

    host: int
    served: tuple[Served, ...]


class Decided(Message, tag=172):
    """The scalars by which a program decides what it launches next: those that a launch has made on an island. It comes
    before the launch is done."""

    sequence: int
    values: tuple[int, ...]


class IslandLaunchFailed(Message, tag=34):
    """A launch whose part on this host ended in an error. Counts as its completion there.

    `hosts` are those that must have failed with it: they hold shards of the value that failed. None named, it is all.
    `consumed` are the arguments whose memory it took before.
    """

    sequence: int
    failure: Failure
    hosts: tuple[int, ...] = ()
    consumed: tuple[int, ...] = ()


class Enqueued(Message, tag=35):
    """Gangs of a launch that were dispatched one at a time are on the device queues."""

    sequence: int
    first: int


class Running(msgspec.Struct, frozen=True, array_like=True):
    """A launch that is first in the queues of all the devices of a host that it uses, and the milliseconds since. One
    that a client handed over, and nobody has sent yet, has a number below 0, and its `program`."""

    sequence: int
    ms: int
    program: int = 0


class Heartbeat(Message, tag=36):
    """The host's process runs. `slowness` is that of its machine. `running` are launches that have kept its devices for
    a while; if there are such, `queued` are those in device queues behind others. `stopped` are launches that stand
    before they are all enqueued, `uploads` arrays that come from clients. One of several that `leads` is linked to the
    others, and most of its last launches were waited for, one by one."""

    host: int
    slowness: Measured = 1.0
    running: tuple[Running, ...] = ()
    queued: tuple[int, ...] = ()
    stopped: tuple[Stopped, ...] = ()
    uploads: tuple[Arriving, ...] = ()
    leads: bool = False


class Compiling(Message, tag=171):
    """A host begins to compile a program; `Ready` ends it."""

    host: int
    program: int


class BarrierReached(Message, tag=38):
    """A launch has come to an input barrier on this host, and what it waits for there has arrived, or failed."""

    host: int
    sequence: int
    barrier: int
    failure: Failure | None = None


class IslandUp(Message, tag=37):
    """A scheduler joins the controller: first message of its stream. `address` is where it serves its hosts; `sequence`
    and `program` are the highest numbers of launches and programs that it has seen."""

    island: int
    address: str
    sequence: int = 0
    program: int = 0


class Gang(msgspec.Struct, frozen=True, array_like=True):
    """One gang of a launch, and its hosts: bit k stands for the k-th host of the island."""

    sequence: int
    gang: int
    hosts: int


class Ordered(Message, tag=39):
    """Gangs that a host has put on its device queues since its last report, in that order; for the order check."""

    host: int
    gangs: tuple[Gang, ...]


class Load(Message, tag=40):
    """Scheduler to controller, now and then: launches of each tenant that wait on the island, and the slowness of the
    scheduler's machine."""

    island: int
    queued: dict[str, int]
    slowness: Measured = 1.0


class Begun(Message, tag=94):
    """A launch that was to be cancelled is with the hosts already."""

    sequence: int


class Inspected(Message, tag=191):
    """A scheduler's answer to `Inspect`: an `observe.views.IslandView` as JSON."""

    look: int
    island: int
    view: bytes


class Examined(Message, tag=212):
    """A host's answer to `Examine`: an `observe.computations.Report` as JSON, or nothing where it has no such program
    any more."""

    look: int
    host: int
    program: int
    report: bytes


FromHost = (
    HostUp
    | Ready
    | Done
    | IslandLaunchFailed
    | Enqueued
    | BarrierReached
    | Heartbeat
    | Ordered
    | Compiling
    | Stored
    | Decided
    | ServedCalls
    | Examined
)
FromIsland = (
    IslandUp
    | IslandOutcomes
    | HostUp
    | HostDown
    | Ready
    | Done
    | IslandLaunchFailed
    | Enqueued
    | Load
    | Begun
    | Stored
    | Inspected
    | Decided
    | ServedCalls
    | Examined
)


TO_ISLAND: Codec[ToIsland] = Codec(ToIsland)
TO_HOST: Codec[ToHost] = Codec(ToHost)
FROM_HOST: Codec[FromHost] = Codec(FromHost)
FROM_ISLAND: Codec[FromIsland] = Codec(FromIsland)
