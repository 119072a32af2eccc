"""The formula of a traced function, where it is one: element-wise operations on arrays of one shape, and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, NamedSharding

from pathways_ray.client.jaxprs import body_of
from pathways_ray.client.slice_array import SliceArray
from pathways_ray.client.specs import spec_from_user
from pathways_ray.errors import ProgramRefused, SpecError
from pathways_ray.formulas import formula as table
from pathways_ray.formulas.formula import (
    BROADCAST,
    COMPARE,
    CONSTRAIN,
    CONVERT,
    ELEMENT_WISE,
    MAX_RANK,
    MAX_VALUES,
    SELECT,
    Constant,
    Formula,
    Kind,
    Operation,
)
from pathways_ray.ir.types import Spec
from pathways_ray.jax_types import name_of

_NAMES = {
    **{name: name for name in ("and", "or", "xor", "not", "abs", "atan2", "cbrt", "ceil", "clamp", "floor", "log")},
    **{name: name for name in ("is_finite", "rsqrt", "sign", "sqrt", "tan", "tanh")},
    "add": "add",
    "add_any": "add",
    "cos": "cosine",
    "div": "divide",
    "exp": "exponential",
    "expm1": "exponential_minus_one",
    "log1p": "log_plus_one",
    "max": "maximum",
    "min": "minimum",
    "mul": "multiply",
    "neg": "negate",
    "pow": "power",
    "rem": "remainder",
    "sin": "sine",
    "sub": "subtract",
}
"""StableHLO's names of JAX's operations that are lowered to one."""

_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")

_COMPARISONS = {direction.lower(): direction for direction in table.DIRECTIONS}

_ROUNDING = {"AWAY_FROM_ZERO": "round_nearest_afz", "TO_NEAREST_EVEN": "round_nearest_even"}


def formula_of(closed: Any, mesh: AbstractMesh) -> Formula | None:
    """The formula of a jaxpr that was traced for a mesh; None of any other function."""
    avals = [*closed.in_avals, *closed.out_avals]
    if closed.effects or not all(isinstance(aval, jax.core.ShapedArray) for aval in avals):
        return None
    shape = next((aval.shape for aval in avals if aval.shape), ())
    try:
        found = _Writer(shape, mesh).written(closed)
        found.kinds()
        return found
    except (_NoFormula, ProgramRefused):  # what hosts would refuse is exported, and says there what is wrong
        return None


class _NoFormula(Exception):
    """A jaxpr does what no formula does."""


class _Writer:
    """A formula while it is found. Values are told by what they are until all are known: arguments, constants and
    operations by the number among their own."""

    def __init__(self, shape: tuple[int, ...], mesh: AbstractMesh) -> None:
        self.shape, self.mesh = shape, mesh
        self.constants: dict[Constant, int] = {}
        self.operations: list[tuple[str, tuple[_Value, ...], str, str, Spec]] = []

    def written(self, closed: Any) -> Formula:
        """Raises `_NoFormula`."""
        if len(self.shape) > MAX_RANK:
            raise _NoFormula
        arguments = tuple(self._kind(aval) for aval in closed.in_avals)
        given = [_Value("argument", k, kind) for k, kind in enumerate(arguments)]
        results = self._run(closed.jaxpr, closed.consts, given)
        first = {"argument": 0, "constant": len(arguments), "operation": len(arguments) + len(self.constants)}

        def place(value: _Value) -> int:
            return first[value.origin] + value.number

        operations = tuple(
            Operation(name, tuple(map(place, operands)), dtype, direction, spec)
            for name, operands, dtype, direction, spec in self.operations
        )
        mesh = self.mesh.shape_tuple if self.mesh.size > 1 else ()
        return Formula(self.shape, arguments, tuple(self.constants), operations, tuple(map(place, results)), mesh)

    def _kind(self, aval: Any) -> Kind:
        if getattr(aval, "shape", None) not in ((), self.shape):  # a token has none
            raise _NoFormula
        dtype = name_of(aval.dtype)
        self._check(dtype)
        return Kind(dtype, bool(aval.shape))

    def _run(self, jaxpr: Any, consts: Sequence[Any], given: Sequence[_Value]) -> list[_Value]:
        values = dict(zip(jaxpr.invars, given, strict=True))
        values.update((place, self._constant(held)) for place, held in zip(jaxpr.constvars, consts, strict=True))

        def read(atom: Any) -> _Value:
            if isinstance(atom, jex_core.Literal):
                kind: Any = atom.aval
                return self._constant(np.asarray(atom.val, kind.dtype))
            return values[atom]

        for equation in jaxpr.eqns:
            results = self._equation(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _constant(self, held: Any) -> _Value:
        if isinstance(held, SliceArray) or not isinstance(held, np.ndarray | np.generic | jax.Array):
            raise _NoFormula  # what lies on a slice is not fetched for it
        if held.shape:
            raise _NoFormula
        if jax.numpy.issubdtype(held.dtype, jax.dtypes.extended):
            raise _NoFormula
        constant = Constant.of(np.asarray(held))
        self._check(constant.dtype)
        if len(self.constants) == MAX_VALUES:
            raise _NoFormula
        return _Value("constant", self.constants.setdefault(constant, len(self.constants)), Kind(constant.dtype, False))

    def _check(self, dtype: str) -> None:
        if dtype != "bool" and dtype not in ELEMENT_WISE["add"][1]:
            raise _NoFormula

    def _added(self, name: str, *operands: _Value, dtype: str = "", direction: str = "", spec: Spec = ()) -> _Value:
        """Adds an operation, which gives what it takes unless `dtype` is given."""
        dtype = dtype or operands[0].kind.dtype
        if name in ELEMENT_WISE and (
            dtype not in ELEMENT_WISE[name][1] or any(one.kind.dtype != dtype for one in operands)
        ):
            raise _NoFormula
        self._check(dtype)
        if len(self.operations) == MAX_VALUES:
            raise _NoFormula
        self.operations.append((name, operands, dtype, direction, spec))
        is_array = name == BROADCAST or any(one.kind.is_array for one in operands)
        return _Value("operation", len(self.operations) - 1, Kind(dtype, is_array and self.shape != ()))

    def _equation(self, equation: Any, given: list[_Value]) -> list[_Value]:
        name, params = equation.primitive.name, equation.params
        if equation.effects:
            raise _NoFormula
        for atom in (*equation.invars, *equation.outvars):
            self._kind(atom.aval)
        if name in _CALLS:
            return self._call(equation, given)
        if name in _NAMES:
            if any(value is not None for value in params.values()):
                raise _NoFormula
            return [self._added(_NAMES[name], *given, dtype="bool" if name == "is_finite" else "")]
        if name in _COMPARISONS:
            left, right = given
            return [self._compared(left, right, _COMPARISONS[name])]
        if name not in _RULES:
            raise _NoFormula
        return [_RULES[name](self, params, *given)]

    def _compared(self, left: _Value, right: _Value, direction: str) -> _Value:
        if left.kind.dtype != right.kind.dtype:
            raise _NoFormula
        return self._added(COMPARE, left, right, dtype="bool", direction=direction)

    def _call(self, equation: Any, given: list[_Value]) -> list[_Value]:
        """A call of a function that says nothing of where it runs, or how its values lie."""
        params = equation.params
        said = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
        layouts = [*params.get("in_layouts", ()), *params.get("out_layouts", ())]
        is_plain = not any(isinstance(one, jax.sharding.Sharding) for one in said) and not any(layouts)
        if not is_plain or params.get("compiler_options_kvs") or type(params.get("name", "")) is not str:
            raise _NoFormula
        inner = body_of(equation)
        return self._run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given)

    # --- operations of JAX that are not one of StableHLO's, or have parameters ----------------------------------------

    def _square(self, params: Any, value: _Value) -> _Value:
        return self._added("multiply", value, value)

    def _logistic(self, params: Any, value: _Value) -> _Value:
        if params["accuracy"] is not None:
            raise _NoFormula
        one = self._number(1, value)
        below = self._added("add", one, self._added("exponential", self._added("negate", value)))
        return self._added("divide", one, below)

    def _integer_pow(self, params: Any, value: _Value) -> _Value:
        """As JAX has it: by repeated squares, and one quotient where the power is negative."""
        power = abs(params["y"])
        made: _Value | None = None
        if params["y"] == 0:
            raise _NoFormula
        if params["y"] == 3:
            return self._added("multiply", self._added("multiply", value, value), value)
        while power:
            if power & 1:
                made = value if made is None else self._added("multiply", made, value)
            power >>= 1
            if power:
                value = self._added("multiply", value, value)
        assert made is not None, "a power has a first bit"
        return made if params["y"] > 0 else self._added("divide", self._number(1, made), made)

    def _number(self, number: int, like: _Value) -> _Value:
        return self._constant(np.asarray(number, jax.numpy.dtype(like.kind.dtype)))

    def _round(self, params: Any, value: _Value) -> _Value:
        return self._added(_ROUNDING[params["rounding_method"].name], value)

    def _select_n(self, params: Any, which: _Value, *cases: _Value) -> _Value:
        if which.kind.dtype != "bool" or len(cases) != 2:
            raise _NoFormula
        return self._added(SELECT, which, cases[1], cases[0], dtype=cases[0].kind.dtype)

    def _convert_element_type(self, params: Any, value: _Value) -> _Value:
        dtype = name_of(params["new_dtype"])
        if params["sharding"] is not None:
            raise _NoFormula
        if dtype == value.kind.dtype:
            return value
        if dtype == "bool":
            return self._compared(value, self._number(0, value), "NE")
        return self._added(CONVERT, value, dtype=dtype)

    def _broadcast_in_dim(self, params: Any, value: _Value, *sizes: Any) -> _Value:
        if sizes or params["sharding"] is not None or (value.kind.is_array and self.shape):
            raise _NoFormula
        if params["shape"] != self.shape or params["broadcast_dimensions"]:
            raise _NoFormula
        return self._added(BROADCAST, value) if self.shape else value

    def _sharding_constraint(self, params: Any, value: _Value) -> _Value:
        sharding = params["sharding"]
        is_plain = isinstance(sharding, NamedSharding) and not params["unconstrained_dims"] and not params["layout"]
        mesh: Any = getattr(sharding, "mesh", None)
        if not is_plain or getattr(mesh, "abstract_mesh", mesh) != self.mesh or sharding.spec.unreduced:
            raise _NoFormula
        if self.mesh.size == 1:
            return value
        try:
            spec = spec_from_user(sharding.spec, self.mesh.axis_names, len(self.shape) if value.kind.is_array else 0)
        except SpecError:
            raise _NoFormula from None
        return self._added(CONSTRAIN, value, spec=spec)


_RULES: dict[str, Callable[..., _Value]] = {
    "square": _Writer._square,
    "logistic": _Writer._logistic,
    "integer_pow": _Writer._integer_pow,
    "round": _Writer._round,
    "select_n": _Writer._select_n,
    "convert_element_type": _Writer._convert_element_type,
    "broadcast_in_dim": _Writer._broadcast_in_dim,
    "sharding_constraint": _Writer._sharding_constraint,
}


class _Value:
    """A value of a formula that is being found."""

    __slots__ = ("kind", "number", "origin")

    def __init__(self, origin: str, number: int, kind: Kind) -> None:
        self.origin, self.number, self.kind = origin, number, kind
