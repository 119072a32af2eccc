"""Which collectives a step's functions hold: compiled for 2 × 2 devices of this process."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megatron_ptdp.models import DATA, TENSOR, Compute, Gpt, ModelConfig, Stage
from megatron_ptdp.parallel import Options, Sizes, cut
from megatron_ptdp.parallel.reduce import BUCKET_SPEC, Reduction
from megatron_ptdp.parallel.shapes import StageShapes
from megatron_ptdp.parallel.stage import StageMath

CONFIG = ModelConfig("gpt", layers=4, hidden=8, heads=2, sequence=6, vocabulary=13)
SIZES = Sizes(pipeline=2, tensor=2, data=2, microbatches=3, examples=2)
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh(
        (2, 2), (DATA, TENSOR), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )


def placed(mesh: jax.sharding.Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P))


def collectives(mesh: jax.sharding.Mesh, run: Callable[..., Any], inputs: Any, outputs: Any, *given: Any) -> Counter:
    jitted = jax.jit(run, in_shardings=placed(mesh, inputs), out_shardings=placed(mesh, outputs))
    text = jitted.lower(*given).compile().as_text()
    return Counter(re.findall(rf" ({KINDS})(?:-start)?\(", text or ""))


def shapes_of(zero: int, stage: int = 1, scatter_gather: bool = True) -> StageShapes:
    model = Gpt(CONFIG, Compute(tensor=2))
    options = Options(zero=zero, scatter_gather=scatter_gather)
    return StageShapes.of(model, cut(4, 2), stage, SIZES, options, [True])


def zeros(shapes: StageShapes) -> Any:
    return jax.eval_shape(lambda: shapes.zeros("float32"))


@pytest.mark.parametrize(
    ("zero", "direct", "kind"), [(0, True, "all-reduce"), (1, True, "reduce-scatter"), (1, False, "all-reduce")]
)
def test_gradients_are_reduced_once(mesh, zero: int, direct: bool, kind: str) -> None:
    """By one kind of collective; and where reduce-scatters are not to be used, XLA makes none of what replaces them."""
    shapes = shapes_of(zero)
    reduction = Reduction(shapes, mesh.abstract_mesh, 1, 1, direct)
    found = collectives(mesh, reduction.inside, (shapes.sum_specs,), shapes.master_specs, zeros(shapes))
    assert set(found) == {kind}
    assert found["all-reduce"] <= 1  # XLA makes one of all arrays


@pytest.mark.parametrize("direct", [True, False])
def test_gradients_leave_an_island_by_one_collective_and_arrive_by_one(mesh, direct: bool) -> None:
    shapes = shapes_of(0)
    reduction = Reduction(shapes, mesh.abstract_mesh, 2, 4, direct)
    specs = [BUCKET_SPEC] * 4
    found = collectives(mesh, reduction.reduce_scatter, (shapes.sum_specs,), specs, zeros(shapes))
    assert found == {"reduce-scatter" if direct else "all-reduce": 1}
    buckets = jax.eval_shape(reduction.reduce_scatter, zeros(shapes))
    assert collectives(mesh, reduction.all_gather, (specs,), shapes.master_specs, buckets) == {"all-gather": 1}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_that_cross_islands_are_the_sums(mesh, zero: int) -> None:
    """Two islands with the same sums, alike for both: twice what one island alone would reduce to."""
    shapes = shapes_of(zero)
    draw = np.random.default_rng(0)
    sums = jax.tree.map(lambda s: draw.standard_normal(s.shape).astype("float32"), zeros(shapes))
    one = Reduction(shapes, mesh.abstract_mesh, 1, 1, True)
    two = Reduction(shapes, mesh.abstract_mesh, 2, 4, False)
    with jax.set_mesh(mesh):
        sums = jax.device_put(sums, placed(mesh, shapes.sum_specs))
        alone = jax.jit(one.inside)(sums)
        buckets = jax.jit(two.reduce_scatter)(sums)
        both = jax.jit(two.all_gather)([two.cross_island_sum([bucket, bucket]) for bucket in buckets])
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(both), strict=True):
        np.testing.assert_array_equal(2 * np.asarray(a), np.asarray(b))


def test_the_receiver_gathers_what_came_in_parts(mesh) -> None:
    """Scatter/gather adds one all-gather to the forward of the receiving stage, and nothing to the sender's."""

    def forward(stage: int, scatter_gather: bool) -> Counter:
        shapes = shapes_of(0, stage, scatter_gather)
        math = StageMath(Gpt(CONFIG, Compute(tensor=2)), shapes, 3, mesh.abstract_mesh, False, "float32", "float32")
        signature = math.specs.forward(wires=True)
        return collectives(
            mesh,
            math.forward,
            signature.inputs,
            signature.output,
            jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, "float32"), shapes.parameters),
            jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), shapes.values),
            {name: math.batch_types[name] for name in math.wanted},
            jax.ShapeDtypeStruct((), jnp.int32),
        )

    assert forward(1, True) - forward(1, False) == {"all-gather": 1}
    assert forward(0, True) == forward(0, False)
    assert shapes_of(0, 0).stage == Stage(0, 2, has_embedding=True, has_loss=False)
