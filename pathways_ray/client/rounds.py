"""Loops of a jaxpr in one form: a body from what it carries to what it carries, and a test or a number of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from pathways_ray.client import prng
from pathways_ray.client.batched_loops import unnamed
from pathways_ray.client.graph_builder import Value
from pathways_ray.client.jaxprs import used_equations


@dataclass
class Loop:
    """A loop whose body takes `constants` and `carry`, and whose test, if it has one, takes `known` and `carry`.

    `results` are, for each result of the operation, the number of the carried value that it is; None where nobody uses
    it. `numbers` are those of the carried values for the user, `line` is the user's function.
    """

    body: jex_core.ClosedJaxpr
    constants: list[Value]
    carry: list[Value]
    results: list[int | None]
    line: str
    numbers: Sequence[int]
    times: int = 0
    test: jex_core.ClosedJaxpr | None = None
    known: Sequence[Value] = ()


def while_of(equation: Any, inputs: list[Value]) -> Loop:
    """The loop of a `while`."""
    params = equation.params
    tests, shared = params["cond_nconsts"], params["body_nconsts"]
    body = params["body_jaxpr"]
    return _without_unused(
        Loop(
            body,
            inputs[tests : tests + shared],
            inputs[tests + shared :],
            _used(equation),
            _line(body),
            users_numbers(equation, len(equation.outvars)),
            test=params["cond_jaxpr"],
            known=inputs[:tests],
        )
    )


def unrolled(equation: Any, inputs: list[Value]) -> Loop:
    """The loop of a `scan`: it also carries the number of the round, which picks the row that is taken and the row that
    is made."""
    params = equation.params
    constants, carried, length = params["num_consts"], params["num_carry"], params["length"]
    closed, reverse = params["jaxpr"], params["reverse"]
    rows = len(inputs) - constants - carried
    stacked = equation.outvars[carried:]
    used, line = _used(equation), _line(closed)
    if not rows and not stacked:
        numbers = users_numbers(equation, carried)
        return _without_unused(Loop(closed, inputs[:constants], inputs[constants:], used, line, numbers, length))

    def step(*values: Any) -> list[Any]:
        shared, scanned = values[:constants], values[constants : constants + rows]
        number, *rest = values[constants + rows :]
        carry, made = rest[:carried], rest[carried:]
        at = length - 1 - number if reverse else number
        taken = [jax.lax.dynamic_index_in_dim(row, at, 0, keepdims=False) for row in scanned]
        found = jex_core.jaxpr_as_fun(closed)(*shared, *carry, *taken)
        kept = [jax.lax.dynamic_update_index_in_dim(m, y, at, 0) for m, y in zip(made, found[carried:], strict=True)]
        return [number + 1, *found[:carried], *kept]

    first = [Value(constant=np.zeros((), np.int32))]
    empty = [nothing_yet(v) for v in stacked]
    avals = [v.aval for v in equation.invars]
    kinds = [*avals[:constants], *avals[constants + carried :], _NUMBER, *avals[constants : constants + carried]]
    body = jax.make_jaxpr(step)(*kinds, *(v.aval for v in stacked))
    # Errors name the function of the user.
    body = body.replace(jaxpr=body.jaxpr.replace(debug_info=unnamed(closed.jaxpr.debug_info)))
    carry = [*first, *inputs[constants : constants + carried], *empty]
    results = [None if k is None else k + 1 for k in used]
    return _without_unused(
        Loop(
            body,
            [*inputs[:constants], *inputs[constants + carried :]],
            carry,
            results,
            line,
            range(-1, len(carry) - 1),
            length,
        )
    )


def users_numbers(equation: Any, count: int) -> Sequence[int]:
    """The numbers that carried values have for the user. JAX has a `fori_loop` carry its count before them, and where
    only devices know its bounds the upper one too."""
    params = equation.params
    body, before = (params["body_jaxpr"], 2) if "body_jaxpr" in params else (params["jaxpr"], 1)
    if body.jaxpr.debug_info.traced_for != "fori_loop":
        before = 0
    return range(-before, count - before)


def nothing_yet(variable: Any) -> Value:
    """The empty array that the first round of a scan writes into."""
    data = prng.data_type(variable.aval)
    return Value(constant=prng.from_data(np.zeros(data.shape, data.dtype), variable.aval))


_NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def _line(closed: Any) -> str:
    return str(closed.jaxpr.debug_info.func_src_info)


def _used(equation: Any) -> list[int | None]:
    """The numbers of the results that somebody uses."""
    return [None if isinstance(variable, jex_core.DropVar) else k for k, variable in enumerate(equation.outvars)]


def _without_unused(loop: Loop) -> Loop:
    """The loop without what it carries for itself alone, such as the count of a `fori_loop` whose body does not look at
    it: each would be a computation in every round."""
    shared, known = len(loop.constants), len(loop.known)
    needed = {k for k in loop.results if k is not None}
    if loop.test is not None:
        needed |= {k - known for k in _taken(loop.test.jaxpr, loop.test.jaxpr.outvars) if k >= known}
    while True:
        outputs = [loop.body.jaxpr.outvars[k] for k in sorted(needed)]
        grown = needed | {k - shared for k in _taken(loop.body.jaxpr, outputs) if k >= shared}
        if grown == needed:
            break
        needed = grown
    if len(needed) == len(loop.carry):
        return loop
    kept = sorted(needed)
    body = _reduced(loop.body, [*range(shared), *(shared + k for k in kept)], kept)
    test = None
    if loop.test is not None:
        test = _reduced(loop.test, [*range(known), *(known + k for k in kept)], [0])
    results = [None if k is None else kept.index(k) for k in loop.results]
    carry, numbers = [loop.carry[k] for k in kept], [loop.numbers[k] for k in kept]
    return Loop(body, loop.constants, carry, results, loop.line, numbers, loop.times, test, loop.known)


def _taken(jaxpr: Any, outputs: Sequence[Any]) -> set[int]:
    """The numbers of the inputs that these outputs depend on."""
    _, variables = used_equations(jaxpr, outputs)
    return {k for k, variable in enumerate(jaxpr.invars) if variable in variables}


def _reduced(closed: Any, inputs: Sequence[int], outputs: Sequence[int]) -> jex_core.ClosedJaxpr:
    """A closed jaxpr with some of its inputs and outputs."""
    jaxpr = closed.jaxpr
    return jex_core.ClosedJaxpr(
        jex_core.Jaxpr(
            jaxpr.constvars,
            [jaxpr.invars[k] for k in inputs],
            [jaxpr.outvars[k] for k in outputs],
            jaxpr.eqns,
            jaxpr.effects,
            unnamed(jaxpr.debug_info),
        ),
        closed.consts,
    )
