"""Loops that `jax.vmap` has given a test for each element: their `while` as JAX lowers it, with a scalar for a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core

from pathways_ray.client.argument_types import keeping_width


def with_scalar_test(equation: Any, values: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A `while` and its inputs; where its test has a shape, one that goes on while any of that is true. An element
    whose own test is false keeps what it has."""
    params = equation.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    if not test.out_avals[0].shape:
        return equation, list(values)
    known, shared = params["cond_nconsts"], params["body_nconsts"]

    def goes_on(functions: Sequence[Callable[..., Any]], *given: Any) -> list[Any]:
        (wanted,) = functions[0](*given)
        return [wanted.any()]

    def step(functions: Sequence[Callable[..., Any]], *given: Any) -> list[Any]:
        carry = given[known + shared :]
        (wanted,) = functions[0](*given[:known], *carry)
        made = functions[1](*given[known:])
        return [kept(new, old, wanted) for new, old in zip(made, carry, strict=True)]

    changed = {
        **params,
        "cond_jaxpr": _made_of(goes_on, [test], test.in_avals),
        "body_jaxpr": _made_of(step, [test, body], [*test.in_avals[:known], *body.in_avals]),
        "body_nconsts": known + shared,
    }
    invars = [*equation.invars[:known], *equation.invars]
    return equation.replace(invars=invars, params=changed), [*values[:known], *values]


@jax.jit
def kept(new: Any, old: Any, wanted: Any) -> Any:
    """The value of each element behind a round, as one operation: it goes to the slice of what is new."""
    return jax.lax.select(jax.lax.broadcast_in_dim(wanted, new.shape, range(wanted.ndim)), new, old)


def _made_of(run: Callable[..., list[Any]], parts: Sequence[Any], kinds: Sequence[Any]) -> jex_core.ClosedJaxpr:
    """The jaxpr of a function of other jaxprs, under the name of the last. It holds their constants as they are."""
    held = [variable.aval for part in parts for variable in part.jaxpr.constvars]

    def flat(*given: Any) -> list[Any]:
        rest = iter(given)
        closed = [jex_core.ClosedJaxpr(part.jaxpr, [next(rest) for _ in part.consts]) for part in parts]
        return run([jex_core.jaxpr_as_fun(one) for one in closed], *rest)

    with keeping_width((*held, *kinds)):  # it may be traced again outside of `jax.enable_x64`
        made = jax.make_jaxpr(flat)(*held, *kinds)
    jaxpr, count = made.jaxpr, len(held)
    return jex_core.ClosedJaxpr(
        jex_core.Jaxpr(
            [*jaxpr.constvars, *jaxpr.invars[:count]],
            jaxpr.invars[count:],
            jaxpr.outvars,
            jaxpr.eqns,
            jaxpr.effects,
            unnamed(parts[-1].jaxpr.debug_info),
        ),
        [*made.consts, *(constant for part in parts for constant in part.consts)],
    )


def unnamed(debug_info: Any) -> Any:
    """All that JAX knows of a function, without names for its arguments and results."""
    if hasattr(debug_info, "replace"):
        return debug_info.replace(arg_names=None, result_paths=None)
    return debug_info._replace(arg_names=None, result_paths=None)
