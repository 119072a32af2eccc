"""docs/schedules.md says what is so: its programs run, its figures are the simulation's, its pictures are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_ptdp.schedules import build, in_flight, registry, schedule_names, simulate
from tests.unit.megatron.schedules.pipelines import BUILT_IN

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "schedules.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROW = re.compile(r"\| `([\w-]+)` \|.*\| ([\d.]+) % \| ([\d.]+) \|")


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs_run(program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(registry, "_GENERATORS", {**registry._GENERATORS})
    exec(compile(program, "docs/schedules.md", "exec"), {})
    printed = capsys.readouterr().out
    for promised in re.findall(r"^print\(.*#\s(.*)$", program, re.MULTILINE):
        assert promised in printed.splitlines()


def test_the_program_of_ones_own_has_at_most_20_lines() -> None:
    own = next(program for program in PROGRAMS if "@register" in program)
    assert len([line for line in own.splitlines() if line.strip()]) <= 20


def test_the_table_has_all_schedules_and_the_simulated_figures() -> None:
    rows = {name: (float(bubble), float(held)) for name, bubble, held in ROW.findall(PAGE)}
    assert tuple(rows) == BUILT_IN
    assert set(BUILT_IN) <= set(schedule_names())
    for name, figures in rows.items():
        schedule = build(name, 4, 8)
        of_ideal = 100 * simulate(schedule).bubble.of_ideal
        assert figures == (pytest.approx(of_ideal, abs=0.051), max(in_flight(schedule)) / schedule.chunks)


@pytest.mark.parametrize("name", BUILT_IN)
def test_pictures_are_there(name: str) -> None:
    assert f"(pictures/schedule_{name}.png)" in PAGE
    assert (DOCS / "pictures" / f"schedule_{name}.png").is_file()
