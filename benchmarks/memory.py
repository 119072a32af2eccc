"""Looks for leaks: many launches of a small program, sampling the memory of every process of the runtime on the way.

Half of the launches feed their result to the next, half drop it at once. The slope of a process's resident memory over
the launches, by least squares, is what one launch leaves behind; in the end the runtime must hold no buffer.

Run it with `python -m benchmarks.memory --launches 10000 --json results.json`.
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import pathways_ray as pw
from benchmarks import measure

LAUNCHES = 10_000
WARM_UP = 500  # caches, pools and queues reach their size
SAMPLES = 40
EMPTY_WITHIN = 10.0  # seconds for the last buffers to be freed, well above a garbage collection and a few messages
DEVICES = 4
RAYS_OWN = {"IDLE", "DashboardAgent", "RuntimeEnvAgent"}  # workers of the raylet that are not actors of the runtime


def run(launches: int = LAUNCHES, session: Any = None) -> dict[str, Any]:
    """Launches on the given running session, or on one of its own, and returns the result as it is written to JSON."""
    if session is not None:
        return measure_launches(session, launches)
    with pw.init(islands=1, hosts_per_island=1, devices_per_host=DEVICES) as own:
        return measure_launches(own, launches)


def measure_launches(session: Any, launches: int) -> dict[str, Any]:
    """The whole measurement on a running session."""
    machine = measure.machine()
    with pw.virtual_slice((DEVICES,), ("x",)) as devices:
        add_one = pw.compiled(lambda v: v + 1.0, slice=devices, in_specs=P("x"), out_specs=P("x"))
        y = pw.put(np.zeros(DEVICES, np.float32), slice=devices, spec=P("x"))
        y = launch(add_one, y, WARM_UP)
        processes = runtime_processes()
        at, memory = [0], {name: [resident(process)] for name, process in processes.items()}
        with Progress() as progress:
            line = progress.add_task("launches", total=launches)
            while at[-1] < launches:
                count = min(max(launches // SAMPLES, 1), launches - at[-1])
                y = launch(add_one, y, count)
                at.append(at[-1] + count)
                for name, process in processes.items():
                    memory[name].append(resident(process))
                progress.advance(line, count)
        del y
        left = buffers_left(session)
    rows = [{"process": name, **growth(at, samples)} for name, samples in memory.items()]
    return {"benchmark": "memory", "machine": machine, "launches": launches, "rows": rows, "buffers_left": left}


def launch(program: Any, y: Any, count: int) -> Any:
    """`count` launches, every other one dropped at once; waits for the last, so that samples are taken at rest."""
    for number in range(count):
        if number % 2:
            program(y)
        else:
            y = program(y)
    y.block_until_ready()
    return y


def runtime_processes() -> dict[str, psutil.Process]:
    """This process and the runtime's actors, which Ray names `ray::Class`; each by a name of its own."""
    here = psutil.Process()
    raylets = [p for p in here.children(recursive=True) if p.name() == "raylet"] or [
        p for p in psutil.process_iter(["name"]) if p.info["name"] == "raylet"
    ]
    found = {"client": here}
    for process in (worker for raylet in raylets for worker in raylet.children()):
        prefix, _, title = (process.cmdline() or [""])[0].partition("::")
        name = re.split(r"\W", title)[0]  # an actor at work shows its method too
        if prefix == "ray" and name not in RAYS_OWN:
            found[f"{name} {sum(key.startswith(f'{name} ') for key in found)}"] = process
    return found


def resident(process: psutil.Process) -> float:
    """Resident memory in KiB."""
    return process.memory_info().rss / 1024


def buffers_left(session: Any) -> int:
    """Live logical buffers once they have had EMPTY_WITHIN seconds to go."""
    deadline = time.monotonic() + EMPTY_WITHIN
    while (left := session.status()["buffers"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def growth(at: Sequence[int], kib: Sequence[float]) -> dict[str, float]:
    """How one process's memory went over the launches."""
    return {"kib_per_launch": measure.slope(at, kib), "first_kib": kib[0], "last_kib": kib[-1], "peak_kib": max(kib)}


def show(result: dict[str, Any], console: Console) -> None:
    """Prints what was measured, on what, and the numbers."""
    console.print(
        f"Resident memory over {result['launches']:,} launches of v + 1 on {DEVICES} devices, after {WARM_UP} others.",
        f"Machine: {measure.describe(result['machine'])}.",
        sep="\n",
        highlight=False,
    )
    table = Table("process", title="resident memory")
    for heading in ("KiB per launch", "first MiB", "last MiB"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        sizes = (f"{row[key] / 1024:.1f}" for key in ("first_kib", "last_kib"))
        table.add_row(row["process"], f"{row['kib_per_launch']:+.4f}", *sizes)
    console.print(table)
    console.print(f"buffers left: {result['buffers_left']}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=LAUNCHES, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args(arguments)
    measured = run(options.launches)
    show(measured, Console())
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")
    return 1 if measured["buffers_left"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
