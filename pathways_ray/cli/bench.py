"""`pathways bench`: the benchmarks of `benchmarks/`."""

from __future__ import annotations

from pathlib import Path

import click

from pathways_ray.cli.output import FILE, FOLDER, CommandFailed, console_beside, load, with_folder, write_json


@click.group("bench")
def command() -> None:
    """Measure the runtime, and what it is compared with, on this machine."""


@command.command()
@click.option("--json", "target", type=FILE, callback=with_folder, help="Write the result here; - is stdout.")
@click.option("--figure", type=FILE, callback=with_folder, metavar="PNG", help="Draw the result here.")
@click.option("--repetitions", type=click.IntRange(min=1), default=9, show_default=True, help="Rounds that count.")
@click.option("--smoke", is_flag=True, help="One short round, to see that everything runs; its numbers mean nothing.")
def dispatch(target: Path | None, figure: Path | None, repetitions: int, smoke: bool) -> None:
    """Small computations that reach the devices in a second: this runtime, JAX called directly, and Ray actors."""
    benchmark = load("benchmarks.dispatch")
    figures = load("benchmarks.figures") if figure else None
    settings = benchmark.SMOKE if smoke else {"repetitions": repetitions}
    console = console_beside(target)
    console.print(f"Measuring dispatch; {settings['repetitions']} rounds after one to warm up ...")
    try:
        result = benchmark.run(**settings)
    except AssertionError as error:
        raise CommandFailed(f"wrong result: {error}") from error
    except RuntimeError as error:
        raise CommandFailed(str(error)) from error
    benchmark.show(result, console)
    if figures:
        figures.dispatch(result, figure)
    if target:
        write_json(result, target)


@command.command()
@click.option("--json", "target", type=FILE, callback=with_folder, help="Write the result here; - is stdout.")
@click.option("--figures", "folder", type=FOLDER, callback=with_folder, help="Draw the results here.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds that count.")
@click.option("--smoke", is_flag=True, help="One short round, to see that everything runs; its numbers mean nothing.")
def tenants(target: Path | None, folder: Path | None, rounds: int, smoke: bool) -> None:
    """Many clients on the same devices: their throughput, against JAX called directly, and their shares."""
    benchmark = load("benchmarks.tenants.benchmark")
    figures = load("benchmarks.figures") if folder else None
    settings = benchmark.SMOKE if smoke else benchmark.Settings(rounds=rounds)
    console = console_beside(target)
    console.print(f"Measuring tenants; {settings.rounds} rounds after one to warm up ...")
    try:
        result = benchmark.run(settings)
    except RuntimeError as error:
        raise CommandFailed(str(error)) from error
    benchmark.show(result, console)
    if figures and folder:
        figures.tenants(result, folder)
    if target:
        write_json(result, target)
