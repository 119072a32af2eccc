"""The papers' tables stay predicted: the goals of the page `benchmarks.paper_tables`, by closed forms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks.paper_tables.benchmark import calibrate, calibrate_h100, html, predict, show, summaries, winners
from benchmarks.paper_tables.rows import CALIBRATION, Line, Row, model_of, printed
from megatron_ptdp.config import load
from megatron_ptdp.planner.estimate import estimate
from megatron_ptdp.planner.layers import Split, layer_cost
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.settings import check
from tests.unit.megatron.planner.helpers import asked, gpt, selene


def predicted(row: Row) -> float:
    check(row.plan, row.model)
    one = estimate(asked(row.model, row.plan.devices, row.plan.batch, load.cluster(row.cluster)), row.plan)
    return row.plan.batch / one.seconds if row.unit == "seq/s" else one.hardware_flops / 1e12


def errors(rows: Iterable[Row]) -> list[float]:
    return [abs(predicted(row) / row.printed - 1) for row in rows if row.printed]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_table_1() -> None:
    found = errors(printed("PTD-P table 1"))
    assert mean(found) <= 0.05
    assert max(found) <= 0.10


def test_table_2() -> None:
    rows = list(printed("PTD-P table 2"))
    assert mean(errors(row for row in rows if row.plan.zero == 0)) <= 0.07
    assert mean(errors(row for row in rows if row.plan.zero == 3)) <= 0.15


def test_figures_11_to_18() -> None:
    assert mean(errors(printed("PTD-P figure"))) <= 0.12


def test_winners_of_the_figures() -> None:
    """All but two: figure 15 at B=32, and figure 16 at B=128, where the chart's lead is 2 % and ours -1 %."""
    lines = [
        Line(row.table, row.label, "", row.printed, predicted(row), row.unit, compare=row.compare)
        for row in printed("PTD-P table 2", "PTD-P figure")
    ]
    missed = {(one["table"], one["compare"]) for one in winners(lines) if not one["same"]}
    assert missed <= {("PTD-P figure 15", "B=32"), ("PTD-P figure 16", "B=128")}


def test_the_constants_are_those_of_the_three_calibration_rows() -> None:
    assert len(CALIBRATION) == 3
    """The least error of the neighbourhood; `--calibrate` looks through the whole range."""
    device = selene().device
    found = calibrate(range(76, 81), range(64, 73, 2))
    assert found[:2] == (device.matrix_efficiency, device.memory_efficiency)
    assert found[2] < 0.01


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "forward", "backward"),
    [
        (False, "none", 7.7, 11.9),
        (True, "none", 7.2, 11.8),
        (False, "full", 7.7, 19.5),
        (False, "selective", 7.7, 13.2),
        (True, "selective", 7.2, 13.1),
    ],
)
def test_one_layer_of_22b(sequence_parallel: bool, recompute: str, forward: float, backward: float) -> None:
    """Korthikanti et al. 2022, table 4, in ms. No number was fitted to it."""
    model = gpt(layers=48, hidden=6144, heads=64, sequence=2048, vocabulary=51200)
    split = Split(tensor=8, microbatch=4, sequence_parallel=sequence_parallel, recompute=recompute)
    cost = layer_cost(model, model.row[0], split, selene(), load.software("megatron-2022"))
    assert 1e3 * (cost.forward + cost.forward_tensor) == pytest.approx(forward, rel=0.05)
    assert 1e3 * (cost.inputs + cost.weights + cost.inputs_tensor) == pytest.approx(backward, rel=0.12)


def test_other_systems() -> None:
    """What others print: each row within 15 %, and 6 % on average; no constant but `h100`'s was set on them."""
    found = []
    for row in printed():
        if row.table.startswith("PTD-P"):
            continue
        check(row.plan, row.model)
        over = predict(row) / (row.printed or 1.0)
        found.append(abs(over - 1))
        if row.table == "Korthikanti table 5":  # the same makers' software and cluster: as their PTD-P tables
            assert found[-1] <= 0.06
            asked_for = asked(row.model, row.plan.devices, row.plan.batch, software=row.software)
            assert estimate(asked_for, row.plan).fits
    assert len(found) > 25
    assert max(found) <= 0.15
    assert mean(found) <= 0.06


def test_the_constant_of_h100_is_that_of_its_three_rows() -> None:
    matrix, error = calibrate_h100(range(57, 64))
    assert matrix == load.cluster("h100").device.matrix_efficiency
    assert error < 0.08


def test_what_did_not_fit_does_not_fit() -> None:
    """ZeRO-3 of 529.6B, microbatches of 4: 560 devices were too few, 640 were enough (PTD-P table 2)."""
    fits = [
        estimate(asked(model_of("529.6B"), n, batch), Plan(data=n, microbatch=4, batch=batch, zero=3)).fits
        for n, batch in ((560, 2240), (640, 2560))
    ]
    assert fits == [False, True]


def test_the_page_shows_errors_marks_and_winners() -> None:
    lines = [
        Line("T", "one", "t8", 100.0, 103.0, "TFLOP/s", calibrated=True, compare="x"),
        Line("T", "two", "t4", None, 110.0, "TFLOP/s", read=True, compare="x"),
        Line("T", "three", "", 50.0, 99.0, "TFLOP/s", counted=False),
    ]
    result: dict[str, Any] = {
        "lines": [
            {**{name: getattr(line, name) for name in Line.__dataclass_fields__}, "error": line.error} for line in lines
        ],
        "tables": summaries(lines),
        "winners": winners(lines),
        "calibration_rows": ["T, one"],
        "constants": [{"name": "<a100>"}],
    }
    assert result["tables"][0]["rows"] == 1
    assert result["tables"][0]["mean"] == pytest.approx(0.03)
    assert result["winners"][0]["planner"] == "two"
    page = html(result)
    assert "100*" in page
    assert "+3.0%" in page
    assert "50°" in page
    assert "&lt;a100&gt;" in page
    from rich.console import Console

    console = Console(record=True, width=130)
    show(result, console)
    assert "same winner in 0 of 1 comparisons" in console.export_text()
