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
import functools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, has_rows, option
from benchmarks.peers.process import PeerError
from benchmarks.peers.rounds import Case, Session, session
from benchmarks.peers.systems import SystemInfo
from benchmarks.peers.task_graphs import PATTERNS, START, STEPS, WIDTH, last_row
from benchmarks.printing import Table, shows

REPETITIONS = 3  # of each measurement; the median counts
CALIBRATIONS = 5
HALF = 0.5
CLOSE = 1.5  # the search ends when its two bounds are this near; between them the efficiency is as good as straight
DURATIONS = (1e-6, 1.0)  # seconds; where the search gives up
LEAP = 64  # from the first duration to the guess, at most: a guess may be far out
LONGEST_S = 1.5  # of work in a run; who has not reached half there is not asked for longer tasks
RUN_LIMIT_S = 120.0
FIRST_S = 200e-6  # where the first search of a case begins
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
    """No task within DURATIONS, or LONGEST_S, is on the other side of 50 %."""

    @staticmethod
    def at(point: Point) -> NotReached:
        return NotReached(f"tasks of {1e6 * point.duration:,.0f} us run at {point.efficiency:.0%}")


def search(granularity: Callable[[float], float], first: float) -> Point:
    """Finds where the efficiency crosses 50 %.

    A first measurement gives a guess: were the overhead the same for all durations, METG would be twice that.

    Args:
        granularity: measures tasks of a duration; returns seconds.
        first: the duration that is measured first.

    Raises:
        NotReached: it does not cross.
    """
    points = {first: Point(first, granularity(first))}
    overhead = points[first].granularity - first
    is_near = first / CLOSE <= overhead <= first * CLOSE
    begin = first if is_near else min(max(overhead, first / LEAP, DURATIONS[0]), first * LEAP, DURATIONS[1])

    def reaches_half(duration: float) -> bool:
        if duration not in points:
            points[duration] = Point(duration, granularity(duration))
        return points[duration].efficiency >= HALF

    low, high = measure.narrowed(reaches_half, begin, *DURATIONS, CLOSE)
    if low is None or high is None:
        *_, point = points.values()
        raise NotReached.at(point)
    return crossing(points[low], points[high])


def crossing(low: Point, high: Point) -> Point:
    """Between two points on either side of 50 %, on straight lines of the logarithms."""
    below, above = math.log(low.efficiency / HALF), math.log(high.efficiency / HALF)
    share = -below / (above - below) if above > below else 0.5  # noise may have turned the two around
    duration = low.duration * (high.duration / low.duration) ** min(max(share, 0.0), 1.0)
    return Point(duration, duration / HALF)


@dataclass(frozen=True)
class Settings:
    rounds: int = option(3, "searches of each")
    systems: tuple[str, ...] = option(("pathways", "jax", "dask"), choices=tuple(SYSTEMS))
    patterns: tuple[str, ...] = option(("stencil", "trivial", "no_comm", "tree", "fft"), choices=PATTERNS)
    target_s: float = 0.15  # of one measured run


SMOKE = Settings(rounds=1, systems=("pathways", "jax"), patterns=("stencil",), target_s=0.05)


