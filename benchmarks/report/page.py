"""One HTML page of benchmark results: figures and tables, with the settings, the machine and the date, and missed aims.

Reads the JSON results of any benchmark here. An unknown result gets its tables all the same: `rows` and other lists of
records become tables, `ratios` and `figures` bars beside their aims (`benchmarks.report.aims`). The page is one file:
pictures are in it, and no script.

Run it with `python -m benchmarks.report results/*.json --html report.html`.
"""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from benchmarks import measure, registry
from benchmarks.report.aims import AIMS, Aim, aim_of
from benchmarks.report.html import bars, page, records, table

FIGURES = ("ratios", "figures")
FIGURES_IN_ROWS = {"metg": (("system", "mode", "pattern"), "metg_us")}  # the words of the name, and the spread
BELOW = "slower"  # a ratio of this runtime over another one, below 1, that has no aim


@dataclass(frozen=True)
class Found:
    """A figure of a result, with its aim. `verdict` is "met", "missed", "slower", or empty."""

    result: Result
    name: str
    values: Mapping[str, float]
    aim: Aim | None

    @property
    def median(self) -> float:
        return self.values["median"]

    @property
    def verdict(self) -> str:
        if self.aim is not None:
            return "met" if self.aim.met_by(self.median) else "missed"
        return BELOW if self.name.startswith("pathways") and " / " in self.name and self.median < 1 else ""


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
    def title(self) -> str:
        entry = registry.entry_of(self.benchmark)
        return entry.title if entry else self.benchmark

    @property
    def when(self) -> str:
        """The time of the measurement; that of the file if the result has none."""
        when = self.machine.get("when")
        return str(when) if when else f"file of {self.written:%Y-%m-%d %H:%M} UTC"

    @property
    def machine(self) -> Mapping[str, Any]:
        machine = self.data.get("machine")
        return machine if isinstance(machine, dict) else {}

    @property
    def where(self) -> str:
        try:
            return measure.describe(self.machine)
        except (KeyError, TypeError, ValueError, AttributeError):
            return ", ".join(f"{key} {value}" for key, value in self.machine.items()) or "unknown"

    def figures(self) -> Iterator[Found]:
        """All that can have an aim."""
        for key in FIGURES:
            for one in records(self.data.get(key)):
                yield from self._found(named(one), one)
        if self.benchmark in FIGURES_IN_ROWS:
            for row in records(self.data.get("rows")):
                words, value = FIGURES_IN_ROWS[self.benchmark]
                if isinstance(row.get(value), dict):
                    yield from self._found(" ".join(str(row.get(word, "?")) for word in words), row[value])

    def _found(self, name: str, one: Mapping[str, Any]) -> Iterator[Found]:
        values = {k: one[k] for k in ("min", "median", "max") if isinstance(one.get(k), int | float)}
        if "median" in values:
            yield Found(self, name, values, aim_of(self.benchmark, name))


def named(record: Mapping[str, Any]) -> str:
    """A record's name with what tells it from others of the same name."""
    parts = [str(record.get("name", "?"))]
    if "payload" in record:
        parts.append(str(record["payload"]))
    if "hosts" in record and "devices_per_host" in record:
        parts.append(f"{record['hosts']} x {record['devices_per_host']}")
    if "length_ms" in record:
        parts.append(f"{record['length_ms']:g} ms")
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


# --- pictures ---------------------------------------------------------------------------------------------------------


def pictures(result: Result) -> str:
    """The figures of a result as HTML; a note in their place when they cannot be drawn."""
    entry = registry.entry_of(result.benchmark)
    if entry is None:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            for output in registry.load(entry).outputs:
                output.write_below(dict(result.data), Path(folder))
        except Exception as error:  # a result of another version, or no matplotlib: the tables are there all the same
            return f'<p class="note">No figure: {escape(f"{type(error).__name__}: {error}")}</p>'
        images = [base64.b64encode(file.read_bytes()).decode() for file in sorted(Path(folder).glob("*.png"))]
    name = escape(result.title)
    return "".join(f'<img alt="{name}" src="data:image/png;base64,{image}">' for image in images)


