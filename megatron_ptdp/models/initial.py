"""Initial parameters: the same numbers however the model is split into stages, sharded or padded.

Every array, of each layer its own, has a generator whose key is made of the seed, the path and the layer's number in
the whole model. So a stage makes its own parameters and no others, and two stages that hold the same array make it
equal.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from megatron_ptdp.models.interface import Model, Parameter, Stage, Tree
from megatron_ptdp.models.split import pad


def initialise(model: Model, stage: Stage, seed: int, dtype: str = "float32") -> Tree:
    """A stage's parameters as whole NumPy arrays, drawn in float32 for every dtype."""
    stacks = model.stacks(stage)

    def fill(tree: Tree, path: tuple[str, ...]) -> Tree:
        if isinstance(tree, Parameter):
            first, last = stacks[path[0]] if tree.stacked else (0, 0)
            return pad(_filled(tree, "/".join(path), seed, range(first, last), dtype), tree)
        return {name: fill(part, (*path, name)) for name, part in tree.items()}

    return fill(model.parameters(stage), ())


def _filled(parameter: Parameter, path: str, seed: int, numbers: range, dtype: str) -> np.ndarray:
    """One array without its padding."""
    shape = list(parameter.shape)
    if parameter.padded:
        shape[parameter.padded[0]] = parameter.padded[1]
    if parameter.initial != "normal":
        return np.full(shape, 1 if parameter.initial == "ones" else 0, dtype)
    array = np.empty(shape, dtype)
    if not parameter.stacked:
        array[...] = _normal(f"{seed}/{path}", tuple(shape)) * np.float32(parameter.scale)
    for i, number in enumerate(numbers):
        array[i] = _normal(f"{seed}/{path}/{number}", tuple(shape[1:])) * np.float32(parameter.scale)
    return array


def _normal(name: str, shape: tuple[int, ...]) -> np.ndarray:
    key = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, dtype=np.float32)
