"""`benchmarks.planner_here`: which configurations are measured, what plan each is, and how predictions are judged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.planner_here import MODELS, Run, figures, rankings, row_of, runs, show
from benchmarks.training.runtime import SPMD, Case
from megatron_ptdp.config import load
from megatron_ptdp.config.cluster import Cluster, Level
from megatron_ptdp.planner.settings import check

INSIDE = Level("island", 2, 1e9, 1.0, 1e-3, 1.0, message_bandwidth=1e9, message_latency=1e-3, collectives=19)
BETWEEN = Level("dcn", 0, 1e9, 1.0, 1e-3, 1.0, message_bandwidth=1e9, message_latency=1e-3)


def here() -> Cluster:
    return replace(load.cluster("this-machine"), levels=(INSIDE, BETWEEN))


@pytest.mark.parametrize("one", runs(MODELS, (4, 8, 16), ("inside", "across")), ids=lambda one: one.name)
def test_each_configuration_is_a_legal_plan_of_two_devices_with_its_batch(one: Run) -> None:
    check(one.plan, one.model)
    assert one.plan.devices == 2
    assert one.plan.batch == one.case.microbatches * one.sizes.examples
    assert one.plan.microbatches * one.plan.data == one.case.microbatches
    seconds, parts = one.seconds(here())
    assert sum(parts.values()) == pytest.approx(seconds)


def test_the_models_parameters_are_those_that_train() -> None:
    """But the norm before the logits, which the planner leaves out as the paper does."""
    sizes = MODELS[1]
    from jax.tree import leaves

    trained = sum(array.size for array in leaves(sizes.parameters()))
    assert Run(sizes, Case("pathways", SPMD, 8)).model.parameters == trained - 2 * sizes.hidden


def test_gradients_cross_islands_in_one_piece_and_inside_array_by_array() -> None:
    inside, across = (Run(MODELS[0], Case("pathways", SPMD, 8, place=place)) for place in ("inside", "across"))
    apart = inside.seconds(here())[1]["data"] - across.seconds(here())[1]["data"]
    assert apart == pytest.approx(18 * 2 * 1e-3)


def row(name: str, group: str, measured: float, predicted: float) -> dict[str, object]:
    return {
        "name": name,
        "group": group,
        "measured_ms": dict.fromkeys(("quartile", "median", "min", "max"), measured),
        "predicted_ms": predicted,
        "error": predicted / measured - 1,
        "error_of_median": predicted / measured - 1,
    }


def test_rankings_and_errors_are_told() -> None:
    rows = [row("a", "x", 100, 110), row("b", "x", 120, 105), row("c", "y", 50, 90)]
    (only,) = rankings(rows)
    assert (only["fastest"], only["picked"], only["costs"]) == ("a", "b", pytest.approx(0.2))
    worst, mean, _, within = figures(rows)
    assert worst["max"] == pytest.approx(0.8)
    assert mean["median"] == pytest.approx((0.1 + 0.125 + 0.8) / 3)
    assert within["median"] == pytest.approx(2 / 3)
    console = Console(record=True, width=130)
    machine = {"cpu": "a", "cores": 2, "memory_gib": 1, "system": "x", "python": "3", "packages": {}, "load": [0, 0, 0]}
    show(
        {
            "machine": machine,
            "cluster": "",
            "references": [{"reference": "r", "ms": 10.0, "model_ms": 11.0}],
            "rows": rows,
            "figures": figures(rows),
            "best": rankings(rows),
        },
        console,
    )
    text = console.export_text()
    assert "+10.0%" in text
    assert "picks b, 20.0% slower" in text


def test_a_row_compares_the_lower_quartile() -> None:
    one = Run(MODELS[0], Case("pathways", "1f1b", 8, place="across"))
    seconds = one.seconds(here())[0]
    made = row_of(one, [seconds / 2, seconds, 2 * seconds, 3 * seconds, 9 * seconds], here())
    assert made["error"] == pytest.approx(0.0)
    assert made["error_of_median"] == pytest.approx(-0.5)
    assert made["measured_ms"]["max"] == pytest.approx(9e3 * seconds)
