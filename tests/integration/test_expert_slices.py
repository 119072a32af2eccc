"""Experts on slices of their own, on two islands, beside the dense form in plain JAX on one device."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from megatron_ptdp.models import DATA, TENSOR, Compute, Gpt, ModelConfig, initialise, whole
from megatron_ptdp.models.reference import reference_loss
from megatron_ptdp.parallel import Layout, Options, Sizes
from megatron_ptdp.parallel.cuts import cut_of
from megatron_ptdp.parallel.gradient_step import GradientStep
from megatron_ptdp.schedules import build

CONFIG = ModelConfig("gpt", layers=2, hidden=8, heads=2, sequence=6, vocabulary=16, experts=4, top_k=2)
EXAMPLES = 4
BOUND = 1e-12

pytestmark = pytest.mark.usefixtures("doubles")


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_dense_form(cluster) -> None:
    """The rest of the model has two devices of island 0; two experts have one device there, two others island 1."""
    model = Gpt(CONFIG, Compute(tensor=2, dtype="float64"))
    places = [((1, 2), 0), ((1, 1), 0), ((1, 2), 1)]
    sizes = Sizes(tensor=2, examples=EXAMPLES, expert_slices=2)
    slices = tuple(cluster.virtual_slice(shape, (DATA, TENSOR), island=island) for shape, island in places)
    layout, options = Layout(sizes, (whole(model),), (slices,)), Options(master="float64", compute="float64")
    params = initialise(model, whole(model), seed=0, dtype="float64")
    batch = {"tokens": np.random.default_rng(0).integers(0, CONFIG.vocabulary, (EXAMPLES, 7)).astype(np.int32)}
    wanted, expected = jax.jit(jax.value_and_grad(lambda tree: reference_loss(CONFIG, tree, batch)))(params)
    apart = cut_of(model, layout, build("1f1b", 1, 1), options)
    assert apart is not None
    step = GradientStep(model, lambda _: optax.sgd(0.1), apart, sizes, options)
    state = step.initial(params)
    loss, found = step.gradients(state, batch)
    tokens = model.tokens(batch)
    assert loss == pytest.approx(float(wanted) / tokens, rel=BOUND)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other / tokens) <= BOUND * np.linalg.norm(other / tokens)
    state, metrics = step(state, batch)
    assert not any(int(one) for layer in metrics["dropped"] for one in layer)
    assert bool(metrics["applied"])
    del state, metrics
    layout.release()
