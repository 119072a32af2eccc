"""Events that the resource manager's core takes, and the commands that its decisions end in.

Some events expect an answer. They carry a token of the caller, which comes back in an `Answer`, at once or later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pathways_ray.ir.links import Hardware
from pathways_ray.ir.plan import Device
from pathways_ray.resource_manager.islands import KeptIslands
from pathways_ray.resource_manager.slice_requests import SliceRequest
from pathways_ray.transport.messages import (
    Accepted,
    HeldSlices,
    Holdings,
    HostInfo,
    JoinReply,
    KnownHost,
    NotYet,
    Refused,
    SliceCreated,
)

Busy = tuple[tuple[Device, float], ...]
"""Devices, and for what part of its time each computed lately, 0 to 1."""

# --- events -----------------------------------------------------------------------------------------------------------


class ControllerServes(NamedTuple):
    """The controller serves schedulers at `address`; comes once a second. `actor` is the name that it is killed by,
    `busy` has the devices that computed lately. Its process is `pid`, which began at `started`, see `HostInfo`."""

    incarnation: str
    address: str
    actor: str
    busy: Busy = ()
    pid: int = 0
    started: int = 0


class ControllerStarts(NamedTuple):
    """A process has begun to be the controller; it serves when it is ready."""

    pid: int
    started: int


class ControllerHolds(NamedTuple):
    """An incarnation of the controller says what it knows of the cluster."""

    incarnation: str
    holdings: Holdings


class Published(NamedTuple):
    """A process serves at `address`."""

    name: str
    address: str


class Withdrawn(NamedTuple):
    """The process that served at `address` is gone."""

    name: str
    address: str


class LookedUp(NamedTuple):
    """The caller needs an address, or the first one to be published; answered with it."""

    token: int
    name: str


class JoinRequested(NamedTuple):
    """A host is about to start JAX; answered with a `JoinReply` once all hosts of its island have come."""

    token: int
    host: HostInfo


class HostDescribed(NamedTuple):
    """A host that has joined under `epoch` says what its devices are."""

    host: int
    epoch: int
    hardware: Hardware


class IslandRemoved(NamedTuple):
    """An island was ended for good: its hosts will not come again."""

    island: int


class IslandAdded(NamedTuple):
    """The operator starts another island of so many hosts; answered with its number and theirs, or `Refused`. `spec`
    says to who starts islands what it is."""

    token: int
    hosts: int
    spec: bytes = b""


class DrainRequested(NamedTuple):
    """An island is to get no slices any more, and those that it has may stay for some seconds; answered with
    `Accepted` or `Refused`."""

    token: int
    island: int
    deadline_s: float
    reason: str = ""


class UndrainRequested(NamedTuple):
    """An island is to get slices again; answered with `Accepted` or `Refused`."""

    token: int
    island: int


class RemoveRequested(NamedTuple):
    """An island is to be ended for good; answered with `Accepted` or `Refused`."""

    token: int
    island: int


class HostServes(NamedTuple):
    """A scheduler has taken in a host that had joined."""

    host: KnownHost


class HostLeft(NamedTuple):
    """A host is gone that was up under `epoch`."""

    host: int
    epoch: int


class KillRequested(NamedTuple):
    """A scheduler cannot use the process that a host has under `epoch`."""

    host: int
    epoch: int


class SliceRequested(NamedTuple):
    """A session needs a slice; answered with `SliceCreated` or `Refused`, or, while islands have not joined, with
    `NotYet`, unless the request is the `final` one."""

    token: int
    session: int
    request: SliceRequest
    final: bool = True


class SliceReleased(NamedTuple):
    """A session gives a slice back; answered with whether it had it."""

    token: int
    session: int
    slice: int


class SlicesExchanged(NamedTuple):
    """Slices of a session change devices in pairs; answered with whether they did. Each call has a number of its own:
    one that comes again, since its answer was lost, changes nothing."""

    token: int
    session: int
    pairs: tuple[tuple[int, int], ...]
    call: int


class SlicesHeld(NamedTuple):
    """A session has come back to another controller with these slices, and no others; answered with True."""

    token: int
    session: int
    found: HeldSlices


class SessionReleased(NamedTuple):
    """A session has ended; answered with the number of slices it gives back."""

    token: int
    session: int


SliceQuestion = SliceRequested | SliceReleased | SlicesExchanged | SlicesHeld | SessionReleased

ControllerQuestion = SliceQuestion | DrainRequested | UndrainRequested | RemoveRequested


class FromController(NamedTuple):
    """The controller whose process began at `started`, its fencing token, asks or changes something about slices or
    islands. Once a later one has asked what there is, which would not know of it, it changes nothing, and the answer is
    None."""

    started: int
    question: ControllerQuestion


class ControllerAsks(NamedTuple):
    """A controller whose process began at `started` is about to take the place of another one, and asks who holds
    which slices; answered with `HeldSlices`."""

    token: int
    started: int


class Inquired(NamedTuple):
    """The caller looks at hosts and slices; answered once they are known."""

    token: int


class Ticked(NamedTuple):
    """Time has passed; comes every `core.TICK_S`. `slowness` is that of this machine."""

    slowness: float = 1.0


Event = (
    ControllerServes
    | ControllerStarts
    | ControllerHolds
    | Published
    | Withdrawn
    | LookedUp
    | JoinRequested
    | HostDescribed
    | IslandRemoved
    | IslandAdded
    | DrainRequested
    | UndrainRequested
    | RemoveRequested
    | HostServes
    | HostLeft
    | KillRequested
    | SliceQuestion
    | FromController
    | ControllerAsks
    | Inquired
    | Ticked
)

IslandChange = IslandAdded | DrainRequested | UndrainRequested | RemoveRequested

Question = SliceQuestion | FromController | Inquired | IslandChange
"""Events whose answers depend on hosts and slices."""

# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the event with this token; None where nobody listens to it any more."""

    token: int
    value: (
        str
        | int
        | bool
        | JoinReply
        | HeldSlices
        | SliceCreated
        | Accepted
        | Refused
        | NotYet
        | tuple[int, tuple[int, ...]]
        | None
    )


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Kill a host's process, stopped or stuck as it may be; Ray restarts it. It began at `started`, see `HostInfo`."""

    node: str
    pid: int
    reason: str
    host: int = -1
    started: int = 0


@dataclass(frozen=True, slots=True)
class KillHost:
    """Kill a host's actor, whose process is not known; Ray restarts it."""

    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class KillController:
    """Kill this process of the controller, and not one that has taken its place; where `pid` is 0, the one that its
    actor has. Ray restarts it."""

    actor: str
    reason: str
    pid: int = 0
    started: int = 0


@dataclass(frozen=True, slots=True)
class EndIsland:
    """End the processes of an island for good, and free what was reserved for them."""

    island: int
    hosts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep this where the successor of this process finds it."""

    islands: KeptIslands


Command = Answer | KillProcess | KillHost | KillController | EndIsland | Keep
