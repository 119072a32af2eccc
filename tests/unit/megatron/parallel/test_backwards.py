"""All ways to a gradient give the same one: two stages by hand on 2 × 2 devices, against one device, in float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megatron_ptdp.models import DATA, TENSOR, Compute, Gpt, ModelConfig, initialise, join, take, whole
from megatron_ptdp.parallel import Options, Sizes, cut
from megatron_ptdp.parallel.reduce import Reduction
from megatron_ptdp.parallel.shapes import StageShapes
from megatron_ptdp.parallel.stage import StageMath

CONFIG = ModelConfig("gpt", layers=2, hidden=8, heads=2, sequence=4, vocabulary=7, tied=False)
SIZES = Sizes(pipeline=2, tensor=2, data=2, microbatches=2, examples=1)
STAGES = cut(2, 2)


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def mesh_of(data: int, tensor: int) -> jax.sharding.Mesh:
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((data, tensor), (DATA, TENSOR), axis_types=kinds, devices=jax.devices()[: data * tensor])


def on_one_device(params: Any, tokens: np.ndarray) -> tuple[Any, Any]:
    model = Gpt(CONFIG, Compute(dtype="float64"))
    specs = jax.tree.map(lambda p: p.spec, model.parameters(whole(model)))

    def loss(params: Any) -> Any:
        def run(params: Any, tokens: Any) -> Any:
            return model.forward(whole(model), params, {}, {"tokens": tokens})[None]

        return jax.shard_map(run, mesh=mesh_of(1, 1), in_specs=(specs, P(DATA)), out_specs=P(DATA))(params, tokens)[0]

    return jax.device_get(jax.jit(jax.value_and_grad(loss))(params))


@pytest.mark.parametrize("cut_in_two", [pytest.param(False, marks=pytest.mark.long), True], ids=["B", "I-and-W"])
@pytest.mark.parametrize(
    ("options", "compute"),
    [
        ({"keep": "residuals"}, {}),
        pytest.param({"keep": "input"}, {"sequence_parallel": True}, marks=pytest.mark.long),
        pytest.param(
            {"keep": "residuals", "zero": 2},
            {"recompute": "selective", "sequence_parallel": True},
            marks=pytest.mark.long,
        ),
    ],
    ids=["residuals", "input-sp", "zero2-selective-sp"],
)
def test_every_backward_gives_the_gradient_of_one_device(options, compute, cut_in_two: bool) -> None:
    model = Gpt(CONFIG, Compute(tensor=2, dtype="float64", **compute))
    chosen = Options(master="float64", compute="float64", **options)
    mesh = mesh_of(2, 2)
    one = Gpt(CONFIG, Compute(dtype="float64"))
    params = initialise(one, whole(one), 0, "float64")
    tokens = np.random.default_rng(0).integers(0, 7, (SIZES.microbatches, 2, 5)).astype("int32")
    again = chosen.keep == "input"
    math, sums, parts, forwards, backwards = [], [], [], [], []
    kinds = [(False, True), (True, False)] if cut_in_two else [(True, True)]
    for number in range(2):
        shapes = StageShapes.of(model, STAGES, number, SIZES, chosen, [True])
        math.append(StageMath(model, shapes, 2, mesh.abstract_mesh, again, "float64", "float64"))
        sums.append(jax.jit(functools.partial(shapes.zeros, "float64"))())
        parts.append(take(model, STAGES[number], params))
        forwards.append(jax.jit(math[number].forward))
        backwards.append([(jax.jit(math[number].backward(again, *kind)), *kind) for kind in kinds])

    total = 0.0
    with jax.set_mesh(mesh):

        def backward(stage: int, values: Any, kept: Any, k: Any, upstream: Any) -> tuple[Any, Any]:
            rest = (parts[stage], values, [] if again else kept, batch if again else {}, k if again else (), upstream)
            downstream = losses = None
            for run, weights, inputs in backwards[stage]:
                new, found, loss = run(*rest, sums[stage] if weights else {})
                sums[stage] = new if weights else sums[stage]
                downstream, losses = (found, loss) if inputs else (downstream, losses)
            return downstream, losses

        batch = {"tokens": tokens}
        for number in range(SIZES.microbatches):
            k = jnp.int32(number)
            values, first = forwards[0](parts[0], {}, batch, k)
            losses, last = forwards[1](parts[1], values, batch, k)
            upstream, once_more = backward(1, values, last, k, [jnp.asarray(1.0)])
            if again:
                np.testing.assert_allclose(once_more, losses, rtol=1e-14)
            backward(0, {}, first, k, upstream)
            total += float(jnp.sum(losses))
        reduced = [
            jax.jit(Reduction(m.shapes, mesh.abstract_mesh, 1, 1, True).inside)(s)
            for m, s in zip(math, sums, strict=True)
        ]

    loss, expected = on_one_device(params, tokens.reshape(-1, 5))
    assert total == pytest.approx(float(loss), rel=1e-14)
    gradients = join(model, STAGES, jax.tree.map(np.asarray, reduced))
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(found - wanted) <= 1e-13 * max(float(np.linalg.norm(wanted)), 1e-3)
