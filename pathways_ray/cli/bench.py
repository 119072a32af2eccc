"""`pathways bench`: the benchmarks of `benchmarks/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pathways_ray.cli.output import FILE, FOLDER, CommandFailed, console_beside, load, with_folder, write_json, writing

SMOKE = "One short round, to see that everything runs; its numbers mean nothing."


@click.group("bench")
def command() -> None:
    """Measure the runtime, and what it is compared with, on this machine."""


@command.command()
@click.option("--json", "target", type=FILE, callback=with_folder, help="Write the result here; - is stdout.")
@click.option("--figure", type=FILE, callback=with_folder, metavar="PNG", help="Draw the result here.")
@click.option("--repetitions", type=click.IntRange(min=1), default=9, show_default=True, help="Rounds that count.")
@click.option("--smoke", is_flag=True, help=SMOKE)
def dispatch(target: Path | None, figure: Path | None, repetitions: int, smoke: bool) -> None:
    """Small computations that reach the devices in a second: this runtime, JAX called directly, and Ray actors."""
    benchmark = load("benchmarks.dispatch").BENCHMARK
    _measure(benchmark, benchmark.smoke if smoke else benchmark.settings(repetitions=repetitions), target, figure)


@command.command()
@click.option("--json", "target", type=FILE, callback=with_folder, help="Write the result here; - is stdout.")
@click.option("--figures", "folder", type=FOLDER, callback=with_folder, help="Draw the results here.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds that count.")
@click.option("--smoke", is_flag=True, help=SMOKE)
def tenants(target: Path | None, folder: Path | None, rounds: int, smoke: bool) -> None:
    """Many clients on the same devices: their throughput, against JAX called directly, and their shares."""
    benchmark = load("benchmarks.tenants.benchmark").BENCHMARK
    _measure(benchmark, benchmark.smoke if smoke else benchmark.settings(rounds=rounds), target, folder)


def _measure(benchmark: Any, settings: Any, target: Path | None, drawing: Path | None) -> None:
    """Runs a benchmark, prints its result, and writes and draws it where that is asked for."""
    figures = load("benchmarks.figures") if drawing else None
    console = console_beside(target)
    rounds = getattr(settings, "repetitions", None) or settings.rounds
    console.print(f"Measuring {benchmark.name}; {rounds} rounds after one to warm up ...")
    try:
        result = benchmark.measured(settings)
    except AssertionError as error:
        raise CommandFailed(f"wrong result: {error}") from error
    except RuntimeError as error:
        raise CommandFailed(str(error)) from error
    benchmark.show(result, console)
    if target:
        write_json(result, target)
    if figures and drawing:
        with writing(drawing):
            getattr(figures, benchmark.name)(result, drawing)
