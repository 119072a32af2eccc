"""The meaning of a recipe, without a device: parts one behind the other, loops round by round; and that of a branch or
a loop of a graph.

Simulations and tests run recipes by it on values of their own; the compiler (`executor/compile/compiler.py`) has to
agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pathways_ray.ir.graph import Branch, Control, Graph, Loop, Part, Recipe, Ref, Repeat
from pathways_ray.ir.verify_control import within

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


def evaluate_control(
    graph: Graph,
    node: Control,
    inputs: Sequence[V],
    run: Callable[[Graph, Sequence[V]], list[V]],
    value: Callable[[V], int],
) -> list[V]:
    """The outputs of a branch or a loop of `graph`.

    Args:
        inputs: what it consumes, in the order of `inputs_of`.
        run: runs a body, as a graph of its own.
        value: the whole number, or truth value, that a value is.
    """
    match node:
        case Branch():
            chosen = min(max(value(inputs[0]), 0), len(node.bodies) - 1)
            return run(within(graph, node.bodies[chosen]), inputs[1:])
        case Repeat():
            carried, shared = list(inputs[: len(node.outputs)]), list(inputs[len(node.outputs) :])
            left = node.times
            while value(run(within(graph, node.test), [*carried, *shared])[0]) if node.test is not None else left:
                carried = run(within(graph, node.body), [*carried, *shared])
                left -= 1
            return carried
