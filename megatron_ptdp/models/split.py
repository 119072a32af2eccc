"""Trees of the whole model split into those of stages, and joined again: parameters, and any tree with their paths.

The whole tree is the form in which a model is kept: stacks with all their layers, no padding, a tied embedding once.
It does not depend on the stages or the sharding, so a checkpoint in this form loads under any other sizes. All arrays
here are whole NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_ptdp.errors import CheckpointError, ConfigError
from megatron_ptdp.models.interface import Model, Parameter, Stage, Tree


def whole(model: Model) -> Stage:
    """The stage that is all of the model."""
    return Stage(0, model.layers, has_embedding=True, has_loss=True)


def cut(model: Model, counts: Sequence[int]) -> list[Stage]:
    """Stages with `counts` layers each.

    Raises:
        ConfigError: they do not add up to the model's layers, or one is negative.
    """
    if not counts or min(counts) < 0 or sum(counts) != model.layers:
        raise ConfigError(f"stages of {list(counts)} layers do not add up to a model of {model.layers} layers")
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    final = len(counts) - 1
    return [Stage(end - n, end, i == 0, i == final) for i, (n, end) in enumerate(zip(counts, ends, strict=True))]


def pad(array: np.ndarray, parameter: Parameter) -> np.ndarray:
    """The array with zeros appended, so that it divides among members."""
    if parameter.padded is None:
        return array
    dimension, size = parameter.padded
    widths = [(0, 0)] * array.ndim
    widths[dimension] = (0, parameter.shape[dimension] - size)
    return np.pad(array, widths)


def unpad(array: np.ndarray, parameter: Parameter) -> np.ndarray:
    """The array without the zeros of `pad`."""
    if parameter.padded is None:
        return array
    dimension, size = parameter.padded
    return array[(slice(None),) * dimension + (slice(0, size),)]


def take(model: Model, stage: Stage, tree: Tree) -> Tree:
    """A stage's tree from the whole tree.

    Raises:
        CheckpointError: the tree is not one of this model: an array is missing or has another shape.
    """
    stacks, all_stacks = model.stacks(stage), model.stacks(whole(model))

    def visit(parameters: Tree, part: Any, path: tuple[str, ...]) -> Tree:
        if not isinstance(parameters, Parameter):
            return {name: visit(below, _below(part, path, name), (*path, name)) for name, below in parameters.items()}
        expected = list(parameters.shape)
        if parameters.padded:
            expected[parameters.padded[0]] = parameters.padded[1]
        if parameters.stacked:
            expected[0] = all_stacks[path[0]][1]
        array = np.asarray(part)
        if array.shape != tuple(expected):
            raise CheckpointError(f"{'/'.join(path)} has the shape {array.shape}, this model's is {tuple(expected)}")
        return pad(array[slice(*stacks[path[0]])] if parameters.stacked else array, parameters)

    return visit(model.parameters(stage), tree, ())


def join(model: Model, stages: Sequence[Stage], parts: Sequence[Tree]) -> Tree:
    """The whole tree from those of all stages, in any order. Tied arrays must be equal.

    Raises:
        ConfigError: the stages are not the whole model.
    """
    order = sorted(
        range(len(stages)),
        key=lambda i: (stages[i].first, stages[i].last, not stages[i].has_embedding, stages[i].has_loss),
    )
    rows = [stages[i] for i in order]
    counts = [stage.last - stage.first for stage in rows]
    if len(parts) != len(rows) or sum(counts) != model.layers or rows != cut(model, counts):
        raise ConfigError(f"{len(parts)} trees of the stages {rows} are not a whole model of {model.layers} layers")
    declared = [model.parameters(stage) for stage in rows]

    def visit(parameters: Tree, path: tuple[str, ...]) -> Tree:
        if not isinstance(parameters, Parameter):
            return {name: visit(below, (*path, name)) for name, below in parameters.items()}
        found = [
            unpad(np.asarray(_at(parts[i], path)), _at(tree, path))
            for i, tree in zip(order, declared, strict=True)
            if _at(tree, path) is not None
        ]
        return np.concatenate(found) if parameters.stacked else found[0]

    return visit(model.parameters(whole(model)), ())


def _below(tree: Any, path: tuple[str, ...], name: str) -> Any:
    if not isinstance(tree, dict) or name not in tree:
        raise CheckpointError(f"{'/'.join((*path, name))} is missing: this is no tree of this model")
    return tree[name]


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    """The value of a nested dict at a path, or None."""
    for name in path:
        if not isinstance(tree, dict) or name not in tree:
            return None
        tree = tree[name]
    return tree
