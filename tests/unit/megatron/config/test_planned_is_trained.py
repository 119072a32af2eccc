"""One description of a parallel configuration: what is planned is what is trained, and no default differs unsaid."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_ptdp.config import load
from megatron_ptdp.config.model import COMMON
from megatron_ptdp.config.parallel import split_layers
from megatron_ptdp.models import Value, build, preset, presets
from megatron_ptdp.parallel import cut
from megatron_ptdp.planner.estimate import Question, estimate, message_bytes
from megatron_ptdp.planner.memory import stage_layers, stage_memory
from megatron_ptdp.planner.pipeline import placement
from megatron_ptdp.planner.plan import Plan, illegal
from megatron_ptdp.planner.settings import config_text
from megatron_ptdp.planner.traffic import traffic
from megatron_ptdp.schedules import rules_of, schedule_names
from megatron_ptdp.train.config import Config, Parallel
from megatron_ptdp.train.config import load as load_training
from megatron_ptdp.train.run import require_fitting
from megatron_ptdp.train.setup import schedule_of, sizes_of
from tests.unit.strategies import repeatable


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int]:
    """A plan that is legal for a gpt-tiny with this number of layers."""
    schedule = draw(st.sampled_from(schedule_names()))
    pipeline, data = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    chunks = rules_of(schedule).chunks or draw(st.integers(2, 3))
    plan = Plan(
        pipeline=pipeline,
        tensor=draw(st.sampled_from([1, 2])),
        data=data,
        chunks=1 if pipeline == 1 else chunks,
        batch=data * draw(st.sampled_from([4, 8, 12])),
        schedule="1f1b" if pipeline == 1 else schedule,
        zero=draw(st.integers(0, 1)),
    )
    layers = draw(st.integers(1, 26))
    assume(illegal(plan, preset("gpt-tiny", layers=layers, tied=_ties(plan)).planned()) is None)
    return plan, layers


def _ties(plan: Plan) -> bool:
    """Stages that update at times of their own share no embedding."""
    return not rules_of(plan.schedule).stale


def training_of(plan: Plan, layers: int, path: Path) -> Config:
    """The configuration that `pathways-plan --config-out` writes, as `pathways-train` reads it."""
    path.write_text(config_text("gpt-tiny", plan))
    return load_training(path, [f"layers={layers}", f"tied={str(_ties(plan)).lower()}"])


@repeatable(150)
@given(planned=plans())
def test_stages_devices_and_batches_of_a_plan_are_those_that_are_trained(
    planned: tuple[Plan, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan, layers = planned
    config = training_of(plan, layers, tmp_path_factory.mktemp("plan") / "plan.toml")
    schedule = schedule_of(config)
    sizes = sizes_of(config, schedule)
    require_fitting(config, schedule, sizes)
    assert (sizes.devices, sizes.stages, sizes.microbatches, sizes.batch) == (
        plan.devices,
        plan.stages,
        plan.microbatches,
        plan.batch,
    )
    assert schedule.placement == placement(plan)
    trained = cut(build(config.model).layers, sizes.stages, config.parallel.lighter, config.parallel.stage_layers)
    model = config.model.planned()
    estimated = [len(stage_layers(plan, model, stage)) for stage in range(plan.stages)]
    assert [stage.last - stage.first for stage in trained] == estimated


def test_seven_layers_on_four_stages_are_trained_as_they_are_planned(tmp_path: Path) -> None:
    """The last stage has one layer fewer: the logits take its place."""
    plan = Plan(pipeline=4, batch=8)
    config = training_of(plan, 7, tmp_path / "plan.toml")
    stages = cut(config.model.layers, sizes_of(config, schedule_of(config)).stages, config.parallel.lighter)
    assert [stage.last - stage.first for stage in stages] == [2, 2, 2, 1]


@repeatable(100)
@given(layers=st.integers(1, 200), stages=st.integers(1, 64), fewer=st.integers(0, 3))
def test_a_split_has_every_layer_once_and_equal_stages_inside(layers: int, stages: int, fewer: int) -> None:
    split = split_layers(layers, stages, fewer)
    if split is None:
        return
    assert (len(split), sum(split)) == (stages, layers)
    assert min(split) >= 0
    assert len(set(split[1:-1])) <= 1
    if fewer and stages > 2:
        assert (split[1] - split[0], split[1] - split[-1]) == (fewer, fewer)


def test_defaults_of_the_trainer_are_those_of_a_plan() -> None:
    """But where leaving a setting out says more: chunks and batch then follow from others. A training on few devices
    recomputes nothing, a plan of a large model all."""
    trained, planned = msgspec.structs.asdict(Parallel()), Plan().as_dict()
    assert set(planned) <= set(trained)
    differ = {name: (trained[name], planned[name]) for name in planned if trained[name] != planned[name]}
    assert differ == {"chunks": (0, 1), "batch": (0, 1), "recompute": ("none", "full")}


@pytest.mark.parametrize("name", presets())
def test_a_named_model_is_trained_with_the_sizes_that_are_planned(name: str) -> None:
    planned, trained = load.model(name), preset(name).planned()
    for size in COMMON:
        assert getattr(planned, size) == getattr(trained, size), size
    assert planned.parameters == trained.parameters


@pytest.mark.parametrize(("name", "sequences"), [("gpt-tiny", {}), ("t5-tiny", {}), ("t5-tiny", {"sequence": 48})])
def test_messages_between_stages_are_planned_as_they_are_sent(name: str, sequences: dict[str, int]) -> None:
    """A T5 sends the encoder's tokens and the decoder's over every boundary."""
    config, plan = preset(name, **sequences), Plan(pipeline=4, microbatch=2, batch=6, recompute="none")
    cluster, software = load.cluster("this-machine"), load.software("xla-f32")
    question = Question(config.planned(), cluster, software, plan.devices, plan.batch)
    model = build(config)
    for stage in cut(model.layers, plan.pipeline)[1:]:
        values = jax.tree.leaves(model.values(stage, plan.microbatch), is_leaf=lambda leaf: isinstance(leaf, Value))
        sent = sum(math.prod(value.shape) * np.dtype(value.dtype).itemsize for value in values)
        assert message_bytes(question, plan) == sent
        there_and_back = sum(level.pipeline for level in traffic(question, estimate(question, plan)))
        assert there_and_back == pytest.approx(2 * plan.microbatches * sent)
        assert stage_memory(plan, question.model, cluster, software).first.working == 4 * sent
