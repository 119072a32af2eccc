"""README's table of figures: lines whose figures were measured are replaced, the others stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.aims import aim_of
from benchmarks.readme_table import HEAD, LINES, updated
from benchmarks.report import Found

README = Path(__file__).parents[3] / "README.md"


def figure(benchmark: str, name: str, low: float, median: float, high: float) -> Found:
    return Found("some.json", name, {"min": low, "median": median, "max": high}, aim_of(benchmark, name))


def test_lines_with_figures_change_and_the_others_stay() -> None:
    rates = [
        figure("serving", f"requests a second / jax.jit in one process, {callers}", 0.2, median, 0.9)
        for callers, median in (
            ("1 threads", 0.1),
            ("8 threads", 0.4),
            ("8 threads, joined", 0.7),
            ("4 processes", 0.3),
        )
    ]
    title = "METG, stencil of 4 tasks; plain JAX, each task a call; plain JAX in one function"
    old = f"| {title} | **258 us**; 300 us; 211 us | ≤ 100 us | `x` |\n"
    text = f"# Project\n\n{HEAD}\n|---|---|---|---|\n| memory | 0.07 KiB | – | `y` |\n{old}\nRatios are medians.\n"
    found, made = updated(text, [("serving", rates)])
    assert made == 1
    spread = "(0.20 to 0.90)"
    figures = f"**0.40** {spread}; 0.70 {spread}; **0.30** {spread}"
    new = f"| {figures} | ≥ 0.5 | `python -m benchmarks.serving --json serving.json` |"
    lines = found.splitlines()
    assert [line for line in lines if "serving" in line] == [
        f"| serving: requests a second, ÷ `jax.jit` in one process; 8 threads; with their calls joined; 4 processes "
        f"{new}"
    ]
    assert old in found
    assert "| memory | 0.07 KiB | – | `y` |" in lines
    assert found.endswith("\n\nRatios are medians.\n")
    assert updated(found, [("serving", rates)]) == (found, 1)
    assert updated(found, [("serving", rates[:3])]) == (found, 0)


def test_a_page_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table that begins with"):
        updated("# Project\n", [])


def test_every_line_of_the_readme_can_be_written_once() -> None:
    """With all figures known, each line is there once, and the other lines of README are as they were."""
    figures = [
        (line.benchmark, [figure(line.benchmark, name.replace("*", "x"), 1.0, 2.0, 3.0) for name in line.figures])
        for line in LINES
    ]
    before = README.read_text(encoding="utf-8")
    after, made = updated(before, figures)
    assert made == len(LINES)
    for line in LINES:
        assert after.count(f"\n| {line.title} | ") == 1
    titles = tuple(f"| {line.title} | " for line in LINES)
    kept = [line for line in before.splitlines() if not line.startswith(titles)]
    assert [line for line in after.splitlines() if not line.startswith(titles)] == kept
