"""Messages between clients and the controller: the client's stream, and calls with one reply."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pathways_ray import limits
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.transport.launch_messages import EarlyLaunch, InlineLaunch, Launch, PrioritizedLaunch
from pathways_ray.transport.message import Codec, Counted, Message, Uploaded
from pathways_ray.transport.operator_messages import (
    DrainIsland,
    LiftRefusal,
    LogPart,
    ReadLog,
    RemoveIsland,
    UndrainIsland,
)
from pathways_ray.transport.preemption_messages import GiveWay, Vacate
from pathways_ray.transport.resume_messages import ResumeSession

# --- client → controller, hot stream ----------------------------------------------------------------------------------


class Register(Message, tag=1):
    """A lowered-to-layouts program under a client-made id, with the exported functions the controller may lack."""

    program: int
    graph: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_GRAPH_BYTES)]
    functions: Annotated[dict[str, bytes], msgspec.Meta(max_length=limits.MAX_NODES)]


class Put(Message, tag=3):
    """A buffer that the client uploaded to the hosts of a slice. `epochs` has the incarnation of each it went to."""

    buffer: Uploaded
    slice: int
    type: ArrayType
    spec: Spec
    epochs: Annotated[dict[int, int], msgspec.Meta(max_length=limits.MAX_HOSTS)] = msgspec.field(default_factory=dict)


class Free(Message, tag=4):
    """Handles that the client dropped."""

    buffers: Annotated[tuple[Counted, ...], msgspec.Meta(max_length=limits.MAX_CLIENT_BATCH_MESSAGES)]


class Upgrade(Message, tag=5):
    """The client's last message on its hot stream: what it says from now on comes by its direct link.

    It is sent when the link is open and both ends have shown that they know the session's secret. The stream stays open
    without messages, as the sign that the client lives.
    """


class Cancel(Message, tag=91):
    """The user cancels a launch. Answered by its outcome, or by `CancelRefused`."""

    launch: Counted


class Unregister(Message, tag=95):
    """The client calls a program no more, and will send `functions` again if another one names them."""

    program: int
    functions: Annotated[tuple[str, ...], msgspec.Meta(max_length=limits.MAX_NODES)] = ()


ToController = (
    Register | Launch | PrioritizedLaunch | InlineLaunch | EarlyLaunch | Put | Free | Upgrade | Cancel | Unregister
)


# --- controller → client ----------------------------------------------------------------------------------------------


class Completed(Message, tag=10):
    """Launches that ended in a value, the microseconds that each took on its devices, and whether other sessions have
    launches under way."""

    launches: tuple[int, ...]
    device_us: tuple[int, ...] = ()
    contended: bool = False


class LaunchFailed(Message, tag=11):
    """A launch that ended in an error.

    Of the buffers that it was to take over (donated ones), `consumed` are those whose memory it took; `undecided` those
    of which `DonationsDecided` will tell. The others live again. The program with number `again` is not registered, for
    a reason that may pass: its client registers it, with its functions, before it calls it again.
    """

    launch: int
    failure: Failure
    consumed: tuple[int, ...] = ()
    undecided: tuple[int, ...] = ()
    again: int = 0


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
    """All hosts have compiled a program. Its calls may be handed to `host`, if that is not -1, by the number `key`."""

    program: int
    key: int = 0
    host: int = -1


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
    | Vacate
    | GiveWay
    | Upgraded
)


# --- client → controller, one call and one reply ----------------------------------------------------------------------


class OpenSession(Message, tag=70):
    """First call of a client."""

    version: int
    name: str


class SessionOpened(Message, tag=71):
    """`secret` opens the hot stream, `data_token` the data streams; functions are exported for `platforms`.

    `link_port` is a port of the controller for a direct link (`transport.links`); 0 where it has no such port. What a
    `trusted` session may not export, JAX alone decides. `resume_tag` shows the controller's successor that the session
    is the client's.
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
    coalesce: bool = True
    resume_tag: str = ""


