"""Reading jaxprs: what is nested in them, what they captured, what of them is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend import core as jex_core

INLINED = ("pjit", "jit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")
"""Operations that stand for the body that they hold."""

CONTROL = ("cond", "while", "scan")
"""Operations that choose or repeat bodies: `control` of a `GraphBuilder` takes those whose bodies name slices."""


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation, closed or open."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield inner


def body_of(equation: Any) -> Any:
    """The jaxpr, closed or open, that an operation which does what a jaxpr says has among its parameters."""
    return equation.params["jaxpr"] if "jaxpr" in equation.params else equation.params["call_jaxpr"]


def is_transposed(equation: Any) -> bool:
    """Whether JAX made an operation for the backward of a derivative, so that nobody wrote its bodies."""
    return "transpose(" in str(equation.source_info.name_stack)


def equations_of(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of nested jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations_of(getattr(inner, "jaxpr", inner))


def constant_bytes(closed: jex_core.ClosedJaxpr) -> int:
    """Bytes of the constants that a traced function captured, nested functions included; each counts once."""
    return sum({id(constant): int(getattr(constant, "nbytes", 0)) for constant in constants_of(closed)}.values())


def constants_of(closed: Any) -> Iterator[Any]:
    """The constants of a jaxpr and of those in it."""
    yield from closed.consts
    for equation in closed.jaxpr.eqns:
        yield from inner_constants(equation)


def inner_equations(equation: Any) -> Iterator[Any]:
    """All equations of the jaxprs among the parameters of an equation."""
    for inner in inner_jaxprs(equation):
        yield from equations_of(getattr(inner, "jaxpr", inner))


def inner_constants(equation: Any) -> Iterator[Any]:
    """The constants of the jaxprs in an equation, however deep."""
    for inner in inner_jaxprs(equation):
        yield from getattr(inner, "consts", ())
        for nested in getattr(inner, "jaxpr", inner).eqns:
            yield from inner_constants(nested)


def without_unused(equation: Any, used: set[Any]) -> Any:
    """An equation whose results that nobody uses are marked as such; `used` are the variables of its jaxpr that are."""
    return equation.replace(outvars=[v if v in used else jex_core.DropVar(v.aval) for v in equation.outvars])


def used_equations(jaxpr: Any, wanted: Iterable[Any] | None = None) -> tuple[list[Any], set[Any]]:
    """The equations whose results are used or that have effects (debug calls), so that nothing is placed for the sake
    of others, and the variables that are used. Left out, `wanted` are the outputs."""
    wanted = jaxpr.outvars if wanted is None else wanted
    needed = {atom for atom in wanted if isinstance(atom, jex_core.Var)}
    used = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            used.append(equation)
            needed.update(atom for atom in equation.invars if isinstance(atom, jex_core.Var))
    return used[::-1], needed
