"""Devices as first-in-first-out queues, and collectives as gloo does them.

A gang starts on a host when it is first in the queues of all its devices there and its inputs are ready. A gang over
several hosts then waits for the others. Collectives find each other by their order, not by name: the first of one host
meets the first of the next one, whatever they are. So hosts that enqueue in different orders get wrong values and no
error, and a gang that only some hosts have holds up all that is behind it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pathways_ray.errors import Failure
from pathways_ray.simulation.network import Network, Process
from pathways_ray.simulation.values import Future, agreed, when_all_ready
from pathways_ray.transport.messages import Heartbeat, Running

NOTED_AFTER_S = 0.5
"""A launch that keeps devices for longer is in the heartbeat, as on a real host."""

Identity = tuple[int, int]
"""A gang: its launch and its node."""

Report = Callable[[str], None]


@dataclass(eq=False, slots=True)
class Work:
    """A host's part in a gang. `compute` takes one value for each input and gives one for each output."""

    gang: Identity
    clique: tuple[int, ...]
    hosts: tuple[int, ...]
    devices: tuple[int, ...]
    inputs: Sequence[Future]
    outputs: list[Future]
    donated: tuple[int, ...]
    compute: Callable[[list[int]], list[int] | Failure]
    seconds: float
    queues: Devices
    started: bool = False
    since: float = 0.0
    asked: bool = False


@dataclass(eq=False)
class Group:
    """The hosts of an island under one epoch, as far as their collectives meet.

    `arrived` has, by clique and host, gangs that wait for those of the others.
    """

    report: Report
    arrived: dict[tuple[int, ...], dict[int, deque[Work]]] = field(default_factory=dict)

    def arrive(self, work: Work, host: int) -> None:
        waiting = self.arrived.setdefault(work.clique, {})
        waiting.setdefault(host, deque()).append(work)
        if len(waiting) < len(work.hosts) or not all(waiting.values()):
            return
        members = [waiting[host].popleft() for host in sorted(waiting)]
        if len({member.gang for member in members}) > 1:
            self.report(f"gangs of different launches met in a collective: {[m.gang for m in members]}")
        result = _computed(members)
        for member in members:
            member.queues.run_for(member, result, max(m.seconds for m in members))


def _computed(members: Sequence[Work]) -> list[int] | Failure:
    """The outputs of a gang, from the inputs on all its devices."""
    inputs = []
    for position in range(len(members[0].inputs)):
        found = [
            value
            for member in members
            if position < len(member.inputs)
            for value in member.inputs[position].memory().values()
        ]
        inputs.append(agreed(found))
    return members[0].compute(inputs)


@dataclass(eq=False)
class Devices:
    """The device queues of one host process, and what was put into each, in order."""

    network: Network
    process: Process
    host: int
    group: Group
    slowness: Callable[[], float]
    queues: dict[int, deque[Work]] = field(default_factory=dict)
    order: dict[int, list[Identity]] = field(default_factory=dict)

    def enqueue(self, work: Work) -> None:
        if any(value.remote and not value.ready for value in work.inputs):
            self.group.report(f"gang {work.gang} is in a device queue, and waits for another host")
        for device in work.devices:
            self.queues.setdefault(device, deque()).append(work)
            self.order.setdefault(device, []).append(work.gang)
        self._try(work)

    def _try(self, work: Work) -> None:
        if work.started or any(self.queues[device][0] is not work for device in work.devices):
            return
        if not all(value.ready for value in work.inputs):
            if not work.asked:
                work.asked = True
                when_all_ready(work.inputs, lambda: self.process.run(self._try, work))
            return
        work.started, work.since = True, self.network.clock.now
        failure = next((value.error for value in work.inputs if value.error is not None), None)
        if failure is not None:
            self._end(work, failure)
        elif len(work.hosts) > 1:
            self.group.arrive(work, self.host)
        else:
            self.run_for(work, _computed([work]), work.seconds)

    def run_for(self, work: Work, result: list[int] | Failure, seconds: float) -> None:
        for k in work.donated:
            work.inputs[k].overwritten = True
        if seconds < math.inf:
            self.network.after(self.process, seconds * self.slowness(), self._end, work, result)

    def heartbeat(self, slowness: float, sequence_of: Callable[[int], int]) -> Heartbeat:
        """The launches that have kept devices for a while, and those behind them, by the numbers that they were sent
        under."""
        now = self.network.clock.now
        works = sorted({work for queue in self.queues.values() for work in queue}, key=lambda work: work.gang)
        since = {sequence_of(work.gang[0]): work.since for work in works if work.started}
        running = [Running(one, round(1000 * (now - at))) for one, at in since.items() if now - at > NOTED_AFTER_S]
        queued = dict.fromkeys(one for work in works if (one := sequence_of(work.gang[0])) not in since)
        return Heartbeat(self.host, slowness, tuple(running), tuple(queued) if running else ())

    def _end(self, work: Work, result: list[int] | Failure) -> None:
        for device in work.devices:
            self.queues[device].popleft()
        for k, output in enumerate(work.outputs):
            if isinstance(result, Failure):
                output.settle({}, result)
            else:
                output.settle(dict.fromkeys(work.devices, result[k]))
        for device in work.devices:
            if self.queues[device]:
                self._try(self.queues[device][0])
