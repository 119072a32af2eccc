"""What the scheduler knows, and the commands that its decisions end in. `order.py` decides."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pathways_ray.errors import Failure
from pathways_ray.scheduler.policies import Candidate, Usage
from pathways_ray.transport.messages import Drop, DropProgram, FromIsland, IslandLaunch, IslandLaunchFailed, ToHost

UNMEASURED_S = 0.005
"""What a launch is taken for until the first one of its program has been measured."""


@dataclass(frozen=True, slots=True)
class ToHosts:
    """Send to every host of the island that is up."""

    message: ToHost


@dataclass(frozen=True, slots=True)
class ToController:
    message: FromIsland


@dataclass(frozen=True, slots=True)
class Refuse:
    """Close the stream of a host that joined with an old epoch."""

    host: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Have the process of a host under `epoch` killed, so that it comes back under a new one."""

    host: int
    epoch: int


Command = ToHosts | ToController | Refuse | Kill


@dataclass(slots=True)
class ProgramState:
    """What the scheduler knows of a program. `seconds` is the mean time of a launch on its devices, 0 while unknown."""

    name: str = ""
    devices: int = 1
    device_set: int = 0
    cross_island: bool = False
    seconds: float = 0.0

    @property
    def estimate(self) -> float:
        """Seconds on its devices that the next launch will take, presumably."""
        return self.seconds or UNMEASURED_S

    def measure(self, seconds: float) -> None:
        self.seconds = seconds if not self.seconds else self.seconds + 0.1 * (seconds - self.seconds)


@dataclass(slots=True)
class Lane:
    """Launches of this island alone on one set of devices that are with the hosts, and their estimated seconds."""

    launches: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Queue:
    """What a session has waiting; `candidate` describes the launch at its head."""

    session: int
    usage: Usage
    candidate: Candidate
    items: deque[IslandLaunch | Drop | DropProgram] = field(default_factory=deque)

    @property
    def head(self) -> IslandLaunch:
        """Its next launch; what stands before a launch is sent at once."""
        run = self.items[0]
        assert isinstance(run, IslandLaunch), run
        return run


@dataclass(slots=True)
class Outstanding:
    """A launch with the hosts: who has yet to complete it, the first failure seen, the most microseconds it took.

    `failed_on` are hosts that failed, `failed_at` is when the first one did, in seconds; `must_fail` hosts that have
    part in what failed. `arrived` are, by gate, the hosts that have come to it; `missed` the failure that one of them
    got there.
    """

    hosts: set[int]
    run: IslandLaunch
    program: ProgramState
    usage: Usage
    estimate: float
    device_us: int = 0
    failed: IslandLaunchFailed | None = None
    failed_on: set[int] = field(default_factory=set)
    failed_at: float = 0.0
    must_fail: set[int] = field(default_factory=set)
    succeeded: bool = False
    arrived: dict[int, set[int]] = field(default_factory=dict)
    missed: dict[int, Failure] = field(default_factory=dict)
