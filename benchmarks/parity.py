"""The smallest computation at which this runtime keeps up with JAX: Figure 6 of the Pathways paper.

A computation is some work on each device of a gang, then an all-reduce of a scalar and an addition; calls of it follow
each other, each on the result of the one before, op by op, none waited for. With work of 5 ms the cost of a call is
hidden; without work, nothing else shows. How long must a computation be for this runtime to reach 95 % of the rate of
multi-controller JAX, which has one process for each host? Found by bisection on the work; each ratio is the median of
paired runs, in turn.

    python -m benchmarks.parity --json parity.json
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, has_rows, option
from benchmarks.peers.process import PeerError
from benchmarks.peers.protocol import work
from benchmarks.peers.systems import FLOOR, JAX, SYSTEMS, Running, start
from benchmarks.printing import Table, shows

OURS = ("pathways", "pathways-no-fusion")
PARITY = 0.95
WARM = 3  # runs before
FIRST_S = 0.5e-3  # of work, where the search begins
DURATIONS_S = (10e-6, 50e-3)  # of work; where it gives up
CLOSE = 1.2  # the search ends when its two bounds are this near
CALIBRATION = (2_000, 200_000)  # iterations, between which one is measured
RUN_LIMIT_S = 120.0

MEASURED = (
    "Calls of one computation, each on the result of the one before, none waited for: work of so many iterations on "
    "each device, an all-reduce of a scalar, an addition. Parity is the computation, as long as JAX takes for it, "
    "from which on the rate is {parity:.0%} of JAX's: shorter ones may keep up as well. Ratios are medians of {rounds} "
    "paired runs, in turn."
)


@dataclass(frozen=True)
class Probe:
    """One ratio.

    Attributes:
        iterations: of work
        jax_s: what JAX took for a computation
        ratio: rate of this runtime / rate of JAX; min, median, max
    """

    iterations: int
    jax_s: float
    ratio: dict[str, float]

    @property
    def keeps_up(self) -> bool:
        return self.ratio["median"] >= PARITY


@dataclass
class Found:
    """The result of a search: the computation from which on all keep up, None if none does, and all probes."""

    shortest: Probe | None = None
    probes: list[Probe] = field(default_factory=list)


def search(probe: Callable[[int], Probe], first: int, lower: int, upper: int) -> Found:
    """The iterations from which on this runtime keeps up with JAX.

    Fewer ones may keep up as well, as where calls are so short that they leave together: where one does not, none below
    it is tried.

    Args:
        probe: measures this many iterations of work.
        lower: where shorter work makes no difference any more; if that keeps up, it is the answer.
        upper: where the search gives up.
    """
    found = Found()

    def keeps_up(iterations: float) -> bool:
        found.probes.append(probe(round(iterations)))
        if found.probes[-1].keeps_up:
            found.shortest = found.probes[-1]
        return found.probes[-1].keeps_up

    measure.narrowed(keeps_up, first, lower, upper, CLOSE)
    return found


@dataclass(frozen=True)
class Settings:
    hosts: tuple[str, ...] = option(("2x1", "1x4"), "hosts x devices of each")
    systems: tuple[str, ...] = option((*OURS, FLOOR), choices=(*OURS, FLOOR))
    rounds: int = option(5, "paired runs of each ratio, of which the median counts")
    here: bool = option(False, "run JAX in this environment if its own is not built")
    target_s: float = 0.4  # of one measured run

    def __post_init__(self) -> None:
        for topology in self.hosts:
            if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", topology):
                raise ValueError(f"{topology!r} is not HOSTSxDEVICES, as in 2x1")


SMOKE = Settings(("1x2",), ("pathways",), rounds=1, here=True, target_s=0.02)


class Pair:
    """This runtime and JAX, started for one topology."""

    def __init__(self, systems: Mapping[str, Running], settings: Settings) -> None:
        self._systems, self._settings = systems, settings

    def seconds(self, name: str, iterations: int, count: int) -> float:
        """Of one run of `count` computations."""
        return self._systems[name].seconds(RUN_LIMIT_S, "opbyop", work(iterations), count)

    def probe(self, iterations: int) -> Probe:
        count, target_s = 64, self._settings.target_s
        while (took := self.seconds("jax", iterations, count)) < target_s / 2:
            count = max(2 * count, round(count * target_s / took / 2))
        for _ in range(WARM):  # often enough for runs of launches to be measured and compiled
            self.seconds("ours", iterations, count)
            measure.settle()
        samples = measure.interleaved(
            ["ours", "jax"], lambda name: self.seconds(name, iterations, count), self._settings.rounds, 0
        )
        jax_s = measure.spread(samples["jax"])["median"] / count
        return Probe(iterations, jax_s, measure.paired_ratios(samples["jax"], samples["ours"]))

    def parity(self, progress: Progress) -> dict[str, Any]:
        """The length from which on computations keep up, and all that were tried."""
        iteration_s = self.iteration_s()
        first, lower, upper = (max(round(duration / iteration_s), 1) for duration in (FIRST_S, *DURATIONS_S))

        def probe(iterations: int) -> Probe:
            found = self.probe(iterations)
            progress.say(f"{1e3 * found.jax_s:.3f} ms: {found.ratio['median']:.2f} of JAX")
            return found

        found = search(probe, max(first, lower), lower, upper)
        return {
            "iteration_ns": 1e9 * iteration_s,
            "parity_ms": 1e3 * found.shortest.jax_s if found.shortest else None,
            "probes": [
                {"iterations": p.iterations, "jax_ms": 1e3 * p.jax_s, "ratio": p.ratio}
                for p in sorted(found.probes, key=lambda p: p.iterations)
            ],
        }

    def iteration_s(self) -> float:
        """Time of one iteration of work on a device, by JAX."""
        few, many = (min(self.seconds("jax", n, 64) for _ in range(3)) / 64 for n in CALIBRATION)
        if many <= few:
            raise PeerError(f"{CALIBRATION[1]} iterations took {many:.2g} s and {CALIBRATION[0]} {few:.2g} s")
        return (many - few) / (CALIBRATION[1] - CALIBRATION[0])


def run(settings: Settings, progress: Progress) -> Result:
    rows: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    for topology in settings.hosts:
        hosts, devices = map(int, topology.split("x"))
        for name in settings.systems:
            progress.say(f"{name}, {topology}: starting")
            try:
                with contextlib.ExitStack() as stack:
                    systems = {}
                    for kind, system in {"ours": SYSTEMS[name], "jax": SYSTEMS[JAX]}.items():
                        system = system.or_here(settings.here and system.is_jax)
                        systems[kind] = stack.enter_context(contextlib.closing(start(system, hosts, devices)))
                    pair = Pair(systems, settings)
                    rows.append({"system": name, "hosts": hosts, "devices": devices, **pair.parity(progress)})
            except PeerError as error:
                errors[f"{name}, {topology}"] = str(error)
                progress.say(f"{name}, {topology}: {error}")
    return {
        "measured": MEASURED.format(parity=PARITY, rounds=settings.rounds),
        "rows": rows,
        "figures": [
            {
                "name": "parity, {system}, {hosts} hosts of {devices}".format_map(row),
                "unit": "ms",
                "median": math.inf if row["parity_ms"] is None else row["parity_ms"],  # never there misses the aim
            }
            for row in rows
        ],
        "errors": errors,
    }


TABLES = shows(Table(f"parity up to {DURATIONS_S[1]} s of work", "rows", "system", "hosts", "devices", "parity_ms:.3f"))


def show(result: Result, console: Console) -> None:
    TABLES(result, console)
    for row in result["rows"]:
        where = f"rate / JAX's rate, {row['system']}, {row['hosts']} x {row['devices']}"
        Table(where, "probes", "jax_ms:.3f", "ratio:.2f").show(row, console)


BENCHMARK = Benchmark("parity", __doc__, Settings, SMOKE, run, show, succeeded=has_rows, uses_peers=True)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
