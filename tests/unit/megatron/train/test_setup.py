"""What does not fit is found before a cluster starts."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatron_ptdp.data import TokenWriter
from megatron_ptdp.errors import BadSizes, ConfigError
from megatron_ptdp.models import build
from megatron_ptdp.parallel.layer_split import cut
from megatron_ptdp.schedules import Schedule, registry
from megatron_ptdp.schedules.classic import interleaved
from megatron_ptdp.train import setup
from megatron_ptdp.train.config import load
from megatron_ptdp.train.run import require_fitting
from megatron_ptdp.train.setup import batches_of, optimizer_of, own_cluster, schedule_of, sizes_of
from pathways_ray import limits


def check(*settings: str) -> tuple[int, int]:
    """Islands and devices of each host of the run's own cluster."""
    config = load(None, ["model=gpt-tiny", *settings])
    schedule = schedule_of(config)
    sizes = sizes_of(config, schedule)
    require_fitting(config, schedule, sizes)
    return own_cluster(config, sizes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["pipeline=2", "islands=1", "devices_per_host=1"], "are 2 devices, but there are 1"),
        (["pipeline=2", "islands=2", "devices_per_host=2", "placement=together", "tensor=2"], "but has 2"),
        (
            ["data=2", "data_islands=2", "islands=1", "devices_per_host=2"],
            "replicas are to lie on 2 islands, but there are 1",
        ),
        (
            ["pipeline=4", "layers=9"],
            "9 layers do not divide into 4 stages, with or without one fewer at the ends",
        ),
        (["pipeline=8"], "4 layers cannot fill 8 stages"),
        (["lighter=1"], "lighter 1 is of a first and a last stage, and here is one; leave it out"),
        (["pipeline=2", "lighter=1", "layers=5"], "5 layers do not divide into 2 stages where"),
        (["pipeline=2", "stage_layers=[1,2]"], "layers per stage are [1, 2]: 2 stages with 3 layers"),
        (["pipeline=4", "stage_layers=[2,1,0,1]"], "[2, 1, 0, 1]: stage 2 has none, and so nothing to train"),
        (
            ["pipeline=2", "chunks=2", "schedule=interleaved", "microbatches=2", "stage_layers=[0,0,2,2]"],
            "stage 1 has none, and so nothing to train",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_values(settings: list[str], message: str) -> None:
    with pytest.raises(BadSizes, match=re.escape(message)):
        check(*settings)


def test_layers_are_compared_with_stages_before_the_schedule_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule of a million stages takes a minute to build."""
    built: list[int] = []

    def waves(devices: int, microbatches: int, chunks: int = 2) -> Schedule:
        built.append(devices)
        return interleaved(devices, microbatches, chunks)

    monkeypatch.setattr(registry, "_GENERATORS", {**registry._GENERATORS, "waves": waves})
    for sizes in (["pipeline=8"], ["pipeline=2", "chunks=4"]):
        with pytest.raises(BadSizes, match="4 layers cannot fill 8 stages"):
            check("schedule=waves", "microbatches=8", *sizes)
    assert built == []
    assert check("schedule=waves", "pipeline=2", "microbatches=2", "stage_layers=[1,1,1,1]") == (2, 1)
    assert built == [2]


@pytest.mark.parametrize(
    ("sizes", "backwards"),
    [
        (["microbatches=8193"], "8,193"),
        (["batch=8000000", "pipeline=2"], "16,000,000"),
        (["microbatches=2049", "pipeline=2", "chunks=2"], "8,196"),
        (["microbatches=4097", "data=2", "data_islands=2"], "8,194"),
        (["microbatches=1025", "token_slices=8"], "8,200"),
    ],
)
def test_what_no_program_holds_is_refused_before_the_schedule_is_built(
    monkeypatch: pytest.MonkeyPatch, sizes: list[str], backwards: str
) -> None:
    monkeypatch.setattr(setup, "build_schedule", None)
    with pytest.raises(BadSizes, match=f"would have {backwards} backwards .* and a program takes 8,192; choose"):
        check(*sizes)


def test_a_step_may_have_as_many_backwards_as_a_program_has_nodes() -> None:
    assert setup.MAX_BACKWARDS == limits.MAX_NODES
    assert schedule_of(load(None, ["model=gpt-tiny", "microbatches=8192"])).microbatches == limits.MAX_NODES


def test_options_that_do_not_fit_the_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"zero 3 .* here are pipeline 2 × chunks 1"):
        check("pipeline=2", "zero=3")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["tied=false"],
            "pipedream has no norm of the whole gradient, by which clip=1.0 could scale it; set clip to 0",
        ),
        (["clip=0"], "two stages share: embedding/tokens; set tied to false"),
        (["clip=0", "tied=false", "data=2", "data_islands=2"], "here are 2 groups of replicas"),
        (["clip=0", "tied=false", "data=2", "min_data=1"], "is another rule with fewer replicas"),
        (["clip=0", "pipeline=1", "experts=4", "expert_slices=2"], "but with expert_slices 2 all is updated at once"),
    ],
)
def test_what_stages_that_update_at_their_own_times_cannot_have(settings: list[str], message: str) -> None:
    sizes = ("pipeline=2", "microbatches=4", "schedule=pipedream")
    assert check(*sizes, "clip=0", "tied=false") == (2, 1)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(*sizes, *settings)


@pytest.mark.parametrize(("schedule", "updates"), [("1f1b", 1), ("pipedream", 4), ("pipedream-2bw", 2)])
def test_all_updates_of_a_step_have_its_learning_rate(schedule: str, updates: int) -> None:
    falling = ("steps=3", "decay=linear", "learning_rate=1.0", "final_learning_rate=0.1")
    plain = ("optimizer=sgd", "beta1=0", "weight_decay=0")
    sizes = ("pipeline=2", "microbatches=4", f"schedule={schedule}")
    config = load(None, ["model=gpt-tiny", *sizes, *falling, *plain])
    made = optimizer_of(config, schedule_of(config))({"weight": True})
    ones = {"weight": jnp.ones(())}
    slots, rates = made.init(ones), []
    for _ in range(3 * updates):
        change, slots = made.update(ones, slots, ones)
        rates.append(-float(change["weight"]))
    assert rates == pytest.approx(np.repeat([1.0, 0.7, 0.4], updates))


def test_what_experts_on_slices_of_their_own_cannot_have() -> None:
    assert check("experts=4", "expert_slices=2") == (2, 2)
    with pytest.raises(ConfigError, match="without sequence_parallel, recompute full and zero"):
        check("experts=4", "expert_slices=2", "recompute=full")


def test_uneven_stages_fit() -> None:
    assert check("pipeline=2", "stage_layers=[1,3]") == (2, 1)
    assert check("pipeline=4", "layers=6", "lighter=1") == (4, 1)


@pytest.mark.parametrize("model", ["gpt-tiny", "t5-tiny"])
@pytest.mark.parametrize("more", [[], ["experts=2"], ["tied=false"]])
def test_ends_without_layers_fit_and_have_parameters(model: str, more: list[str]) -> None:
    config = load(None, [f"model={model}", *more])
    built = build(config.model)
    counts = [0, built.layers, 0]
    assert check(f"model={model}", *more, "pipeline=3", f"stage_layers={counts}") == (3, 1)
    assert all(jax.tree.leaves(built.parameters(stage)) for stage in cut(built.layers, 3, counts=counts))


def test_a_cluster_is_as_large_as_the_sizes_need() -> None:
    assert check("pipeline=2", "tensor=2", "data=2") == (2, 4)
    assert check("pipeline=2", "data=2", "data_islands=2") == (4, 1)
    assert check("pipeline=2", "tensor=2", "placement=together") == (1, 4)
    assert check("pipeline=2", "tensor=2", "hosts_per_island=2") == (2, 1)
    assert check("pipeline=4", "islands=2") == (2, 2)


def test_the_decoder_of_a_t5_goes_on_with_the_text_of_its_encoder(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "ascending", 256, "count") as writer:
        writer.add(np.arange(256))
    sizes = ["vocabulary=256", "sequence=8", "encoder_sequence=16"]
    config = load(None, ["model=t5-tiny", *sizes, f"path={tmp_path / 'ascending'}"])
    batches, _ = batches_of(config, 2)
    batch = batches.at(0)
    np.testing.assert_array_equal(batch["tokens"][:, 0], batch["encoder_tokens"][:, -1] + 1)
    assert batch["tokens"].shape == (2, 9)
