"""How long it takes from `pw.init` to the first result: two islands of one host with 4 CPU devices each.

Every repetition is a fresh Python process that starts Ray, the runtime and its hosts, traces and compiles one function,
runs it, and shuts down.

Run it with `python -m benchmarks.startup --json results.json`.
"""

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import measure

REPETITIONS = 3
PHASES = {
    "import": "importing pathways_ray",
    "init": "pw.init returns",
    "first_result": "first result of a function on 4 devices",
    "init_to_first_result": "from pw.init to first result",
    "shutdown": "shutting down",
}


def start_once(results: Connection) -> None:
    """One start, in the process it is called in; sends the seconds of each phase."""
    times = [time.perf_counter()]
    import pathways_ray as pw

    times.append(time.perf_counter())
    with pw.init(islands=2, hosts_per_island=1, devices_per_host=4):
        times.append(time.perf_counter())
        first_result(pw)
        times.append(time.perf_counter())
    times.append(time.perf_counter())
    imported, begun, computed, ended = (later - earlier for earlier, later in itertools.pairwise(times))
    results.send(dict(zip(PHASES, (imported, begun, computed, begun + computed, ended), strict=True)))


def first_result(pw: Any) -> None:
    """Doubles eight numbers on the 4 devices of one island, and checks them."""
    import numpy as np
    from jax.sharding import PartitionSpec as P

    with pw.virtual_slice((4,), ("x",)) as devices:
        double = pw.compiled(lambda v: v * 2.0, slice=devices, in_specs=P("x"), out_specs=P("x"))
        v = np.arange(8, dtype=np.float32)
        np.testing.assert_array_equal(np.asarray(double(v)), v * 2.0)


def run(repetitions: int = REPETITIONS) -> dict[str, Any]:
    """Starts and stops the runtime in fresh processes, one after the other; needs no Ray to be running."""
    machine, spawn = measure.machine(), multiprocessing.get_context("spawn")
    samples = []
    for _ in range(repetitions):
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=start_once, args=(theirs,))
        process.start()
        theirs.close()
        samples.append(ours.recv())  # raises EOFError when the process died; its own traceback is printed
        process.join()
    rows = [{"phase": phase, "seconds": measure.spread([sample[phase] for sample in samples])} for phase in PHASES]
    return {"benchmark": "startup", "machine": machine, "repetitions": repetitions, "rows": rows}


def show(result: dict[str, Any], console: Console) -> None:
    """Prints what was measured, on what, and the numbers."""
    console.print(
        f"Start of two islands of one host with 4 CPU devices, {result['repetitions']} fresh processes.",
        f"Machine: {measure.describe(result['machine'])}.",
        sep="\n",
        highlight=False,
    )
    table = Table("phase", title="seconds")
    for heading in ("min", "median", "max"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(PHASES[row["phase"]], *(f"{row['seconds'][key]:.2f}" for key in ("min", "median", "max")))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args(arguments)
    measured = run(options.repetitions)
    show(measured, Console())
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
