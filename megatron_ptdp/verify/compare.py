"""Differences of two trees of arrays, tensor by tensor, and their bounds.

The measure is the relative Frobenius error ‖a − b‖ / ‖b‖ of each tensor, where a tensor is what one layer has of one
parameter: in an array of all layers one wrong layer would be diluted.

In float64 the bound is 1e-12. In float32 it is k · C^(L + 1 − l) · eps for a tensor of layer l of L (TTrace, arXiv
2506.09280, theorem 5.3: what rounding does to a gradient grows with the way back from the loss), with C = 1.03 as
there; embedding and positions are layer 0, what comes after the last layer is layer L + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from megatron_ptdp.models import ModelConfig
from megatron_ptdp.models.interface import Tree

DType: TypeAlias = Literal["float64", "float32"]

FLOAT64_BOUND = 1e-12

GROWTH = 1.03  # TTrace's C

FACTOR = 32.0
"""k in float32. TTrace takes 4 for two runs of the same precision in large models; here the other side is float64, and
sums of few terms do not average their rounding out."""

TRAINED_BOUND = 1e-11
"""Bound for parameters after optimizer steps, in float64: Adam divides by roots of small numbers."""


class Tensor(NamedTuple):
    """One compared tensor: its path, with the number of the layer in its stack, and the layer in the whole model."""

    name: str
    layer: int
    array: np.ndarray


def tensors(config: ModelConfig, tree: Tree) -> Iterator[Tensor]:
    """The tensors of a whole tree."""
    first = {"layers": 1, "encoder": 1, "decoder": config.encoder_layers + 1}
    last = config.encoder_layers + config.layers + 1
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [str(entry.key) for entry in path]
        array = np.asarray(leaf)
        if names[0] in first:
            for number, part in enumerate(array):
                yield Tensor("/".join([names[0], str(number), *names[1:]]), first[names[0]] + number, part)
        else:
            layer = {"embedding": 0, "encoder_final": config.encoder_layers}.get(names[0], last)
            yield Tensor("/".join(names), layer, array)


def relative(found: Any, expected: Any) -> float:
    """‖found − expected‖ / ‖expected‖; infinite where something is not finite, or where only `expected` is zero."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape or not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return float("inf")
    apart, size = float(np.linalg.norm(found - expected)), float(np.linalg.norm(expected))
    if apart == 0:
        return 0.0
    return apart / size if size else float("inf")


def bound(dtype: DType, config: ModelConfig, layer: int) -> float:
    """The largest relative error of a gradient of a layer."""
    if dtype == "float64":
        return FLOAT64_BOUND
    depth = config.encoder_layers + config.layers + 1
    return FACTOR * GROWTH ** (depth - layer) * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Difference:
    """The worst tensor of a comparison.

    Attributes:
        worst: the name of the tensor with the largest ratio of error to bound
        error: its relative error
        bound: the largest error that passes
        tensors: the number of compared tensors
    """

    worst: str
    error: float
    bound: float
    tensors: int

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


def difference(pairs: Mapping[str, tuple[Any, Any, float]]) -> Difference:
    """The worst difference of (found, expected, bound) by name."""
    errors = {name: (relative(found, expected), limit) for name, (found, expected, limit) in pairs.items()}
    worst = max(errors, key=lambda name: errors[name][0] / errors[name][1])
    return Difference(worst, *errors[worst], len(errors))


def gradients_apart(
    config: ModelConfig, dtype: DType, found: tuple[float, Tree], expected: tuple[float, Tree]
) -> Difference:
    """The difference between two (loss, whole gradients)."""
    pairs: dict[str, tuple[Any, Any, float]] = {"loss": (found[0], expected[0], bound(dtype, config, 0))}
    pairs |= {
        here.name: (here.array, there.array, bound(dtype, config, here.layer))
        for here, there in zip(tensors(config, found[1]), tensors(config, expected[1]), strict=True)
    }
    return difference(pairs)


def trained_apart(config: ModelConfig, found: Mapping[str, Any], expected: Mapping[str, Any]) -> Difference:
    """The difference between two trainings: {"params": whole tree, "losses": [steps], "norms": [steps]}."""
    pairs = {name: (found[name], expected[name], TRAINED_BOUND) for name in ("losses", "norms")}
    pairs |= {
        here.name: (here.array, there.array, TRAINED_BOUND)
        for here, there in zip(tensors(config, found["params"]), tensors(config, expected["params"]), strict=True)
    }
    return difference(pairs)


def bits_apart(config: ModelConfig, found: tuple[float, Tree], expected: tuple[float, Tree]) -> Difference:
    """The difference between two (loss, whole gradients) that must have the same bits."""
    pairs: dict[str, tuple[Any, Any]] = {"loss": (found[0], expected[0])}
    pairs |= {
        here.name: (here.array, there.array)
        for here, there in zip(tensors(config, found[1]), tensors(config, expected[1]), strict=True)
    }
    differ = {
        name: relative(a, b) for name, (a, b) in pairs.items() if np.asarray(a).tobytes() != np.asarray(b).tobytes()
    }
    if not differ:
        return Difference("", 0.0, 0.0, len(pairs))
    worst = max(differ, key=lambda name: differ[name])
    return Difference(worst, max(differ[worst], float(np.finfo(np.float64).tiny)), 0.0, len(pairs))
