"""The page: every result is on it, what misses its aim is marked, and a file that is no result breaks nothing."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme_table, report
from benchmarks.aims import AIMS, Aim, aim_of
from benchmarks.printing import text_of
from benchmarks.report import Found, cell, points, table

MACHINE = {
    "cpu": "a processor",
    "cores": 2,
    "memory_gib": 1.0,
    "system": "Linux",
    "python": "3.11",
    "packages": {"jax": "0.10"},
    "load": [0.0, 0.0, 0.0],
    "when": "2026-01-02 03:04 UTC",
}
DISPATCH = {
    "benchmark": "dispatch",
    "machine": MACHINE,
    "measured": "A computation & another <one>.",
    "rows": [{"system": "pathways", "computations_per_second": {"min": 1.0, "median": 2.0, "max": 3.0}}],
    "ratios": [
        {"name": "pathways opbyop / jax opbyop", "min": 0.9, "median": 1.97, "max": 2.0},
        {"name": "pathways fused / jax fused", "min": 0.9, "median": 0.91, "max": 1.0},
        {"name": "pathways other / jax other", "min": 0.4, "median": 0.5, "max": 0.6},
    ],
}


def page(tmp_path: Path, **files: Any) -> str:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / f"{name}.json").write_text(text)
    results = [report.read(tmp_path / f"{name}.json") for name in files]
    return report.build(results, datetime(2026, 1, 2, tzinfo=UTC))


def test_the_page_says_what_was_run_where_and_when(tmp_path: Path) -> None:
    text = page(tmp_path, one=DISPATCH)
    assert "A computation &amp; another &lt;one&gt;." in text
    assert "a processor, 2 cores" in text
    assert "2026-01-02 03:04 UTC" in text
    assert '2 <span class="spread">1 to 3</span>' in text, "the table of rows, with the spread"


def test_the_page_needs_nothing_beside_itself(tmp_path: Path) -> None:
    text = page(tmp_path, one=DISPATCH)
    assert "<script" not in text
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)


def test_losses_are_marked(tmp_path: Path) -> None:
    """
    1. One ratio meets its aim, one misses it, a third has none and is below 1.
    2. The last two are in the list of losses, and an aim without any figure is said to be not measured.
    """
    text = page(tmp_path, one=DISPATCH)
    assert "1 figures meet their aim, 1 miss it, 1 without an aim are slower" in text
    losses = text[text.index("<h3>Losses</h3>") : text.index('<h2 id="one.json">')]
    assert "pathways fused / jax fused" in losses
    assert "pathways other / jax other" in losses
    assert "pathways opbyop / jax opbyop" not in losses
    assert "not measured" in text


def test_a_loss_is_a_rate_below_that_of_another_system() -> None:
    rate, tenants, time = (
        Found("some.json", name, {"median": 0.4}, aim_of(benchmark, name))
        for benchmark, name in (
            ("loops", "coalesced / jax, three programs, 1 devices"),
            ("tenants", "4 clients / JAX alone, 0.33 ms"),
            ("compiling", "other slices / one slice"),
        )
    )
    assert (rate.verdict, tenants.verdict, time.verdict) == ("slower", "slower", "")


def test_an_aim_is_of_the_figure_that_it_names_alone() -> None:
    assert aim_of("startup", "pw.init to the first result / the floor") is None
    assert aim_of("startup", "pw.init to the first result") is not None
    assert aim_of("parity", "parity, pathways, 12 hosts of 1") is None
    aims = [aim_of("parity", f"parity, {system}, 2 hosts of 1") for system in ("pathways", "pathways-no-fusion")]
    assert [aim and aim.bound for aim in aims] == [1, 2]


def test_a_result_that_the_page_knows_nothing_of_gets_its_tables(tmp_path: Path) -> None:
    deep = {"benchmark": "new", "total": 3, "parts": {"inner": [{"size": 7, "took_ms": {"median": 1.25}}], "seed": 5}}
    text = page(tmp_path, strange=deep)
    assert "not one that this page knows" in text
    for part in ("<summary>parts.inner</summary>", "took ms", "1.25", "<th>total</th>", "<th>seed</th>"):
        assert part in text


@pytest.mark.parametrize(
    ("content", "trouble"),
    [
        ("[1, 2]", "the file holds a list"),
        ("{", "not read"),
        ('{"rows": [1], "ratios": 3}', ""),
        ('{"rows": [{"half": {"min": 1, "median": 2}, "deep": {"median": {"min": 1, "median": 2}}}]}', "half: median"),
        ('{"ratios": [{"name": "of no length", "length_ms": null, "median": 1}]}', "of no length"),
    ],
)
def test_what_is_no_result_is_said_to_be_none(content: str, trouble: str, tmp_path: Path) -> None:
    text = page(tmp_path, odd=content, one=DISPATCH)
    assert trouble in text
    assert "odd.json" in text
    assert "pathways fused / jax fused" in text, "the others are there"


def test_a_result_that_cannot_be_drawn_keeps_its_tables(tmp_path: Path) -> None:
    text = page(tmp_path, one={**DISPATCH, "rows": [{"unexpected": 1}]})
    assert "No figure: KeyError" in text
    assert "unexpected" in text


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.json").write_text(json.dumps(DISPATCH))
    target = tmp_path / "new" / "page.html"
    report.main([str(tmp_path / "one.json"), str(tmp_path / "gone.json"), "--html", str(target)])
    assert "2 results, 1 figures miss their aim" in capsys.readouterr().out
    assert "FileNotFoundError" in target.read_text()


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.json").write_text(json.dumps(DISPATCH))
    with pytest.raises(SystemExit) as ended:
        report.main([str(tmp_path / "one.json"), "--html", str(tmp_path)])
    assert ended.value.code == 2
    assert f"--html: {tmp_path} cannot be written: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "trouble"),
    [(None, "cannot be read: No such file"), ("# Project\n", "no table that"), (readme_table.HEAD, "no table that")],
)
def test_a_readme_without_the_table_is_refused_before_the_page_is_written(
    content: str | None, trouble: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.json").write_text(json.dumps(DISPATCH))
    readme, html = tmp_path / "README.md", tmp_path / "new" / "page.html"
    if content is not None:
        readme.write_text(content)
    with pytest.raises(SystemExit) as ended:
        report.main([str(tmp_path / "one.json"), "--html", str(html), "--readme", str(readme)])
    assert (ended.value.code, html.parent.exists()) == (2, False)
    assert f"--readme: {readme}" in (said := capsys.readouterr().err)
    assert trouble in said


def test_a_result_with_a_flaw_is_marked_and_not_in_the_readme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results of before that mark, and those of a run that came to its end, are as they were."""
    figures = [{"name": "computations that a second start compiles", "median": 3.0}]
    line = "| computations that a second start compiles | **3** |"
    for name, more, marked in (
        ("old", {}, 0),
        ("whole", {"complete": True}, 0),
        ("part", {"complete": False}, 1),
        ("tiny", {"smoke": True, "complete": True}, 2),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({"benchmark": "compiling", "figures": figures, **more}))
        readme, html = tmp_path / "README.md", tmp_path / "page.html"
        readme.write_text(f"{readme_table.HEAD}\n|---|---|---|---|\n| other | 1 | 2 | |\n")
        report.main([str(tmp_path / f"{name}.json"), "--html", str(html), "--readme", str(readme)])
        assert html.read_text().count(f"{name}.json is incomplete") == (marked == 1)
        assert html.read_text().count(f"{name}.json is of the smallest sizes") == (marked == 2)
        assert (line in readme.read_text()) == (not marked)
        said = capsys.readouterr().err
        assert said.count("nothing of part.json, which is incomplete") == (marked == 1)
        assert said.count("nothing of tiny.json, which is of the smallest sizes") == (marked == 2)


