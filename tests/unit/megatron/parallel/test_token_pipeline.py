"""A GPT trained in slices of tokens has the loss and the gradients of whole examples."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from megatron_ptdp.errors import BadSizes, ConfigError
from megatron_ptdp.models import Compute, Gpt, build, preset, whole
from megatron_ptdp.parallel import Layout, Options, Sizes, cut, cuts
from megatron_ptdp.parallel.gradient_step import GradientStep
from megatron_ptdp.schedules import build as schedule
from tests.unit.client.local import LocalSession
from tests.unit.megatron.models import members

pytestmark = pytest.mark.timeout(400)  # a function of its own for each slice of each stage, to be compiled
CONFIG = members.CONFIGS["gpt-untied"]
BOUND = 1e-12


def step_of(sizes: Sizes) -> GradientStep:
    model = build(CONFIG, Compute(tensor=sizes.tensor, dtype="float64"))
    options = Options(master="float64", compute="float64", clip=1.0)
    layout = Layout.of(model, sizes)
    made = schedule("terapipe", sizes.pipeline, sizes.microbatches, slices=sizes.token_slices)
    found = cuts.cut_of(model, layout, made, options)
    assert found is not None
    return GradientStep(model, lambda _: optax.adam(1e-2), found, sizes, options)


def gpt_of(step: GradientStep) -> Gpt:
    assert isinstance(step.model, Gpt)
    return step.model


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(Sizes(pipeline=2, microbatches=2, examples=2, token_slices=3), marks=pytest.mark.slow),
        pytest.param(Sizes(tensor=2, data=2, examples=2, token_slices=2), marks=pytest.mark.long),
    ],
    ids=["two stages", "two members of both axes"],
)
def test_loss_and_gradients_are_those_of_whole_examples(session: LocalSession, sizes: Sizes) -> None:
    """Slices of 2, 3 and 3 tokens; then of all axes with one stage."""
    step = step_of(sizes)
    state, batch = step.initial(members.started(CONFIG)), members.batch_of(gpt_of(step))
    loss, gradients = step.gradients(state, batch)
    model = build(CONFIG, Compute(dtype="float64"))
    wanted, tokens = members.computed(model, [whole(model)]), step.model.tokens(batch)
    assert loss == pytest.approx(wanted.loss / tokens, rel=BOUND)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted.gradients), strict=True):
        assert np.linalg.norm(one - other / tokens) <= BOUND * (1 + np.linalg.norm(other))
    assert float(step.evaluate(state, batch)) == pytest.approx(loss, rel=BOUND)
    state, metrics = step(state, batch)
    assert bool(metrics["applied"])
    again = step.gather(step.place(step.gather(state)))
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(step.gather(state)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("error", "text", "changes", "compute", "sizes"),
    [
        (ConfigError, "are for a gpt without experts", {"experts": 4}, {}, {}),
        (BadSizes, "token_slices 9 are more than the 8 tokens of an example", {}, {}, {"token_slices": 9}),
        (ConfigError, "go without sequence_parallel", {}, {"tensor": 2, "sequence_parallel": True}, {"tensor": 2}),
        (ConfigError, "data_islands, which are False, 0 and 2", {}, {}, {"data": 2, "islands": 2}),
        (ConfigError, "no array is shared by two stages, as the embedding is", {"tied": True}, {}, {"pipeline": 2}),
    ],
)
def test_what_looks_at_whole_examples_is_refused(
    error: type[Exception], text: str, changes: Any, compute: Any, sizes: Any
) -> None:
    model: Any = build(preset("gpt-tiny", **{**members.TINY_GPT, "tied": False, **changes}), Compute(**compute))
    with pytest.raises(error, match=text):
        cuts.check(model, Sizes(**{"token_slices": 2, **sizes}), Options(), ())


def test_a_stage_without_layers_is_refused() -> None:
    model, stages = build(CONFIG, Compute()), cut(2, 3)
    assert [stage.last - stage.first for stage in stages] == [1, 1, 0]
    with pytest.raises(BadSizes, match=r"each stage needs a layer, but stages \[2\] have none"):
        cuts.check(model, Sizes(pipeline=3, token_slices=2), Options(), stages)


def test_no_slice_joins_its_forward_with_its_backward() -> None:
    with pytest.raises(ConfigError, match="join is for stages that take whole microbatches"):
        cuts.check(build(CONFIG, Compute()), Sizes(token_slices=2), Options(join=True), ())
