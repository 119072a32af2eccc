"""One HTML page of benchmark results: figures and tables, with the settings, the machine and the date, and missed aims.

Reads the JSON results of any benchmark here. An unknown result gets its tables all the same: `rows` and other lists of
records become tables, `ratios` and `figures` points beside their aims (`benchmarks.aims`). The page is one file:
pictures are in it, and no script.

Run it with `python -m benchmarks.report results/*.json --html report.html`. `--readme README.md` writes the figures
into README's table as well (`benchmarks.readme_table`).
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from html import escape
from math import inf
from pathlib import Path
from typing import Any

from benchmarks import measure, readme_table, registry
from benchmarks.aims import AIMS, Aim, aim_of
from benchmarks.harness import check_writable
from benchmarks.printing import text_of

FIGURES = ("ratios", "figures")
FIGURES_IN_ROWS = {"metg": (("system", "mode", "pattern"), "metg_us")}  # the words of the name, and the spread
BELOW = "slower"  # a ratio of rates, of this runtime over another one, below 1, that has no aim
OURS = (
    "pathways* / *",
    "coalesced / jax*",
    "each by itself / jax*",
    "* clients / JAX alone*",
)  # the names of such ratios
SPREAD = {"min", "median", "max"}
DEEPEST = 3  # dictionaries in a record that become columns of their own
FLAWS = {
    "incomplete": "its benchmark has not come to its end",
    "of the smallest sizes": "its benchmark has only shown that it runs",
}
OPEN_ROWS = 40  # of a table that is shown at once

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .6rem 0; font-size: 13px } img { max-width: 100%; display: block }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums } .spread { color: #777 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: 13px } dt { color: #777 }
dd { margin: 0; overflow-wrap: anywhere } details { overflow-x: auto } summary { cursor: pointer; font-weight: 600 }
.met { color: #00734f } .missed { color: #b3261e; font-weight: 600 } .slower { color: #a65c00 } .note { color: #777 }
h2 { margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem }
"""


@dataclass(frozen=True)
class Found:
    """A figure of a result, with its aim. `verdict` is "met", "missed", "slower", or empty."""

    file: str
    name: str
    values: Mapping[str, float]
    aim: Aim | None

    @property
    def verdict(self) -> str:
        median = self.values["median"]
        if self.aim is not None:
            return "met" if self.aim.met_by(median) else "missed"
        return BELOW if median < 1 and any(fnmatchcase(self.name, one) for one in OURS) else ""

    def row(self, aim: str) -> dict[str, Any]:
        return {"verdict": self.verdict, "figure": self.name, "found": self.values, "aim": aim, "file": self.file}


@dataclass(frozen=True)
class Result:
    """One file. `trouble` says why it could not be read, and then there is no `data`."""

    name: str
    written: datetime
    data: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""

    @property
    def benchmark(self) -> str:
        return str(self.data.get("benchmark", self.name.removesuffix(".json")))

    @property
    def entry(self) -> registry.Entry | None:
        return registry.entry_of(self.benchmark)

    @property
    def title(self) -> str:
        return self.entry.title if self.entry else self.benchmark

    @property
    def machine(self) -> Mapping[str, Any]:
        machine = self.data.get("machine")
        return machine if isinstance(machine, dict) else {}

    @property
    def when(self) -> str:
        """The time of the measurement, that of the file if the result has none; and its flaw."""
        when = str(self.machine.get("when") or f"file of {self.written:%Y-%m-%d %H:%M} UTC")
        return ", ".join(filter(None, (when, self.flaw)))

    @property
    def flaw(self) -> str:
        """The reason why its figures stand for nothing, or "": its benchmark did not come to its end, or only
        showed that it runs. Files without a word about it are of one that did, with the usual sizes."""
        flaws = {"incomplete": not self.data.get("complete", True), "of the smallest sizes": self.data.get("smoke")}
        return next((flaw for flaw in FLAWS if flaws[flaw]), "")

    @property
    def where(self) -> str:
        try:
            return measure.describe(self.machine)
        except (KeyError, TypeError, ValueError, AttributeError):
            return ", ".join(f"{key} {value}" for key, value in self.machine.items()) or "unknown"

    def figures(self) -> list[Found]:
        """All that can have an aim."""
        ones = [(named(one), one) for key in FIGURES for one in records(self.data.get(key))]
        words, value = FIGURES_IN_ROWS.get(self.benchmark, ((), ""))
        for row in records(self.data.get("rows")):
            if isinstance(row.get(value), dict):
                ones.append((" ".join(str(row.get(word, "?")) for word in words), row[value]))
        found = []
        for name, one in ones:
            values = {key: one[key] for key in ("min", "median", "max") if isinstance(one.get(key), int | float)}
            if "median" in values:
                file = ", ".join(filter(None, (self.name, self.flaw)))
                found.append(Found(file, name, values, aim_of(self.benchmark, name)))
        return found


