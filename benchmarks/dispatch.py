"""How many small computations a second each system gets onto its devices, as Figure 5 of the Pathways paper asks.

Compares this runtime, JAX called directly, and Ray actors, on one host with 4 CPU devices; `benchmarks.systems` says
what they run. All systems are started first and stay alive, and each is measured once per round, in turn.

Run it with `python -m benchmarks.dispatch --json results.json --figure results.png`.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import measure
from benchmarks.systems import CHAIN, DEVICES, Jax, Pathways, Ray, RayStateful, System

COMPUTATIONS = 2048  # per measured run: 16 chains, so that fetching the last value weighs little
REPETITIONS = 9
SMOKE = {"repetitions": 1, "computations": 2 * CHAIN}  # proves that everything runs; its numbers mean nothing
SYSTEMS = ("pathways", "jax", "ray", "ray-stateful")

MEASURED = (
    "One computation is an all-reduce of a float32 scalar over {devices} CPU devices of one host, a division by "
    "{devices} and an addition of 1; its output feeds the next. opbyop: one call per computation, none waited for. "
    "chained: calls of {chain} nodes. fused: calls of one node with {chain} computations in it. Each run issues "
    "{computations} computations, fetches the last value within the measured time, and checks that it is exact. "
    "{repetitions} rounds after one warm-up, all systems alive and measured in turn; ratios are taken round by round."
)


@dataclass(frozen=True)
class Case:
    """One bar of the figure."""

    system: str
    mode: str

    def __str__(self) -> str:
        return f"{self.system} {self.mode}"


# Who is compared with whom. JAX has nothing like `chained`, so that is held against its `opbyop`, as in the paper.
RATIOS = (
    (Case("pathways", "opbyop"), Case("jax", "opbyop")),
    (Case("pathways", "chained"), Case("jax", "opbyop")),
    (Case("pathways", "fused"), Case("jax", "fused")),
    (Case("pathways", "opbyop"), Case("ray", "opbyop")),
    (Case("pathways", "opbyop"), Case("ray-stateful", "opbyop")),
    (Case("pathways", "chained"), Case("ray", "chained")),
    (Case("pathways", "fused"), Case("ray", "fused")),
)


def run(
    repetitions: int = REPETITIONS,
    computations: int = COMPUTATIONS,
    systems: Sequence[str] = SYSTEMS,
    reuse_session: bool = False,
) -> dict[str, Any]:
    """Measures and returns the result as it is written to JSON.

    Args:
        repetitions: rounds that count; one warm-up round comes before them.
        computations: per measured run; a multiple of 128.
        systems: names out of SYSTEMS.
        reuse_session: use the session that is running for `pathways`, in place of one made for the benchmark. It must
            have a host with 4 free devices.
    """
    if computations % CHAIN:
        raise ValueError(f"computations must be a multiple of {CHAIN}, got {computations}")
    machine = measure.machine()
    with start(systems, reuse_session) as started:
        cases = [Case(name, mode) for name, system in started.items() for mode in system.modes]
        samples = measure.interleaved(
            cases, lambda case: computations / started[case.system].seconds(case.mode, computations), repetitions
        )
    settings = {"devices": DEVICES, "chain": CHAIN, "computations": computations, "repetitions": repetitions}
    return result(machine, MEASURED.format(**settings), samples)


@contextlib.contextmanager
def start(names: Sequence[str], reuse_session: bool) -> Iterator[dict[str, System]]:
    """Starts the systems and closes them in reverse: Pathways comes first, so that Ray's actor joins its cluster."""
    makers: dict[str, Callable[[], System]] = {
        "pathways": lambda: Pathways(reuse_session),
        "jax": Jax,
        "ray": Ray,
        "ray-stateful": RayStateful,
    }
    with contextlib.ExitStack() as stack:
        systems = {}
        for name in [name for name in makers if name in names]:
            systems[name] = makers[name]()
            stack.callback(systems[name].close)
        yield systems


def result(machine: dict[str, Any], measured: str, samples: dict[Case, list[float]]) -> dict[str, Any]:
    """The JSON form of the measurements; samples are computations per second."""
    rows = [
        {
            "system": case.system,
            "mode": case.mode,
            "hosts": 1,
            "devices_per_host": DEVICES,
            "computations_per_second": measure.spread(values),
        }
        for case, values in samples.items()
    ]
    ratios = [
        {
            "name": f"{over} / {under}",
            "numerator": vars(over),
            "denominator": vars(under),
            **measure.paired_ratios(samples[over], samples[under]),
        }
        for over, under in RATIOS
        if over in samples and under in samples
    ]
    return {"benchmark": "dispatch", "machine": machine, "measured": measured, "rows": rows, "ratios": ratios}


def show(result: dict[str, Any], console: Console) -> None:
    """Prints what was measured, on what, and the numbers."""
    console.print(result["measured"], f"Machine: {measure.describe(result['machine'])}.", sep="\n", highlight=False)
    rates = Table("system", "mode", title="computations per second")
    ratios = Table("ratio", title="ratios, round by round")
    for table in (rates, ratios):
        for heading in ("min", "median", "max"):
            table.add_column(heading, justify="right")
    rates.add_column("us each", justify="right")
    for row in result["rows"]:
        rate = row["computations_per_second"]
        numbers = [f"{rate[key]:,.0f}" for key in ("min", "median", "max")]
        rates.add_row(row["system"], row["mode"], *numbers, f"{1e6 / rate['median']:.1f}")
    for ratio in result["ratios"]:
        ratios.add_row(ratio["name"], *(f"{ratio[key]:.2f}" for key in ("min", "median", "max")))
    console.print(rates)
    if result["ratios"]:
        console.print(ratios)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--figure", type=Path, help="draw a PNG here")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="rounds (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="one short round, to see that everything runs")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="default: all")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    settings = SMOKE if options.smoke else {"repetitions": options.repetitions}
    measured = run(systems=options.systems, **settings)
    show(measured, Console())
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")
    if options.figure:
        from benchmarks import figures  # matplotlib is not needed to measure

        figures.dispatch(measured, options.figure)
    return measured


if __name__ == "__main__":
    main()
