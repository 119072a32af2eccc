"""Time from `pw.init` to the first result: two islands of one host with 4 CPU devices each.

Every repetition is a fresh Python process that starts Ray, the runtime and its hosts, traces and compiles one function,
runs it, and shuts down. Beside it, in turn, the floor: an empty Ray, and after it two processes of it that import JAX
and compute something.

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


class Floor:
    """An empty Ray and two JAX processes, in the process in which it is called."""

    def seconds(self) -> float:
        """Seconds until both processes have computed."""
        import ray

        begun = time.perf_counter()
        ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2)
        try:
            task = ray.remote(_computed)
            assert ray.get([task.remote(), task.remote()], timeout=120) == [56.0, 56.0]
            return time.perf_counter() - begun
        finally:
            ray.shutdown()


def _computed() -> float:
    import jax
    import numpy as np

    return float(jax.jit(lambda v: (v * 2).sum())(np.arange(8, dtype=np.float32)))


def run(settings: Settings, progress: Progress) -> Result:
    """Starts and stops the runtime in fresh processes, one after the other; needs no Ray to be running."""
    samples, floors = [], []
    for _ in range(settings.repetitions):
        samples.append(_asked(Start))
        floors.append(_asked(Floor))
    rows = [{"phase": phase, "seconds": measure.spread([sample[phase] for sample in samples])} for phase in PHASES]
    rows.append({"phase": "floor", "seconds": measure.spread(floors)})
    whole = [sample["init_to_first_result"] for sample in samples]
    return {
        "repetitions": settings.repetitions,
        "rows": rows,
        "figures": [{"name": "pw.init to the first result", "unit": "s", **measure.spread(whole)}],
        "ratios": [{"name": "pw.init to the first result / the floor", **measure.paired_ratios(whole, floors)}],
    }


def _asked(make: Any) -> Any:
    """The answer of a fresh process."""
    process = Worker(make, daemon=False)  # it starts processes itself
    try:
        process.answer()
        return process.ask("seconds")
    finally:
        process.close()


show = shows(
    Table("starts of two islands of one host with 4 CPU devices", "rows", "phase", "seconds:.2f"),
    Table("ratios, round by round", "ratios", "name", ".:.2f"),
)

BENCHMARK = Benchmark("startup", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    from benchmarks.startup import BENCHMARK  # its processes find what they run by the module's name

    raise SystemExit(BENCHMARK.main())
