"""What a stage computes, looked at without running it: types over a mesh of 2 × 2."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from megatron_ptdp.models import DATA, TENSOR, Compute, Gpt, ModelConfig, Parameter, Value
from megatron_ptdp.parallel import Options, Sizes, cut
from megatron_ptdp.parallel.shapes import StageShapes, shared_dimension, shared_spec, wire_spec
from megatron_ptdp.parallel.stage import StageMath
from pathways_ray.executor.compile.allowlist import verdicts

CONFIG = ModelConfig("gpt", layers=4, hidden=8, heads=2, sequence=6, vocabulary=13)
SIZES = Sizes(pipeline=2, tensor=2, data=2, microbatches=3, examples=2)


def stage(number: int, compute: Compute | None = None, options: Options | None = None) -> StageMath:
    model = Gpt(CONFIG, compute or Compute(tensor=2))
    options = options or Options()
    shapes = StageShapes.of(model, cut(4, 2), number, SIZES, options, [True])
    mesh = AbstractMesh((2, 2), (DATA, TENSOR))
    keep_input = options.keep == "input"
    return StageMath(model, shapes, SIZES.microbatches, mesh, keep_input, options.compute, options.master)


def arguments(math: StageMath) -> tuple:
    shapes = math.shapes
    return (
        jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, "float32"), shapes.parameters),
        jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), shapes.values),
        {name: math.batch_types[name] for name in math.wanted},
        jax.ShapeDtypeStruct((), jnp.int32),
    )


def test_a_stage_is_given_of_the_batch_what_it_looks_at() -> None:
    assert stage(0).wanted == ("tokens",)
    assert stage(1).wanted == ("tokens",)  # the targets are the same array
    model, middle = Gpt(CONFIG, Compute(tensor=2)), cut(4, 4)
    shapes = StageShapes.of(model, middle, 1, SIZES, Options(), [True] * 3)
    mesh = AbstractMesh((2, 2), (DATA, TENSOR))
    assert StageMath(model, shapes, 3, mesh, False, "float32", "float32").wanted == ()


def test_a_forward_keeps_no_parameter_and_nothing_twice() -> None:
    math = stage(1)
    _, kept = jax.eval_shape(math.forward, *arguments(math))
    # Largest of all would be the table of the logits, [vocabulary / t, hidden], on each of the members.
    parameters = {(2, *p.shape) for p in jax.tree.leaves(math.shapes.parameters)}
    assert kept
    assert not {array.shape[1:] for array in kept} & parameters
    assert math.pullback is not None
    numbers = [number for argument, number in math.pullback.leaves if not argument]
    assert sorted(set(numbers)) == list(range(len(kept)))
    assert any(argument for argument, _ in math.pullback.leaves)


def test_more_recomputation_keeps_less() -> None:
    def kept(recompute: str, options: Options | None = None) -> int:
        math = stage(0, Compute(tensor=2, recompute=recompute), options)  # type: ignore[arg-type]
        return sum(a.size * a.dtype.itemsize for a in jax.eval_shape(math.forward, *arguments(math))[1])

    everything, selective, inputs = kept("none"), kept("selective"), kept("full")
    assert everything > selective > inputs > 0
    assert kept("full", Options(keep="input")) == 0  # only the stage's own input, which is there anyway


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_with_full_recomputation_a_forward_keeps_no_logits(recompute: str) -> None:
    math = stage(1, Compute(tensor=2, recompute=recompute))  # type: ignore[arg-type]
    _, kept = jax.eval_shape(math.forward, *arguments(math))
    own = -(-CONFIG.vocabulary // 2)
    logits = [array for array in kept if array.shape[-1] == own and array.dtype == jnp.float32]  # no tokens
    assert bool(logits) == (recompute == "selective")


def test_backward_gives_sums_as_it_takes_them_and_a_gradient_for_each_value() -> None:
    math = stage(1)
    params, values, batch, k = arguments(math)
    sums = jax.eval_shape(lambda: math.shapes.zeros("float32"))
    scale = [jax.ShapeDtypeStruct((), jnp.float32)]
    given: tuple[Any, ...] = (params, values, [], batch, k, scale, sums)
    new, downstream, losses = jax.eval_shape(math.backward(recompute=True, weights=True, inputs=True), *given)
    assert new == sums
    assert [(g.shape, g.dtype) for g in downstream] == [(v.shape, v.dtype) for v in jax.tree.leaves(values)]
    assert losses.shape == (2,)


PARAMETERS = [
    (Parameter((4, 6), P(None, TENSOR)), 0),
    (Parameter((3, 6), P(None, TENSOR)), -1),
    (Parameter((4, 8), P(None, None)), 1),
    (Parameter((8, 8), P()), 0),
    (Parameter((), P()), -1),
]


@pytest.mark.parametrize(("parameter", "dimension"), PARAMETERS)
def test_members_of_data_share_the_largest_dimension_that_divides(parameter: Parameter, dimension: int) -> None:
    assert shared_dimension(parameter, 2, zero=1) == dimension
    assert shared_dimension(parameter, 2, zero=0) == -1
    assert (DATA in tuple(shared_spec(parameter, dimension))) == (dimension >= 0)


def test_values_that_all_members_hold_travel_in_parts() -> None:
    whole = Value((2, 6, 8), "float32", P(DATA), split=2)
    assert wire_spec(whole, 2, scatter=True) == P(DATA, None, TENSOR)
    assert wire_spec(whole, 2, scatter=False) == P(DATA, None, None)
    assert wire_spec(whole, 3, scatter=True) == P(DATA, None, None)  # 8 is no multiple of 3
    assert wire_spec(Value((2, 6, 8), "float32", P(DATA, TENSOR)), 2, scatter=True) == P(DATA, TENSOR, None)


@pytest.mark.parametrize(
    ("compute", "options"),
    [
        (Compute(tensor=2), Options()),
        (Compute(tensor=2, sequence_parallel=True, recompute="full"), Options(zero=1)),
        (Compute(tensor=2, sequence_parallel=True, recompute="selective", scatter="psum"), Options(zero=3)),
        (Compute(tensor=2, unroll=True), Options(zero=2)),
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_hosts_allow_its_functions_to_any_tenant(number: int, compute: Compute, options: Options) -> None:
    """Their collectives stand in loops over layers, which every device goes round as often."""
    math = stage(number, compute, options)
    params, values, batch, k = math.arguments()
    sums = jax.eval_shape(lambda: math.shapes.zeros("float32"))
    made = [
        (math.forward, (params, values, batch, k)),
        (math.evaluate, (params, values, batch, k)),
        (
            math.backward(recompute=True, weights=True, inputs=True),
            (params, values, [], batch, k, math.upstream(), sums),
        ),
    ]
    for function, given in made:
        leaves, tree = jax.tree.flatten(given)
        flat = lambda *x: jax.tree.leaves(function(*jax.tree.unflatten(tree, x)))  # noqa: B023, E731
        with jax.sharding.use_abstract_mesh(math.mesh):
            found = export.export(jax.jit(flat), platforms=("cpu", "cuda"))(*leaves)
        assert verdicts([bytes(found.serialize())]) == [("", 4)]
