"""The meaning of a recipe, without a device: parts one behind the other, loops round by round.

Simulations and tests run recipes by it on values of their own; the compiler (`executor/compile/compiler.py`) has to
agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pathways_ray.ir.graph import Loop, Part, Recipe, Ref

V = TypeVar("V")

Outputs = Callable[[int], V]
"""The outputs of a part by number."""


def evaluate(recipe: Recipe, inputs: Sequence[V], call: Callable[[Part, list[V]], Outputs[V]]) -> list[V]:
    """The outputs of a recipe.

    Args:
        call: runs one exported function on its arguments.
    """
    return _values(recipe.parts, inputs, call, recipe.outputs)


def _values(
    parts: Sequence[Part | Loop],
    inputs: Sequence[V],
    call: Callable[[Part, list[V]], Outputs[V]],
    wanted: Sequence[Ref],
) -> list[V]:
    made: list[Outputs[V]] = []

    def value(ref: Ref) -> V:
        return inputs[ref.output] if ref.node == -1 else made[ref.node](ref.output)

    for part in parts:
        taken = [value(ref) for ref in part.inputs]
        made.append(_rounds(part, taken, call).__getitem__ if isinstance(part, Loop) else call(part, taken))
    return [value(ref) for ref in wanted]


def _rounds(loop: Loop, inputs: list[V], call: Callable[[Part, list[V]], Outputs[V]]) -> list[V]:
    fed = [value for _, value in loop.carried]
    for _ in range(loop.times):
        found = _values(loop.body, inputs, call, [*fed, *loop.outputs])
        inputs = list(inputs)
        for (place, _), value in zip(loop.carried, found, strict=False):
            inputs[place] = value
    return found[len(fed) :]
