"""Time from `pw.init` to the first result: two islands of one host with 4 CPU devices each.

Every repetition is a fresh Python process that starts Ray, the runtime and its hosts, traces and compiles one function,
runs it, and shuts down.

Run it with `python -m benchmarks.startup --json results.json`.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows
from benchmarks.workers import Worker

PHASES = ("import", "init", "first_result", "init_to_first_result", "shutdown")
"""Importing pathways_ray; until `pw.init` returns; the first result of a function on 4 devices; these two together."""


@dataclass(frozen=True)
class Settings:
    repetitions: int = option(3)


SMOKE = Settings(repetitions=1)


class Start:
    """One start, in the process in which it is called."""

    def seconds(self) -> dict[str, float]:
        """The seconds of each phase."""
        times = [time.perf_counter()]
        import pathways_ray as pw

        times.append(time.perf_counter())
        with pw.init(islands=2, hosts_per_island=1, devices_per_host=4):
            times.append(time.perf_counter())
            first_result(pw)
            times.append(time.perf_counter())
        times.append(time.perf_counter())
        imported, begun, computed, ended = (later - earlier for earlier, later in itertools.pairwise(times))
        return dict(zip(PHASES, (imported, begun, computed, begun + computed, ended), strict=True))


def first_result(pw: Any) -> None:
    """Doubles eight numbers on the 4 devices of one island, and checks them."""
    import numpy as np
    from jax.sharding import PartitionSpec as P

    with pw.virtual_slice((4,), ("x",)) as devices:
        double = pw.compiled(lambda v: v * 2.0, slice=devices, in_specs=P("x"), out_specs=P("x"))
        v = np.arange(8, dtype=np.float32)
        np.testing.assert_array_equal(np.asarray(double(v)), v * 2.0)


def run(settings: Settings, progress: Progress) -> Result:
    """Starts and stops the runtime in fresh processes, one after the other; needs no Ray to be running."""
    samples = []
    for _ in range(settings.repetitions):
        process = Worker(Start, daemon=False)  # it starts processes itself
        try:
            process.answer()
            samples.append(process.ask("seconds"))
        finally:
            process.close()
    rows = [{"phase": phase, "seconds": measure.spread([sample[phase] for sample in samples])} for phase in PHASES]
    return {"repetitions": settings.repetitions, "rows": rows}


show = shows(Table("starts of two islands of one host with 4 CPU devices", "rows", "phase", "seconds:.2f"))

BENCHMARK = Benchmark("startup", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
