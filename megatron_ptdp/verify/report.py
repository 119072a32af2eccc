"""Outcomes for people and for programs: a table with one row for each check, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table
from rich.text import Text

from megatron_ptdp.verify.checks import Outcome, record
from megatron_ptdp.verify.compare import DType


def table(outcomes: Sequence[Outcome], dtype: DType) -> Table:
    """One row for each check: the worst tensor, how far it is off, and how far it might be."""
    made = Table(title=f"parity in {dtype}", title_justify="left")
    for name in ("check", "case", "worst tensor"):
        made.add_column(name, overflow="fold")
    for name in ("error", "bound", "seconds", ""):
        made.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        check, apart = outcome.check, outcome.difference
        found = [outcome.failure, "", ""] if apart is None else _found(outcome)
        verdict = Text(*_verdict(outcome))
        made.add_row(check.kind, Text(check.label()), *map(Text, found), f"{outcome.seconds:.1f}", verdict)
    return made


def _found(outcome: Outcome) -> list[str]:
    apart = outcome.difference
    assert apart is not None
    if outcome.check.kind == "bits":
        return [apart.worst or "none differs", f"{apart.error:.1e}" if apart.error else "0", "0"]
    return [apart.worst, f"{apart.error:.1e}", f"{apart.bound:.1e}"]


def _verdict(outcome: Outcome) -> tuple[str, str]:
    """A word and its colour."""
    if outcome.check.planted_bug:
        return ("found", "green") if outcome.passed else ("NOT FOUND", "red")
    return ("pass", "green") if outcome.passed else ("FAIL", "red")


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    """One line."""
    failed = [outcome for outcome in outcomes if not outcome.passed]
    planted = sum(bool(outcome.check.planted_bug) for outcome in outcomes)
    parts = [f"{len(outcomes) - planted} checks"] if len(outcomes) > planted else []
    parts += [f"{planted} mistakes"] if planted else []
    worst = furthest(outcomes)
    return (
        f"{' and '.join(parts)} in {seconds:.0f} s: "
        + (f"{len(failed)} failed" if failed else "all as they must be")
        + (f"; the worst error is {worst:.2g} of its bound" if worst is not None else "")
    )


def furthest(outcomes: Sequence[Outcome]) -> float | None:
    """The largest error of a check without a planted bug, as a share of its bound; None if no check has a bound."""
    shares = [
        outcome.difference.error / outcome.difference.bound
        for outcome in outcomes
        if outcome.difference is not None and outcome.difference.bound and not outcome.check.planted_bug
    ]
    return max(shares, default=None)


def written(path: Path, outcomes: Sequence[Outcome], asked: int, dtype: DType, seconds: float) -> None:
    """Writes all of it as JSON; "passed" is true only when all checks that were asked for are there."""
    worst = furthest(outcomes)
    whole: dict[str, Any] = {
        "dtype": dtype,
        "jax": jax.__version__,
        "seconds": round(seconds, 1),
        "asked": asked,
        "passed": len(outcomes) == asked and all(outcome.passed for outcome in outcomes),
        "worst_share_of_bound": worst if worst is None or worst != float("inf") else "inf",
        "checks": [record(outcome) for outcome in outcomes],
    }
    path.write_text(json.dumps(whole, indent=1) + "\n")
