"""The smallest task at 50 % efficiency, METG(50 %), as Task Bench (Slaughter et al., SC'20) defines it.

A graph of rows of 4 tasks, one for each worker, runs with shorter and shorter tasks. With tasks of a known duration

    efficiency  = tasks x duration / (wall x workers)
    granularity = wall x workers / tasks

METG is the granularity at which the efficiency falls through 50 %; the tasks themselves then take half of it. The
graphs are in `benchmarks.peers.task_graphs`, and how each system runs them is in `pathways_tasks` and `dask_tasks`
beside it. A task computes; it does not wait. Its duration is its number of iterations times what one takes with all
workers at work, measured for each system on the day: so having fewer cores than workers lowers no efficiency.

    python -m benchmarks.metg --json metg.json
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.peers.process import PeerError
from benchmarks.peers.systems import Running, SystemInfo, start
from benchmarks.peers.task_graphs import PATTERNS, START, STEPS, WIDTH, last_row
from benchmarks.printing import Table, shows

REPETITIONS = 3  # of each measurement; the median counts
CALIBRATIONS = 5
HALF = 0.5
CLOSE = 1.15  # the search ends when its two bounds are this near
DURATIONS = (1e-6, 1.0)  # seconds; where the search gives up
LEAP = 64  # from the first duration to the guess, at most: a guess may be far out
RUN_LIMIT_S = 120.0
SYSTEMS = {
    "pathways": SystemInfo("", ("benchmarks.peers.pathways_tasks",)),
    "pathways-no-fusion": SystemInfo("", ("benchmarks.peers.pathways_tasks", "--no-fusion")),
    "jax": SystemInfo("", ("benchmarks.peers.jax_tasks",)),
    "dask": SystemInfo("dask", ("benchmarks.peers.dask_tasks",)),
}
ROWS = {"dask": 16}  # a row takes tens of milliseconds, so fewer than 64 are enough

MEASURED = (
    "Rows of {width} tasks on {width} workers of one host; a task takes values of the row before, works, and leaves "
    "one value; the last row is checked. tasks: each task is a node of its own; gang: a row is. METG is wall time x "
    "workers / tasks where tasks of known duration are 50 % of that. {rounds} searches of each, in turn."
)


@dataclass(frozen=True)
class Point:
    """Tasks of a duration, and what they took; seconds."""

    duration: float
    granularity: float

    @property
    def efficiency(self) -> float:
        return self.duration / self.granularity


class NotReached(Exception):
    """No task within DURATIONS is on the other side of 50 %."""


def search(granularity: Callable[[float], float], first: float) -> Point:
    """Finds where the efficiency crosses 50 %.

    A first measurement gives a guess: were the overhead the same for all durations, METG would be twice that.

    Args:
        granularity: measures tasks of a duration; returns seconds.
        first: the duration that is measured first.

    Raises:
        NotReached: it does not cross.
    """
    overhead = granularity(first) - first
    begin = min(max(overhead, first / LEAP, DURATIONS[0]), first * LEAP, DURATIONS[1])
    points: dict[float, Point] = {}

    def reaches_half(duration: float) -> bool:
        points[duration] = point = Point(duration, granularity(duration))
        return point.efficiency >= HALF

    low, high = measure.narrowed(reaches_half, begin, *DURATIONS, CLOSE)
    if low is None or high is None:
        *_, point = points.values()
        raise NotReached(f"tasks of {1e6 * point.duration:,.0f} us run at {point.efficiency:.0%}")
    return crossing(points[low], points[high])


def crossing(low: Point, high: Point) -> Point:
    """Between two points on either side of 50 %, on straight lines of the logarithms."""
    below, above = math.log(low.efficiency / HALF), math.log(high.efficiency / HALF)
    share = -below / (above - below) if above > below else 0.5  # noise may have turned the two around
    duration = low.duration * (high.duration / low.duration) ** min(max(share, 0.0), 1.0)
    return Point(duration, duration / HALF)


@dataclass
class Workers:
    """The workers of a started system.

    Attributes:
        target_s: about the time of one measured run.
        rows: of the graphs that are measured, a multiple of this.
        iteration_s: time of one iteration of a task when all workers work.
    """

    system: Running
    target_s: float
    rows: int = STEPS
    iteration_s: float = 0.0

    def seconds(self, mode: str, payload: str, rows: int, iterations: int) -> float:
        """Seconds of a run, whose values are checked."""
        expected = [START] * WIDTH if payload == "calibrate" else last_row(payload, rows)
        return self.system.seconds(RUN_LIMIT_S, mode, payload, rows, expected, iterations=iterations)

    def calibrate(self, mode: str) -> None:
        """Finds `iteration_s` from runs of n and 2 n iterations: what a run costs besides drops out.

        From the fastest of each: what disturbs a run only makes it longer, and a difference doubles the disturbance.
        """
        n = 1000
        while self.seconds(mode, "calibrate", 1, n) < self.target_s:
            n *= 2
        pairs = [[self.seconds(mode, "calibrate", 1, times * n) for times in (1, 2)] for _ in range(CALIBRATIONS)]
        one, two = (min(times) for times in zip(*pairs, strict=True))
        if two <= one:
            raise PeerError(f"{n} iterations take {one:.3f} s and twice as many {two:.3f} s: the machine is not quiet")
        self.iteration_s = (two - one) / n

    def granularity(self, mode: str, pattern: str) -> Callable[[float], float]:
        """Measures tasks of a duration: seconds from the beginning of one row to that of the next.

        With as many workers as tasks in a row, that is wall x workers / tasks.
        """

        def of(duration: float) -> float:
            iterations = max(round(duration / self.iteration_s), 1)
            row_s = self.seconds(mode, pattern, self.rows, iterations) / self.rows
            rows = self.rows * min(max(round(self.target_s / row_s / self.rows), 1), 64)
            runs = [self.seconds(mode, pattern, rows, iterations) / rows for _ in range(REPETITIONS)]
            # For the duration that was asked for, where iterations are too coarse to hit it.
            return statistics.median(runs) * duration / (iterations * self.iteration_s)

        return of


@dataclass(frozen=True)
class Settings:
    rounds: int = option(3, "searches of each")
    systems: tuple[str, ...] = option(tuple(SYSTEMS), choices=tuple(SYSTEMS))
    patterns: tuple[str, ...] = option(PATTERNS, choices=PATTERNS)
    target_s: float = 0.3  # of one measured run


SMOKE = Settings(rounds=1, systems=("pathways", "jax"), patterns=("stencil",), target_s=0.05)


class Bench:
    """Started systems and all searches so far. A system or case that fails is dropped, and its error is kept."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.settings, self.progress = settings, progress
        self.workers: dict[str, Workers] = {}
        self.found: dict[tuple[str, str, str], list[Point]] = {}
        self.errors: dict[str, str] = {}

    def start(self, name: str) -> None:
        self.progress.say(f"starting {name}")
        try:
            system = start(SYSTEMS[name], 1, WIDTH)
            self.workers[name] = workers = Workers(system, self.settings.target_s, ROWS.get(name, STEPS))
            modes = system.described["modes"]["calibrate"]
            workers.calibrate(modes[0])
            self.found |= {(name, mode, pattern): [] for pattern in self.settings.patterns for mode in modes}
            self.progress.say(f"{name}: one iteration takes {1e9 * workers.iteration_s:.0f} ns")
        except PeerError as error:
            self.fail(name, error)

    def search(self, name: str, mode: str, pattern: str) -> None:
        """One more search of a case, from where the one before ended."""
        what, earlier = f"{name} {mode} {pattern}", self.found[name, mode, pattern]
        if what in self.errors:
            return
        first = earlier[-1].duration if earlier else 200e-6
        try:
            earlier.append(search(self.workers[name].granularity(mode, pattern), first))
            self.progress.say(f"{what}: {1e6 * earlier[-1].granularity:,.0f} us")
        except (PeerError, NotReached) as error:
            self.fail(what, error)

    def fail(self, what: str, error: Exception) -> None:
        self.errors[what] = str(error)
        self.progress.say(f"{what}: {error}")

    def close(self) -> None:
        for workers in self.workers.values():
            workers.system.close()

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"system": name, "mode": mode, "pattern": pattern, "hosts": 1, "workers": WIDTH}
            | {"metg_us": measure.spread([1e6 * point.granularity for point in points])}
            | {"task_us": measure.spread([1e6 * point.duration for point in points])}
            for (name, mode, pattern), points in self.found.items()
            if points
        ]


def run(settings: Settings, progress: Progress) -> Result:
    """Measures on 1 host of 4 devices, or 4 workers."""
    machine = measure.machine()
    with contextlib.closing(Bench(settings, progress)) as bench:
        for name in settings.systems:
            bench.start(name)
        # All systems in turn for each pattern.
        bench.found = dict(sorted(bench.found.items(), key=lambda item: settings.patterns.index(item[0][2])))
        for k in range(settings.rounds):
            progress.say(f"round {k + 1} of {settings.rounds}")
            for case in bench.found:
                bench.search(*case)
    return {
        "benchmark": "metg",
        "machine": machine,
        "measured": MEASURED.format(width=WIDTH, rounds=settings.rounds),
        "versions": {name: workers.system.described["versions"] for name, workers in bench.workers.items()},
        "iteration_ns": {name: 1e9 * workers.iteration_s for name, workers in bench.workers.items()},
        "rows": bench.rows(),
        "errors": bench.errors,
    }


show = shows(Table("METG(50 %), us", "rows", "system", "mode", "pattern", "metg_us:,.0f"))

BENCHMARK = Benchmark("metg", __doc__, Settings, SMOKE, run, show, uses_peers=True)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
