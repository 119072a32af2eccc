"""Evaluates an operation of a traced program with the compiled functions that it calls inlined.

The values are those of JAX, or its tracers: so a branch or a loop that calls compiled functions on one slice becomes
one function of JAX, which is exported like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core

from pathways_ray.client import prng
from pathways_ray.client.batched_loops import with_scalar_test
from pathways_ray.client.jaxprs import INLINED, body_of
from pathways_ray.client.tracer import call_p, capture_p, holds_calls, is_call

Held = Mapping[int, Any]
"""The values of captured arrays, by `id` of the array."""


def run(equation: Any, values: Sequence[Any], held: Held) -> list[Any]:
    """The results of one operation on `values`, one for each of its inputs."""
    if equation.primitive is call_p:
        exported = equation.params["site"].exported
        made = exported.run(*map(prng.to_data, values))
        return [prng.from_data(value, kind) for value, kind in zip(made, exported.results, strict=True)]
    if is_call(equation):  # pinned to the slice of the whole: what it says of layouts was outlined
        return _body(equation.params["jaxpr"], held)(*values)
    if equation.primitive is capture_p:
        return [held[id(equation.params["captured"].array)]]
    if not holds_calls(equation):
        made = equation.primitive.bind(*values, **equation.primitive.get_bind_params(equation.params))
        return list(made) if equation.primitive.multiple_results else [made]
    if equation.primitive.name in INLINED:
        return _body(body_of(equation), held)(*values)
    return _CONTROL[equation.primitive.name](equation, list(values), held)


def _body(closed: Any, held: Held) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function."""

    def evaluate(*arguments: Any) -> list[Any]:
        jaxpr = getattr(closed, "jaxpr", closed)
        constants = [held.get(id(constant), constant) for constant in getattr(closed, "consts", ())]
        known = dict(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex_core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            with jax.threefry_partitionable(equation.ctx.threefry_partitionable):
                made = run(equation, [read(atom) for atom in equation.invars], held)
            known.update(zip(equation.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    return evaluate


def _cond(equation: Any, values: list[Any], held: Held) -> list[Any]:
    branches = [_body(branch, held) for branch in equation.params["branches"]]
    return list(jax.lax.switch(values[0], branches, *values[1:]))


def _while(equation: Any, values: list[Any], held: Held) -> list[Any]:
    equation, values = with_scalar_test(equation, values)
    params = equation.params
    tests, rest = params["cond_nconsts"], params["body_nconsts"]
    test, body = _body(params["cond_jaxpr"], held), _body(params["body_jaxpr"], held)
    known, shared, first = values[:tests], values[tests : tests + rest], values[tests + rest :]
    return list(
        jax.lax.while_loop(
            lambda carry: test(*known, *carry)[0], lambda carry: tuple(body(*shared, *carry)), tuple(first)
        )
    )


def _scan(equation: Any, values: list[Any], held: Held) -> list[Any]:
    params = equation.params
    constants, carried = params["num_consts"], params["num_carry"]
    body = _body(params["jaxpr"], held)
    shared, first, rows = values[:constants], values[constants : constants + carried], values[constants + carried :]

    def step(carry: Any, row: Any) -> tuple[Any, Any]:
        made = body(*shared, *carry, *row)
        return tuple(made[:carried]), tuple(made[carried:])

    last, stacked = jax.lax.scan(step, tuple(first), tuple(rows), params["length"], params["reverse"], params["unroll"])
    return [*last, *stacked]


_CONTROL: Mapping[str, Callable[[Any, list[Any], Held], list[Any]]] = {"cond": _cond, "scan": _scan, "while": _while}
