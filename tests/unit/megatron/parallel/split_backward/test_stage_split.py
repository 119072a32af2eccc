"""A backward in two parts gives what one does, and neither part does what the other did."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatron_ptdp.models import DATA, TENSOR, Compute, ModelConfig, build
from megatron_ptdp.parallel import Options, Sizes, cut
from megatron_ptdp.parallel.shapes import StageShapes
from megatron_ptdp.parallel.split_backward.stage_split import SplitBackward
from megatron_ptdp.parallel.stage import StageMath

GPT = ModelConfig("gpt", layers=4, hidden=32, heads=2, sequence=8, vocabulary=12)
MOE = ModelConfig("gpt", layers=4, hidden=8, heads=2, sequence=4, vocabulary=12, experts=4)
T5 = ModelConfig(
    "t5", layers=2, encoder_layers=2, hidden=8, heads=2, sequence=4, encoder_sequence=6, vocabulary=12, bias=False
)


class Parts:
    """A stage of a model on 2 × 2 devices, with its backward whole and in two parts."""

    def __init__(self, config: ModelConfig, compute: dict[str, Any], number: int, stages: int) -> None:
        model = build(config, Compute(tensor=2, dtype="float64", **compute))
        sizes = Sizes(pipeline=stages, data=2, tensor=2, microbatches=1, examples=1)
        kinds = (jax.sharding.AxisType.Auto,) * 2
        self.mesh = jax.make_mesh((2, 2), (DATA, TENSOR), axis_types=kinds, devices=jax.devices()[:4])
        options = Options(master="float64", compute="float64")
        shapes = StageShapes.of(model, cut(4, stages), number, sizes, options, [True] * (stages - 1))
        self.math = StageMath(model, shapes, 1, self.mesh.abstract_mesh, options.keep == "input", "float64", "float64")
        self.parts = SplitBackward(self.math)
        random = np.random.default_rng(0)

        def filled(kind: Any) -> Any:
            if np.issubdtype(kind.dtype, np.floating):
                return random.normal(size=kind.shape).astype(kind.dtype)
            return random.integers(0, 7, kind.shape).astype(kind.dtype)

        self.params, self.values, self.batch, _ = jax.tree.map(filled, self.math.arguments())
        self.upstream = jax.tree.map(filled, self.math.upstream())
        self.sums = jax.jit(functools.partial(shapes.zeros, "float64"))()
        with jax.set_mesh(self.mesh):
            self.kept = jax.jit(self.math.forward)(self.params, self.values, self.batch, jnp.int32(0))[1]
        self.early, self.late = ([self.kept[k] for k in which] for which in (self.parts.early, self.parts.late))

    def whole(self) -> tuple[Any, ...]:
        """B: how to compile it."""
        run = jax.jit(self.math.backward(recompute=False, weights=True, inputs=True))
        return run, (self.params, self.values, self.kept, {}, (), self.upstream, self.sums)

    def first(self) -> tuple[Any, ...]:
        """I."""
        return jax.jit(self.parts.input_gradient()), (self.params, self.values, self.early, self.late, self.upstream)

    def second(self, saved: Any) -> tuple[Any, ...]:
        """W."""
        return jax.jit(self.parts.weight_gradient()), (
            self.params,
            self.values,
            self.late,
            self.upstream,
            saved,
            self.sums,
        )


def size(arrays: list[Any]) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)


@pytest.mark.parametrize(
    ("config", "compute", "number", "stages"),
    [
        (GPT, {}, 1, 2),
        pytest.param(GPT, {}, 0, 2, marks=pytest.mark.long),
        pytest.param(GPT, {"sequence_parallel": True, "recompute": "selective"}, 1, 2, marks=pytest.mark.long),
        pytest.param(MOE, {"sequence_parallel": True}, 1, 2, marks=pytest.mark.long),
        pytest.param(T5, {}, 1, 4, marks=pytest.mark.long),
        pytest.param(T5, {"sequence_parallel": True}, 1, 2, marks=pytest.mark.long),
    ],
    ids=["gpt", "gpt-first", "gpt-sp-selective", "moe-sp", "t5", "t5-sp"],
)
def test_two_parts_give_what_one_backward_does(
    config: ModelConfig, compute: dict[str, Any], number: int, stages: int
) -> None:
    with jax.enable_x64(True), jax.checking_leaks():  # as the runtime does when it traces
        stage = Parts(config, compute, number, stages)
        with jax.set_mesh(stage.mesh):
            run, given = stage.whole()
            sums, downstream, _ = run(*given)
            run, given = stage.first()
            found, saved = run(*given)
            run, given = stage.second(saved)
            added = run(*given)
    for one, other in zip(jax.tree.leaves((found, added)), jax.tree.leaves((downstream, sums)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-14 * np.linalg.norm(other)


def flops(run: Any, given: Any) -> float:
    """Operations of a computation by XLA's count."""
    found = run.lower(*given).compile().cost_analysis()["flops"]
    assert isinstance(found, float)
    return found


def test_no_part_repeats_the_other_and_little_is_kept_between_them() -> None:
    with jax.enable_x64(True):
        stage = Parts(GPT, {}, 1, 2)
        with jax.set_mesh(stage.mesh):
            run, given = stage.first()
            saved = jax.eval_shape(run, *given)[1]
            whole, first, second = flops(*stage.whole()), flops(run, given), flops(*stage.second(saved))
    assert first + second == pytest.approx(whole, rel=0.1)
    assert 0.3 * whole < second < 0.6 * whole
    assert size([*stage.late, *saved]) < 0.6 * size(stage.kept)


def test_full_recomputation_computes_the_forward_of_a_layer_once_more() -> None:
    with jax.enable_x64(True):
        plain, full = Parts(GPT, {}, 1, 2), Parts(GPT, {"recompute": "full"}, 1, 2)
        with jax.set_mesh(plain.mesh):
            forward = flops(jax.jit(plain.math.forward), (plain.params, plain.values, plain.batch, jnp.int32(0)))
            once, again = flops(*plain.whole()), flops(*full.whole())
    assert again < once + 1.05 * forward
    assert size(full.kept) < 0.1 * size(plain.kept)


def test_a_backward_with_its_forward_inside_computes_the_logits_once() -> None:
    """Although a forward by itself keeps none of them where layers are recomputed."""
    wide = dataclasses.replace(GPT, vocabulary=512)
    head = 2 * wide.sequence * wide.hidden * wide.vocabulary / 2  # on each of two members
    joined = []
    with jax.enable_x64(True):
        for recompute in ("none", "full"):
            stage = Parts(wide, {"recompute": recompute}, 1, 2)
            with jax.set_mesh(stage.mesh):
                given = (stage.params, stage.values, stage.batch, jnp.int32(0))
                forward = flops(jax.jit(stage.math.forward), given)
                run = jax.jit(stage.math.backward(recompute=True, weights=True, inputs=True))
                more: tuple[Any, ...] = (
                    stage.params,
                    stage.values,
                    [],
                    stage.batch,
                    jnp.int32(0),
                    stage.upstream,
                    stage.sums,
                )
                joined.append(flops(run, more))
    assert joined[1] < joined[0] + 1.1 * (forward - head)


def test_the_first_stage_has_no_first_part() -> None:
    """Tokens have no gradient: W does it all."""
    with jax.enable_x64(True):
        parts = Parts(GPT, {}, 0, 2).parts
    assert (parts.early, parts.saved_axes) == ([], [])
