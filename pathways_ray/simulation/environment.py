"""The run as its processes see it.

A process knows the `Environment` and the protocol beside its own class that extends it; the checker sees a process as
an `Observer`. `World` alone knows all classes.
"""

from __future__ import annotations

from random import Random
from typing import Protocol

from pathways_ray.controller.launches import Launches
from pathways_ray.errors import Failure
from pathways_ray.executor.run.core import HostCore
from pathways_ray.scheduler.core import SchedulerCore
from pathways_ray.simulation.clock import Clock
from pathways_ray.simulation.devices import Devices
from pathways_ray.simulation.log import Log
from pathways_ray.simulation.network import Network, Process
from pathways_ray.simulation.settings import Settings
from pathways_ray.simulation.values import Future, Outcome
from pathways_ray.transport.messages import HostDown, HostUp


class Observer(Protocol):
    """Steps of processes that an observer checks. It changes nothing that it is given."""

    def report(self, what: str) -> None:
        """Notes what should not be."""

    def launched(self, session: int, launch: int, fails: bool, doubtful: bool) -> None:
        """A client made a launch.

        Args:
            fails: a call that it depends on is poisoned.
            doubtful: it takes another result of such a launch.
        """

    def trespassed(self, session: int, launch: int) -> None:
        """A client made a launch that names a buffer its session does not have."""

    def uploaded_amiss(self, session: int, launch: int) -> None:
        """A client made a launch whose arguments are not on all hosts, or not of their type."""

    def compiles(self, host: int, program: str, functions: tuple[str, ...]) -> None:
        """A host begins to compile a program that it will not come to the end of."""

    def blamed(self, launches: Launches, message: HostDown) -> None:
        """The controller is about to learn of a host that was lost."""

    def outcome(self, session: int, launch: int, failure: Failure | None, by_client: bool = False) -> None:
        """A client learned the outcome of a launch, or decided it (`by_client`)."""

    def expect(self, session: int, buffer: int, outcome: Outcome, doubtful: bool) -> None:
        """A client made a buffer that should hold `outcome`."""

    def result(self, host: int, session: int, buffer: int, value: Future | Failure) -> None:
        """A host put a launch's result into its store."""

    def fetched(self, session: int, what: str, expected: Outcome, shards: dict[tuple[int, int], int]) -> None:
        """A client fetched a buffer, or got the value of a call, as `what` says."""

    def fetch_failed(self, session: int, buffer: int, failure: Failure, revived: bool = False) -> None:
        """A client's fetch failed; of an array that it may count on to be there (`revived`)."""

    def host_serves(self, island: int, host: int, epoch: int, devices: Devices) -> None:
        """A host begins to serve under an epoch."""

    def host_accepted(self, island: int, host: int, epoch: int, last: int) -> None:
        """A scheduler accepted a host; the last time under epoch `last`."""

    def host_known(self, launches: Launches, message: HostUp) -> None:
        """The controller is about to learn of a host that serves."""

    def heard_from(self, core: SchedulerCore, host: int, epoch: int) -> None:
        """A scheduler acted on a message that a host sent under an epoch."""

    def host_bounded(self, core: HostCore) -> None:
        """A host handled a batch."""

    def scheduler_bounded(self, core: SchedulerCore) -> None:
        """A scheduler handled a batch of its controller."""

    def controller_bounded(self, launches: Launches) -> None:
        """The controller handled an event."""

    def island_restarts(self, island: int, message: HostDown) -> None:
        """A scheduler has lost a host, and has the whole island start again."""

    def session_ended(self, session: int) -> None:
        """A client left, or died, or lost its session; 0 for a session that was never opened."""

    def check_kept(self, session: int, handles: set[int], last_drop: float) -> None:
        """A client has nothing under way, and handles to these buffers only since it last dropped one."""


class Environment(Protocol):
    """Everything that any process needs of its run. `machine_slowness` is what processes read of their machine."""

    machine_slowness: float

    settings: Settings
    random: Random
    clock: Clock
    log: Log
    network: Network

    @property
    def checker(self) -> Observer: ...

    def kill(self, process: Process, why: str) -> None:
        """Ends a process; Ray starts a successor, unless it is a client's."""

    def hosts_told(self, scheduler: Process) -> None:
        """A scheduler sends something to all its hosts."""

    def step_begins(self) -> None:
        """A step of a move, a suspension or a change of islands begins: faults may fall into it."""
