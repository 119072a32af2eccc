"""Experts that compute the tokens that chose them, beside each expert for all tokens: values, gradients, operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megatron_ptdp.models import TENSOR, Compute, ModelConfig, build, cut, layers, moe, preset
from tests.unit.megatron.models import members

SIZES = {"layers": 1, "hidden": 16, "heads": 4, "ffn": 24, "sequence": 16, "vocabulary": 32}
EXPERTS = preset("gpt-tiny", **SIZES, experts=8, top_k=2)
BOUND = 1e-12
X = P(None, None, None)


def parameters(config: ModelConfig, skewed: float = 0.0) -> members.Tree:
    """`skewed` makes the first expert the choice of most tokens."""
    random = np.random.default_rng(3)
    e, h, f = config.experts, config.hidden, config.ffn
    tree: members.Tree = {
        "router": {"weight": random.standard_normal((h, e))},
        "in": {"weight": random.standard_normal((e, h, f)), "bias": random.standard_normal((e, f))},
        "out": {"weight": random.standard_normal((e, f, h)), "bias": random.standard_normal((e, h))},
    }
    tree["router"]["weight"][:, 0] += skewed
    return tree


def run(config: ModelConfig, compute: Compute, params: members.Tree, x: np.ndarray) -> Any:
    """The value of a sum over what comes out, weighted, and its gradients, on as many members as `compute` says."""
    weights = np.random.default_rng(9).standard_normal(x.shape)
    own = P(None, TENSOR, None) if compute.sequence_parallel else X
    shared = {name: {key: P(TENSOR) for key in params[name]} for name in ("in", "out")}
    specs = {"router": {"weight": P()}, **shared}

    def inside(params: members.Tree, x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        params = layers.vary(params, TENSOR)
        if moe.by_parts(config, compute):
            y, balance = moe.experts_of_parts(x, params, config)
        else:
            y, balance = moe.experts(layers.enter(x, compute), params, config, compute)
        y = jnp.sum(y * weights)
        return (jax.lax.psum(y, TENSOR) if compute.sequence_parallel else y), jax.lax.pmean(balance, TENSOR)

    def loss(params: members.Tree, x: jax.Array) -> jax.Array:
        made, balance = jax.shard_map(
            inside, mesh=members.mesh(1, compute.tensor), in_specs=(specs, own, own), out_specs=(P(), P())
        )(params, x, jnp.asarray(weights))
        return made + jnp.sum(balance)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)


def agree(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.max(np.abs(a - b)) <= BOUND * (1 + np.max(np.abs(b)))


@pytest.mark.parametrize(("tensor", "parallel", "skewed"), [(1, False, 3.0), (4, False, 3.0), (4, True, 0.0)])
def test_values_and_gradients_are_those_of_the_dense_form(tensor: int, parallel: bool, skewed: float) -> None:
    """Without a capacity, and with one that all tokens fit into; also where one expert has nearly all of them."""
    x = np.abs(np.random.default_rng(1).standard_normal((3, 16, 16)))
    params = parameters(EXPERTS, skewed)
    how = Compute(tensor=tensor, sequence_parallel=parallel, dtype="float64")
    dense = run(EXPERTS, replace(how, experts="dense"), params, x)
    agree(run(EXPERTS, how, params, x), dense)
    agree(run(replace(EXPERTS, capacity=4.0), how, params, x), dense)


def test_beyond_its_capacity_an_expert_takes_no_token() -> None:
    """All tokens choose expert 0 first: it takes the first ones, and the others go past it."""
    config = replace(EXPERTS, top_k=1, capacity=1.0)
    params = parameters(config)
    params["router"]["weight"][:] = 0.0  # of equal ones the first
    x = np.random.default_rng(1).standard_normal((2, 16, 16))

    def out(config: ModelConfig) -> np.ndarray:
        def inside(x: jax.Array, params: members.Tree) -> jax.Array:
            params = layers.vary(params, TENSOR)
            return moe.experts(layers.vary(x, TENSOR), params, config, Compute(dtype="float64"))[0]

        place = members.mesh(1, 1)
        made = jax.jit(jax.shard_map(inside, mesh=place, in_specs=(P(), P()), out_specs=P()))(x, params)
        return np.asarray(made).reshape(-1, 16)

    rows = moe.capacity_of(config, 32)
    assert rows == 4
    whole, some = out(replace(config, capacity=0.0)), out(config)
    np.testing.assert_allclose(some[:rows], whole[:rows], atol=1e-12)
    assert not some[rows:].any()
    assert whole[rows:].all()


def operations(config: ModelConfig, compute: Compute, tokens: int) -> float:
    """FLOPs of one layer's experts, as XLA counts them, on one member."""
    x = jax.ShapeDtypeStruct((1, tokens, config.hidden), np.float32)
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, np.float32), parameters(config))

    def inside(x: jax.Array, params: members.Tree) -> jax.Array:
        return moe.experts(layers.vary(x, TENSOR), layers.vary(params, TENSOR), config, compute)[0]

    sharded = jax.shard_map(inside, mesh=members.mesh(1, 1), in_specs=(P(), P()), out_specs=P())
    counted = jax.jit(sharded).lower(x, params).compile().cost_analysis()
    assert counted is not None
    return float(counted["flops"])


def test_operations_are_proportional_to_the_chosen_experts() -> None:
    """By XLA's count: twice as many experts cost nothing more, twice as many choices cost twice as much; and the dense
    form costs what all experts do."""
    tokens = 512
    config = replace(EXPERTS, hidden=32, ffn=64, experts=16, heads=4)
    one = 4 * tokens * config.hidden * config.ffn
    counted = {
        (experts, top_k): operations(replace(config, experts=experts, top_k=top_k), Compute(), tokens) / one
        for experts, top_k in ((8, 2), (16, 2), (16, 4))
    }
    dense = operations(config, Compute(experts="dense"), tokens) / one
    with_capacity = operations(replace(config, capacity=1.25), Compute(), tokens) / one
    assert 2.0 <= counted[8, 2] <= 1.5 * 2
    assert 2.0 <= counted[16, 2] <= 1.5 * 2
    assert 4.0 <= counted[16, 4] <= 1.5 * 4
    assert 2.0 <= with_capacity <= 1.5 * 2
    assert dense >= 16


@pytest.mark.long
def test_a_model_with_a_capacity_for_all_is_that_without() -> None:
    config = replace(members.CONFIGS["gpt-experts"], capacity=2.0)
    how = Compute(tensor=2, sequence_parallel=True, dtype="float64")
    model = build(config, how, weighted=True)
    errors = members.difference(
        members.computed(model, cut(model, [1, 1])), members.expected(members.CONFIGS["gpt-experts"])
    )
    assert max(errors.values()) <= BOUND, errors
