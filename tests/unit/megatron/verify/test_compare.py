"""The measure: relative, layer by layer, strict where something is zero or not finite; and the bounds."""

from __future__ import annotations

import copy
from typing import Any

import jax
import numpy as np
import pytest

from megatron_ptdp.models import build, initialise, whole
from megatron_ptdp.verify import compare, models
from megatron_ptdp.verify.compare import bits_apart, bound, gradients_apart, relative, tensors, trained_apart

GPT, T5 = models.CONFIGS["gpt"], models.CONFIGS["t5"]


def tree(name: str = "gpt") -> Any:
    return models.parameters(name, "float64")


def test_relative_is_the_frobenius_norm_of_the_difference_over_that_of_the_expected() -> None:
    assert relative([[3.0, 0.0], [0.0, 4.0]], [[0.0, 0.0], [0.0, 4.0]]) == pytest.approx(0.75)
    assert relative(2.0, 1.0) == 1.0
    assert relative([0.0], [0.0]) == 0.0


@pytest.mark.parametrize(
    "found, expected", [([1.0], [0.0]), ([np.nan], [1.0]), ([np.nan], [np.nan]), ([np.inf], [np.inf]), ([1.0], 1.0)]
)
def test_what_cannot_be_compared_is_infinitely_far(found: Any, expected: Any) -> None:
    assert relative(found, expected) == np.inf


def test_tensors_are_one_layers_and_know_how_deep_they_lie() -> None:
    layers = {tensor.name: tensor.layer for tensor in tensors(GPT, tree())}
    assert (layers["embedding/tokens"], layers["layers/0/ffn/in/weight"], layers["layers/3/ffn/in/weight"]) == (0, 1, 4)
    assert layers["final/scale"] == 5
    layers = {tensor.name: tensor.layer for tensor in tensors(T5, tree("t5"))}
    assert (layers["encoder/1/relative"], layers["decoder/0/relative"]) == (2, 3)
    assert (layers["encoder_final/scale"], layers["final/scale"]) == (2, 5)


def test_float32_may_be_further_off_the_longer_the_way_from_the_loss() -> None:
    eps = np.finfo(np.float32).eps
    assert bound("float32", GPT, 5) == pytest.approx(32 * eps)
    assert bound("float32", GPT, 0) == pytest.approx(32 * 1.03**5 * eps)
    assert {bound("float64", GPT, layer) for layer in range(6)} == {1e-12}


def test_one_wrong_number_in_one_layer_is_named() -> None:
    expected = tree()
    found = copy.deepcopy(expected)
    found["layers"]["ffn"]["in"]["bias"][2, 7] += 1e-9
    apart = gradients_apart(GPT, "float64", (1.0, found), (1.0, expected))
    assert not apart.passed
    assert apart.worst == "layers/2/ffn/in/bias"
    size = np.linalg.norm(expected["layers"]["ffn"]["in"]["bias"][2])
    assert apart.error == pytest.approx(1e-9 / size)
    assert gradients_apart(GPT, "float32", (1.0, found), (1.0, expected)).passed
    assert gradients_apart(GPT, "float64", (1.0, expected), (1.0, expected)).passed
    assert gradients_apart(GPT, "float64", (1.0 + 1e-11, expected), (1.0, expected)).worst == "loss"


def test_a_training_is_compared_in_losses_norms_and_parameters() -> None:
    expected = {"params": tree(), "losses": [2.0, 1.0], "norms": [0.5, 0.4]}
    assert trained_apart(GPT, expected, expected).tensors == len(list(tensors(GPT, tree()))) + 2
    apart = trained_apart(GPT, {**expected, "norms": [0.5, 0.4 + 1e-9]}, expected)
    assert (apart.worst, apart.passed) == ("norms", False)


def test_bits_differ_by_the_last_place_and_by_the_sign_of_zero() -> None:
    one = tree()
    other = jax.tree.map(np.copy, one)
    assert bits_apart(GPT, (1.0, one), (1.0, other)).passed
    weight = other["layers"]["ffn"]["in"]["weight"]
    weight[1, 0, 0] = np.nextafter(weight[1, 0, 0], 9.0)
    apart = bits_apart(GPT, (1.0, other), (1.0, one))
    assert (apart.worst, apart.passed) == ("layers/1/ffn/in/weight", False)
    assert not bits_apart(GPT, (0.0, one), (-0.0, one)).passed


def test_the_parameters_that_are_compared_have_no_zeros_and_do_not_depend_on_t() -> None:
    for name, config in models.CONFIGS.items():
        assert all((tensor.array != 0).all() for tensor in tensors(config, models.parameters(name, "float64")))
        model = build(config)
        plain = jax.tree.structure(initialise(model, whole(model), seed=3))
        assert jax.tree.structure(models.parameters(name, "float32")) == plain  # type: ignore[operator]
    assert compare.FLOAT64_BOUND == 1e-12
    weights = models.batch("gpt")["weights"]
    assert {0.0, 0.5, 1.0} == set(np.unique(weights))
