"""The controller's tables: sessions, buffers, launches on their islands, hosts; and the commands it gives."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pathways_ray.controller.deferred import DeferredLaunches
from pathways_ray.controller.programs import BufferType, PlannedProgram
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.scheduler.policies import Usage
from pathways_ray.transport.messages import Free, Launch, Put, ToClient, ToIsland


@dataclass(frozen=True, slots=True)
class SendIsland:
    island: int
    message: ToIsland


@dataclass(frozen=True, slots=True)
class SendClient:
    session: int
    message: ToClient


Command = SendIsland | SendClient


@dataclass(slots=True)
class Buffer:
    """One logical array: what it is, the launch that makes it (0: it is there), why it failed."""

    held: BufferType
    producer: int
    failure: Failure | None = None


@dataclass(slots=True)
class Session:
    """One connection of a tenant.

    `waiting` keeps the session's order while its head cannot be admitted, `admitting` is set while it is worked off;
    calls in `aside` come before it, and may be passed.
    `places` remembers released slices too, since buffers may outlive them. `device_bytes` is what its buffers take.
    """

    id: int
    tenant: Tenant
    usage: Usage
    slices: dict[int, PlacedSlice] = field(default_factory=dict)
    places: dict[int, PlacedSlice] = field(default_factory=dict)
    programs: dict[int, PlannedProgram] = field(default_factory=dict)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    waiting: deque[Launch | Put | Free] = field(default_factory=deque)
    aside: DeferredLaunches = field(default_factory=DeferredLaunches)
    in_flight: int = 0
    device_bytes: int = 0
    admitting: bool = False

    @property
    def backlog(self) -> int:
        """Calls that wait."""
        return len(self.aside.calls) + len(self.waiting)

    def lives(self, number: int) -> bool:
        """Whether a number stands for a buffer that is there or will be."""
        buffer = self.buffers.get(number)
        return buffer is not None and buffer.failure is None

    def keep(self, number: int, buffer: Buffer) -> None:
        """A buffer under the client's number for it."""
        self.buffers[number] = buffer
        if buffer.failure is None:
            self.device_bytes += buffer.held.device_bytes

    def forget(self, number: int) -> Buffer | None:
        """The buffer, out of the table; None when there is none."""
        buffer = self.buffers.pop(number, None)
        if buffer is not None and buffer.failure is None:
            self.device_bytes -= buffer.held.device_bytes
        return buffer

    def fail(self, buffer: Buffer, failure: Failure) -> None:
        """A buffer that will not be: it takes no memory."""
        buffer.producer = 0
        if buffer.failure is None:
            self.device_bytes -= buffer.held.device_bytes
        buffer.failure = failure


@dataclass(slots=True)
class InFlight:
    """A launch on its islands. `producers` are launches it consumes from that had no outcome at admission, `consumers`
    those that consume from it in turn; `root` is the failure of the first producer that failed. `device_seconds` is
    what it took so far, `estimate` what it was charged in advance."""

    sequence: int
    session: int
    usage: Usage
    launch: int
    program: PlannedProgram
    results: int
    arguments: tuple[int, ...]
    pending: set[int]
    producers: tuple[int, ...]
    estimate: float = 0.0
    device_seconds: float = 0.0
    next_gang: int = 0
    awaiting: set[int] = field(default_factory=set)
    failure: Failure | None = None
    root: Failure | None = None
    dependents: list[int] = field(default_factory=list)
    consumers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class HostState:
    """A host as last heard of; `down_since` is None while it is up. It has seen no launch up to number `since`."""

    host: int
    island: int
    epoch: int
    transfer_address: str
    data_address: str
    devices: int
    pid: int
    down_since: float | None = None
    since: int = 0
