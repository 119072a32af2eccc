"""Every message on the wire, as typed structs. One definition is both the data type and the schema.

Messages travel as MessagePack lists of tagged arrays: `[tag, field, field, …]`. Decoding checks every type, so that a
malformed message is a `WireError` before any of it is used, and nothing is ever unpickled. A field may be added at the
end (older readers ignore it); anything else raises `VERSION`, which both ends compare when a session opens.

The life of a launch, in messages: `Launch` (client → controller), `IslandLaunch` (controller → scheduler → hosts),
`Done` (hosts → scheduler → controller), `Completed` (controller → client); on the way back `IslandLaunchFailed` and
`LaunchFailed` may stand in their place.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import msgspec

from pathways_ray import limits
from pathways_ray.errors import Failure, WireError
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, Spec

VERSION = 7

Counted = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""An id that others are counted on from: what comes out must fit on the wire as well."""


Measured = Annotated[float, msgspec.Meta(ge=0.0)]
"""Seconds, or a factor: a number that can be compared, which NaN cannot."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="message"):
    """Base of all messages."""


# --- client → controller, hot stream ---------------------------------------------------------------------------------


class Register(Message, tag=1):
    """A lowered-to-layouts program under a client-made id, with the exported functions the controller may lack."""

    program: int
    graph: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_GRAPH_BYTES)]
    functions: Annotated[dict[str, bytes], msgspec.Meta(max_length=limits.MAX_NODES)]


class Launch(Message, tag=2):
    """One call. Result k becomes buffer `results + k`; both ids are made by the client."""

    launch: int
    program: int
    arguments: Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_NODES)]
    results: Counted


class Put(Message, tag=3):
    """A buffer that the client uploaded to the hosts of a slice."""

    buffer: int
    slice: int
    type: ArrayType
    spec: Spec


class Free(Message, tag=4):
    """Handles that the client dropped."""

    buffers: Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_CLIENT_BATCH_MESSAGES)]


class Upgrade(Message, tag=5):
    """The client's last message on its hot stream: what it says from now on comes by its direct link.

    It is sent when the link is open and both ends have shown that they know the session's secret. The stream stays open
    without messages, as the sign that the client lives.
    """


class Cancel(Message, tag=91):
    """The user cancels a launch. Answered by its outcome, or by `CancelRefused`."""

    launch: int


ToController = Register | Launch | Put | Free | Upgrade | Cancel


# --- controller → client ---------------------------------------------------------------------------------------------


class Completed(Message, tag=10):
    """Launches that ended in a value, the microseconds that each took on its devices, and whether other sessions have
    launches under way."""

    launches: tuple[int, ...]
    device_us: tuple[int, ...] = ()
    contended: bool = False


class LaunchFailed(Message, tag=11):
    """A launch that ended in an error.

    Of the buffers that it was to take over (donated ones), `consumed` are those whose memory it took; `undecided` those
    of which `DonationsDecided` will tell. The others live again.
    """

    launch: int
    failure: Failure
    consumed: tuple[int, ...] = ()
    undecided: tuple[int, ...] = ()


class DonationsDecided(Message, tag=90):
    """Whether a failed launch took the memory of `undecided` buffers: of those in `consumed`; the others in `buffers`
    live again."""

    buffers: tuple[int, ...]
    consumed: tuple[int, ...]


class BuffersLost(Message, tag=12):
    """Ready buffers whose host is gone."""

    buffers: tuple[int, ...]
    failure: Failure


class HostAddress(Message, tag=13):
    """The address at which clients reach a host; an empty one means that it is down."""

    host: int
    epoch: int
    address: str


class SessionEnded(Message, tag=14):
    """The controller closed the session; everything it held is freed."""

    reason: str


class Prepared(Message, tag=15):
    """All hosts have compiled a program."""

    program: int


class Upgraded(Message, tag=16):
    """The controller's last message on the hot stream, in answer to `Upgrade`: the rest comes by the direct link."""


class CancelRefused(Message, tag=92):
    """A launch that was to be cancelled has begun, or is over. It is marked: its results are freed when they come, and
    count as failed with `failure` from now on."""

    launch: int
    failure: Failure


ToClient = (
    Completed
    | LaunchFailed
    | DonationsDecided
    | CancelRefused
    | BuffersLost
    | HostAddress
    | SessionEnded
    | Prepared
    | Upgraded
)


# --- controller → scheduler → hosts ----------------------------------------------------------------------------------


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """A host as other hosts reach it. What launches up to number `since` made there is gone: it was another epoch."""

    host: int
    epoch: int
    transfer_address: str
    since: int = 0


class Peers(Message, tag=20):
    """The hosts of the whole cluster that are up."""

    peers: tuple[Peer, ...]


