"""Runs a schedule on costs: an event simulation in one thread, without time passing.

Each device takes its actions strictly in order. An action starts when the one before it on the device has ended and all
it needs is there. When it ends, its output goes onto the link to the neighbouring stage's device, behind what the link
carries already. Events are handled in the order of their time, then of the device's number: the same each time.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

from megatron_ptdp.schedules.actions import Schedule
from megatron_ptdp.schedules.check import peak_memory
from megatron_ptdp.schedules.costs import Costs
from megatron_ptdp.schedules.flow import Flow
from megatron_ptdp.schedules.lower import Value
from megatron_ptdp.schedules.timeline import Event, Span, Timeline, Transfer

_Way = tuple[int, float, float]
"""The way of an output to its consumer: the number of the link, or -1 inside a device; seconds on the link, and
after it."""


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The start and end of each action and each message.

    Args:
        schedule: as `check` takes it
        costs: left out, F, I and W take 1 each, B takes 2, messages take no time and each stash is 1.

    Raises:
        ScheduleError: the schedule cannot run, or the costs do not fit it.
    """
    full = (costs or Costs.uniform(schedule.stages)).filled(schedule.stages)
    flow = Flow.of(schedule)
    run = _Run(schedule, full, flow)
    run.play()
    if len(run.started) < len(flow.entries):
        flow.order()  # names the deadlock
    peaks = peak_memory(schedule, full.stash, full.kept)
    return run.timeline(peaks)


class _Run:
    """The state of the devices and links. Steps are numbers of `Flow`; None stands for the start of it all."""

    def __init__(self, schedule: Schedule, costs: Costs, flow: Flow) -> None:
        self.schedule, self.flow = schedule, flow
        self.overlap = costs.overlap
        self.seconds = costs.seconds(flow.entries)
        self.ways, links = _ways(schedule, costs)
        self.takers = flow.takers
        # Of steps: how many outputs are to come, when the last of those that came was there, and what brought it.
        self.missing = [len(needs) for needs in flow.needs]
        self.there = [0.0] * len(flow.entries)
        self.brought: list[Event | None] = [None] * len(flow.entries)
        # Of devices: the next step, whether one runs, from when on it is free, and what it did until then.
        self.head = list(flow.starts[:-1])
        self.running: list[Span | None] = [None] * schedule.devices
        self.free = [0.0] * schedule.devices
        self.before: list[Event | None] = [None] * schedule.devices
        # Of links: from when on they are free, and what they carried until then.
        self.link_free = [0.0] * links
        self.carried: list[Event | None] = [None] * links
        # What has happened.
        self.events: list[tuple[float, int]] = []
        self.started: list[Span] = []
        self.causes: list[Event | None] = []
        self.transfers: list[Transfer] = []
        self.transfer_causes: list[Event | None] = []

    def play(self) -> None:
        for device in range(self.schedule.devices):
            self._start(device)
        while self.events:
            _, device = heapq.heappop(self.events)
            self._end(device)

    def _start(self, device: int) -> None:
        """Starts the device's next step, if there is one, the device computes nothing, and all is there."""
        step = self.head[device]
        if self.running[device] or step == self.flow.starts[device + 1] or self.missing[step]:
            return
        free, there = self.free[device], self.there[step]
        late = there > free
        start = there if late else free
        end = start + self.seconds[step]
        span = Span(device, self.flow.entries[step], start, end)
        self.running[device] = span
        self.started.append(span)
        self.causes.append(self.brought[step] if late else self.before[device])
        heapq.heappush(self.events, (end, device))

    def _end(self, device: int) -> None:
        """The step that runs has ended: its outputs leave, and what waited for this may start."""
        span = self.running[device]
        assert span is not None
        step = self.head[device]
        self.running[device] = None
        self.head[device] = step + 1
        self.free[device] = span.end
        self.before[device] = span
        served = []
        for taker, hop in self.takers[step]:
            link, occupied, after = self.ways[hop]
            brought: Event = span
            arrival = span.end
            if link >= 0:
                brought = self._carry(span, hop, self.flow.device[taker], link, occupied, after)
                arrival = brought.arrival
                if not self.overlap and brought.end > self.free[device]:
                    self.free[device] = brought.end
                    self.before[device] = brought
            self.missing[taker] -= 1
            if self.brought[taker] is None or arrival > self.there[taker]:
                self.there[taker] = arrival
                self.brought[taker] = brought
            served.append(self.flow.device[taker])
        for other in (*served, device):
            self._start(other)

    def _carry(self, span: Span, hop: int, target: int, link: int, occupied: float, after: float) -> Transfer:
        busy = self.link_free[link] > span.end
        start = self.link_free[link] if busy else span.end
        end = start + occupied
        value: Value = "B" if hop % 2 else "F"
        sent = span.entry.parts[-1 if hop % 2 else 0]  # a pair is a forward, then a backward
        transfer = Transfer(sent.stage, value, sent.microbatch, span.device, target, start, end, end + after)
        self.transfers.append(transfer)
        self.transfer_causes.append(self.carried[link] if busy else span)
        self.link_free[link] = end
        self.carried[link] = transfer
        return transfer

    def timeline(self, peaks: tuple[float, ...]) -> Timeline:
        rows: list[list[Span]] = [[] for _ in range(self.schedule.devices)]
        for span in self.started:
            rows[span.device].append(span)
        return Timeline(
            self.schedule,
            tuple(map(tuple, rows)),
            tuple(self.transfers),
            peaks,
            tuple(self.started),
            (tuple(self.causes), tuple(self.transfer_causes)),
        )


def _ways(schedule: Schedule, costs: Costs) -> tuple[list[_Way], int]:
    """For each hop of the flow the way it takes; and how many links there are."""
    numbers: dict[str | tuple[int, int], int] = {}
    ways: list[_Way] = []
    for (here, there), size in zip(pairwise(schedule.placement), costs.message, strict=True):
        for source, target in ((here, there), (there, here)):
            link = costs.link_of(source, target)
            if source == target:
                ways.append((-1, 0.0, 0.0))
            else:
                number = numbers.setdefault(link.name or (source, target), len(numbers))
                ways.append((number, size / link.bytes_per_second, link.latency_s))
    return ways, len(numbers)
