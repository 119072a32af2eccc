"""The result of `simulate`: start and end of every action and message."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from megatron_ptdp.schedules.actions import Entry, Schedule
from megatron_ptdp.schedules.lower import Value


class Span(NamedTuple):
    """A device does this from `start` to `end`, in seconds from the start of the step."""

    device: int
    entry: Entry
    start: float
    end: float

    def __str__(self) -> str:
        return str(self.entry)


class Transfer(NamedTuple):
    """The link is occupied from `start` to `end`; the message is there at `arrival`. `stage` sent it."""

    stage: int
    value: Value
    microbatch: int
    source: int
    target: int
    start: float
    end: float
    arrival: float

    def __str__(self) -> str:
        return f"{self.stage}SEND_{self.value}{self.microbatch}"


Event: TypeAlias = Span | Transfer


class Bubble(NamedTuple):
    """The time in which devices compute nothing, in both conventions. They are β and β/(1+β): never compare across.

    Attributes:
        busy: seconds of computation
        idle: seconds without, from the start of the step to its end
        of_ideal: idle / busy, as in the papers of GPipe and Megatron: (p-1)/m for 1F1B
        of_total: idle / (busy + idle), as in the papers of zero bubble: (p-1)/(m+p-1) for 1F1B
    """

    busy: float
    idle: float
    of_ideal: float
    of_total: float

    @classmethod
    def of(cls, busy: float, total: float) -> Bubble:
        idle = total - busy
        return cls(busy, idle, idle / busy if busy else 0.0, idle / total if total else 0.0)


@dataclass(frozen=True)
class Timeline:
    """One training step on all devices.

    Attributes:
        schedule: what was run
        rows: for each device its spans, in order
        transfers: in the order in which they got their links
        peak_memory: for each device, the most bytes of stashes it holds
        started: the spans of all devices in the order in which they started, each after what it needs. One controller
            may enqueue the whole step in this order.
        causes: for each span of `started`, what ended last of what it waited for, and None for the first ones; then,
            for each transfer, the same.
    """

    schedule: Schedule
    rows: tuple[tuple[Span, ...], ...]
    transfers: tuple[Transfer, ...]
    peak_memory: tuple[float, ...]
    started: tuple[Span, ...]
    causes: tuple[tuple[Event | None, ...], tuple[Event | None, ...]]

    @cached_property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of its last action."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @cached_property
    def bubbles(self) -> tuple[Bubble, ...]:
        """The bubble of each device, over the whole makespan."""
        busy = (sum(span.end - span.start for span in row) for row in self.rows)
        return tuple(Bubble.of(seconds, self.makespan) for seconds in busy)

    @cached_property
    def bubble(self) -> Bubble:
        """The bubble of all devices."""
        return Bubble.of(sum(bubble.busy for bubble in self.bubbles), self.makespan * len(self.rows))

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """Events from the start of the step to its end, each of which waited for the one before. Nothing else matters
        for the makespan as long as these take so long."""
        of_span = dict(zip(map(id, self.started), self.causes[0], strict=True))
        of_transfer = dict(zip(map(id, self.transfers), self.causes[1], strict=True))
        event: Event | None = max((row[-1] for row in self.rows if row), key=lambda span: span.end, default=None)
        path: list[Event] = []
        while event is not None:
            path.append(event)
            event = of_span[id(event)] if isinstance(event, Span) else of_transfer[id(event)]
        return tuple(reversed(path))
