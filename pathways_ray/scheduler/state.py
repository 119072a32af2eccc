"""Records of a scheduler: programs, queues, launches with the hosts. `order.py` changes them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pathways_ray.errors import Failure
from pathways_ray.scheduler.devices import DeviceSet
from pathways_ray.scheduler.estimates import MovingAverage
from pathways_ray.scheduler.events import Command
from pathways_ray.scheduler.policies import Candidate, Usage
from pathways_ray.transport.messages import Drop, DropProgram, IslandLaunch, IslandLaunchFailed, Program


class RestartIsland(NamedTuple):
    """A decision of the order, always its last one: the island's hosts have to start again.

    `host` is the one whose report led to it, `kind` the error that launches get. `launch` is the launch that the reason
    names, or 0; `program` the one whose compilation is at fault, or 0. One that has neither names nothing of a tenant,
    and is told to all. A launch that was over its limit had its devices for `seconds`, and is to blame.
    """

    host: int
    reason: str
    kind: str = "HostLost"
    launch: int = 0
    program: int = 0
    seconds: float = 0.0


Decision = Command | RestartIsland


@dataclass(slots=True)
class ProgramState:
    """A program as the scheduler knows it. `seconds` is the time of a launch on each of its devices. One that `calls`
    host functions waits for them beside the devices. A launch has so many `results`, and may take the memory of the
    `donated` arguments. It is its `tenant`'s. One whose `islands` are 0 is not known. The `inline` hosts run its
    computations within the call that enqueues them, where nothing is under way that these take or wait behind; all of
    its hosts do where it `is_inline`."""

    name: str = ""
    devices: DeviceSet = field(default_factory=DeviceSet)
    cross_island: bool = False
    seconds: MovingAverage = field(default_factory=MovingAverage)
    computations: int = 1
    calls: bool = False
    results: int = 0
    donated: tuple[int, ...] = ()
    islands: int = 0
    tenant: str = ""
    inline: set[int] = field(default_factory=set)
    is_inline: bool = False
    counts: bool = field(init=False)
    """Whether its launches count as work on their devices while they are with the hosts. Those that wait for other
    islands, or for host functions, may have none there."""
    waits_for_calls: bool = field(init=False)
    """Whether launches call host functions, and run on this island alone."""
    width: int = field(init=False)
    """Devices that a launch keeps."""

    def __post_init__(self) -> None:
        self.counts = not (self.cross_island or self.calls)
        self.waits_for_calls = self.calls and not self.cross_island
        self.width = len(self.devices.devices) or 1

    @classmethod
    def of(cls, message: Program, devices: DeviceSet, known: ProgramState | None) -> ProgramState:
        """The program of a message; one that was `known` keeps the time that its launches have taken."""
        seconds = known.seconds if known is not None else MovingAverage()
        kind = message.cross_island, seconds, message.computations, message.calls
        return cls(message.name, devices, *kind, message.results, message.donated, message.islands, message.tenant)


@dataclass(slots=True)
class SessionQueue:
    """Messages of a session that wait; `candidate` describes the launch at the head. It goes with the last one once the
    session has `ended`, or the controller that knew it has. `ranks` are when launches count as called, by sequence;
    some are `prioritized`."""

    session: int
    usage: Usage
    candidate: Candidate
    items: deque[IslandLaunch | Drop | DropProgram] = field(default_factory=deque)
    ended: bool = False
    ranks: dict[int, float] = field(default_factory=dict)
    prioritized: bool = False

    @property
    def head(self) -> IslandLaunch:
        """The next launch; messages before a launch are sent at once."""
        launch = self.items[0]
        assert isinstance(launch, IslandLaunch), launch
        return launch

    def lead(self, launch: IslandLaunch, now: float) -> None:
        """Notes that a launch has come to the head."""
        self.candidate.arrival = launch.sequence
        self.candidate.since = now


@dataclass(slots=True)
class InputBarrier:
    """An input barrier of a launch: the hosts that have reached it, and the first failure that one of them got."""

    reached: set[int] = field(default_factory=set)
    failure: Failure | None = None


@dataclass(slots=True)
class PartialFailure:
    """A launch that has failed on some hosts.

    `report` is the first host's, with what any of them consumed. `hosts` have failed so far; `affected` hosts hold
    shards of the value that failed, and must fail too.
    """

    report: IslandLaunchFailed
    hosts: set[int] = field(default_factory=set)
    affected: set[int] = field(default_factory=set)


class Outstanding(msgspec.Struct):
    """A launch with the hosts, which got it at time `at`; its tenant was charged already with `charge` device seconds.
    `hosts` have yet to complete it; `device_us` is the longest time on the devices of one of the others, and
    `succeeded` says whether one of them completed it without failure. `enqueued` has, by gang, the hosts that have it
    on their device queues, where gangs come one at a time. One that `is_inline` counts as none in device queues."""

    hosts: set[int]
    launch: IslandLaunch
    program: ProgramState
    usage: Usage
    estimate: float
    charge: float = 0.0
    at: float = 0.0
    is_inline: bool = False
    device_us: int = 0
    succeeded: bool = False
    failed: PartialFailure | None = None
    barriers: dict[int, InputBarrier] = {}
    enqueued: dict[int, set[int]] = {}