def named(record: Mapping[str, Any]) -> str:
    """A record's name with what tells it from others of the same name."""
    parts = [str(record.get("name", "?"))]
    if "payload" in record:
        parts.append(str(record["payload"]))
    if "hosts" in record and "devices_per_host" in record:
        parts.append(f"{record['hosts']} x {record['devices_per_host']}")
    if "length_ms" in record:
        parts.append(f"{text_of(record['length_ms'])} ms")
    return ", ".join(parts)


def read(path: Path) -> Result:
    """A result, or the reason why the file is invalid."""
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC) if path.exists() else datetime.now(UTC)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Result(path.name, written, trouble=f"not read: {type(error).__name__}: {error}")
    if not isinstance(data, dict):
        return Result(path.name, written, trouble=f"not a result: the file holds a {type(data).__name__}")
    return Result(path.name, written, data)


# --- tables -----------------------------------------------------------------------------------------------------------


def records(value: Any) -> list[dict[str, Any]]:
    """A list of dictionaries, or nothing."""
    return value if isinstance(value, list) and all(isinstance(one, dict) for one in value) else []


def is_spread(value: Any) -> bool:
    return isinstance(value, dict) and (value.keys() == SPREAD or value.keys() == {"median"})


def cell(value: Any) -> str:
    """A value of a record. Spreads show their median first; long lists only how long they are."""
    if value is None:
        return "<td></td>"
    if isinstance(value, int | float):
        return f'<td class="number">{text_of(value)}</td>'
    if is_spread(value):
        ends = (
            f' <span class="spread">{text_of(value["min"])} to {text_of(value["max"])}</span>' if "min" in value else ""
        )
        return f'<td class="number">{text_of(value["median"])}{ends}</td>'
    if isinstance(value, list):
        plain = len(value) <= 8 and not any(isinstance(one, list | dict) for one in value)
        value = ", ".join(map(str, value)) if plain else f"{len(value)} entries"
    marked = f' class="{value}"' if value in ("met", "missed", BELOW) else ""
    return f"<td{marked}>{escape(str(value))}</td>"


def flat(record: Mapping[str, Any], depth: int = DEEPEST) -> dict[str, Any]:
    """A record without dictionaries in it but spreads: their entries become columns of their own."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict) and not is_spread(value) and depth:
            found.update({f"{key}: {inner}": one for inner, one in flat(value, depth - 1).items()})
        else:
            found[key] = value
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Records as rows; a column for everything that any of them has. Nothing for no record."""
    if not rows:
        return ""
    flattened = [flat(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flattened for key in row))
    head = "".join(f"<th>{escape(column.replace('_', ' '))}</th>" for column in columns)
    body = "".join("<tr>" + "".join(cell(row.get(column)) for column in columns) + "</tr>" for row in flattened)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def tables(data: Mapping[str, Any]) -> str:
    """All lists of records of a result, also those that lie deeper; numbers and texts that stand alone first."""
    known = {"benchmark", "complete", "machine", "measured", "settings", *FIGURES}
    rest = {key: value for key, value in data.items() if key not in known}
    alone = {key: value for key, value in rest.items() if isinstance(value, str | int | float)}
    parts = [table([alone] if alone else [])]
    for name, rows in _lists(rest, ""):
        shown = " open" if len(rows) <= OPEN_ROWS else ""
        parts.append(f"<details{shown}><summary>{escape(name)}</summary>{table(rows)}</details>")
    return "".join(parts)


