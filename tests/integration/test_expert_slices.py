"""Experts on slices of their own, on two islands, beside the dense form in plain JAX on one device."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from megatron_ptdp.models import DATA, TENSOR, Compute, Gpt, ModelConfig, initialise, whole
from megatron_ptdp.models.reference import reference_loss
from megatron_ptdp.parallel.expert_slices import ExpertSlices

CONFIG = ModelConfig("gpt", layers=2, hidden=8, heads=2, sequence=6, vocabulary=16, experts=4, top_k=2)
EXAMPLES = 4
BOUND = 1e-12


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def test_loss_and_gradients_are_those_of_the_dense_form(cluster) -> None:
    """The rest of the model has two devices of island 0; two experts have one device there, two others island 1."""
    model = Gpt(CONFIG, Compute(tensor=2, dtype="float64"))
    places = [((1, 2), 0), ((1, 1), 0), ((1, 2), 1)]
    home, *others = [cluster.virtual_slice(shape, (DATA, TENSOR), island=island) for shape, island in places]
    params = initialise(model, whole(model), seed=0, dtype="float64")
    batch = {"tokens": np.random.default_rng(0).integers(0, CONFIG.vocabulary, (EXAMPLES, 7)).astype(np.int32)}
    wanted, expected = jax.jit(jax.value_and_grad(lambda tree: reference_loss(CONFIG, tree, batch)))(params)
    apart = ExpertSlices(model, home, others, EXAMPLES)
    state = apart.place(params)
    loss, gradients, dropped = apart(*state, batch)
    assert float(loss) == pytest.approx(float(wanted), rel=BOUND)
    assert not any(int(one) for one in dropped)
    found = apart.gather(*gradients)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) <= BOUND * np.linalg.norm(other)
    del state, gradients, dropped, loss
    for one in (home, *others):
        one.release()
