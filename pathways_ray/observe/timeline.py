"""One timeline over client, controller, schedulers and hosts, as a file for Perfetto (the JSON of trace events).

Each launch is a slice on every process that had it, joined by a flow from the call, or its admission, to the gangs on
devices and to its outcome. Slices of one process that overlap stand in lanes. Times of processes on other machines are
moved by the offset of their clocks; the file says how far these may be wrong.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from pathways_ray.observe.predictions import Prediction, Span

MAX_LANES = 128
"""Lanes of a process; what overlaps more is left out, and counted."""

MAX_SLICES = 250_000
"""Slices of a file, some 90 MB, which Perfetto still opens; of a longer trace the last ones are drawn."""

MIN_SLICES = 1000
"""Of each process, however many there are."""

COLOURS = (
    "thread_state_running",
    "rail_response",
    "rail_animation",
    "rail_load",
    "cq_build_passed",
    "cq_build_failed",
    "thread_state_iowait",
    "good",
    "bad",
    "terrible",
    "yellow",
    "olive",
)
"""Names of colours of trace events; tenants get them in turn."""

CLIENT, CONTROLLER, SCHEDULERS, HOSTS = 1, 2, 10, 100_000


Record = TypeVar("Record", bound=tuple[Any, ...])


class Clock(msgspec.Struct, frozen=True):
    """The clock of a process beside that of the collector: seconds to take off its times, and the largest error."""

    offset_s: float = 0.0
    within_s: float = 0.0


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A launch at the controller; `launch` is its client's number, negative where it failed."""

    sequence: int
    session: int
    program: int
    start: float
    end: float
    launch: int


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """A launch at another process, by its number in the cluster (at a client: by the client's)."""

    sequence: int
    start: float
    end: float


class Records(msgspec.Struct, frozen=True):
    """All that was recorded. Hosts are by number, with what ran on their devices and what waited for data, or for
    Python beside them."""

    ended: list[Ended] = []
    programs: dict[int, str] = {}
    tenants: dict[int, str] = {}
    moved: dict[int, int] = {}
    schedulers: dict[int, list[Interval]] = {}
    ran: dict[int, list[Interval]] = {}
    waits: dict[int, list[Interval]] = {}
    python: dict[int, list[Interval]] = {}
    client: dict[int, list[Interval]] = {}
    clocks: dict[str, Clock] = {}
    predictions: list[Prediction] = []
    left_out_s: float = 0.0
    """Seconds at the beginning of which the file would have become too large."""


Timed = TypeVar("Timed", Interval, Span)


