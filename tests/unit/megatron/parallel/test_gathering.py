"""ZeRO-3 holds one whole layer at a time: seen in the memory of what XLA compiled, and in the gradients it gives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from megatron_ptdp.models import DATA, TENSOR, Compute, ModelConfig, build, initialise, whole
from megatron_ptdp.parallel import Options, Sizes, cut
from megatron_ptdp.parallel.reduce import Reduction
from megatron_ptdp.parallel.shapes import StageShapes
from megatron_ptdp.parallel.stage import StageMath

GPT = ModelConfig("gpt", layers=2, hidden=8, heads=2, sequence=4, vocabulary=7)
T5 = ModelConfig(
    "t5", layers=1, encoder_layers=1, hidden=8, heads=2, sequence=4, encoder_sequence=6, vocabulary=7, bias=False
)
MOE = ModelConfig("gpt", layers=2, hidden=8, heads=2, sequence=4, vocabulary=7, experts=2, top_k=1)


def mesh_of(data: int, tensor: int) -> jax.sharding.Mesh:
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((data, tensor), (DATA, TENSOR), axis_types=kinds, devices=jax.devices()[: data * tensor])


def math_of(config: ModelConfig, compute: Compute, options: Options, mesh: jax.sharding.Mesh, direct: bool) -> Any:
    """The only stage of a model."""
    data, tensor = mesh.devices.shape
    model = build(config, compute)
    sizes = Sizes(data=data, tensor=tensor, microbatches=1, examples=1)
    shapes = StageShapes.of(model, cut(model.layers, 1), 0, sizes, options, [])
    keep_input = options.keep == "input"
    return StageMath(model, shapes, 1, mesh.abstract_mesh, keep_input, options.compute, options.master, direct)


def temporary(layers: int, zero: int, recompute: Any, compute: Any = "float32") -> tuple[int, int]:
    """Bytes that forward and backward need on a device beside what they take and give; and those of a whole layer."""
    mesh = mesh_of(4, 1)
    config = ModelConfig("gpt", layers=layers, hidden=128, heads=2, sequence=8, vocabulary=32)
    math = math_of(config, Compute(recompute=recompute, dtype=compute), Options(zero=zero, compute=compute), mesh, True)
    shapes = math.shapes

    def placed(tree: Any, specs: Any) -> Any:
        return jax.tree.map(
            lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)), tree, specs
        )

    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, math.used), shapes.parameters)
    batch = placed({name: math.batch_types[name] for name in math.wanted}, math.specs.batch)
    sums = placed(jax.eval_shape(lambda: shapes.zeros("float32")), shapes.sum_specs)
    k, scale = jax.ShapeDtypeStruct((), jnp.int32), [jax.ShapeDtypeStruct((), jnp.float32)]
    run = jax.jit(math.backward(recompute=True, weights=True, inputs=True), donate_argnums=6)
    with jax.set_mesh(mesh):
        compiled = run.lower(placed(params, shapes.used_specs), {}, [], batch, k, scale, sums).compile()
    layer = sum(array.size * 4 // layers for array in jax.tree.leaves(params["layers"]))
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes, layer


@pytest.mark.parametrize(
    ("recompute", "compute"),
    [
        ("full", "float32"),
        pytest.param("none", "float32", marks=pytest.mark.long),
        pytest.param("none", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_a_layer_more_costs_no_whole_layer_of_memory(recompute: str, compute: str) -> None:
    """Gathered all at once, a layer more took two whole ones and more: itself and its gradient."""
    few, layer = temporary(2, 3, recompute, compute)
    many, _ = temporary(10, 3, recompute, compute)
    each = (many - few) / 8
    # A quarter is the member's part of the gradient. The rest are activations.
    assert each < (0.3 if recompute == "full" else 0.55) * layer
    assert many < 0.5 * 10 * layer + 2 * few


@pytest.mark.parametrize(
    ("config", "compute", "keep", "direct"),
    [
        (GPT, {}, "residuals", True),
        pytest.param(
            GPT, {"sequence_parallel": True, "recompute": "selective"}, "residuals", True, marks=pytest.mark.long
        ),
        pytest.param(GPT, {"recompute": "full"}, "input", False, marks=pytest.mark.long),
        pytest.param(MOE, {}, "residuals", True, marks=pytest.mark.long),
        pytest.param(T5, {"sequence_parallel": True}, "input", True, marks=pytest.mark.long),
    ],
    ids=["gpt", "gpt-sp-selective", "gpt-full-indirect", "moe", "t5-sp"],
)
def test_gradients_are_those_of_replicas_with_whole_parameters(
    config: ModelConfig, compute: dict[str, Any], keep: Any, direct: bool
) -> None:
    with jax.enable_x64(True), jax.checking_leaks():  # as the runtime does when it traces
        mesh = mesh_of(2, 2)
        found = []
        for zero in (0, 3):
            options = Options(zero=zero, keep=keep, master="float64", compute="float64")
            math = math_of(config, Compute(tensor=2, dtype="float64", **compute), options, mesh, direct)
            params = initialise(math.model, whole(math.model), 0, "float64")
            types = math.model.batch(2).items()
            batch = {
                name: np.random.default_rng(0).integers(0, 7, (1, *shape)).astype(dtype)
                for name, (shape, dtype) in types
            }
            again = keep == "input"
            with jax.set_mesh(mesh):
                _, kept = jax.jit(math.forward)(params, {}, batch, jnp.int32(0))
                rest = (batch, jnp.int32(0)) if again else ({}, ())
                sums = jax.jit(functools.partial(math.shapes.zeros, "float64"))()
                backward = jax.jit(math.backward(again, weights=True, inputs=True))
                sums, _, _ = backward(params, {}, kept, *rest, [jnp.asarray(1.0)], sums)
                reduction = Reduction(math.shapes, mesh.abstract_mesh, 1, 1, direct)
                found.append(jax.tree.map(np.asarray, jax.jit(reduction.inside)(sums)))
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found[0]), jax.tree.leaves(found[1]), strict=True
    ):
        assert np.linalg.norm(one - other) <= 1e-13 * max(float(np.linalg.norm(one)), 1e-3), path


def test_what_is_gathered_is_not_kept_for_the_backward() -> None:
    math = math_of(GPT, Compute(tensor=2), Options(zero=3), mesh_of(2, 2), True)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, "float32"), math.shapes.parameters)
    batch = {name: math.batch_types[name] for name in math.wanted}
    _, kept = jax.eval_shape(math.forward, params, {}, batch, jax.ShapeDtypeStruct((), jnp.int32))
    largest = max(np.prod(array.shape[2:]) for array in kept)
    stacked = jax.tree.leaves(math.shapes.parameters["layers"]["ffn"]["in"]["weight"].shape)
    assert kept
    assert largest < np.prod(stacked) / 2  # of TENSOR a half, and whole over DATA