# --- aims, tables, bars -----------------------------------------------------------------------------------------------


def test_what_tells_records_apart_is_part_of_the_name() -> None:
    record = {"name": "a / b", "payload": "noop", "hosts": 2, "devices_per_host": 1, "median": 1.0}
    assert report.named(record) == "a / b, noop, 2 x 1"
    assert report.named({"name": "1 client / JAX alone", "length_ms": 0.33}) == "1 client / JAX alone, 0.33 ms"
    batched = aim_of("peers", "pathways opbyop / jax-multicontroller opbyop, allreduce, 2 x 1")
    assert batched is not None
    assert batched.bound == 1.0
    assert aim_of("peers", "pathways opbyop / jax-multicontroller opbyop, noop, 2 x 1") is None


def test_rows_of_metg_are_figures(tmp_path: Path) -> None:
    rows = [
        {"system": "pathways", "mode": "gang", "pattern": "stencil", "metg_us": {"min": 1, "median": 120, "max": 200}}
    ]
    (tmp_path / "metg.json").write_text(json.dumps({"benchmark": "metg", "rows": rows}))
    (one,) = report.read(tmp_path / "metg.json").figures()
    assert (one.name, one.verdict) == ("pathways gang stencil", "missed")


def test_an_aim_is_a_bound_from_below_or_above() -> None:
    least, most = Aim("", ("b",), "x*", 2.0), Aim("", ("b",), "x*", 2.0, at_most=True, unit="ms")
    assert (least.met_by(2.0), least.met_by(1.9), most.met_by(2.0), most.met_by(2.1)) == (True, False, True, False)
    assert (least.bound_text, most.bound_text) == ("≥ 2", "≤ 2 ms")
    assert least.holds_for("b", "x y")
    assert not least.holds_for("c", "x y")