# --- the page ---------------------------------------------------------------------------------------------------------


def summary(results: Sequence[Result]) -> str:
    """Every aim with its figures; those without any are marked as not measured."""
    found = [one for result in results for one in result.figures()]
    rows = []
    for aim in AIMS:
        mine = [one for one in found if one.aim is aim]
        for one in mine:
            rows.append(
                {
                    "aim": aim.text,
                    "bound": aim.bound_text,
                    "found": {**one.values},
                    "verdict": one.verdict,
                    "figure": one.name,
                    "file": one.result.name,
                }
            )
        if not mine:
            rows.append({"aim": aim.text, "bound": aim.bound_text, "verdict": "not measured"})
    missed = [one for one in found if one.verdict in ("missed", BELOW)]
    met = sum(one.verdict == "met" for one in found)
    lead = f"<p>{met} figures meet their aim, {sum(one.verdict == 'missed' for one in missed)} miss it, "
    lead += (
        f"{sum(one.verdict == BELOW for one in missed)} without an aim are slower than what they are compared with.</p>"
    )
    losses = table(
        [
            {
                "verdict": one.verdict,
                "figure": one.name,
                "found": {**one.values},
                "aim": one.aim.bound_text if one.aim else "none; 1 is even",
                "file": one.result.name,
            }
            for one in missed
        ]
    )
    return lead + table(rows) + ("<h3>Losses</h3>" + losses if missed else "")


def section(result: Result) -> str:
    """One result: settings, machine and date; its figures, its tables."""
    head = f'<h2 id="{escape(result.name)}">{escape(result.title)}</h2>'
    if result.trouble:
        return f'{head}<p class="missed">{escape(result.name)}: {escape(result.trouble)}</p>'
    facts = [
        ("file", result.name),
        (
            "benchmark",
            f"{result.benchmark}" + ("" if registry.entry_of(result.benchmark) else " (not one that this page knows)"),
        ),
        ("when", result.when),
        ("where", result.where),
        ("what", str(result.data.get("measured", "unknown"))),
        ("settings", json.dumps(result.data["settings"]) if "settings" in result.data else "unknown"),
    ]
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in facts)
    drawn = bars([(one.name, one.values, one.aim, one.verdict) for one in result.figures()])
    return f"{head}<dl>{listed}</dl>{pictures(result)}{drawn}{tables(result)}"


def tables(result: Result) -> str:
    """All lists of records of a result, also those that lie deeper; numbers and texts that stand alone first."""
    known = {"benchmark", "machine", "measured", "settings", *FIGURES}
    rest = {key: value for key, value in result.data.items() if key not in known}
    alone = {key: value for key, value in rest.items() if isinstance(value, str | int | float)}
    parts = [table([alone])] if alone else []
    for name, rows in _lists(rest, ""):
        parts.append(
            f"<details{' open' if len(rows) <= 40 else ''}><summary>{escape(name)}</summary>{table(rows)}</details>"
        )
    return "".join(parts)


def _lists(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if found := records(inner):
            yield name, found
        elif isinstance(inner, dict):
            deeper = list(_lists(inner, f"{name}."))
            yield from deeper
            plain = {k: v for k, v in inner.items() if not isinstance(v, list) and not isinstance(v, dict)}
            if plain:
                yield name, [plain]


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
    options = parser.parse_args(arguments)
    files = options.results or sorted(Path("results").glob("*.json"))
    if not files:
        parser.error("no results: give JSON files, or run benchmarks with --json results/NAME.json")
    results = [read(path) for path in files]
    options.html.write_text(build(results, datetime.now(UTC)), encoding="utf-8")
    missed = sum(one.verdict == "missed" for result in results for one in result.figures())
    print(f"{options.html}: {len(results)} results, {missed} figures miss their aim")
    return 0
