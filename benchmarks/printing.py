"""Results as text: a heading, tables of spreads, systems that did not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import measure

SPREAD = ("min", "median", "max")


def heading(result: Mapping[str, Any], console: Console) -> None:
    """Prints the description of a measurement and of the machine."""
    console.print(result["measured"], f"Machine: {measure.describe(result['machine'])}.", sep="\n", highlight=False)


def table(title: str, texts: Sequence[str], numbers: Sequence[str] = SPREAD, **style: Any) -> Table:
    """A table with columns of text and, on the right, of numbers."""
    made = Table(*texts, title=title, **style)
    for name in numbers:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def numbers(spread: Mapping[str, float], form: str, names: Sequence[str] = SPREAD) -> list[str]:
    """The cells of a spread."""
    return [format(spread[name], form) for name in names]


def with_range(spread: Mapping[str, float], form: str) -> str:
    """A median with the lowest and highest value: `1.90 (1.43 to 2.76)`."""
    low, median, high = numbers(spread, form)
    return f"{median} ({low} to {high})"


def not_run(errors: Mapping[str, str], console: Console) -> None:
    """Prints systems and cases that did not run, with their errors."""
    for what, error in errors.items():
        console.print(f"Not run, {what}: {error}", markup=False)
