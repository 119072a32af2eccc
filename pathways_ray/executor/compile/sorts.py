"""The check of what sorts compare by, since on CPU that decides where they read and write.

XLA's sort on CPU is `std::sort`, which looks for no end of the array where what it compares by says that one comes: by
one that is no order, such as `a <= b`, it reads and exchanges what lies before and behind the array, which on hosts may
be another client's, until the process ends. So a sort that is not stable passes only if it compares by an order: the
values of an expression, or of several, each where those before are equal, as `jax.lax.sort` writes it. A stable one is
`std::stable_sort`, which stays in the array whatever it compares by, as long as that says the same twice.
"""

from __future__ import annotations

from jaxlib.mlir import ir

from pathways_ray.errors import ProgramRefused
from pathways_ray.executor.compile.attributes import Value, maker


def _names(text: str) -> frozenset[str]:
    return frozenset(f"stablehlo.{name}" for name in text.split())


_OF_ONE_VALUE = _names("compare constant imag real select")
"""Operations of which the expressions that are compared are made."""

_SAYS_THE_SAME = _names("""
abs add and bitcast_convert ceil clamp compare complex constant convert divide exponential floor imag is_finite log
maximum minimum multiply negate not or power real remainder return select shift_left shift_right_arithmetic
shift_right_logical sign sqrt subtract xor
""")
"""Operations of what stable sorts compare by: `rng` draws another number each time, and calls may do so."""


def check_sort(op: ir.Operation) -> None:
    """Raises `ProgramRefused` for a `stablehlo.sort` that may leave its arrays."""
    block = op.regions[0].blocks[0]
    if "is_stable" in op.attributes and ir.BoolAttr(op.attributes["is_stable"]).value:
        if other := next((inner.operation.name for inner in block if inner.operation.name not in _SAYS_THE_SAME), ""):
            raise ProgramRefused(f"a sort compares by a function with the operation {other}")
    elif not _Order(block).holds():
        raise ProgramRefused(
            "a sort that is not stable compares by what is not sure to be an order; sort with is_stable=True, or by "
            "what jax.lax.sort compares by"
        )


def check_top_k(function: ir.Operation) -> None:
    """Raises `ProgramRefused` for a function by which `ApproxTopK` compares, other than JAX's: whether the first value
    is more, or less, than the second."""
    block = function.regions[0].blocks[0]
    compared, *rest = (each.operation for each in block)
    is_plain = compared.name == "stablehlo.compare" and len(rest) == 1 and _direction(compared) in ("LT", "GT")
    if not is_plain or list(compared.operands) != list(block.arguments)[:2]:
        raise ProgramRefused("custom call 'ApproxTopK' compares by a function that is not as JAX makes it")


def _direction(compare: ir.Operation) -> str:
    return str(compare.attributes["comparison_direction"]).split()[-1].rstrip(">")


def _kind(compare: ir.Operation) -> str:
    """The order of a comparison: "TOTALORDER", or what else it says."""
    attributes = _attributes(compare)
    return str(attributes["compare_type"]).split()[-1].rstrip(">") if "compare_type" in attributes else ""


def _attributes(op: ir.Operation) -> dict[str, ir.Attribute]:
    return {name: op.attributes[name] for name in op.attributes}


class _Order:
    """The block that a sort compares by: of each array one value, and another one behind it."""

    def __init__(self, block: ir.Block) -> None:
        self.block = block
        self._alike: set[tuple[Value, Value]] = set()

    def holds(self) -> bool:
        """Whether what it returns is sure to be an order: keys are compared, each where those before are equal."""
        (value,) = list(self.block)[-1].operation.operands
        while (op := maker(value)) is not None and op.name == "stablehlo.or":
            less, both = (maker(operand) for operand in op.operands)
            if less is None or both is None or both.name != "stablehlo.and":
                return False
            equal = maker(both.operands[0])
            if equal is None or equal.name != "stablehlo.compare" or _direction(equal) != "EQ":
                return False
            if not self._compares(less) or list(equal.operands) != list(less.operands) or _kind(equal) != _kind(less):
                return False
            value = both.operands[1]
        return op is not None and self._compares(op)

    def _compares(self, op: ir.Operation) -> bool:
        """Whether an operation says which of two values of the same expression comes first; NaNs have a place too."""
        if op.name != "stablehlo.compare" or _direction(op) not in ("LT", "GT"):
            return False
        element = ir.RankedTensorType(op.operands[0].type).element_type
        total = isinstance(element, ir.IntegerType) or (isinstance(element, ir.FloatType) and _kind(op) == "TOTALORDER")
        return total and self._are_alike(*op.operands)

    def _are_alike(self, left: Value, right: Value) -> bool:
        """Whether two values are the same expression, of the first values and of the second ones."""
        if (left, right) in self._alike:
            return True
        one, other = maker(left), maker(right)
        if one is None and other is None:
            return self._number(left) == self._number(right) - 1 and self._number(left) % 2 == 0
        if one is None or other is None or one.name != other.name or one.name not in _OF_ONE_VALUE:
            return False
        if _attributes(one) != _attributes(other):
            return False
        if not all(self._are_alike(*pair) for pair in zip(one.operands, other.operands, strict=True)):
            return False
        self._alike.add((left, right))
        return True

    def _number(self, value: Value) -> int:
        """The number of an argument; -1 for one of another block."""
        arguments: list[Value] = list(self.block.arguments)
        return arguments.index(value) if value in arguments else -1
