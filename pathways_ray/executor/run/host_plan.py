"""One host's part in a plan, as far as decisions need it: steps and barriers, arguments, results. Pure."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from pathways_ray import limits
from pathways_ray.errors import Failure
from pathways_ray.executor.data.failure_texts import OF_A_PEER
from pathways_ray.executor.run.barriers import HostStep, InputBarrier, hosts_of, is_independent, with_barriers
from pathways_ray.ir.plan import Device, Execute, IslandPlan, Regroup, Reshard, Send
from pathways_ray.ir.regions import shard_shape
from pathways_ray.ir.types import ArrayType, Layout, item_bytes
from pathways_ray.transport.messages import Gang, IslandLaunch, IslandLaunchFailed

NO_LIMIT = 1 << 60
"""The gang that a launch may not reach, where it may reach all."""


def has_part(plan: IslandPlan, host: int) -> bool:
    """Whether anything of a plan happens on a host. One without a part gets the launches too, and only ends them."""
    return any(host in placed.hosts for placed in plan.slices)


class Route(NamedTuple):
    """The steps and barriers that a launch passes on a host, in order; for each position, that of the next barrier (of
    the end, behind the last one)."""

    steps: tuple[HostStep, ...]
    barriers: tuple[int, ...]

    @classmethod
    def along(cls, steps: tuple[HostStep, ...]) -> Route:
        barriers, following = [], len(steps)
        for position in range(len(steps), -1, -1):
            if position < len(steps) and isinstance(steps[position], InputBarrier):
                following = position
            barriers.append(following)
        return cls(steps, tuple(reversed(barriers)))

    def stop(self, first: int, limit: int) -> int:
        """The position of the first step from `first` on that cannot be enqueued: a barrier, or a gang from `limit` on.
        That of the end, where all can."""
        stop = self.barriers[first]
        return next((at for at in range(first, stop) if self.steps[at].gang >= limit), stop)


@dataclass(frozen=True)
class HostPlan:
    """A plan as host `host` sees it.

    Args:
        multi_host: whether the island has other hosts.
    """

    plan: IslandPlan
    host: int
    multi_host: bool

    def __post_init__(self) -> None:
        """Derives everything now, so that the thread that enqueues does not have to at the first launch."""
        for derived in vars(HostPlan).values():
            if isinstance(derived, functools.cached_property) and derived.attrname is not None:
                getattr(self, derived.attrname)

    @functools.cached_property
    def has_part(self) -> bool:
        return has_part(self.plan, self.host)

    @functools.cached_property
    def whole(self) -> Route:
        """The way of a launch that is dispatched as a whole."""
        return Route.along(with_barriers(self.plan.steps, self.plan, self.host, self.multi_host))

    @functools.cached_property
    def by_gang(self) -> Route:
        """The way of a launch whose gangs are dispatched one at a time."""
        steps = sorted(self.plan.steps, key=lambda step: step.gang)
        return Route.along(with_barriers(steps, self.plan, self.host, self.multi_host))

    def route_of(self, launch: IslandLaunch) -> Route:
        return self.by_gang if launch.gangs else self.whole

    def barrier_at(self, launch: IslandLaunch, position: int) -> InputBarrier:
        barrier = self.route_of(launch).steps[position]
        assert isinstance(barrier, InputBarrier)
        return barrier

    @functools.cached_property
    def is_unobstructed(self) -> bool:
        """Whether there are steps for this host, and no barrier among them."""
        return bool(self.whole.steps) and not any(isinstance(step, InputBarrier) for step in self.whole.steps)

    @functools.cached_property
    def computes(self) -> bool:
        """Whether it only computes, on any host, and exchanges nothing with other islands."""
        return all(isinstance(step, Execute | Regroup | Reshard) for step in self.plan.steps)

    @functools.cached_property
    def may_be_early(self) -> bool:
        """Whether launches may begin before their scheduler sends them: they only compute, no host waits for another
        one before it enqueues, they take the memory of nothing, and make something that they are told by, which is
        small. Clients know that as well, but nobody has looked at what one hands over."""
        small = bool(self.plan.results) and self._result_bytes <= limits.MAX_EARLY_BYTES
        taken = any(self._donated(step) for step in self.plan.steps)
        return self.is_unobstructed and self.computes and not taken and not self.plan.decides and small

    def _donated(self, step: HostStep) -> set[int]:
        """The slots of arguments whose memory a step takes."""
        if not isinstance(step, Execute):
            return set()
        donated = {step.inputs[k] for k in self.plan.executables[step.executable].donated}
        return donated & {slot for slot, _ in self.plan.arguments}

    @functools.cached_property
    def result_types(self) -> dict[int, tuple[ArrayType, Layout]]:
        """The types of the results on all hosts, by their numbers, as far as a step says them."""
        plan, found = self.plan, dict[int, tuple[ArrayType, Layout]]()
        for step in plan.steps:
            match step:
                case Execute():
                    made = plan.executables[step.executable]
                    found |= zip(step.inputs, zip(made.inputs, made.input_layouts, strict=True), strict=True)
                    found |= zip(step.outputs, zip(made.outputs, made.output_layouts, strict=True), strict=True)
                case Regroup():
                    found[step.target] = step.type, step.layout
                case Reshard():
                    edges = plan.bundles[step.bundle].edges
                    found |= {slot: (edge.type, edge.target) for slot, edge in zip(step.targets, edges, strict=True)}
        return {number: found[slot] for slot, number in plan.results if slot in found}

    @functools.cached_property
    def _result_bytes(self) -> float:
        """Bytes of the results on all devices; without a bound where nothing here says of what type one is."""
        if len(self.result_types) < len(self.plan.results):
            return math.inf
        return sum(self._device_bytes(*kind) for kind in self.result_types.values())

    def _device_bytes(self, kind: ArrayType, layout: Layout) -> int:
        mesh = self.plan.placed(layout.slice).mesh
        return math.prod(shard_shape(kind, layout.spec, mesh)) * item_bytes(kind.dtype) * mesh.size

    @functools.cached_property
    def is_independent(self) -> bool:
        return is_independent(self.whole.steps, self.plan)

    @functools.cached_property
    def offers(self) -> bool:
        """Whether a launch has something for other hosts."""
        return any(isinstance(step, Send) for step in self.whole.steps)

    @functools.cached_property
    def last_gang(self) -> int:
        return max((step.gang for step in self.plan.steps), default=0)

    @functools.cached_property
    def _here(self) -> tuple[bool, ...]:
        """Whether this host has a shard of each slot."""
        return tuple(self.host in self.plan.placed(slice_id).hosts for slice_id in self.plan.slots)

    @functools.cached_property
    def arguments(self) -> tuple[tuple[int, int, bool], ...]:
        """The slot and the number of each argument, and whether this host has a shard of it.

        Those on other hosts of the island count too: all hosts wait for the same launches at the same points. Otherwise
        they would enqueue later launches in different orders.
        """
        return tuple((slot, number, self._here[slot]) for slot, number in self.plan.arguments)

    @functools.cached_property
    def taken(self) -> tuple[tuple[int, int], ...]:
        """The slot and the number of each argument that this host takes from its store."""
        return tuple((slot, number) for slot, number, here in self.arguments if here)

    @functools.cached_property
    def types(self) -> dict[int, tuple[ArrayType, Layout]]:
        """The types of the arguments that this host takes, by their numbers."""
        numbers = {number for _, number in self.taken}
        every = zip(self.plan.arguments, self.plan.argument_types, strict=False)
        return {number: kind for (_, number), kind in every if number in numbers}

    @functools.cached_property
    def results(self) -> tuple[tuple[int, int], ...]:
        """The slot and the number of each result that this host stores."""
        return tuple((slot, number) for slot, number in self.plan.results if self._here[slot])

    @functools.cached_property
    def repeated(self) -> list[int]:
        """The results whose values are those of earlier ones, by their numbers: the program has moved them and back."""
        first: dict[int, int] = {}
        return [number for slot, number in self.results if first.setdefault(slot, number) != number]

    @functools.cached_property
    def handed_on(self) -> dict[int, int]:
        """The slots of results that are arguments, and the numbers of these, which are not made here."""
        given = dict(self.taken)
        return {slot: given[slot] for slot, _ in self.results if slot in given}

    @functools.cached_property
    def awaited(self) -> tuple[int, ...]:
        """The slots whose readiness ends a launch on this host: of each gang the first of its outputs, in whose place
        its end is waited for."""
        found = (root for slot in self.plan.awaited if self._here[slot] for root in self._roots(slot) or [slot])
        return tuple(dict.fromkeys(found))

    def _roots(self, slot: int) -> list[int]:
        """The first outputs of the gangs that make a value, as far as they run here; none where something else does."""
        for step in self.plan.steps:
            if isinstance(step, Execute) and slot in step.outputs:
                return [step.outputs[0]]
            if isinstance(step, Regroup) and slot == step.target:
                sources = [self._roots(source) for source in step.sources if self._here[source]]
                return [root for roots in sources for root in roots] if all(sources) else []
        return []

    @functools.cached_property
    def decides(self) -> tuple[int, ...]:
        """The slots of the scalars whose values this host says: that of a slice's first device does."""
        devices = {slot: self.plan.placed(self.plan.slots[slot]).devices[0] for slot in self.plan.decides}
        return tuple(slot for slot, device in devices.items() if device.host == self.host)

    @functools.cached_property
    def overwritten(self) -> tuple[int, ...]:
        """The slots of arguments whose memory a computation takes here."""
        return tuple(sorted({slot for step in self.whole.steps for slot in self._donated(step)}))

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices of the island that the plan uses."""
        slices = [placed for placed in self.plan.slices if placed.island == self.plan.island]
        return tuple(sorted({device for placed in slices for device in placed.devices}))

    @functools.cached_property
    def watched_with(self) -> tuple[Device, ...]:
        """The devices whose launches are awaited and reported in one order. Launches on other devices must not wait
        behind them; but the hosts of an island report all launches in the order in which they enqueue."""
        return () if self.multi_host else self.devices

    @functools.cached_property
    def own_devices(self) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.host == self.host)

    # --- what is reported of a launch ---------------------------------------------------------------------------------

    def gangs_between(self, launch: IslandLaunch, first: int, last: int, members: tuple[int, ...]) -> tuple[Gang, ...]:
        """The gangs that a launch enqueues in its steps from `first` up to `last`."""
        return tuple(
            Gang(launch.sequence, step.gang, sum(1 << members.index(host) for host in hosts_of(step, self.plan)))
            for step in self.route_of(launch).steps[first:last]
            if isinstance(step, Execute | Reshard)
        )

    def failed(self, sequence: int, failure: Failure, place: int, consumed: tuple[int, ...] = ()) -> IslandLaunchFailed:
        """The report of a launch that failed.

        Args:
            place: of the value that failed, in `awaited`; all hosts that have a shard of it must fail with it.
            consumed: the arguments whose memory it took.
        """
        hosts = self.plan.placed(self.plan.slots[self.awaited[place]]).hosts if self.multi_host else ()
        return IslandLaunchFailed(sequence, self._attributed(failure), hosts, consumed)

    def _attributed(self, failure: Failure) -> Failure:
        """A failure with the computations it can come from. One that happens on a device shows when results are
        awaited, without a name; one that a peer's data brought is left to the peer to name."""
        if failure.node or failure.kind != "ExecutionError" or OF_A_PEER in failure.message:
            return failure
        return self.plan.attributed(failure)
