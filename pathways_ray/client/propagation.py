"""Propagation of shardings: how the results of an operation lie, given how its operands do.

JAX knows for each operation how its result lies over a mesh whose axes are explicit. An operation that JAX finds
ambiguous, or has no rule for, has results that lie like an operand of the same shape, else replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from pathways_ray.client import prng
from pathways_ray.client.jaxprs import equations_of, inner_jaxprs
from pathways_ray.client.specs import spec_from_user
from pathways_ray.errors import SpecError
from pathways_ray.ir.types import ArrayType, SliceType, Spec, canonical_spec, check_layout
from pathways_ray.jax_types import partition_spec

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_CALLS |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr"}
"""Operations that do what a jaxpr among their parameters says, once."""


_ROUNDS = 3
"""Times that the body of a loop is walked until its carry lies as it did."""


_SAYS = ("sharding_constraint", "shard_map", "device_put", "reshard")
"""The primitives that say how their results lie, however their operands do."""


def output_specs(closed: jex_core.ClosedJaxpr, specs: Sequence[Spec], mesh: SliceType) -> list[Spec]:
    """The spec of each result of a traced function whose arguments lie as `specs` say.

    A result whose dimensions would not divide is replicated.
    """
    says = any(equation.primitive.name in _SAYS for equation in equations_of(closed.jaxpr))
    if mesh.size == 1 or not (says or any(specs)):
        return [()] * len(closed.jaxpr.outvars)
    explicit = AbstractMesh(mesh.shape, mesh.axes, axis_types=(AxisType.Explicit,) * len(mesh.axes))
    with jax.sharding.use_abstract_mesh(explicit):
        found = _Walk(explicit).run(closed.jaxpr, list(specs))
    return [
        spec if _fits(atom.aval, spec, mesh) else () for atom, spec in zip(closed.jaxpr.outvars, found, strict=True)
    ]


def _fits(aval: Any, spec: Spec, mesh: SliceType) -> bool:
    data = prng.data_type(aval)
    try:
        check_layout(ArrayType(data.shape, data.dtype.name), spec, mesh, "")
    except SpecError:
        return False
    return True


class _Walk:
    """One pass over a jaxpr and those in it."""

    def __init__(self, mesh: AbstractMesh) -> None:
        self.mesh = mesh

    def run(self, jaxpr: Any, arguments: list[Spec]) -> list[Spec]:
        specs: dict[Any, Spec] = dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Spec:
            return () if isinstance(atom, jex_core.Literal) else specs.get(atom, ())

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            specs.update(zip(equation.outvars, self._equation(equation, inputs), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, inputs: list[Spec]) -> list[Spec]:
        name = equation.primitive.name
        if name == "sharding_constraint" and isinstance(equation.params["sharding"], NamedSharding):
            return [_spec(equation.params["sharding"].spec, self.mesh)]
        if name == "reshard":
            return [_spec(equation.params["dst_sharding"].spec, self.mesh)]
        if name == "device_put":  # to no layout in particular, a value stays as it lies
            asked = zip(equation.params["devices"], inputs, strict=True)
            return [_spec(to.spec, self.mesh) if isinstance(to, NamedSharding) else lying for to, lying in asked]
        if name == "shard_map":
            return [_spec(spec, self.mesh) for spec in equation.params["out_specs"]]
        inner = equation.params.get(_CALLS.get(name, ""))
        if inner is not None:
            jaxpr = getattr(inner, "jaxpr", inner)
            if len(jaxpr.invars) == len(inputs):
                return self.run(jaxpr, inputs)
        if name == "scan":
            return self._scan(equation.params, inputs)
        if name == "cond":
            return self._cond(equation, inputs)
        if name == "while":
            return self._while(equation.params, inputs)
        if not any(inputs):
            return [()] * len(equation.outvars)
        if any(inner_jaxprs(equation)):
            return _like_operands(equation, inputs)
        if name == "dot_general":
            inputs = _without_contracted(equation, inputs)
        found = self._by_rule(equation, inputs)
        return found if found is not None else _like_operands(equation, inputs)

    def _scan(self, params: Any, inputs: list[Spec]) -> list[Spec]:
        """The specs of the last carry and of what each round gives, stacked along a dimension that is whole."""
        consts, carries, body = params["num_consts"], params["num_carry"], params["jaxpr"].jaxpr
        carry, rows = inputs[consts : consts + carries], [spec[1:] for spec in inputs[consts + carries :]]
        carry, made = self._carried(body, inputs[:consts], carry, rows)
        stacked = [((), *spec) if spec else () for spec in made]
        return [*carry, *stacked]

    def _while(self, params: Any, inputs: list[Spec]) -> list[Spec]:
        """The specs of the last carry."""
        tests, before = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        return self._carried(params["body_jaxpr"].jaxpr, inputs[tests:before], inputs[before:], [])[0]

    def _carried(
        self, body: Any, consts: list[Spec], carry: list[Spec], rows: list[Spec]
    ) -> tuple[list[Spec], list[Spec]]:
        """The specs of what a loop carries, and of what its body gives beside that."""
        made = [*carry]
        for _ in range(_ROUNDS):
            made = self.run(body, [*consts, *carry, *rows])
            joined = [_joined(before, after) for before, after in zip(carry, made, strict=False)]
            if joined == carry:
                break
            carry = joined
        return carry, made[len(carry) :]

    def _cond(self, equation: Any, inputs: list[Spec]) -> list[Spec]:
        """The specs in which all branches leave a result; where they differ, as an operand of its shape."""
        made = [self.run(branch.jaxpr, inputs[1:]) for branch in equation.params["branches"]]
        alike = _like_operands(equation, inputs)
        return [spec[0] if len(set(spec)) == 1 else other for *spec, other in zip(*made, alike, strict=True)]

    def _by_rule(self, equation: Any, inputs: list[Spec]) -> list[Spec] | None:
        """The specs by the rule that JAX has for the operation; None where it refuses."""
        avals = []
        for atom, spec in zip(equation.invars, inputs, strict=True):
            aval: Any = atom.aval
            if not hasattr(aval, "shape") or prng.is_key(aval):
                return None
            avals.append((aval, NamedSharding(self.mesh, _padded(spec, len(aval.shape)))))
        try:
            typed = [aval.update(sharding=sharding) for aval, sharding in avals]
            found = equation.primitive.abstract_eval(*typed, **equation.params)[0]
        except Exception:  # whatever JAX refuses to decide, such as of sizes that do not divide
            return None
        results = found if equation.primitive.multiple_results else [found]
        return [_spec(result.sharding.spec, self.mesh) for result in results]


def _joined(before: Spec, after: Spec) -> Spec:
    """The spec of a value that goes round in a loop: partitioned where one of both is, whole where they differ."""
    return before if before == after or not after else after if not before else ()


def _without_contracted(equation: Any, inputs: list[Spec]) -> list[Spec]:
    """Operands of a product, whole along the dimensions that are summed over: their result is summed over devices."""
    contracted = equation.params["dimension_numbers"][0]
    return [
        canonical_spec(tuple(() if k in dimensions else axes for k, axes in enumerate(spec)))
        for spec, dimensions in zip(inputs, contracted, strict=True)
    ]


def _like_operands(equation: Any, inputs: list[Spec]) -> list[Spec]:
    by_shape: dict[tuple[int, ...], Spec] = {}
    for atom, spec in zip(equation.invars, inputs, strict=True):
        shape = tuple(getattr(atom.aval, "shape", ()))
        by_shape[shape] = by_shape.get(shape) or spec
    return [by_shape.get(tuple(getattr(variable.aval, "shape", ())), ()) for variable in equation.outvars]


def _padded(spec: Spec, rank: int) -> Any:
    return partition_spec((*spec, *((),) * (rank - len(spec))))


def _spec(value: Any, mesh: AbstractMesh) -> Spec:
    """The spec that JAX found, without what it has beside names of axes."""
    try:
        return spec_from_user(value, mesh.axis_names)
    except SpecError:
        return ()
