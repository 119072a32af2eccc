"""The search for lines: functions of one array that are plain arithmetic, one operation behind the other.

Each operation of a *line* takes the value before it, alone or with a constant. So XLA makes one kernel of it, alone or
between other lines: nothing in it has a second user, for which it would be made or rounded by itself. No two values
meet that may both be NaN, of which the compiler would choose one. No operation only changes a sign, nor takes a root,
which of a square XLA takes for one that does: LLVM makes it one with a product beside it or not, as what stands around
them is, and a NaN has another sign then. All values have 32 bits and one shape, so that their bits can be taken as
numbers (`composition`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir

from pathways_ray.compat import module_of
from pathways_ray.executor.compile.functions import Called
from pathways_ray.formulas.calls import FormulaCall
from pathways_ray.formulas.formula import MAX_IN_LINE
from pathways_ray.joint_exports import Joint, Member

MAX_OPERATIONS = MAX_IN_LINE
"""Operations of a line: several lines are one kernel, and compile time grows with it."""

_NAMES = "abs add and convert divide maximum minimum multiply negate not or subtract xor"
_PLAIN = frozenset(f"stablehlo.{name}" for name in _NAMES.split())
"""Operations whose results IEEE 754, arithmetic modulo 2**32 or XLA's rules for divisions by 0 and conversions out of
range say to the last bit."""

MAX_BYTES = 64 << 10
"""Of a module beyond which nobody looks into it: it has arrays or many operations, and so is no line."""

Functions = Mapping[str, ir.Operation]


_in_joints: weakref.WeakKeyDictionary[Joint, frozenset[str]] = weakref.WeakKeyDictionary()
"""The lines of each joint export that was looked into: several computations have members of one."""


def lines_among(calls: Mapping[str, Called]) -> frozenset[str]:
    """The names of those functions that are lines; a sandbox has read them before."""
    return frozenset(name for name, call in calls.items() if _is_line(call))


def _is_line(call: Called) -> bool:
    if isinstance(call, FormulaCall):
        return call.formula.is_line
    if not isinstance(call, Member):
        code = call.mlir_module_serialized
        return len(code) <= MAX_BYTES and bool(_lines_of(module_of(code), ["main"]))
    found = _in_joints.get(call.joint)
    if found is None:
        joint = call.joint
        found = _in_joints[joint] = _lines_of(joint.module(), joint.names)
    return call.joint.names[call.number] in found


def _lines_of(module: Any, names: Sequence[str]) -> frozenset[str]:
    """Those functions of a module that are lines."""
    entries = [entry.operation for entry in module.body if entry.operation.name == "func.func"]
    functions = {ir.StringAttr(op.attributes["sym_name"]).value: op for op in entries}
    return frozenset(name for name in names if _Look(functions).is_line(name))


class _Look:
    """A look at a function, and at those that it calls."""

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self.operations = 0
        self.shapes: set[tuple[int, ...]] = set()
        self.shardings: set[str] = set()

    def is_line(self, name: str) -> bool:
        """Whether it is one, as far as was looked yet."""
        block = self.functions[name].regions[0].blocks[0]
        if len(block.arguments) != 1 or not self._fits(block.arguments[0]):
            return False
        value, constants = block.arguments[0], dict[Any, float]()
        for op in (entry.operation for entry in block):
            taken = {operand for operand in op.operands if operand not in constants}
            if op.name == "func.return":
                return list(op.operands) == [value]
            if op.name == "stablehlo.constant":
                if (number := _number(op)) is None:
                    return False
                constants[op.results[0]] = number
            elif op.name == "stablehlo.broadcast_in_dim" and not taken:
                constants[op.results[0]] = constants[op.operands[0]]
            elif _changes_sign(op, constants):
                return False
            elif taken == {value} and len(op.results) == 1 and self._goes_on(op):
                value = op.results[0]
            else:
                return False
        return False

    def _goes_on(self, op: ir.Operation) -> bool:
        self.operations += 1
        if self.operations > MAX_OPERATIONS or not self._fits(op.results[0]):
            return False
        if op.name == "func.call":
            return self.is_line(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)
        if op.name == "sdy.sharding_constraint":
            self.shardings.add(str(op.attributes["sharding"]))
            return len(self.shardings) == 1  # or devices would exchange shards within it
        return op.name in _PLAIN

    def _fits(self, value: Any) -> bool:
        kind = ir.RankedTensorType(value.type)
        element = kind.element_type
        self.shapes.add(tuple(kind.shape))
        is_plain = isinstance(element, ir.F32Type) or (isinstance(element, ir.IntegerType) and element.width == 32)
        return is_plain and len(self.shapes) == 1


def _changes_sign(op: ir.Operation, constants: Mapping[Any, float]) -> bool:
    """Whether an operation on numbers with a fraction is, or may be simplified to, a change of the sign alone."""
    if not op.results or not isinstance(ir.RankedTensorType(op.results[0].type).element_type, ir.F32Type):
        return False
    numbers = [constants.get(operand) for operand in op.operands]
    match op.name.removeprefix("stablehlo."):
        case "abs" | "negate":
            return True
        case "multiply" | "divide":
            return -1 in numbers
        case "subtract":
            return numbers[0] == 0
    return False


def _number(constant: ir.Operation) -> float | None:
    """The number that a constant is in all of its elements; None where they differ, or are NaN."""
    try:
        value = constant.attributes["value"]
    except TypeError:
        return None  # complex numbers, which these bindings cannot look into
    if not isinstance(value, ir.DenseElementsAttr) or not value.is_splat:
        return None
    element: Any = value.get_splat_value()
    number = float(element.value)
    return None if math.isnan(number) else number
