"""Dtypes, what recomputation keeps, T5's distances and the routing of experts."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatron_ptdp.config.parallel import Recompute
from megatron_ptdp.models import Compute, build, take, whole
from megatron_ptdp.models.moe import route
from megatron_ptdp.models.reference import _kinds
from megatron_ptdp.models.t5 import buckets
from tests.unit.megatron.models import members
from tests.unit.megatron.models.members import CONFIGS


@pytest.mark.parametrize("dtype, bound", [pytest.param("float32", 3e-6, marks=pytest.mark.slow), ("bfloat16", 0.03)])
def test_shorter_dtypes(dtype: str, bound: float) -> None:
    """Activations and gradients have the dtype of the computation, the loss float32; all near the float64 result."""
    config = CONFIGS["gpt"]
    model = build(config, Compute(tensor=2, sequence_parallel=True, dtype=dtype), weighted=True)  # type: ignore[arg-type]
    stage = whole(model)
    params = jax.tree.map(lambda x: x.astype(dtype), take(model, stage, members.started(config)))
    backward = members.backward(model, stage, members.mesh(1, 2))
    loss, gradients, _ = backward(params, {}, members.batch_of(model), None)
    assert loss.dtype == jnp.float32
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype(dtype)}
    got = members.Result(float(loss), members.join(model, [stage], [jax.device_get(gradients)]))
    got = got._replace(gradients=jax.tree.map(lambda g: g.astype(np.float64), got.gradients))
    errors = members.difference(got, members.expected(config))
    assert max(errors.values()) <= bound, errors


def kept(recompute: Recompute) -> list[tuple[int, ...]]:
    """Shapes of what the forward of a stage of two layers keeps for the backward, on one device."""
    config = replace(CONFIGS["gpt"], layers=2)
    model = build(config, Compute(dtype="float64", recompute=recompute))
    stage, place = whole(model), members.mesh(1, 1)
    params, batch = members.take(model, stage, members.started(config)), members.batch_of(model)

    def loss(params: members.Tree) -> jax.Array:
        specs = (members.specs(model.parameters(stage)), members.P(members.DATA))

        def run(params: members.Tree, batch: members.Tree) -> jax.Array:
            return jax.lax.psum(model.forward(stage, params, {}, batch), members.DATA)

        return jax.shard_map(run, mesh=place, in_specs=specs, out_specs=members.P())(params, batch)

    leaves = jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params))
    return [leaf.shape for leaf in leaves if leaf.shape]


def test_what_recomputation_does_not_keep() -> None:
    """[B, heads, S, S] are scores: kept only without recomputation. With full, of a layer only what comes in."""
    scores = (4, 4, 8, 8)
    none, selective, full = (kept(r) for r in ("none", "selective", "full"))
    assert any(shape[-4:] == scores for shape in none)
    assert not any(shape[-4:] == scores for shape in selective)

    of_ffn = (4, 8, 24)
    assert any(shape[-3:] == of_ffn for shape in selective)
    assert not any(shape[-3:] == of_ffn for shape in full)
    assert none.count((4, 8, 9)) == 1  # of the logits' size
    assert sum(map(np.prod, full)) < sum(map(np.prod, selective)) < sum(map(np.prod, none))


@pytest.mark.parametrize("causal", [True, False])
def test_kinds_of_distance(causal: bool) -> None:
    """Beyond the farthest distance too."""
    assert np.array_equal(buckets(200, causal=causal), _kinds(200, causal))


def test_routing() -> None:
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2, 0.0001], [0.1, 0.2, 0.3, 0.4]]]))
    weights, chosen, balance = route(logits, 2)
    assert chosen.tolist() == [[[0, 1], [3, 2]]]
    assert np.allclose(weights[0], [[0.625, 0.375, 0, 0], [0, 0, 3 / 7, 4 / 7]], atol=1e-4)
    assert np.allclose(route(logits, 1)[0][0, 1], [0, 0, 0, 0.4], atol=1e-4)
    assert balance.shape == (1,)
    even = jnp.zeros((1, 3, 4))
    assert np.allclose(route(even, 4).balance, 1)
    assert np.allclose(route(even.at[..., 0].set(50.0), 1).balance, 4)  # all to one expert of four
