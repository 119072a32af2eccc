"""A launch on a host, from its arrival until all of it is enqueued: its phase, and how far it is. Pure.

`TRANSITIONS` is the whole life of a launch that may stop somewhere. Most cannot: they run through as they arrive, and
are never active.
"""

from __future__ import annotations

from enum import Enum

from pathways_ray.errors import Failure
from pathways_ray.executor.run.barriers import InputBarrier
from pathways_ray.executor.run.host_plan import NO_LIMIT, HostPlan
from pathways_ray.transport.messages import IslandLaunch


class Phase(Enum):
    """The reason for which a launch is on this host."""

    __hash__ = object.__hash__  # that of Enum costs a tenth of a microsecond on the way of every launch

    STARTING = "has just arrived"
    WAITING_FOR_INPUTS = "waits for results of earlier launches"
    AT_BARRIER = "waits for data of other hosts, or for the other hosts themselves"
    WAITING_FOR_GANG = "has enqueued the gangs that were dispatched, and waits for the next one"
    ENQUEUED = "is all on the device queues here, and waits for the other hosts before it ends"
    DONE = "has stored its results"


STARTING, WAITING_FOR_INPUTS, AT_BARRIER, WAITING_FOR_GANG, ENQUEUED, DONE = Phase

TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    STARTING: frozenset({WAITING_FOR_INPUTS, AT_BARRIER, WAITING_FOR_GANG, ENQUEUED, DONE}),
    WAITING_FOR_INPUTS: frozenset({AT_BARRIER, WAITING_FOR_GANG, ENQUEUED, DONE}),
    AT_BARRIER: frozenset({AT_BARRIER, WAITING_FOR_GANG, ENQUEUED, DONE}),
    WAITING_FOR_GANG: frozenset({WAITING_FOR_GANG, AT_BARRIER, ENQUEUED, DONE}),
    ENQUEUED: frozenset({WAITING_FOR_GANG, DONE}),
    DONE: frozenset(),
}


class PendingResults:
    """The results of a launch that later launches can name before they are stored.

    `consumers` has the launches that wait for each of them, `freed` those that were freed meanwhile: they leave the
    store as soon as they have come.
    """

    __slots__ = ("consumers", "freed")

    def __init__(self) -> None:
        self.consumers: dict[int, list[ActiveLaunch]] = {}
        self.freed: list[int] = []


class ActiveLaunch:
    """A launch that is not through on this host.

    `position` is the step at which it goes on, and `limit` the gang that it may not reach yet (dispatch of one gang
    at a time raises it). `reported` is the last gang that the scheduler knows to be enqueued. `unresolved` are the
    inputs that earlier launches have yet to store, each with the slots that take it; the last one is resolved when the
    launch leaves WAITING_FOR_INPUTS. `pending` is set while others can name its results. `arrived` is the last barrier
    whose inputs are here or failed, `brought` the failure that came there; `failure` is set once the launch has ended
    elsewhere, and comes in place of all inputs from then on.
    """

    __slots__ = (
        "arrived",
        "brought",
        "failure",
        "launch",
        "limit",
        "pending",
        "phase",
        "plan",
        "position",
        "reported",
        "route",
        "unresolved",
    )

    def __init__(self, launch: IslandLaunch, plan: HostPlan) -> None:
        self.launch = launch
        self.plan = plan
        self.route = plan.route_of(launch)
        self.phase = STARTING
        self.position = 0
        self.limit = launch.first + launch.gangs if launch.gangs else NO_LIMIT
        self.reported = -1
        self.unresolved: dict[int, list[int]] = {}
        self.pending: PendingResults | None = None
        self.arrived = -1
        self.brought: Failure | None = None
        self.failure: Failure | None = None

    def enter(self, phase: Phase) -> None:
        """Goes to another phase. Raises `AssertionError` for one that `TRANSITIONS` does not allow."""
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"launch {self.launch.sequence} cannot go from {self.phase.name} to {phase.name}")
        self.phase = phase

    @property
    def goes_early(self) -> bool:
        """Whether it may go on with results of a launch that has not ended on all hosts."""
        return self.plan.is_independent and not self.launch.gangs

    @property
    def results(self) -> list[int]:
        """The numbers of all its result buffers, also of those on other hosts."""
        return [self.launch.results + number for _, number in self.plan.plan.results]

    @property
    def barrier(self) -> InputBarrier | None:
        """The barrier at which it waits; None when it does not."""
        if self.phase is not AT_BARRIER and self.phase is not ENQUEUED:
            return None
        step = self.route.steps[self.position]
        return step if isinstance(step, InputBarrier) else None
