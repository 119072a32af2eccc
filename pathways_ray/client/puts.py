"""Slices that traced functions name by JAX's words: `device_put`, `reshard`, `with_sharding_constraint`, `shard_map`.

On its own in a program, each of the first three moves its values, as `pw.reshard` does. A computation runs on one
slice: inside of one, none takes a value to another slice. So nested functions, branches and loops in which a
`device_put` or `reshard` does so are no computations, but parts of the program. What is mapped over the mesh of a slice
runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from pathways_ray.client.argument_types import check_width
from pathways_ray.client.jaxprs import CONTROL, INLINED, equations_of, inner_equations
from pathways_ray.client.slices import VirtualSlice, slice_of
from pathways_ray.client.specs import spec_from_user, warn_of_memory
from pathways_ray.errors import UsageError
from pathways_ray.ir.types import check_layout

_WORDS = {
    "device_put": "jax.device_put",
    "reshard": "jax.sharding.reshard",
    "sharding_constraint": "jax.lax.with_sharding_constraint",
    "shard_map": "jax.shard_map",
}
"""The primitives, and how users write them."""


def moved(builder: Any, equation: Any, read: Callable[[Any], Any]) -> list[Any] | None:
    """The values that a `GraphBuilder` makes of an equation that puts what it takes on slices; None of other ones.

    A constraint to the slice where its value lies is an operation like others: it may become part of one.
    """
    slices = targets(equation)
    if not slices:
        return None
    values, made = [read(atom) for atom in equation.invars], []
    if equation.primitive.name == "sharding_constraint":
        lying = builder.layout_of(values[0])
        if lying is not None and lying[0] is slices[0]:
            return None
    given = zip(values, equation.invars, slices, _shardings(equation), strict=True)
    for number, (value, atom, where, sharding) in enumerate(given):
        kind = builder.type_of(value)
        check_width(_WORDS[equation.primitive.name], number, kind, atom.aval)
        # JAX leaves open how a dimension lies that it added for jax.vmap.
        asked = PartitionSpec(*(None if one is PartitionSpec.UNCONSTRAINED else one for one in sharding.spec))
        warn_of_memory(sharding)
        spec = spec_from_user(asked, where.axes, len(kind.shape))
        check_layout(kind, spec, where.type, _WORDS[equation.primitive.name])
        made.append(builder._move(value, where, spec))
    return made


def moves_inside(builder: Any, equation: Any, values: Iterable[Any]) -> bool:
    """Whether bodies of an operation, which may be parts of a program, take values off the slice where it would run."""
    if equation.primitive.name not in (*INLINED, *CONTROL):
        return False
    layouts = map(builder.layout_of, values)
    lying = next((layout[0] for layout in layouts if layout is not None), None)
    return lying is not None and moves_off(inner_equations(equation), lying)


def targets(equation: Any) -> list[VirtualSlice]:
    """The slices that an equation puts its values on; none where it puts one elsewhere."""
    found = [where for where in _slices(equation) if where is not None]
    return found if len(found) == len(equation.invars) else []


def mapped_over(equation: Any) -> VirtualSlice | None:
    """The slice over whose mesh an equation is a `jax.shard_map`."""
    return slice_of(equation.params["mesh"]) if equation.primitive.name == "shard_map" else None


def named(equation: Any) -> list[VirtualSlice]:
    """The slices that an equation puts values on, or the one that it is mapped over."""
    return [where for where in (mapped_over(equation), *_slices(equation)) if where is not None]


def is_program(jaxpr: Any, lying: VirtualSlice | None) -> bool:
    """Whether a function for `jax.jit` is a program: since it takes values off the slice on which the first of its
    arguments is `lying`, or that it is mapped over, and so it would run there; or puts them on slices by itself where
    none lies on any."""
    return any(map(targets, jaxpr.eqns)) if lying is None else moves_off(equations_of(jaxpr), lying)


def moves_off(equations: Iterable[Any], lying: VirtualSlice) -> bool:
    """Whether any equation takes values off a slice by `jax.device_put` or `jax.sharding.reshard`, or off one that
    another is mapped over; a constraint does not."""
    found = list(equations)
    slices = {lying, *(where for one in found if (where := mapped_over(one)) is not None)}
    puts = (one for one in found if one.primitive.name in ("device_put", "reshard"))
    return any({where} != slices for one in puts for where in targets(one))


def check_stays(name: str, jaxpr: Any, where: VirtualSlice) -> None:
    """Raises `UsageError` where a computation on a slice puts a value on another one, or is mapped over it."""
    for equation in equations_of(jaxpr):
        for found in named(equation):
            if found is not where:
                raise UsageError(
                    f"{name} runs on {where}, and {_WORDS[equation.primitive.name]} inside of it names {found}: a "
                    "computation runs on one slice. Use it outside, or pw.reshard"
                )


def _shardings(equation: Any) -> tuple[Any, ...]:
    name, params = equation.primitive.name, equation.params
    if name == "device_put":
        return tuple(params["devices"])
    if name == "reshard":
        return (params["dst_sharding"],)
    return (params["sharding"],) if name == "sharding_constraint" else ()


def _slices(equation: Any) -> list[VirtualSlice | None]:
    """The slices that an equation puts values on; None for each that it puts elsewhere."""
    return [slice_of(one.mesh) if isinstance(one, NamedSharding) else None for one in _shardings(equation)]
