"""Parameters: what they are at first, how they are cut into stages and shared, and put together again."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ptdp.errors import CheckpointError, ConfigError
from megatron_ptdp.models import Compute, Stage, build, cut, initialise, join, take, whole
from megatron_ptdp.models.interface import Tree
from tests.drawn import drawn
from tests.unit.megatron.models.members import CONFIGS, leaves

NAMES = sorted(CONFIGS)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, int, list[int]]:
    """A model, its tensor parallel size, and layers of each stage."""
    name = draw(st.sampled_from(NAMES))
    layers = build(CONFIGS[name]).layers
    marks = sorted(draw(st.lists(st.integers(0, layers), max_size=4)))
    counts = [b - a for a, b in zip([0, *marks], [*marks, layers], strict=True)]
    return name, draw(st.sampled_from([1, 2, 4])), counts


def equal(one: Tree, other: Tree) -> bool:
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all()), one, other)
    return all(jax.tree.leaves(same))


@settings(max_examples=drawn(60))
@given(cuts(), st.integers(0, 2**64))
def test_first_values_do_not_depend_on_how_the_model_is_cut(chosen: tuple[str, int, list[int]], seed: int) -> None:
    """Each stage makes its own; joined, they are those of one device. Taking stages from the whole gives them back."""
    name, tensor, counts = chosen
    alone = build(CONFIGS[name])
    expected = initialise(alone, whole(alone), seed)
    model = build(CONFIGS[name], Compute(tensor=tensor))
    stages = cut(model, counts)
    parts = [initialise(model, stage, seed) for stage in stages]
    assert equal(join(model, stages, parts), expected)
    assert all(equal(take(model, stage, expected), part) for stage, part in zip(stages, parts, strict=True))


@settings(max_examples=drawn(60))
@given(cuts(), cuts())
def test_what_is_kept_of_one_cut_loads_under_any_other(
    one: tuple[str, int, list[int]], other: tuple[str, int, list[int]]
) -> None:
    """Of any dtype and value: moments of an optimizer too. Stages are joined in any order."""
    name, tensor, counts = one
    before = build(CONFIGS[name], Compute(tensor=tensor))
    stages = cut(before, counts)
    alone = build(CONFIGS[name])
    shapes = initialise(alone, whole(alone), 0)
    tree = jax.tree.map(lambda x: np.arange(x.size, dtype=np.int32).reshape(x.shape), shapes)
    kept = join(before, stages[::-1], [take(before, stage, tree) for stage in stages[::-1]])
    after = build(CONFIGS[name], Compute(tensor=other[1]))
    again = cut(after, [1] * after.layers)
    assert equal(join(after, again, [take(after, stage, kept) for stage in again]), tree)


def test_values_differ_between_arrays_layers_and_seeds() -> None:
    model = build(CONFIGS["gpt"])
    one, other = initialise(model, whole(model), 1), initialise(model, whole(model), 2)
    weights = one["layers"]["attention"]["query"]["weight"]
    assert not np.allclose(weights[0], weights[1])
    assert not np.allclose(weights, other["layers"]["attention"]["query"]["weight"])
    assert not np.allclose(
        one["layers"]["ffn"]["in"]["weight"][..., :16], one["layers"]["ffn"]["in"]["weight"][..., 8:]
    )


def test_first_values_have_the_declared_spread() -> None:
    """Where a block ends, that of GPT-2: 0.02 / sqrt(2 layers)."""
    model = build(replace(CONFIGS["gpt"], hidden=128, ffn=512, head_size=32))
    tree = initialise(model, whole(model), 0)["layers"]
    assert tree["ffn"]["in"]["weight"].std() == pytest.approx(0.02, rel=0.02)
    assert tree["ffn"]["out"]["weight"].std() == pytest.approx(0.02 / 8**0.5, rel=0.02)
    assert tree["attention"]["out"]["weight"].std() == pytest.approx(0.02 / 8**0.5, rel=0.02)
    assert (tree["ffn_norm"]["scale"] == 1).all()
    assert not tree["ffn"]["in"]["bias"].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tensor", [1, 4])
def test_members_can_share_every_array_evenly(name: str, tensor: int) -> None:
    model = build(CONFIGS[name], Compute(tensor=tensor))
    for parameter in leaves(model.parameters(whole(model))):
        assert len(parameter.spec) == len(parameter.shape)
        for size, axis in zip(parameter.shape, parameter.spec, strict=True):
            assert axis is None or size % tensor == 0


def test_only_a_cut_embedding_is_tied() -> None:
    """On the first stage and the last, once in what is kept; the same array on both."""
    model = build(CONFIGS["t5"], Compute(tensor=2))
    stages = cut(model, [1, 2, 1])
    tied = [[p.tied for p in leaves(model.parameters(stage).get("embedding", {}))] for stage in stages]
    assert tied == [[True], [], [True]]
    assert not any(p.tied for p in leaves(model.parameters(whole(model))))
    first, last = (initialise(model, stage, 0)["embedding"]["tokens"] for stage in (stages[0], stages[-1]))
    assert (first == last).all()


def test_stages_that_are_no_cut_are_refused() -> None:
    model = build(CONFIGS["gpt"])
    with pytest.raises(ConfigError, match=r"stages of \[1, 2\] layers do not add up to a model of 4 layers"):
        cut(model, [1, 2])
    with pytest.raises(ConfigError, match="no stage of a model of 4 layers"):
        model.parameters(Stage(1, 3, has_embedding=True, has_loss=False))
    stages = cut(model, [2, 2])
    parts = [initialise(model, stage, 0) for stage in stages]
    with pytest.raises(ConfigError, match="not a whole model of 4 layers"):
        join(model, stages[:1], parts[:1])


def test_a_tree_of_another_model_is_refused() -> None:
    model, other = build(CONFIGS["gpt"]), build(replace(CONFIGS["gpt"], hidden=32, head_size=8))
    tree = initialise(other, whole(other), 0)
    with pytest.raises(CheckpointError, match=r"layers/\w+/scale has the shape \(4, 32\), this model's is \(4, 16\)"):
        take(model, whole(model), tree)
    del tree["final"]
    with pytest.raises(CheckpointError, match="final is missing"):
        take(other, whole(other), tree)
