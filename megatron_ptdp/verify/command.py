"""`pathways-train verify`: starts a cluster, runs all checks one after another, and prints their outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import pathways_ray as pw
from megatron_ptdp.errors import ConfigError
from megatron_ptdp.verify import cases, checks, report
from megatron_ptdp.verify.cases import DEVICES, ISLANDS, Grid
from megatron_ptdp.verify.checks import Check, Outcome
from megatron_ptdp.verify.compare import DType


def verify(
    grid: Grid,
    dtype: DType,
    only: Sequence[str],
    mistakes: bool,
    path: Path | None,
    seen: Console,
    out: Console,
    part: str = ":",
) -> bool:
    """Runs the checks, and returns whether all passed.

    Args:
        only: as `cases.selected`
        mistakes: planted bugs instead of the grid
        path: where to write JSON
        seen: shows the progress
        out: gets the table
        part: as `cases.part`, of what `only` leaves

    Raises:
        ConfigError: nothing is left to check, or `path` cannot be written.
    """
    todo = checks.chosen(grid, dtype, mistakes, only)
    todo = todo[cases.part(part, len(todo))]
    if path is not None:
        _require_writable(path)
    # The side of one device is computed in float64, whatever the runtime computes in.
    jax.config.update("jax_enable_x64", True)
    start = time.perf_counter()
    with pw.init(ISLANDS, 1, DEVICES):
        outcomes = _all(todo, dtype, seen, lambda so_far: _write(path, so_far, len(todo), dtype, start))
    seconds = time.perf_counter() - start
    out.print(report.table(outcomes, dtype))
    out.print(report.summary(outcomes, seconds), soft_wrap=True, markup=False)
    return all(outcome.passed for outcome in outcomes)


def _write(path: Path | None, outcomes: Sequence[Outcome], asked: int, dtype: DType, start: float) -> None:
    """Writes the outcomes so far; called after every check, so that a run that is stopped leaves them."""
    if path is not None:
        report.written(path, outcomes, asked, dtype, time.perf_counter() - start)


def _all(
    todo: Sequence[Check], dtype: DType, seen: Console, done: Callable[[Sequence[Outcome]], None]
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=seen) as progress:
        line = progress.add_task("", total=len(todo))
        for check in todo:
            progress.update(line, description=f"{check.kind} {check.label()}")
            outcomes.append(checks.answered(check, dtype))
            progress.advance(line)
            done(outcomes)
            if not outcomes[-1].passed:
                progress.console.print(f"failed: {check.kind} {check.label()}", markup=False, soft_wrap=True)
    return outcomes


def _require_writable(path: Path) -> None:
    """Checks the path before the cases run, which takes minutes."""
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(
            f"--json {path} cannot be written: {error.strerror}; name a file in a folder that is"
        ) from error
