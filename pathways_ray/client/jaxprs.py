"""Reading jaxprs: what is nested in them, what they captured, what of them is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend import core as jex_core


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation, closed or open."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield inner


def equations_of(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of nested jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations_of(getattr(inner, "jaxpr", inner))


def constant_bytes(closed: jex_core.ClosedJaxpr) -> int:
    """Bytes of the constants that a traced function captured, nested functions included; each counts once."""
    constants = list(closed.consts)
    for equation in equations_of(closed.jaxpr):
        for inner in inner_jaxprs(equation):
            constants += getattr(inner, "consts", ())
    return sum({id(constant): int(getattr(constant, "nbytes", 0)) for constant in constants}.values())


def inner_equations(equation: Any) -> Iterator[Any]:
    """All equations of the jaxprs among the parameters of an equation."""
    for inner in inner_jaxprs(equation):
        yield from equations_of(getattr(inner, "jaxpr", inner))


def used_equations(jaxpr: Any, wanted: Iterable[Any] | None = None) -> list[Any]:
    """The equations whose results are used, so that nothing is placed for the sake of those that are not. Left out,
    `wanted` are the outputs."""
    wanted = jaxpr.outvars if wanted is None else wanted
    needed = {atom for atom in wanted if isinstance(atom, jex_core.Var)}
    used = []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            used.append(equation)
            needed.update(atom for atom in equation.invars if isinstance(atom, jex_core.Var))
    return used[::-1]
