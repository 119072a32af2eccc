"""Results as text: what was measured and on what, tables of records, what did not run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks import measure

Record = Mapping[str, Any]


class Table:
    """A list of records in a result, as a table for people.

    Args:
        records: the way to them in the result, or to a lone one: keys with dots between.
        columns: the way to a value in a record, and its format behind a colon: `ratio.median:.2f`. "." is the record
            itself. A spread is shown as `1.90 (1.43 to 2.76)`, and what is not there leaves its cell empty.
    """

    def __init__(self, title: str, records: str, *columns: str) -> None:
        self.title, self.records = title, records
        self.columns = [column.partition(":")[::2] for column in columns]
        self.headings = [
            way.removesuffix(".median").translate(str.maketrans("_.", "  ")).strip() for way, _ in self.columns
        ]

    def rows(self, result: Record) -> list[list[str]]:
        """The cells of each row."""
        found = value_at(result, self.records) or ()
        records = [found] if isinstance(found, Mapping) else found
        return [[text_of(value_at(record, way), form) for way, form in self.columns] for record in records]

    def show(self, result: Record, console: Console) -> None:
        """Prints the table; nothing where there is no record."""
        table = RichTable(*self.headings, title=self.title)
        for row in self.rows(result):
            table.add_row(*row)
        if table.row_count:
            console.print(table)


def shows(*tables: Table) -> Callable[[Record, Console], None]:
    """A function that prints a result: its heading, tables, and what did not run."""

    def show(result: Record, console: Console) -> None:
        for text in (result.get("measured"), f"Machine: {measure.describe(result['machine'])}."):
            if text:
                console.print(text, highlight=False)
        for table in tables:
            table.show(result, console)
        for what, error in result.get("errors", {}).items():
            console.print(f"Not run, {what}: {error}", markup=False)

    return show


def value_at(record: Record, way: str) -> Any:
    """The value that a way leads to; None where a key is not there."""
    found: Any = record
    for key in filter(None, way.split(".")):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def text_of(value: Any, form: str = "") -> str:
    """One cell. Numbers without a format have four digits that count, and thousands apart."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        if "median" not in value:
            return ", ".join(text_of(one, form) for one in value.values())
        text = text_of(value["median"], form)
        ends = [text_of(value[key], form) for key in ("min", "max") if key in value]
        return f"{text} ({' to '.join(ends)})" if len(ends) == 2 else text
    if isinstance(value, list | tuple):
        return ", ".join(text_of(one, form) for one in value if one is not None)
    if form or not isinstance(value, int | float):
        return format(value, form)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or value == 0 or not math.isfinite(value):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