def test_aims_are_found_by_name() -> None:
    assert aim_of("scale", "scheduler cost per launch and host, 512 / 16 hosts, 64 at once") in AIMS
    assert aim_of("scale", "scheduler cost per launch and host, 1024 / 16 hosts, 64 at once") is None
    assert aim_of("pipeline", "parallel / sequential, flowing, 8 stages") in AIMS
    assert aim_of("tenants", "4 clients / 1 client, 10 ms") in AIMS
    assert aim_of("tenants", "4 clients / JAX alone, 0.33 ms") is None
    assert aim_of("gradients", "jax.value_and_grad / by hand") in AIMS
    assert aim_of("snapshots", "with a snapshot / without, time, stages that wait") in AIMS
    assert aim_of("snapshots", "with a snapshot / without, cpu, stages that wait") is None
    assert aim_of("memory", "memory kept by a launch, worst process") in AIMS


def test_records_without_a_column_leave_it_empty() -> None:
    made = table([{"a": 1, "deep": {"b": {"c": 2}}}, {"d": [1, 2], "long": list(range(100))}])
    assert list(re.findall("<th>(.*?)</th>", made)) == ["a", "deep: b: c", "d", "long"]
    assert "<td>1, 2</td>" in made
    assert "<td>100 entries</td>" in made
    assert cell(None) == "<td></td>"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12345, "12,345"), (12345.6, "12,346"), (0.012345, "0.01235"), (True, "yes"), (float("inf"), "inf")],
)
def test_numbers_have_four_digits_that_count(value: float, text: str) -> None:
    assert text_of(value) == text


def test_figures_with_a_place_on_a_logarithmic_line_are_drawn() -> None:
    aim = Aim("", ("b",), "*", 2.0)
    nowhere = [Found("file", "odd", {"median": median}, None) for median in (0.0, float("inf"))]
    (picture,) = points([Found("file", "fast", {"min": 1.0, "median": 3.0, "max": 4.0}, aim), *nowhere])
    assert picture.startswith(b"\x89PNG")
    assert points(nowhere) == []