def _lists(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if found := records(inner):
            yield name, found
        elif isinstance(inner, dict):
            yield from _lists(inner, f"{name}.")
            plain = {k: v for k, v in inner.items() if not isinstance(v, list | dict)}
            if plain:
                yield name, [plain]


# --- pictures ---------------------------------------------------------------------------------------------------------


def pictures(result: Result) -> str:
    """The figures of a result as HTML; a note in their place when they cannot be drawn."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            for output in registry.load(result.entry).outputs if result.entry else ():
                output.write_below(dict(result.data), Path(folder))
            images = [file.read_bytes() for file in sorted(Path(folder).glob("*.png"))]
            images += points(result.figures())
        except Exception as error:  # a result of another version, or no matplotlib: the tables are there all the same
            return f'<p class="note">No figure: {escape(f"{type(error).__name__}: {error}")}</p>'
    encoded = (base64.b64encode(image).decode() for image in images)
    return "".join(f'<img alt="{escape(result.title)}" src="data:image/png;base64,{image}">' for image in encoded)


def points(found: Sequence[Found]) -> list[bytes]:
    """A picture of each figure as a point with its spread on a logarithmic line, and a tick where its aim is."""
    from matplotlib.figure import Figure

    from benchmarks.figures import against_aims

    shown = [(f"{one.name} {one.verdict}", one.values, one.aim) for one in found if 0 < one.values["median"] < inf]
    if not shown:
        return []
    figure, written = Figure(figsize=(10, 0.8 + 0.2 * len(shown)), layout="constrained"), io.BytesIO()
    axes = figure.subplots()
    axes.set_xscale("log")
    against_aims(axes, shown)
    figure.savefig(written, dpi=100)
    return [written.getvalue()]


# --- the page ---------------------------------------------------------------------------------------------------------


def page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def summary(results: Sequence[Result]) -> str:
    """Every aim with its figures; those without any are marked as not measured."""
    found = [one for result in results for one in result.figures()]
    rows = []
    for aim in AIMS:
        mine = [one.row(aim.bound_text) for one in found if one.aim is aim]
        rows += [{"for": aim.text, **row} for row in mine or [{"verdict": "not measured", "aim": aim.bound_text}]]
    lost = [one for one in found if one.verdict in ("missed", BELOW)]
    losses = [one.row(one.aim.bound_text if one.aim else "none; 1 is even") for one in lost]
    met, missed, below = (sum(one.verdict == verdict for one in found) for verdict in ("met", "missed", BELOW))
    lead = f"<p>{met} figures meet their aim, {missed} miss it, "
    lead += f"{below} without an aim are slower than what they are compared with.</p>"
    return lead + table(rows) + "<h3>Losses</h3>" + table(losses)


def section(result: Result) -> str:
    """One result: settings, machine and date; its figures, its tables."""
    head = f'<h2 id="{escape(result.name)}">{escape(result.title)}</h2>'
    if result.trouble:
        return f'{head}<p class="missed">{escape(result.name)}: {escape(result.trouble)}</p>'
    unknown = "" if result.entry else " (not one that this page knows)"
    facts = {
        "file": result.name,
        "benchmark": f"{result.benchmark}{unknown}",
        "when": result.when,
        "where": result.where,
        "what": str(result.data.get("measured", "unknown")),
        "settings": json.dumps(result.data["settings"]) if "settings" in result.data else "unknown",
    }
    if result.flaw:
        head += f'<p class="missed">{escape(result.name)} is {result.flaw}: {FLAWS[result.flaw]}</p>'
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in facts.items())
    figures = table([{"figure": one.name, **one.values, "verdict": one.verdict} for one in result.figures()])
    return f"{head}<dl>{listed}</dl>{pictures(result)}{figures}{tables(result.data)}"


def build(results: Sequence[Result], now: datetime) -> str:
    """The whole page."""
    links = "".join(
        f'<li><a href="#{escape(r.name)}">{escape(r.title)}</a> ({escape(r.name)}, {escape(r.when)})</li>'
        for r in results
    )
    body = (
        f"<h1>Benchmarks</h1><p>Made {now:%Y-%m-%d %H:%M} UTC from {len(results)} results. Numbers are medians, with "
        "the lowest and highest round beside them. Ratios were taken round by round, all systems alive and measured in "
        "turn; absolute times of different results are not comparable.</p>"
        f"<ul>{links}</ul><h2>Aims</h2>{summary(results)}" + "".join(section(result) for result in results)
    )
    return page("Benchmarks", body)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="*", help="JSON files (default: all in results/)")
    parser.add_argument("--html", type=Path, default=Path("report.html"), help="default: %(default)s")
    parser.add_argument("--readme", type=Path, help="write the figures into the table of this file as well")
    options = parser.parse_args(arguments)
    files = options.results or sorted(Path("results").glob("*.json"))
    if not files:
        parser.error("no results: give JSON files, or run benchmarks with --json results/NAME.json")
    results = [read(path) for path in files]
    found = [(result.benchmark, result.figures()) for result in results if not result.flaw]
    if options.readme is not None:  # known before the page is written, not behind it
        try:
            text, lines = readme_table.updated(options.readme.read_text(encoding="utf-8"), found)
        except OSError as error:
            parser.error(f"--readme: {options.readme} cannot be read: {error.strerror}")
        except ValueError as error:
            parser.error(f"--readme: {options.readme}: {error}")
    try:
        check_writable(options.html)
    except OSError as error:
        parser.error(f"--html: {options.html} cannot be written: {error.strerror}")
    options.html.write_text(build(results, datetime.now(UTC)), encoding="utf-8")
    if options.readme is not None:
        for result in results:
            if result.flaw:
                print(f"{options.readme}: nothing of {result.name}, which is {result.flaw}", file=sys.stderr)
        options.readme.write_text(text, encoding="utf-8")
        print(f"{options.readme}: {lines} lines of its table are of these results")
    missed = sum(one.verdict == "missed" for result in results for one in result.figures())
    print(f"{options.html}: {len(results)} results, {missed} figures miss their aim")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