class Program(Message, tag=21):
    """A plan to prepare; the functions are those it names. Hosts compile for one tenant after the other.

    `trusted` programs are the operator's, or a tenant's whom the operator trusts: hosts check their functions for less.
    The rest is for the scheduler: the program's name, the devices of the island that it uses, whether its launches run
    on other islands too, and the computations that a launch puts on one device's queue (`computations`).
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


class IslandLaunch(Message, tag=22):
    """One launch on one island: `gangs` gangs from number `first` on, or all of them when `gangs` is 0. One that was
    `cancelled` computes nothing: its values are that failure."""

    sequence: int
    session: int
    program: int
    arguments: tuple[int, ...]
    results: int
    first: int = 0
    gangs: int = 0
    cancelled: Failure | None = None


class Drop(Message, tag=23):
    """Buffers that are not needed any more."""

    session: int
    buffers: tuple[int, ...]


class DropSession(Message, tag=24):
    """Everything of a session."""

    session: int


class DropProgram(Message, tag=25):
    """A program that its session cannot launch any more."""

    session: int
    program: int


class BarrierReleased(Message, tag=26):
    """Scheduler to hosts: all have reached input barrier `barrier` of a launch with its inputs, or one failed."""

    sequence: int
    barrier: int
    failure: Failure | None = None


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


class Abort(Message, tag=60):
    """Launches that have ended in `failure` elsewhere, each with its program: nothing that they wait for will come, and
    nobody takes what they offer."""

    launches: tuple[tuple[int, int], ...]
    failure: Failure


ToHost = Peers | Program | IslandLaunch | Drop | DropSession | DropProgram | BarrierReleased | Abort
ToIsland = Peers | Program | IslandLaunch | Drop | DropSession | DropProgram | Account | CancelLaunch | Abort


# --- hosts → scheduler → controller ----------------------------------------------------------------------------------


class HostUp(Message, tag=30):
    """A host joins under a new epoch: first message of its stream. `crash` is the signal that its process before this
    one brought on itself, if it did.

    `memory` are the bytes of each device, or those that the devices of all hosts with this `pool` share; 0 is unknown.
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


class HostDown(Message, tag=31):
    """The scheduler lost a host; `reason` says how it knew, `kind` names the error its launches get.

    `candidates` are the launches that were first in line on its devices, `compiling` the programs that it compiled: one
    of them may have been the cause. With `decided` it was, since the scheduler ended the host for what it did. `story`
    has the scheduler's last events that led to the loss.
    """

    host: int
    epoch: int
    reason: str
    kind: str = "HostLost"
    candidates: tuple[int, ...] = ()
    story: tuple[str, ...] = ()
    compiling: tuple[int, ...] = ()
    decided: bool = False


class Ready(Message, tag=32):
    """A host prepared a program, or could not. Bytes are per device, the largest computation's."""

    host: int
    program: int
    temporary_bytes: int
    failure: Failure | None = None


class Done(Message, tag=33):
    """Launches whose part on this host (or island) is complete, without error.

    `device_us` is the time of each launch on the devices in microseconds, whatever their number; from a scheduler, the
    longest of its hosts' times.
    """

    sequences: tuple[int, ...]
    device_us: tuple[int, ...] = ()


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
    """A launch that is first in the queues of all the devices of a host that it uses, and the milliseconds since."""

    sequence: int
    ms: int


class Heartbeat(Message, tag=36):
    """The host's process runs. `slowness` is that of its machine. `running` are launches that have kept its devices for
    a while; if there are such, `queued` are those in device queues behind others."""

    host: int
    slowness: Measured = 1.0
    running: tuple[Running, ...] = ()
    queued: tuple[int, ...] = ()


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
    """A scheduler joins the controller: first message of its stream. `address` is where it serves its hosts."""

    island: int
    address: str


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


class Stored(Message, tag=61):
    """An array that a client uploaded lies on this host: its part of one of this type, on a slice, with a spec."""

    host: int
    session: int
    buffer: int
    slice: int
    type: ArrayType
    spec: Spec


FromHost = (
    HostUp | Ready | Done | IslandLaunchFailed | Enqueued | BarrierReached | Heartbeat | Ordered | Compiling | Stored
)
FromIsland = IslandUp | HostUp | HostDown | Ready | Done | IslandLaunchFailed | Enqueued | Load | Begun | Stored


# --- client ↔ host, data stream --------------------------------------------------------------------------------------


class PutOpen(Message, tag=50):
    """An array is coming: the distinct boxes that this host's devices hold, in row-major order of the devices.

    `slice_tag` is what came with the slice: that it is the session's, and lies on these devices.
    """

    request: int
    buffer: int
    type: ArrayType
    spec: Spec
    placed: PlacedSlice
    slice_tag: str


class PutPart(Message, tag=51):
    """Bytes of box number `box`, in C order, from `offset` on, which is where the part before ended."""

    request: int
    box: int
    offset: int
    data: bytes


class Fetch(Message, tag=52):
    """Asks for the shards on some devices of this host (their places on the host), once the buffer is ready."""

    request: int
    buffer: int
    devices: tuple[int, ...]


class CancelFetch(Message, tag=53):
    """A fetch whose result is not needed any more."""

    request: int


ToHostData = PutOpen | PutPart | Fetch | CancelFetch


class PutDone(Message, tag=55):
    """The array lies on the devices."""

    request: int


