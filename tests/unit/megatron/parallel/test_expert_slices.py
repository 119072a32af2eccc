"""Experts on slices of their own have the loss and the gradients of experts that lie with their layer."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import pathways_ray as pw
from megatron_ptdp.errors import BadSizes, ConfigError
from megatron_ptdp.models import DATA, TENSOR, Compute, Gpt, build, preset, whole
from megatron_ptdp.parallel import Layout, Options, Sizes, cuts
from megatron_ptdp.parallel.gradient_step import GradientStep
from megatron_ptdp.parallel.layout import places_on
from megatron_ptdp.parallel.shapes import names_of
from megatron_ptdp.schedules import build as schedule
from tests.unit.client.local import LocalSession
from tests.unit.megatron.models import members

pytestmark = pytest.mark.timeout(400)  # many functions are compiled
SIZES = {**members.TINY_GPT, "layers": 1, "experts": 4, "top_k": 2}
BOUND = 1e-12


def slices(session: LocalSession, *sizes: int) -> tuple[pw.VirtualSlice, ...]:
    return tuple(session.virtual_slice((1, size), (DATA, TENSOR)) for size in sizes)


def step_of(session: LocalSession, config: Any, sizes: Sizes) -> GradientStep:
    model = build(config, Compute(tensor=sizes.tensor, dtype="float64"))
    options = Options(master="float64", compute="float64", clip=1.0)
    placed = slices(session, sizes.tensor, *[sizes.expert_members] * sizes.expert_slices)
    layout = Layout(sizes, (whole(model),), (placed,))
    found = cuts.cut_of(model, layout, schedule("1f1b", 1, sizes.microbatches), options)
    assert found is not None
    return GradientStep(model, lambda _: optax.adam(1e-2), found, sizes, options)


def gpt_of(step: GradientStep) -> Gpt:
    assert isinstance(step.model, Gpt)
    return step.model


@pytest.mark.parametrize(
    "capacity", [pytest.param(0.0, marks=pytest.mark.long), pytest.param(1.0, marks=pytest.mark.slow)]
)
def test_loss_and_gradients_are_those_of_one_slice(session: LocalSession, capacity: float) -> None:
    """Two slices of two members have two experts each. With a capacity the same choices find no room."""
    config = preset("gpt-tiny", **SIZES, capacity=capacity)
    sizes = Sizes(tensor=2, examples=members.EXAMPLES, expert_slices=2, expert_members=2)
    step = step_of(session, config, sizes)
    state, batch = step.initial(members.started(config)), members.batch_of(gpt_of(step))
    loss, gradients = step.gradients(state, batch)
    wanted = members.computed(gpt_of(step), [whole(step.model)])
    tokens = step.model.tokens(batch)
    assert loss == pytest.approx(wanted.loss / tokens, rel=BOUND)
    agree(gradients, jax.tree.map(lambda array: array / tokens, wanted.gradients))
    assert float(step.evaluate(state, batch)) == pytest.approx(loss, rel=BOUND)
    _, metrics = step(state, batch)
    assert (sum(int(one) for layer in metrics["dropped"] for one in layer) > 0) == (capacity > 0)
    assert bool(metrics["applied"])


@pytest.mark.slow
def test_microbatches_add_up_and_a_state_is_gathered_and_placed(session: LocalSession) -> None:
    config = preset("gpt-tiny", **SIZES)
    whole_batch, halves = (
        step_of(session, config, Sizes(microbatches=m, examples=members.EXAMPLES // m, expert_slices=2)) for m in (1, 2)
    )
    batch = members.batch_of(gpt_of(whole_batch))
    one, two = (step.initial(members.started(config)) for step in (whole_batch, halves))
    for _ in range(2):
        one, metrics = whole_batch(one, batch)
        two, others = halves(two, batch)
        assert float(metrics["loss"]) == pytest.approx(float(others["loss"]), rel=1e-9)
    found = whole_batch.gather(one)
    agree(found, halves.gather(two), 1e-6)
    assert sorted(found["slots"]) == ["0/mu", "0/nu"]
    agree(halves.gather(halves.place(found)), found, 0.0)
    names = {name for number in range(3) for name in names_of(halves.parts[0][number].part.parameters)}
    assert {"layers/0/ffn/router/weight", "0/in/weight"} <= names


def agree(found: Any, expected: Any, bound: float = BOUND) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) <= bound * (1 + np.linalg.norm(other))


def test_what_cannot_be_shared_is_refused() -> None:
    def check(text: str, error: type[Exception] = BadSizes, compute: Any = None, zero: int = 0, **sizes: Any) -> None:
        changes = sizes.pop("model", {})
        model: Any = build(preset("gpt-tiny", **{**SIZES, **changes}), Compute(**(compute or {})))
        with pytest.raises(error, match=text):
            cuts.check(model, Sizes(**{"expert_slices": 2, **sizes}), Options(zero=zero), ())

    check("are for a gpt with experts", model={"experts": 0})
    check("4 experts cannot be shared evenly by 3 slices of 1 members", expert_slices=3)
    check("4 experts cannot be shared evenly by 2 slices of 4 members", expert_members=4)
    check("no pipeline 2", ConfigError, pipeline=2)
    check("no data 2", ConfigError, data=2)
    check("go without sequence_parallel, recompute full and zero", ConfigError, compute={"recompute": "full"})
    check("which are False, none and 1", ConfigError, zero=1)


def test_slices_of_experts_lie_where_most_devices_are_left() -> None:
    sizes = Sizes(tensor=2, expert_slices=3, expert_members=1)
    assert places_on({0: 2, 1: 3}, sizes, "apart") == [[1, 0, 0, 1]]
    assert places_on({0: 3, 1: 3}, sizes, "apart") == [[0, 1, 1, 0]]
    assert places_on({0: 2, 1: 6}, sizes, "together") == [[1, 1, 1, 1]]
    with pytest.raises(BadSizes, match="slice 2 of 3 of the experts needs 1 devices of an island, but no island has"):
        places_on({0: 2, 1: 3}, sizes, "together")
    with pytest.raises(BadSizes, match="expert_slices 3 × expert_members 1, are 5 devices, but there are 4"):
        places_on({0: 4}, sizes, "apart")
