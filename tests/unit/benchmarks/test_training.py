"""The training benchmark: its cases, ratios from known rates, bubbles of known steps, peers that are not there."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks import figures
from benchmarks.aims import AIMS, aim_of
from benchmarks.peers import environments
from benchmarks.training import benchmark as training
from benchmarks.training import model, results
from benchmarks.training.benchmark import Settings, cases_of
from benchmarks.training.model import Sizes
from benchmarks.training.peers import Peers
from benchmarks.training.results import Samples
from benchmarks.training.runtime import Case, bubbles
from megatron_ptdp import schedules
from megatron_ptdp.schedules import Costs, Link
from megatron_ptdp.train.timeline import Measured

TINY = Sizes(layers=4, hidden=16, heads=2, sequence=8, vocabulary=11, examples=2)
SPMD, PIPELINE, FOUR = Case("pathways", "spmd", 4), Case("pathways", "1f1b", 4), Case("pathways", "1f1b", 4, 4)


def known(**rates: Any) -> Samples:
    """All cases of all parts, each at 100 tokens a second but for those given."""
    cases = cases_of(Settings(sizes=TINY))
    found = {case: [100.0, 100.0] for case in cases}
    return Samples(TINY, {case: [3.0, 2.0, 1.0] for case in cases}, found, **rates)


def value(found: Any, name: str) -> float:
    (one,) = [one for one in found if one["name"] == name]
    return float(one["median"])


def test_every_case_is_there_once_and_data_parallel_takes_the_batch_of_its_pipeline() -> None:
    cases = cases_of(Settings())
    assert len(set(cases)) == len(cases)
    for case in cases:
        if case.system == "pathways":
            assert case.cut(4).batch == 4 * case.microbatches, case.name
            assert case.cut(4).devices == case.devices


def test_parts_take_only_the_cases_they_need() -> None:
    assert {case.system for case in cases_of(Settings(parts=("spmd",)))} == {"pathways", "jax"}
    assert {case.how for case in cases_of(Settings(parts=("data",)))} == {"spmd"}
    assert not cases_of(Settings(parts=("bytes",)))


def test_a_pipeline_is_held_against_its_ideal() -> None:
    """1F1B with p = 2 and m = 4 has a bubble of (p - 1) / m = 1/4: at 80 % of SPMD it is ideal."""
    samples = Samples(TINY, {}, {SPMD: [100.0, 50.0, 100.0], PIPELINE: [80.0, 40.0, 60.0]})
    found = list(samples.ratios())
    assert value(found, "pipeline / SPMD, 1f1b, S 2, M 4, inside") == pytest.approx(0.8)
    assert value(found, "pipeline / ideal 1/(1+bubble) of SPMD, 1f1b, S 2, M 4, inside") == pytest.approx(1.0)


def test_every_aim_of_training_has_a_figure_and_oversubscribed_ones_have_none() -> None:
    samples = known()
    samples.bubbles = [
        bubbles(case, [Measured(schedules.simulate(case.schedule()), ())], 0.0)
        for case in (Case("pathways", "1f1b", 8), Case("pathways", "zb-h1", 8))
    ]
    found = [one["name"] for one in (*samples.ratios(), *samples.figures())]
    assert len(set(found)) == len(found)
    for aim in AIMS:
        if "training" in aim.benchmarks:
            assert any(aim_of("training", name) is aim for name in found), aim.text
    assert all(aim_of("training", name) is None for name in found if name.startswith("oversubscribed"))


def test_a_step_that_runs_as_simulated_is_off_by_nothing() -> None:
    case = Case("pathways", "1f1b", 8)
    costs = Costs((1.0, 2.0), (0.0, 0.0), (0.0, 0.0), (3.0, 3.0), message=(0.0,), link=Link(0.5))
    found = bubbles(case, [Measured(schedules.simulate(case.schedule(), costs), ())], 0.5)
    (record,) = found["records"]
    assert record["measured"] == pytest.approx(record["predicted"])
    assert found["ideal"] == pytest.approx(1 / 8)
    assert len(found["picture"]) == 2 * 2 * 8


def test_four_stages_are_predicted_from_the_times_of_each_alone() -> None:
    """(m + p - 1) (F + B) for 1F1B with equal stages, and the rest of the step."""
    samples = Samples(TINY, {}, {FOUR: [TINY.tokens(4) / 42.0]}, stages=(Costs.uniform(4), 0.5))
    assert samples.predicted_seconds(FOUR) == pytest.approx((4 + 4 - 1) * 3.0 + 0.5)
    assert value(samples.figures(), f"oversubscribed / predicted for four cores, {FOUR.name}") == pytest.approx(
        21.5 / 42
    )


def test_losses_that_differ_show() -> None:
    samples = Samples(TINY, {SPMD: [3.0, 2.0], PIPELINE: [3.0, 2.5]})
    (one,) = samples.figures()
    assert one["median"] == 0.5
    aim = aim_of("training", one["name"])
    assert aim is not None
    assert not aim.met_by(one["median"])


def test_other_systems_are_given_the_same_parameters_and_batch(tmp_path: Path) -> None:
    model.write(TINY, 4, tmp_path / "p.npz")
    tree, batch = model.read(tmp_path / "p.npz")
    expected = TINY.parameters()
    assert jax.tree.structure(tree) == jax.tree.structure(expected)  # type: ignore[operator]
    assert all(map(np.array_equal, jax.tree.leaves(tree), jax.tree.leaves(expected)))
    assert batch.shape == (8, 9)
    np.testing.assert_array_equal(batch[:4], TINY.batch(2))


def test_a_peer_that_is_not_built_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    (tmp_path / "torch.error").write_text("No matching distribution found for torch==0.0\n")
    peers = Peers(TINY, tmp_path / "p.npz", [])
    case = Case("torch", "1f1b", 8)
    assert peers.prepare(case, 3) is None
    assert math.isnan(peers.seconds(case, 1))
    assert "No matching distribution" in peers.errors["torch"]


class Known:
    """In place of a cluster: steps of a known time."""

    def prepare(self, case: Case, steps: int) -> list[float]:
        return [1.0] * steps

    def seconds(self, case: Case, steps: int) -> float:
        return 0.1 * steps


class Failing(Peers):
    """Plain JAX that is there at first, and fails when it is to train the second time; torch is not there."""

    trained = 0

    def prepare(self, case: Case, steps: int) -> list[float] | None:
        return None if case.system == "torch" else [1.0] * steps

    def seconds(self, case: Case, steps: int) -> float:
        self.trained += 1
        return 0.2 * steps if self.trained == 1 else math.nan


def test_a_peer_that_fails_on_the_way_leaves_the_others_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(training, "IDLE_S", 0.01)
    settings = Settings(sizes=TINY, microbatches=(8,), rounds=2, parts=("spmd", "torch"))
    runtime: Any = Known()
    result = training.Bench(runtime, Failing(TINY, tmp_path, []), settings, lambda text: None).measured()
    assert [row["name"] for row in result["rows"]] == [
        "pathways spmd, S 2, M 8, inside",
        "pathways 1f1b, S 2, M 8, inside",
        "pathways gpipe, S 2, M 8, inside",
    ]
    for row in result["rows"]:
        assert row["cpu_ms"] >= 0
        assert row["tokens_per_second"]["median"] == pytest.approx(TINY.tokens(8) / 0.1)
    assert value(result["ratios"], "pipeline / SPMD, 1f1b, S 2, M 8, inside") == pytest.approx(1.0)
    assert result["busy_cores_between_rounds"] >= 0


def test_the_result_is_shown_and_drawn(tmp_path: Path) -> None:
    samples = known()
    samples.stages = (Costs.uniform(4), 0.5)
    samples.bubbles = [bubbles(PIPELINE, [Measured(schedules.simulate(PIPELINE.schedule()), ())], 0.0)]
    settings = Settings(sizes=TINY)
    result = {
        "machine": {"cpu": "a processor", "cores": 2, "memory_gib": 1, "system": "", "python": "", "packages": {}}
        | {"load": [0.0]},
        "measured": results.described(settings, []),
        "errors": {"torch": "its environment is not there"},
        "bytes": [{"tensor": 2, "scatter_gather": True, "bytes_between_hosts": 1024, "bytes_to_devices": 2048}],
        **samples.result(),
    }
    text = io.StringIO()
    results.show(result, Console(file=text, width=160))
    words = " ".join(text.getvalue().split())
    for expected in ("Not run, torch", "devices are not pinned", "1,024", "25.0%", "missed"):
        assert expected in words, expected
    figures.training(result, tmp_path)
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_arguments_become_settings() -> None:
    benchmark = training.BENCHMARK
    words = ["--layers", "4", "--microbatches", "2", "4", "--parts", "data"]
    settings = benchmark.settings_of(benchmark.parser().parse_args(words))
    assert (settings.sizes.layers, settings.microbatches, settings.middle) == (4, (2, 4), 2)
    assert settings.parts == ("data",)
    assert benchmark.settings_of(benchmark.parser().parse_args(["--smoke"])) is training.SMOKE
