"""Types that the functions of a computation take and give, held against what the program says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pathways_ray.errors import ProgramRefused
from pathways_ray.executor.compile.composition import Calls
from pathways_ray.ir.graph import Loop, Part, Ref, functions_in
from pathways_ray.ir.plan import Executable
from pathways_ray.ir.types import ArrayType


def check_types(executable: Executable, devices: int, calls: Calls) -> None:
    """Raises `ProgramRefused` unless the functions take and give what the graph says, on as many devices: clients are
    charged for that, and other hosts rely on it."""
    recipe = executable.recipe
    made = _types_made(recipe.parts, executable.inputs, devices, calls)
    for ref, said in zip(recipe.outputs, executable.outputs, strict=True):
        results = made[ref.node]
        if ref.output >= len(results) or results[ref.output] != said:
            name = next(functions_in(recipe.parts[ref.node :])).name
            raise ProgramRefused(f"{name} gives {_listed(results)}; the program says output {ref.output} is {said}")


def _types_made(
    parts: Sequence[Part | Loop], inputs: Sequence[ArrayType], devices: int, calls: Calls
) -> list[list[ArrayType]]:
    """The types that each part makes from `inputs`."""
    made: list[list[ArrayType]] = []

    def type_at(ref: Ref) -> ArrayType:
        if ref.node == -1:
            return inputs[ref.output]
        if ref.output >= len(made[ref.node]):
            name = next(functions_in(parts[ref.node :])).name
            raise ProgramRefused(f"{name} gives {_listed(made[ref.node])}; the program uses output {ref.output} of it")
        return made[ref.node][ref.output]

    for part in parts:
        given = [type_at(ref) for ref in part.inputs]
        if isinstance(part, Loop):
            made.append(_types_of_loop(part, given, devices, calls))
            continue
        exported = calls[part.function]
        taken, results = ([_type_of(a) for a in avals] for avals in (exported.in_avals, exported.out_avals))
        if given != taken:
            raise ProgramRefused(f"{part.name} takes {_listed(taken)}, but the program gives it {_listed(given)}")
        if exported.nr_devices not in (1, devices):
            raise ProgramRefused(f"{part.name} was exported for {exported.nr_devices} devices; its slice has {devices}")
        made.append(results)
    return made


def _types_of_loop(loop: Loop, given: Sequence[ArrayType], devices: int, calls: Calls) -> list[ArrayType]:
    body = _types_made(loop.body, given, devices, calls)
    for place, value in loop.carried:
        results = body[value.node]
        if value.output >= len(results) or results[value.output] != given[place]:
            name = next(functions_in(loop.body[value.node :])).name
            raise ProgramRefused(f"{name} gives {_listed(results)}; the next round of its loop takes {given[place]}")
    if any(ref.output >= len(body[ref.node]) for ref in loop.outputs):
        raise ProgramRefused("a loop of the program gives a value that its body does not make")
    return [body[ref.node][ref.output] for ref in loop.outputs]


def _type_of(aval: Any) -> ArrayType:
    return ArrayType(tuple(aval.shape), np.dtype(aval.dtype).name)


def _listed(types: Sequence[ArrayType]) -> str:
    shown = ", ".join(map(str, types[:8]))
    return f"({shown}{', …' if len(types) > 8 else ''})"
