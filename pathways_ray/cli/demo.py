"""`pathways demo`: starts a small cluster, runs the example programs on it, measures dispatch, shows what came.

All that was started is stopped again, whatever happens: the cluster lives inside one `with`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pathways_ray.cli.demo_programs import PROGRAMS, Program
from pathways_ray.cli.output import FILE, FOLDER, CommandFailed, console_beside, load, with_folder, write_json, writing

CLUSTER: dict[str, Any] = {"islands": 2, "hosts_per_island": 1, "devices_per_host": 4, "platform": "cpu"}

STEPS, SMOKE_STEPS = 200, 3

DISPATCH = {"repetitions": 3, "computations": 1024}
"""Half the size of the benchmark and a third of its rounds: some 15 s on two cores."""

RESULTS = "Folder for demo.json and dispatch.png."


class Shown:
    """Says what runs: a moving line on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        # Drawing takes processor time from what is measured: twice a second is enough.
        self.live = Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=2, transient=True)

    @contextlib.contextmanager
    def step(self, name: str, about: str) -> Iterator[Any]:
        """Shows one step while the block runs; yields what takes the work done and all there is to do."""
        if self.console.is_terminal:
            with self.live as live:
                line = live.add_task(name, total=None)
                yield lambda done, total: live.update(line, completed=done, total=total)
                live.remove_task(line)
            self.console.print(f"{name}: {about}")
            return
        self.console.print(f"{name}: {about} ...")
        said = time.monotonic()

        def say(done: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said > 5.0 or done == total:
                said = time.monotonic()
                self.console.print(f"  {done} of {total} steps")

        yield say


@click.command("demo")
@click.option("--output", type=FOLDER, callback=with_folder, default="results", show_default=True, help=RESULTS)
@click.option("--json", "target", type=FILE, callback=with_folder, help="Write the JSON here instead; - is stdout.")
@click.option("--smoke", is_flag=True, help="The smallest sizes, to see that everything runs.")
def command(output: Path, target: Path | None, smoke: bool) -> None:
    """Run the example programs and a short benchmark on a cluster of its own, in about a minute."""
    console = console_beside(target)
    # The cluster has CPU devices; plain JAX, which its results are compared with, must have the same.
    os.environ["JAX_PLATFORMS"] = "cpu"
    figures, measure = load("benchmarks.figures"), load("benchmarks.measure")
    dispatch = load("benchmarks.dispatch").BENCHMARK
    machine = measure.machine()
    start = time.perf_counter()
    programs, measured = run(console, dispatch, smoke)
    seconds = time.perf_counter() - start
    wrong = wrong_results(programs)
    result = {
        "command": "demo",
        "machine": machine,
        "cluster": CLUSTER,
        "seconds": round(seconds, 1),
        "ok": not wrong,
        "programs": programs,
        "dispatch": measured,
    }
    console.print(programs_table(programs))
    dispatch.show(measured, console)
    figure, target = output / "dispatch.png", target or output / "demo.json"
    write_json(result, target)
    with writing(figure):
        figures.dispatch(measured, figure)
    console.print(f"Figure: {figure}. JSON: {target}. {seconds:.0f} s in all.", soft_wrap=True)
    if wrong:
        raise CommandFailed(f"wrong result: {'; '.join(wrong)}")


def run(console: Console, dispatch: Any, smoke: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs everything on a cluster that is gone afterwards; what the programs gave, and what dispatch measured."""
    import pathways_ray as pw

    shown = Shown(console)
    shape = "{islands} islands of {hosts_per_island} host with {devices_per_host} CPU devices".format(**CLUSTER)
    with contextlib.ExitStack() as cluster:
        with shown.step("start", f"Ray and the runtime, {shape}"):
            session = cluster.enter_context(pw.init(**CLUSTER))
        steps = SMOKE_STEPS if smoke else STEPS
        programs = [run_program(program, session, steps, shown) for program in PROGRAMS]
        with shown.step("dispatch", "how many small computations a second, also by JAX itself and by Ray actors"):
            try:
                settings = dispatch.smoke if smoke else dispatch.settings(**DISPATCH)
                measured = dispatch.measured(dataclasses.replace(settings, reuse_session=True))
            except AssertionError as error:
                raise CommandFailed(f"wrong result in the dispatch benchmark: {error}") from error
        with shown.step("stop", "every process that was started"):
            cluster.close()
    return programs, measured


def run_program(program: Program, session: Any, steps: int, shown: Shown) -> dict[str, Any]:
    """Runs one program; what it prints comes out once it is through."""
    printed = io.StringIO()
    start = time.perf_counter()
    try:
        with shown.step(program.name, program.about) as progress, contextlib.redirect_stdout(printed):
            outcome = program.run(session, steps, progress)
    finally:
        for line in printed.getvalue().splitlines():
            shown.console.print("  " + line, markup=False, highlight=False, soft_wrap=True)
    return {
        "program": program.name,
        "about": program.about,
        "seconds": round(time.perf_counter() - start, 2),
        "checks": [dataclasses.asdict(check) for check in outcome.checks],
        **outcome.details,
    }


def programs_table(programs: list[dict[str, Any]]) -> Table:
    """Table of the programs with their expected and their actual results."""
    table = Table(title="programs")
    table.add_column("program", no_wrap=True)
    for heading in ("result", "expected", "came", ""):
        table.add_column(heading)
    table.add_column("seconds", justify="right")
    for program in programs:
        for number, check in enumerate(program["checks"]):
            first = number == 0
            verdict = "ok" if check["ok"] else "[bold red]wrong[/]"
            name, seconds = (program["program"], f"{program['seconds']:.1f}") if first else ("", "")
            values = (check[key].replace("[", r"\[") for key in ("what", "expected", "came"))
            table.add_row(name, *values, verdict, seconds)
    return table


def wrong_results(programs: list[dict[str, Any]]) -> list[str]:
    """A line for each result that is not as expected."""
    return [
        f"{program['program']}: {check['what']}: expected {check['expected']}, came {check['came']}"
        for program in programs
        for check in program["checks"]
        if not check["ok"]
    ]