class CreateSlice(Message, tag=72):
    """A virtual slice; `shape` () asks for all devices of one island. -1 and "" leave island and platform open.

    With `within`, a slice of the session, it is a part of that one: on its devices number `places`, in this order. With
    `instead`, one of the session too, it is to take the place of that one: on another island where none is named, and
    without counting against the quota of devices. `topology` is the sub-grid of links that it is to be, `memory` the
    least bytes of each device, `generation` what the devices are called; (), 0 and "" leave that open.
    """

    session: int
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_DIMENSIONS)]
    axes: Annotated[tuple[str, ...], msgspec.Meta(max_length=limits.MAX_DIMENSIONS)]
    island: int
    platform: str
    name: str
    within: int = 0
    places: Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_PART_DEVICES)] = ()
    instead: int = 0
    topology: Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_DIMENSIONS)] = ()
    memory: int = 0
    generation: str = ""


class SliceCreated(Message, tag=73):
    """A slice on its devices. `slice_tag` shows hosts that the session holds it; the manager leaves it empty."""

    placed: PlacedSlice
    slice_tag: str = ""


class ReleaseSlice(Message, tag=74):
    session: int
    slice: int


class ListHeld(Message, tag=198):
    """Asks which arrays lie on some slices, or, where none is named, on any, of those with a number above `after`;
    answered with `Held`."""

    session: int
    slices: Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_PLACES)]
    after: int = 0


class HeldBuffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An array: its number, and how it lies."""

    number: int
    slice: int
    type: ArrayType
    spec: Spec


class Held(Message, tag=199):
    """The first of these arrays, by number. Those above `more` are asked for by another question, unless it is 0."""

    buffers: tuple[HeldBuffer, ...]
    more: int = 0


class ExchangeSlices(Message, tag=200):
    """Pairs of slices of equal meshes, each of which gets the devices and the arrays of the other. Nothing of the
    session may be under way; programs that name one of them have to be registered again."""

    session: int
    pairs: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=limits.MAX_SLICES)]


class SlicesExchanged(Message, tag=201):
    """The first slice of each pair, on its new devices."""

    slices: tuple[SliceCreated, ...]


class Suspend(Message, tag=202):
    """The client has copies of what the session holds: its arrays are freed, its slices given back. Nothing of the
    session may be under way. A slice comes back when another one of its mesh is exchanged for it. `gives_way` says
    that the client was told to do so (`GiveWay`), and its user was not asked."""

    session: int
    gives_way: bool = False


class SessionResumed(Message, tag=214):
    """The session is open again, with a new `secret`, its `slices` as they are now, and without the `lost` buffers.
    It has no program: programs have to be registered again. Of the launches that the client named, those in `done` have
    ended in a value, those in `failed` in a failure; of those that are `running` the outcome comes. Of others nobody
    knows."""

    secret: str
    link_port: int
    hosts: tuple[HostAddress, ...]
    slices: tuple[SliceCreated, ...]
    lost: tuple[int, ...]
    done: tuple[int, ...] = ()
    failed: tuple[tuple[int, Failure], ...] = ()
    running: tuple[int, ...] = ()


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


class Look(Message, tag=192):
    """Asks why something waits, or for everything (`subject` "all"): the answer is a `StatusReply`.

    Subjects are "launch" (by the session's number for it, or, without a session, by its number in the cluster),
    "upload", "slice" and "session"; `of` is the session that has it. A tenant may ask for what is the tenant's.
    "computations" and "code" ask what its program was compiled to: the answer has `observe.computations.Report`s.
    """

    session: int
    subject: str
    number: int = 0
    of: int = 0


class Accepted(Message, tag=80): ...


class Refused(Message, tag=81):
    """`again` is a program that has to be registered again, as in `LaunchFailed`."""

    failure: Failure
    again: int = 0


class NotYet(Message, tag=82):
    """The resource manager's answer for a slice while it waits for islands: ask again."""


Request = (
    OpenSession
    | ResumeSession
    | CreateSlice
    | ReleaseSlice
    | ListHeld
    | ExchangeSlices
    | Suspend
    | CloseSession
    | Explain
    | Status
    | LiftRefusal
    | Look
    | ReadLog
    | DrainIsland
    | UndrainIsland
    | RemoveIsland
)
Reply = (
    SessionOpened
    | SessionResumed
    | SliceCreated
    | Held
    | SlicesExchanged
    | Explained
    | StatusReply
    | LogPart
    | Accepted
    | Refused
)


TO_CONTROLLER: Codec[ToController] = Codec(ToController)
TO_CLIENT: Codec[ToClient] = Codec(ToClient)
REQUEST: Codec[Request] = Codec(Request)
REPLY: Codec[Reply] = Codec(Reply)
