"""Derivatives of calls of compiled functions: `jax.grad`, `jax.vjp`, `jax.jvp`, `jax.vmap` and `jax.checkpoint` of
functions that call them.

A call is differentiated as JAX does a call of a `jax.jit`-ed function: what it makes of it, forward and backward, is
again such a call, with the name of the first one, which knows its slice (`operation.PinnedName`). So forward and
backward become nodes on the slice of the call. Residuals lie there, and stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from pathways_ray import jax_hooks
from pathways_ray.client import prng
from pathways_ray.client.operation import PinnedName
from pathways_ray.client.tracer import CallSite, call_p, capture_p
from pathways_ray.errors import UsageError
from pathways_ray.jax_types import partition_spec


def jitted(site: CallSite) -> Any:
    """A call of a compiled function as a jitted function."""
    exported, mesh = site.exported, site.slice.mesh

    def run(*values: Any) -> list[Any]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            made = exported.run(*map(prng.to_data, values))
        return [prng.from_data(value, kind) for value, kind in zip(made, exported.results, strict=True)]

    run.__name__ = PinnedName(exported.name, site.slice)

    def shardings(specs: Any) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, partition_spec(spec)) for spec in specs)

    made = exported.output_specs[: len(exported.results)]
    return jax.jit(run, in_shardings=shardings(exported.input_specs), out_shardings=list(shardings(made)))


def parameters(*, site: CallSite) -> dict[str, Any]:
    """The parameters of that call."""
    (equation,) = jax.make_jaxpr(jitted(site))(*site.exported.arguments).eqns
    return dict(equation.params)


@call_p.def_impl
def _evaluate(*values: Any, site: CallSite) -> list[Any]:
    return jitted(site)(*values)


@capture_p.def_impl
def _captured(*, captured: Any) -> Any:
    return captured.array


jax_hooks.transform_like_jit(call_p, parameters)


def differentiable(
    fun: Callable[..., Any], *, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """A function with a derivative of one's own, for `jax.grad` and `jax.vjp`, as `jax.custom_vjp` has it.

        layer = pw.differentiable(apply, forward=apply_and_keep, backward=pull_back)

    Args:
        fun: what is computed where no derivative is asked for. All three may be `pw.compiled` functions, on any slices,
            or call some.
        forward: takes the arguments of `fun`; returns its result and the residuals, which stay where they are made.
        backward: takes the residuals and the cotangent of the result; returns a tuple of one cotangent for each
            argument.

    Raises:
        UsageError: one of them is no function.
    """
    for name, value in (("fun", fun), ("forward", forward), ("backward", backward)):
        if not callable(value):
            raise UsageError(f"pw.differentiable takes functions; {name}= is {value!r}")
    found = jax.custom_vjp(lambda *arguments: fun(*arguments))
    found.defvjp(lambda *arguments: forward(*arguments), lambda *arguments: backward(*arguments))
    return found
