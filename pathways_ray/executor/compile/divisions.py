"""Divisions of integers that XLA may compute while it compiles: by 0 they would end the process.

XLA says what x / 0 and x % 0 are, and its kernels keep to that. But what it evaluates by itself, as it folds constants,
it divides as the processor does, which raises SIGFPE. So no module is compiled with a division that may be by 0.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from pathways_ray.compat import module_of, serialized_module
from pathways_ray.executor.compile.attributes import Value, maker

_DIVIDE, _REMAINDER = "stablehlo.divide", "stablehlo.remainder"
_SPREADS = ("stablehlo.broadcast_in_dim", "stablehlo.reshape")
_IN_BYTES = (b"divide", b"remainder")


def without_divisions_by_zero(lowered: Any) -> Any:
    """A `jax.stages.Lowered` that computes the same without integer divisions by 0."""
    _changed(lowered.compiler_ir("stablehlo"))
    return lowered


def module_without_divisions_by_zero(module: bytes) -> bytes:
    """A serialised module that computes the same without integer divisions by 0."""
    if not any(name in module for name in _IN_BYTES):
        return module
    read = module_of(module)
    return serialized_module(read) if _changed(read) else module


def _changed(module: Any) -> bool:
    """Has a module divide integers by 1 in place of 0, and choose what XLA says that a division by 0 gives; whether
    there was anything to do."""
    found: list[Any] = []

    def look(op: Any) -> ir.WalkResult:
        if op.name in (_DIVIDE, _REMAINDER) and _may_be_by_zero(op):
            found.append(op)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(look)
        for op in found:
            _guard(op)
    return bool(found)


def _may_be_by_zero(op: Any) -> bool:
    """Whether an operation divides integers, by anything but one number that is not 0."""
    if not isinstance(ir.RankedTensorType(op.results[0].type).element_type, ir.IntegerType):
        return False
    source = _source(op.operands[1])
    value = source.attributes["value"] if source is not None and source.name == "stablehlo.constant" else None
    is_one_number = isinstance(value, ir.DenseIntElementsAttr) and value.is_splat
    return not is_one_number or value == _splat(ir.RankedTensorType(source.results[0].type), 0)


def _source(value: Value) -> Any:
    """The operation that makes the numbers of a value, of which each stands in one or more places."""
    op = maker(value)
    while op is not None and op.name in _SPREADS:
        op = maker(op.operands[0])
    return op


def _splat(kind: ir.RankedTensorType, number: int) -> ir.DenseElementsAttr:
    """An array of one number; these bindings do not read those of all types."""
    return ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(kind.element_type, number))


def _guard(op: Any) -> None:
    dividend, divisor = op.operands
    kind = ir.RankedTensorType(divisor.type)

    with ir.InsertionPoint(op), op.location:
        zero, one = (stablehlo.constant(_splat(kind, number)) for number in (0, 1))
        is_zero = stablehlo.compare(divisor, zero, stablehlo.ComparisonDirectionAttr.get("EQ"))
        op.operands[1] = stablehlo.select(is_zero, one, divisor)
        instead = dividend if op.name == _REMAINDER else stablehlo.not_(zero)
        after = op.clone()
        made = stablehlo.select(is_zero, instead, after.results[0])
    op.results[0].replace_all_uses_with(made)
    op.erase()
