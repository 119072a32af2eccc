"""Formulas as code: the StableHLO of each, as JAX would lower the same operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import msgspec
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy, stablehlo

from pathways_ray.errors import ProgramRefused
from pathways_ray.formulas.formula import BROADCAST, COMPARE, CONSTRAIN, FLOATS, SIGNED, Formula, Kind, Operation
from pathways_ray.jax_types import dtype_named
from pathways_ray.joint_exports import called_p


class FormulaCall(NamedTuple):
    """A formula as a function of a recipe, as those are that were exported."""

    formula: Formula
    kinds: tuple[Kind, ...]

    @classmethod
    def of(cls, formula: Formula) -> FormulaCall:
        """Raises `ProgramRefused` where it makes no sense."""
        return cls(formula, tuple(formula.kinds()))

    @property
    def nr_devices(self) -> int:
        """The devices that it is for."""
        return math.prod(size for _, size in self.formula.mesh)

    def check_mesh(self, axes: Sequence[str], sizes: Sequence[int]) -> None:
        """Raises `ProgramRefused` where it is for another mesh than that of a slice."""
        if self.formula.mesh not in ((), said := tuple(zip(axes, sizes, strict=True))):
            mesh = str(self.formula.mesh[:8])[:100]  # with names that are the client's
            raise ProgramRefused(f"a formula is for the mesh {mesh}, and its slice has {said}")

    @property
    def in_avals(self) -> Sequence[Any]:
        """The types that it takes."""
        return [self._aval(kind) for kind in self.formula.arguments]

    @property
    def out_avals(self) -> Sequence[Any]:
        """The types that it gives."""
        return [self._aval(self.kinds[result]) for result in self.formula.results]

    def on_shards(self, shape: tuple[int, ...]) -> FormulaCall:
        """The same for one device, on shards of this shape. Its constraints of layouts say nothing then."""
        return FormulaCall(msgspec.structs.replace(self.formula, shape=shape, mesh=()), self.kinds)

    @property
    def mlir_module_serialized(self) -> bytes:
        """Raises `ProgramRefused`: it has no module of its own."""
        raise ProgramRefused("a formula cannot be compiled as it is")

    def call(self, *values: Any) -> tuple[jax.Array, ...]:
        """Its results, in a function that is traced."""
        return tuple(called_p().bind(*values, called=self))

    def emitted(self, context: Any, values: Sequence[Any]) -> list[Any]:
        """Its results as operations of a module, put where JAX puts some at the moment."""
        return _Emission(self).results(values)

    def _aval(self, kind: Kind) -> Any:
        shape = self.formula.shape if kind.is_array else ()
        return jax.core.ShapedArray(shape, dtype_named(kind.dtype))


class _Emission:
    """A formula while it is written down."""

    def __init__(self, call: FormulaCall) -> None:
        self.formula, self.kinds = call.formula, call.kinds
        self._types: dict[Kind, Any] = {}
        self._spread: dict[int, Any] = {}
        self._dimensions = ir.DenseI64ArrayAttr.get([])

    def results(self, values: Sequence[Any]) -> list[Any]:
        made = [*values, *(mlir.ir_constant(constant.number()) for constant in self.formula.constants)]
        for operation in self.formula.operations:
            kind = self.kinds[len(made)]
            made.append(self._written(operation, kind, made))
        return [made[result] for result in self.formula.results]

    def _written(self, operation: Operation, kind: Kind, made: list[Any]) -> Any:
        if operation.name == BROADCAST:
            return self._array(operation.operands[0], made)
        if operation.name == CONSTRAIN and not self.formula.mesh:
            return made[operation.operands[0]]
        if operation.name == CONSTRAIN:
            return sdy.sharding_constraint(made[operation.operands[0]], self._layout(operation, kind))
        operands = [
            self._array(operand, made) if kind.is_array and not self.kinds[operand].is_array else made[operand]
            for operand in operation.operands
        ]
        if operation.name == COMPARE:
            dtype = self.kinds[operation.operands[0]].dtype
            means = "FLOAT" if dtype in FLOATS else "SIGNED" if dtype in SIGNED else "UNSIGNED"
            direction = stablehlo.ComparisonDirectionAttr.get(operation.direction)
            left, right = operands
            return stablehlo.compare(left, right, direction, compare_type=stablehlo.ComparisonTypeAttr.get(means))
        types = [self._type(kind)]
        return ir.Operation.create(f"stablehlo.{operation.name}", results=types, operands=operands).results[0]

    def _layout(self, operation: Operation, kind: Kind) -> Any:
        """The layout of an operation's result, in Shardy's form."""
        mesh = sdy.MeshAttr.get([sdy.MeshAxisAttr.get(axis, size) for axis, size in self.formula.mesh])
        rank = len(self.formula.shape) if kind.is_array else 0
        spec = (*operation.spec, *((),) * (rank - len(operation.spec)))
        split = [sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(axis) for axis in axes], True) for axes in spec]
        return sdy.TensorShardingAttr.get(mesh, split)

    def _array(self, number: int, made: list[Any]) -> Any:
        """A number as an array of it."""
        if number not in self._spread:
            kind = self._type(Kind(self.kinds[number].dtype, True))
            self._spread[number] = stablehlo.broadcast_in_dim(kind, made[number], self._dimensions)
        return self._spread[number]

    def _type(self, kind: Kind) -> Any:
        if kind not in self._types:
            shape = self.formula.shape if kind.is_array else ()
            element = mlir.dtype_to_ir_type(dtype_named(kind.dtype))
            self._types[kind] = ir.RankedTensorType.get(shape, element)
        return self._types[kind]


def text_of(formulas: Sequence[Formula]) -> str:
    """The StableHLO of formulas, a function for each."""
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        for number, formula in enumerate(formulas):
            call = FormulaCall.of(formula)
            emission = _Emission(call)
            taken = [emission._type(kind) for kind in formula.arguments]
            given = [emission._type(call.kinds[result]) for result in formula.results]
            with ir.InsertionPoint(module.body):
                entry: Any = func.FuncOp(f"formula_{number}", (taken, given))
            with ir.InsertionPoint(entry.add_entry_block()):
                func.ReturnOp(emission.results(list(entry.arguments)))
        return str(module)
