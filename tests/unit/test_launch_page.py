"""The page that walks one launch, `docs/launch.md`: its tables are those of the code, its excerpts are lines of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path

import pytest

from pathways_ray.client import connection
from pathways_ray.controller import channel, lifecycle
from pathways_ray.executor.run import active_launch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pathways_ray"
PAGE = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")

TOLERANCE = 0.05
"""Part by which the lines of the road may differ from those that the page states."""


def code(names: Iterable[Enum]) -> str:
    return ", ".join(f"`{name.name}`" for name in names)


def events_by_target(transitions: Mapping[Enum, Enum]) -> str:
    """The ways out of a state; events that lead to the same state stand side by side."""
    targets: dict[Enum, list[Enum]] = {}
    for event, target in transitions.items():
        targets.setdefault(target, []).append(event)
    return "; ".join(f"{code(events)} → {code([target])}" for target, events in targets.items()) or "–"


def drawn(title: str, table: Mapping[Enum, Mapping[Enum, Enum]]) -> str:
    rows = [f"| `{state.name}` | {events_by_target(following)} |" for state, following in table.items()]
    return "\n".join([f"| {title} | event → state |", "|---|---|", *rows])


def phases(title: str) -> str:
    rows = [
        f"| `{phase.name}`: {phase.value} | {code(p for p in active_launch.Phase if p in following) or '–'} |"
        for phase, following in active_launch.TRANSITIONS.items()
    ]
    return "\n".join([f"| {title} | following phases |", "|---|---|", *rows])


TABLES = {
    "client": drawn("client's connection", connection.TRANSITIONS),  # type: ignore[arg-type]
    "channel": drawn("its channel at the controller", channel.CHANNEL),  # type: ignore[arg-type]
    "launch": drawn("launch at the controller", lifecycle.LAUNCH_LIFE),  # type: ignore[arg-type]
    "host": phases("active launch on a host"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_states_is_that_of_the_code(name: str) -> None:
    title = TABLES[name].partition("\n")[0]
    assert title in PAGE
    on_page = PAGE[PAGE.index(title) :].partition("\n\n")[0]
    assert on_page == TABLES[name]


def excerpts() -> list[tuple[str, list[str]]]:
    """The files that the blocks of code name in their first line, and the lines below it."""
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [(path, body.splitlines()) for path, body in blocks]


def test_excerpts_are_lines_of_their_files() -> None:
    """Next to each other and indented alike, wherever the file has them."""
    assert len(excerpts()) == PAGE.count("```python")
    for path, lines in excerpts():
        source = (PACKAGE / path).read_text(encoding="utf-8").splitlines()
        wanted = [line.removeprefix(" " * indent(lines)) for line in lines]
        found = [source[at : at + len(wanted)] for at, line in enumerate(source) if line.strip() == wanted[0].strip()]
        assert wanted in [[line[indent(part) :] for line in part] for part in found], f"{path} has no lines {lines}"


def indent(lines: list[str]) -> int:
    return len(lines[0]) - len(lines[0].lstrip())


def test_the_length_of_the_road_is_stated() -> None:
    """Each file is there; the sums are right to 5 %, so that an edit of a file needs none of the page."""
    for total, count, rows in re.findall(r"^\| \*\*([\d,]+) lines\*\* \| (\d+) files (.*) \|$", PAGE, re.MULTILINE):
        stated = re.findall(r"`([\w/]+\.py)` ([\d,]+)", rows)
        assert len(stated) == int(count)
        lengths = [len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) for path, _ in stated]
        assert sum(lengths) == pytest.approx(int(total.replace(",", "")), rel=TOLERANCE)
        assert sum(int(lines.replace(",", "")) for _, lines in stated) == int(total.replace(",", ""))
    assert PAGE.count(" lines** | ") == 3