class _Lanes:
    """Tracks of a process on which slices do not overlap."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.busy: list[tuple[float, int]] = []
        self.made = 0

    def take(self, start: float, end: float) -> int | None:
        while self.busy and self.busy[0][0] <= start:
            heapq.heappush(self.free, heapq.heappop(self.busy)[1])
        if self.free:
            lane = heapq.heappop(self.free)
        elif self.made < MAX_LANES:
            lane, self.made = self.made, self.made + 1
        else:
            return None
        heapq.heappush(self.busy, (end, lane))
        return lane


class _Drawing:
    """The events of a file, in microseconds from `zero`."""

    def __init__(self, records: Records, zero: float) -> None:
        self.records, self.zero = records, zero
        self.events: list[dict[str, Any]] = []
        self.left_out = 0
        self.known = {one.sequence: one for one in records.ended}
        self.predicted = {one.program: one for one in records.predictions}
        tenants = sorted({*records.tenants.values()})
        self.colours = {tenant: COLOURS[k % len(COLOURS)] for k, tenant in enumerate(tenants)}

    def process(self, pid: int, name: str, order: int) -> None:
        for kind, arguments in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": order})):
            self.events.append({"ph": "M", "pid": pid, "tid": 0, "name": kind, "args": arguments})

    def thread(self, pid: int, tid: int, name: str) -> None:
        self.events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}})

    def us(self, at: float) -> float:
        return round((at - self.zero) * 1e6, 3)

    def intervals(
        self, pid: int, first: int, title: str, found: Iterable[Interval], what: str, flow: str = "t"
    ) -> None:
        """Slices of one kind, each on a lane of its own while it lasts."""
        for one, lane in self.lanes(pid, first, title, found):
            ended = self.known.get(one.sequence)
            program = self.records.programs.get(ended.program, "") if ended is not None else ""
            tenant = self.records.tenants.get(ended.session, "") if ended is not None else ""
            name = f"{program or 'launch'} {one.sequence}" if not what else f"{what} {one.sequence}"
            arguments: dict[str, Any] = {"launch": one.sequence, "tenant": tenant, "program": program}
            if not what and program in self.predicted:
                arguments["predicted seconds"] = self.predicted[program].seconds
            if ended is not None and what and (moved := self.records.moved.get(ended.program)):
                arguments["bytes of the launch between hosts"] = moved
            slice_ = {"ph": "X", "pid": pid, "tid": lane, "ts": self.us(one.start), "name": name, "cat": tenant}
            slice_ |= {"dur": max(self.us(one.end) - self.us(one.start), 0.001), "args": arguments}
            if tenant in self.colours:
                slice_["cname"] = self.colours[tenant]
            self.events.append(slice_)
            if ended is not None:
                self.flow(flow, one.sequence, pid, lane, one.start)

    def lanes(self, pid: int, first: int, title: str, found: Iterable[Timed]) -> Iterator[tuple[Timed, int]]:
        """Slices, each with a lane that is its own while it lasts."""
        lanes = _Lanes()
        for one in sorted(found, key=lambda one: one.start):
            lane = lanes.take(one.start, one.end)
            if lane is None:
                self.left_out += 1
            else:
                yield one, first + lane
        for lane in range(lanes.made):
            self.thread(pid, first + lane, title if not lane else f"{title} {lane}")

    def predictions(self) -> dict[int, list[Span]]:
        """The expected course of each host, under each launch of a program that somebody has planned."""
        began: dict[int, float] = {}
        for one in (one for ran in self.records.ran.values() for one in ran):
            began[one.sequence] = min(one.start, began.get(one.sequence, one.start))
        found: dict[int, list[Span]] = {}
        drawn = 0
        for sequence, start in sorted(began.items()):
            ended = self.known.get(sequence)
            prediction = self.predicted.get(self.records.programs.get(ended.program, "")) if ended is not None else None
            for host, span in prediction.at(start) if prediction is not None else ():
                drawn += 1
                if drawn > MAX_SLICES:
                    self.left_out += 1
                else:
                    found.setdefault(host, []).append(span)
        return found

    def spans(self, pid: int, first: int, title: str, found: Iterable[Span]) -> None:
        """Spans of a prediction, in lanes."""
        for one, lane in self.lanes(pid, first, title, found):
            times = {"ts": self.us(one.start), "dur": max(self.us(one.end) - self.us(one.start), 0.001)}
            about = {"name": one.name, "cat": "predicted", "cname": "grey", "args": {}}
            self.events.append({"ph": "X", "pid": pid, "tid": lane, **times, **about})

    def flow(self, kind: str, sequence: int, pid: int, tid: int, at: float) -> None:
        event: dict[str, Any] = {"ph": kind, "id": sequence, "pid": pid, "tid": tid, "ts": self.us(at)}
        self.events.append(event | {"name": "launch", "cat": "flow", **({"bp": "e"} if kind == "f" else {})})


def trace_file(records: Records) -> dict[str, Any]:
    """The file's content, to be written as JSON."""
    starts = [one.start for one in records.ended]
    starts += [one.start for found in (*records.ran.values(), *records.client.values()) for one in found]
    drawing = _Drawing(records, min(starts, default=0.0))
    of_client = {(one.session, abs(one.launch)): one.sequence for one in records.ended}
    for k, (session, found) in enumerate(sorted(records.client.items())):
        drawing.process(CLIENT, "client", 0)
        named = [Interval(of_client.get((session, one.sequence), 0), one.start, one.end) for one in found]
        drawing.intervals(CLIENT, 1000 * k, f"session {session}", named, "", "s")
    drawing.process(CONTROLLER, "controller", 1)
    admitted = [Interval(one.sequence, one.start, one.end) for one in records.ended]
    drawing.intervals(CONTROLLER, 0, "launches", admitted, "", "t" if records.client else "s")
    for island, found in sorted(records.schedulers.items()):
        drawing.process(SCHEDULERS + island, f"scheduler {island}", 2 + island)
        drawing.intervals(SCHEDULERS + island, 0, "with the hosts", found, "")
    predicted = drawing.predictions()
    for host in sorted({*records.ran, *records.waits, *records.python}):
        drawing.process(HOSTS + host, f"host {host}", 10_000 + host)
        drawing.intervals(HOSTS + host, 0, "devices", records.ran.get(host, ()), "", "f")
        drawing.intervals(HOSTS + host, 1000, "waits for data", records.waits.get(host, ()), "data for")
        drawing.intervals(HOSTS + host, 3000, "waits for Python", records.python.get(host, ()), "Python for")
        drawing.spans(HOSTS + host, 2000, "predicted", predicted.get(host, ()))
    clocks = {name: msgspec.to_builtins(clock) for name, clock in records.clocks.items()}
    about = {
        "clocks": clocks,
        "slices left out": drawing.left_out,
        "seconds left out at the beginning": records.left_out_s,
    }
    return {"traceEvents": drawing.events, "displayTimeUnit": "ms", "metadata": about}


def moved_by(records: Iterable[Interval], clock: Clock) -> list[Interval]:
    """Intervals by the collector's clock."""
    return [Interval(one.sequence, one.start - clock.offset_s, one.end - clock.offset_s) for one in records]


def offset_of(samples: Iterable[tuple[float, float, float]]) -> Clock:
    """The clock of another process, of samples: when it was asked, what it said, when that was here. The quickest
    answer is worth most: its time was read at most half the way apart."""
    sent, said, came = min(samples, key=lambda sample: sample[2] - sample[0])
    return Clock(said - (sent + came) / 2, (came - sent) / 2)


def newest(records: Sequence[Record], since: float, end: int, most: int) -> list[Record]:
    """The last `most` of the records that end at `since` or later; `end` is the place of the end in a record."""
    found = [record for record in records if record[end] >= since]
    return sorted(found, key=lambda record: record[end])[-most:] if len(found) > most else found


def share_of(processes: int) -> int:
    """Records that each of so many processes may give, so that the file stays below `MAX_SLICES`."""
    return max(MIN_SLICES, MAX_SLICES // max(1, processes))
