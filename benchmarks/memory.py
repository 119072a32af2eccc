"""Search for leaks: many launches of a small program, sampling the memory of every process of the runtime on the way.

Half of the launches feed their result to the next, half drop it at once. The slope of a process's resident memory over
the launches, by least squares, is what one launch leaves behind; in the end the runtime must hold no buffer.

Run it with `python -m benchmarks.memory --launches 10000 --json results.json`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows

WARM_UP = 500  # caches, pools and queues reach their size
SAMPLES = 40
EMPTY_WITHIN_S = 10.0  # for the last buffers to be freed, well above a garbage collection and a few messages
DEVICES = 4


@dataclass(frozen=True)
class Settings:
    launches: int = option(10_000)


SMOKE = Settings(launches=400)


def run(settings: Settings, progress: Progress) -> Result:
    """Samples the memory of all processes on the way through the launches, always with nothing in flight."""
    launches, at = settings.launches, [0]
    with pw.init(islands=1, hosts_per_island=1, devices_per_host=DEVICES) as session:
        devices = pw.virtual_slice((DEVICES,), ("x",))
        add_one = pw.compiled(lambda v: v + 1.0, slice=devices, in_specs=P("x"), out_specs=P("x"))
        y = launch(add_one, pw.put(np.zeros(DEVICES, np.float32), slice=devices, spec=P("x")), WARM_UP)
        processes = measure.runtime_processes()
        memory = {name: [resident(process)] for name, process in processes.items()}
        while at[-1] < launches:
            count = min(max(launches // SAMPLES, 1), launches - at[-1])
            y = launch(add_one, y, count)
            at.append(at[-1] + count)
            for name, process in processes.items():
                memory[name].append(resident(process))
            if len(at) % 10 == 0:
                progress.say(f"{at[-1]:,} of {launches:,} launches")
        del y
        left = buffers_left(session)
    rows = [
        {"process": name, "kib_per_launch": measure.slope(at, kib)}
        | {"first_kib": kib[0], "last_kib": kib[-1], "peak_kib": max(kib)}
        for name, kib in memory.items()
    ]
    worst = max(measure.slope(at, kib) for kib in memory.values())
    figures = [
        {"name": "memory kept by a launch, worst process", "unit": "KiB", "median": worst},
        {"name": "buffers left", "unit": "", "median": left},
    ]
    return {"launches": launches, "rows": rows, "buffers_left": left, "figures": figures}


def launch(program: Any, y: Any, count: int) -> Any:
    """`count` launches, every other one dropped at once; waits for the last, so that samples are taken at rest."""
    for number in range(count):
        if number % 2:
            program(y)
        else:
            y = program(y)
    y.block_until_ready()
    return y


def resident(process: psutil.Process) -> float:
    """Resident memory in KiB."""
    return process.memory_info().rss / 1024


def buffers_left(session: Any) -> int:
    """Live logical buffers once they have had EMPTY_WITHIN_S to go."""
    deadline = time.monotonic() + EMPTY_WITHIN_S
    while (left := session.status()["buffers"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


show = shows(
    Table(
        f"resident memory over launches of v + 1 on {DEVICES} devices, after {WARM_UP} others",
        "rows",
        *("process", "kib_per_launch:+.4f", "first_kib:,.0f", "last_kib:,.0f", "peak_kib:,.0f"),
    )
)

BENCHMARK = Benchmark(
    "memory", __doc__, Settings, SMOKE, run, show, succeeded=lambda result: not result["buffers_left"]
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
