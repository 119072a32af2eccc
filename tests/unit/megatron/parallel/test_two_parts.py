"""A backward in two parts gives what one does, and neither part does what the other did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatron_ptdp.models import DATA, TENSOR, Compute, ModelConfig, build
from megatron_ptdp.parallel import Options, Sizes, cut
from megatron_ptdp.parallel.halves import Halves
from megatron_ptdp.parallel.shapes import StageShapes
from megatron_ptdp.parallel.stage import StageMath
from megatron_ptdp.parallel.two_parts import TwoParts

GPT = ModelConfig("gpt", layers=4, hidden=32, heads=2, sequence=8, vocabulary=12)
MOE = ModelConfig("gpt", layers=4, hidden=8, heads=2, sequence=4, vocabulary=12, experts=4)
T5 = ModelConfig(
    "t5", layers=2, encoder_layers=2, hidden=8, heads=2, sequence=4, encoder_sequence=6, vocabulary=12, bias=False
)


def halves_of(function: Callable[..., Any], first: int, *arguments: Any) -> tuple[Halves, Any]:
    """Of a function with a flat list of outputs, of which the first ones are the first half's."""
    closed = jax.make_jaxpr(function)(*arguments)
    return Halves.of(closed.jaxpr, range(first), range(first, len(closed.jaxpr.outvars))), closed.consts


def both(function: Callable[..., Any], first: int, *arguments: Any) -> tuple[list[Any], list[Any]]:
    """All outputs, one half after the other; and the taps."""
    halves, constants = halves_of(function, first, *arguments)
    outputs, taps = halves.run_first({k: arguments[k] for k in halves.needs[0]}, constants)
    outputs |= halves.run_second({k: arguments[k] for k in halves.needs[1]}, taps, constants)
    return [outputs[number] for number in sorted(outputs)], taps


def test_what_both_need_is_computed_once_and_handed_on() -> None:
    def function(x: Any, y: Any) -> list[Any]:
        middle = jnp.sin(x)
        return [jnp.sum(middle), jnp.sum(middle.reshape(-1) * y)]

    x, y = jnp.arange(6.0).reshape(2, 3), jnp.arange(6.0)
    found, taps = both(function, 1, x, y)
    for one, other in zip(found, function(x, y), strict=True):
        assert one == other
    assert [tap.shape for tap in taps] == [(2, 3)]  # and it is laid out anew in the second half
    halves, _ = halves_of(function, 1, x, y)
    assert halves.needs == ({0}, {1})


def test_a_loop_is_cut_into_two_that_carry_their_own() -> None:
    """The first half carries a chain. The second one carries a sum of what the chain was in each turn."""

    def function(x: Any, rows: Any, factors: Any) -> list[Any]:
        def turn(carry: Any, taken: Any) -> Any:
            chain, total = carry
            row, factor = taken
            new = jnp.cos(chain) * row
            return (new, total + factor * chain), new * factor

        (chain, total), given = jax.lax.scan(turn, (x, jnp.zeros(())), (rows, factors), reverse=True)
        return [chain, total, given]

    x, rows, factors = jnp.float32(0.5), jnp.arange(4.0), jnp.arange(4.0) + 1
    found, taps = both(function, 1, x, rows, factors)
    for one, other in zip(found, function(x, rows, factors), strict=True):
        np.testing.assert_array_equal(one, other)
    assert [tap.shape for tap in taps] == [(4,), (4,)]  # of each turn, the chain before and after
    halves, _ = halves_of(function, 1, x, rows, factors)
    assert halves.needs == ({0, 1}, {2})
    (loop,) = halves.loops.values()
    assert (loop.carries, loop.given) == (([0], [1]), ([], [2]))


def test_outputs_that_are_inputs_or_shared_are_given_too() -> None:
    def function(x: Any) -> list[Any]:
        y = jnp.exp(x)
        return [y, y, x, jnp.float32(2.0)]

    found, _ = both(function, 1, jnp.float32(1.0))
    assert [float(value) for value in found] == pytest.approx([np.e, np.e, 1, 2])


class Parts:
    """A stage of a model on 2 × 2 devices, with its backward whole and in two parts."""

    def __init__(self, config: ModelConfig, compute: dict[str, Any], number: int, stages: int) -> None:
        model = build(config, Compute(tensor=2, dtype="float64", **compute))
        sizes = Sizes(pipeline=stages, data=2, tensor=2, microbatches=1, examples=1)
        kinds = (jax.sharding.AxisType.Auto,) * 2
        self.mesh = jax.make_mesh((2, 2), (DATA, TENSOR), axis_types=kinds, devices=jax.devices()[:4])
        options = Options(master="float64", compute="float64")
        shapes = StageShapes.of(model, cut(4, stages), number, sizes, options, [True] * (stages - 1))
        self.math = StageMath(model, shapes, 1, self.mesh.abstract_mesh, False, "float64", "float64")
        self.parts = TwoParts(self.math)
        random = np.random.default_rng(0)

        def filled(kind: Any) -> Any:
            if np.issubdtype(kind.dtype, np.floating):
                return random.normal(size=kind.shape).astype(kind.dtype)
            return random.integers(0, 7, kind.shape).astype(kind.dtype)

        self.params, self.values, self.batch, _ = jax.tree.map(filled, self.math.arguments())
        self.upstream = jax.tree.map(filled, self.math.upstream())
        self.sums = shapes.zeros("float64")
        with jax.set_mesh(self.mesh):
            self.kept = jax.jit(self.math.forward)(self.params, self.values, self.batch, jnp.int32(0))[1]
        self.early, self.late = ([self.kept[k] for k in which] for which in (self.parts.early, self.parts.late))

    def whole(self) -> tuple[Any, ...]:
        """B: how to compile it."""
        run = jax.jit(self.math.backward(again=False, weights=True, inputs=True))
        return run, (self.params, self.values, self.kept, {}, (), self.upstream, self.sums)

    def first(self) -> tuple[Any, ...]:
        """I."""
        return jax.jit(self.parts.first()), (self.params, self.values, self.early, self.late, self.upstream)

    def second(self, taps: Any) -> tuple[Any, ...]:
        """W."""
        return jax.jit(self.parts.second()), (self.params, self.values, self.late, self.upstream, taps, self.sums)


def size(arrays: list[Any]) -> int:
    return sum(array.nbytes for array in arrays)


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
            found, taps = run(*given)
            run, given = stage.second(taps)
            added = run(*given)
    for one, other in zip(jax.tree.leaves((found, added)), jax.tree.leaves((downstream, sums)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-14 * np.linalg.norm(other)


def test_no_part_repeats_the_other_and_little_is_kept_between_them() -> None:
    with jax.enable_x64(True):
        stage = Parts(GPT, {}, 1, 2)
        with jax.set_mesh(stage.mesh):

            def flops(run: Any, given: Any) -> float:
                found = run.lower(*given).compile().cost_analysis()["flops"]
                assert isinstance(found, float)
                return found

            whole, first = flops(*stage.whole()), flops(*stage.first())
            run, given = stage.first()
            _, taps = run(*given)
            second = flops(*stage.second(taps))
    assert first + second == pytest.approx(whole, rel=0.1)
    assert 0.3 * whole < second < 0.6 * whole
    assert size([*stage.late, *taps]) < 0.6 * size(stage.kept)


def test_the_first_stage_has_no_first_part() -> None:
    """Nobody waits for the gradient of tokens: W does it all."""
    with jax.enable_x64(True):
        parts = Parts(GPT, {}, 0, 2).parts
    assert (parts.early, parts.taps) == ([], [])