class FetchPart(Message, tag=56):
    """Bytes of the shard on device `device`, in C order, from `offset` on; `total` bytes in all."""

    request: int
    device: int
    offset: int
    total: int
    data: bytes


class DataFailed(Message, tag=57):
    """A put or fetch that could not be served."""

    request: int
    failure: Failure


FromHostData = PutDone | FetchPart | DataFailed


# --- client → controller, one call and one reply ---------------------------------------------------------------------


class OpenSession(Message, tag=70):
    """First call of a client."""

    version: int
    name: str


class SessionOpened(Message, tag=71):
    """`secret` opens the hot stream, `data_token` the data streams; functions are exported for `platforms`.

    `link_port` is a port of the controller for a direct link (`transport.links`); 0 where it has no such port. What a
    `trusted` session may not export, JAX alone decides.
    """

    session: int
    secret: str
    data_token: str
    hosts: tuple[HostAddress, ...]
    platforms: tuple[str, ...]
    fusion: bool
    max_launches: int
    link_port: int = 0
    trusted: bool = False


class CreateSlice(Message, tag=72):
    """A virtual slice; `shape` () asks for all devices of one island. -1 and "" leave island and platform open."""

    session: int
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_DIMENSIONS)]
    axes: Annotated[tuple[str, ...], msgspec.Meta(max_length=limits.MAX_DIMENSIONS)]
    island: int
    platform: str
    name: str


class SliceCreated(Message, tag=73):
    """A slice on its devices. `slice_tag` shows hosts that the session holds it; the manager leaves it empty."""

    placed: PlacedSlice
    slice_tag: str = ""


class ReleaseSlice(Message, tag=74):
    session: int
    slice: int


class CloseSession(Message, tag=75):
    session: int


class Explain(Message, tag=76):
    """Asks how a program of this session would be placed; `program` is its id, or -1 when it is not registered."""

    session: int
    program: int
    graph: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_GRAPH_BYTES)]


class Explained(Message, tag=77):
    plan: str
    order: str
    temporary_bytes: dict[int, int]


class Status(Message, tag=78):
    session: int


class StatusReply(Message, tag=79):
    """JSON text: islands, hosts, devices, slices, sessions, buffers."""

    text: str


class LiftRefusal(Message, tag=170):
    """The operator lets a program run again that the circuit breaker refuses; status has the ids."""

    session: int
    refusal: str


class Accepted(Message, tag=80):
    pass


class Refused(Message, tag=81):
    failure: Failure


class NotYet(Message, tag=82):
    """The resource manager's answer for a slice while it waits for islands: ask again."""


Request = OpenSession | CreateSlice | ReleaseSlice | CloseSession | Explain | Status | LiftRefusal
Reply = SessionOpened | SliceCreated | Explained | StatusReply | Accepted | Refused


# --- resource manager, carried as bytes by Ray calls ------------------------------------------------------------------


class HostInfo(Message):
    """The report of a host that joins. `coordinator` is the address at which it could serve its island's group.

    `members` are all hosts of the island. Where a tenant has the island for itself, `tenant` is its name, and `base`
    the island whose devices it shares. `started` is when its process began, as the kernel counts: no other process of
    its machine has the same pid and that.
    """

    host: int
    island: int
    platform: str
    devices: int
    node: str
    pid: int
    coordinator: str
    members: tuple[int, ...] = ()
    tenant: str = ""
    base: int = -1
    started: int = 0


class JoinReply(Message):
    """The epoch of the host's island, and whom to talk to. `coordinator` is empty for an island of one host.

    The epoch is 0 when the island did not come together; then `absent` has the hosts that it waited for.
    """

    epoch: int
    scheduler_address: str
    data_secret: str
    coordinator: str
    absent: tuple[int, ...] = ()


_ENCODER = msgspec.msgpack.Encoder()

encode = _ENCODER.encode

M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes and strictly decodes one family of messages, singly or as a batch."""

    def __init__(self, family: Any) -> None:
        self._one = msgspec.msgpack.Decoder(family)
        self._many = msgspec.msgpack.Decoder(list[family])

    def decode(self, data: bytes) -> M:
        """Raises `WireError` unless `data` is one message of the family."""
        try:
            return self._one.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"message of {len(data)} bytes refused: {error}") from None

    def decode_batch(self, data: bytes) -> list[M]:
        """Raises `WireError` unless `data` is a batch of messages of the family."""
        try:
            return self._many.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"batch of {len(data)} bytes refused: {error}") from None


TO_CONTROLLER: Codec[ToController] = Codec(ToController)
TO_CLIENT: Codec[ToClient] = Codec(ToClient)
TO_ISLAND: Codec[ToIsland] = Codec(ToIsland)
TO_HOST: Codec[ToHost] = Codec(ToHost)
FROM_HOST: Codec[FromHost] = Codec(FromHost)
FROM_ISLAND: Codec[FromIsland] = Codec(FromIsland)
TO_HOST_DATA: Codec[ToHostData] = Codec(ToHostData)
FROM_HOST_DATA: Codec[FromHostData] = Codec(FromHostData)
REQUEST: Codec[Request] = Codec(Request)
REPLY: Codec[Reply] = Codec(Reply)