class Bench:
    """Searches on started systems. A system or case that fails is dropped, and its error is kept by the session.

    Attributes:
        iteration_s: by system, the time of one iteration of a task when all workers work.
        found: by case, where each search ended.
    """

    def __init__(self, made: Session, settings: Settings) -> None:
        self.made, self.settings = made, settings
        self.iteration_s: dict[str, float] = {}
        self.found: dict[Case, list[Point]] = {}
        for name, system in made.systems.items():
            modes = system.described["modes"]["calibrate"]
            with self.keeping(name):
                self.iteration_s[name] = self.iteration(Case(name, modes[0], "calibrate"))
                self.found |= {Case(name, mode, pattern): [] for pattern in settings.patterns for mode in modes}
                made.say(f"{name}: one iteration takes {1e9 * self.iteration_s[name]:.0f} ns")

    @contextlib.contextmanager
    def keeping(self, what: Case | str) -> Iterator[None]:
        """Keeps an error that is raised inside."""
        try:
            yield
        except (PeerError, NotReached) as error:
            self.made.fail(what, str(error))

    def seconds(self, case: Case, rows: int, iterations: int) -> float:
        """Seconds of a run, whose values are checked."""
        expected = [START] * WIDTH if case.payload == "calibrate" else last_row(case.payload, rows)
        system = self.made.systems[case.system]
        return system.seconds(RUN_LIMIT_S, case.mode, case.payload, rows, expected, iterations=iterations)

    def iteration(self, case: Case) -> float:
        """Time of one iteration from runs of n and 2 n iterations: what a run costs besides drops out.

        From the fastest of each: what disturbs a run only makes it longer, and a difference doubles the disturbance.
        """
        n = 1000
        while self.seconds(case, 1, n) < self.settings.target_s:
            n *= 2
        pairs = [[self.seconds(case, 1, times * n) for times in (1, 2)] for _ in range(CALIBRATIONS)]
        one, two = (min(times) for times in zip(*pairs, strict=True))
        if two <= one:
            raise PeerError(f"{n} iterations take {one:.3f} s and twice as many {two:.3f} s: the machine is not quiet")
        return (two - one) / n

    def granularity(self, case: Case, duration: float) -> float:
        """Seconds from the beginning of one row of tasks of this duration to that of the next.

        With as many workers as tasks in a row, that is wall x workers / tasks.
        """
        few, iteration_s = ROWS.get(case.system, STEPS), self.iteration_s[case.system]
        iterations = max(round(duration / iteration_s), 1)
        first_s = self.seconds(case, few, iterations)
        if few * duration > LONGEST_S and (point := Point(duration, first_s / few)).efficiency < HALF:
            raise NotReached.at(point)
        rows = few * min(max(round(self.settings.target_s / first_s), 1), 64)
        repetitions = REPETITIONS if first_s < REPETITIONS * self.settings.target_s else 1
        runs = [self.seconds(case, rows, iterations) / rows for _ in range(repetitions)]
        # For the duration that was asked for, where iterations are too coarse to hit it.
        return statistics.median(runs) * duration / (iterations * iteration_s)

    def search(self, case: Case) -> None:
        """One more search of a case, from where the one before ended."""
        earlier = self.found[case]
        if str(case) not in self.made.errors:
            with self.keeping(case):
                first = earlier[-1].duration if earlier else FIRST_S
                earlier.append(search(functools.partial(self.granularity, case), first))
                self.made.say(f"{case}: {1e6 * earlier[-1].granularity:,.0f} us")


def run(settings: Settings, progress: Progress) -> Result:
    """Measures on 1 host of 4 devices, or 4 workers."""
    with session(1, WIDTH, {name: SYSTEMS[name] for name in settings.systems}, progress.say) as made:
        bench = Bench(made, settings)
        # All systems in turn for each pattern.
        cases = sorted(bench.found, key=lambda case: settings.patterns.index(case.payload))
        for k in range(settings.rounds):
            progress.say(f"round {k + 1} of {settings.rounds}")
            for case in cases:
                bench.search(case)
    return {
        "measured": MEASURED.format(width=WIDTH, rounds=settings.rounds),
        "versions": {name: system.described["versions"] for name, system in made.systems.items()},
        "iteration_ns": {name: 1e9 * seconds for name, seconds in bench.iteration_s.items()},
        "rows": [
            {"system": case.system, "mode": case.mode, "pattern": case.payload, "hosts": 1, "workers": WIDTH}
            | {"metg_us": measure.spread([1e6 * point.granularity for point in points])}
            | {"task_us": measure.spread([1e6 * point.duration for point in points])}
            for case in cases
            if (points := bench.found[case])
        ],
        "errors": made.errors,
    }


show = shows(Table("METG(50 %), us", "rows", "system", "mode", "pattern", "metg_us:,.0f"))

BENCHMARK = Benchmark("metg", __doc__, Settings, SMOKE, run, show, succeeded=has_rows, uses_peers=True)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
