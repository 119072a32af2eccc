"""Parallel against sequential dispatch of a pipeline whose stages live on different hosts: Figure 7 of the paper.

A program of S stages calls a small computation S times, each time on another host of one island, or with `--islands` on
islands of their own; what one stage makes crosses to the next. Two runtimes are alive at the same time, alike but for
`dispatch="parallel"` and `dispatch="sequential"`: the first has all hosts prepare their stages at once, the second
starts a stage's host work when the stage before is enqueued.

Run it with `python -m benchmarks.pipeline --json pipeline.json --figure pipeline.png`.
"""

import argparse
import contextlib
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import measure

STAGES = (1, 2, 3, 4, 5, 6, 7, 8)
PROGRAMS = 100
REPETITIONS = 7
DISPATCH = ("parallel", "sequential")
MODES = ("waiting", "flowing")

MEASURED = (
    "A program of S stages, each `v + 1` on float32 ({elements},) on one CPU device of another host{where}. "
    "waiting: each call is waited for before the next. flowing: {programs} calls are issued and the last one is waited "
    "for. {repetitions} rounds after one warm-up, both runtimes alive and measured in turn."
)


class Case(NamedTuple):
    """One point of the figure."""

    dispatch: str
    mode: str
    stages: int


def serve(requests: Connection, dispatch: str, stages: Sequence[int], elements: int, islands: bool) -> None:
    """Body of a process that runs one runtime: answers (mode, stages, programs) with seconds, until its parent ends."""
    import pathways_ray as pw

    hosts = max(stages)
    shape = {"islands": hosts} if islands else {"islands": 1, "hosts_per_island": hosts}
    with pw.init(**shape, dispatch=dispatch, fusion=False):
        places = [pw.virtual_slice((1,), island=k if islands else 0) for k in range(hosts)]
        if len({place.devices for place in places}) < hosts:
            raise AssertionError(f"stages share devices: {[place.devices for place in places]}")
        steps = [pw.compiled(lambda v: v + 1, slice=place) for place in places]

        def pipeline(count: int) -> Any:
            def call(v: Any) -> Any:
                for step in steps[:count]:
                    v = step(v)
                return v

            return pw.program(call, name=f"stages{count}")

        programs = {count: pipeline(count) for count in stages}
        start = pw.put(np.zeros(elements, np.float32), slice=steps[0].slice)
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                mode, count, calls = requests.recv()
                requests.send(_seconds(programs[count], start, mode, count, calls))


def _seconds(program: Any, start: Any, mode: str, stages: int, calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        v = program(start)
        if mode == "waiting":
            v.block_until_ready()
    v.block_until_ready()
    seconds = time.perf_counter() - begun
    value = np.asarray(v)
    if not np.array_equal(value, np.full(value.shape, stages, np.float32)):
        raise AssertionError(f"after {stages} stages the value is {value}")
    return seconds


@contextlib.contextmanager
def runtimes(stages: Sequence[int], elements: int, islands: bool) -> Iterator[dict[str, Connection]]:
    """Both runtimes, each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, Connection] = {}
    processes = []
    for dispatch in DISPATCH:
        found[dispatch], theirs = spawn.Pipe()
        # Not a daemon: it starts processes of its own, and ends when this side of the pipe closes.
        processes.append(spawn.Process(target=serve, args=(theirs, dispatch, stages, elements, islands)))
        processes[-1].start()
        theirs.close()
    try:
        yield found
    finally:
        for connection in found.values():
            connection.close()
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.kill()


def run(
    stages: Sequence[int] = STAGES,
    programs: int = PROGRAMS,
    repetitions: int = REPETITIONS,
    elements: int = 256,
    islands: bool = False,
) -> dict[str, Any]:
    """Measures and returns the result as it is written to JSON."""
    machine = measure.machine()
    with runtimes(stages, elements, islands) as found:

        def rate(case: Case) -> float:
            found[case.dispatch].send((case.mode, case.stages, programs))
            return programs * case.stages / float(found[case.dispatch].recv())

        cases = [Case(d, m, s) for s in stages for m in MODES for d in DISPATCH]
        samples = measure.interleaved(cases, rate, repetitions)
    rows = [{**case._asdict(), "computations_per_second": measure.spread(v)} for case, v in samples.items()]
    ratios = [
        {
            "name": f"parallel / sequential, {mode}, {count} stages",
            "mode": mode,
            "stages": count,
            **measure.paired_ratios(samples[Case("parallel", mode, count)], samples[Case("sequential", mode, count)]),
        }
        for mode in MODES
        for count in stages
    ]
    settings = {"elements": elements, "programs": programs, "repetitions": repetitions}
    return {
        "benchmark": "pipeline",
        "machine": machine,
        "measured": MEASURED.format(**settings, where=", each an island" if islands else " of one island"),
        "settings": {**settings, "stages": list(stages), "islands": islands},
        "rows": rows,
        "ratios": ratios,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Prints what was measured, on what, and the numbers."""
    console.print(result["measured"], f"Machine: {measure.describe(result['machine'])}.", sep="\n", highlight=False)
    table = Table("stages", "mode", title="computations per second (medians), and ratios round by round")
    for heading in (*DISPATCH, "parallel / sequential", "min", "max"):
        table.add_column(heading, justify="right")
    rates = {(r["dispatch"], r["mode"], r["stages"]): r["computations_per_second"]["median"] for r in result["rows"]}
    for ratio in result["ratios"]:
        found = [f"{rates[dispatch, ratio['mode'], ratio['stages']]:,.0f}" for dispatch in DISPATCH]
        spread = [f"{ratio[key]:.2f}" for key in ("median", "min", "max")]
        table.add_row(str(ratio["stages"]), ratio["mode"], *found, *spread)
    console.print(table)


def draw(result: dict[str, Any], path: Path) -> None:
    """The figure: computations per second against stages, both ways of dispatch, with the spread as bars."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(MODES), figsize=(9, 3.6), layout="constrained")
    for mode, ax in zip(MODES, axes, strict=True):
        for dispatch, colour in zip(DISPATCH, ("tab:blue", "tab:orange"), strict=True):
            rows = [r for r in result["rows"] if (r["dispatch"], r["mode"]) == (dispatch, mode)]
            x = [r["stages"] for r in rows]
            rates = [r["computations_per_second"] for r in rows]
            middle = [rate["median"] for rate in rates]
            low = [rate["median"] - rate["min"] for rate in rates]
            high = [rate["max"] - rate["median"] for rate in rates]
            ax.errorbar(x, middle, [low, high], label=dispatch, color=colour, marker="o", markersize=3, capsize=2)
        ax.set(title=mode, xlabel="stages, each on another host", ylim=(0, None), xticks=result["settings"]["stages"])
    axes[0].set_ylabel("computations per second")
    axes[0].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--figure", type=Path, help="draw a PNG here")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--elements", type=int, default=256, help="of the array that is handed on (default: %(default)s)"
    )
    parser.add_argument("--islands", action="store_true", help="each stage on an island of its own")
    parser.add_argument("--smoke", action="store_true", help="one short round, to see that everything runs")
    options = parser.parse_args(arguments)
    if options.smoke:
        measured = run((1, 2), programs=5, repetitions=1, islands=options.islands)
    else:
        measured = run(repetitions=options.repetitions, elements=options.elements, islands=options.islands)
    show(measured, Console())
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")
    if options.figure:
        draw(measured, options.figure)
    return measured


if __name__ == "__main__":
    main()
