"""Formulas: functions of element-wise operations as data, which need neither an export nor a checker.

Most small functions of a program, and almost all of its ordinary operations, are sums, products, comparisons and the
like of arrays of one shape and of numbers. To export one takes a client 0.3 ms among others and 7 alone, and a host
reads its code in a process that may crash. A *formula* is a list of such operations instead: every field is one that a
reader of MessagePack checks, and `Formula.kinds` says whether the whole makes sense. A host writes the operations down
itself (`calls`), each as JAX would.

Values are numbered: arguments, then constants, then what each operation gives. Each is an array of the formula's shape
or a single number, which an operation with an array takes as an array of it. On several devices a formula says over
which axes of the slice's mesh values are split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from pathways_ray import limits
from pathways_ray.errors import ProgramRefused, SpecError
from pathways_ray.ir.types import Spec, check_spec
from pathways_ray.jax_types import dtype_named, name_of

_MARK = b"pathways formulas 1\n"
"""The beginning of the bytes of formulas, by which readers know them from exports."""

MAX_RANK = 64

MAX_VALUES = 128
"""Arguments of a formula, its constants, operations and results, each: a host writes them down in Python."""

MAX_MEMBERS = 128
MAX_BYTES = 4 << 20
"""Formulas that come as one, and their bytes, of which the largest ones take a half: no other thread of a host runs
while they are decoded."""


def _names(text: str) -> list[str]:
    return text.split()


FLOATS = frozenset(_names("bfloat16 float16 float32 float64"))
SIGNED = frozenset(_names("int8 int16 int32 int64"))
UNSIGNED = frozenset(_names("uint8 uint16 uint32 uint64"))
_INTEGERS = SIGNED | UNSIGNED
_NUMBERS = FLOATS | _INTEGERS
_BOOL = frozenset(["bool"])
_ANY = _NUMBERS | _BOOL

COMPARE, SELECT, CONVERT, BROADCAST = "compare", "select", "convert", "broadcast_in_dim"
"""Operations whose operands are of other types than their results, or that make an array of a number."""

CONSTRAIN = "sharding_constraint"
"""The operation, of Shardy's, that says how its operand lies."""

DIRECTIONS = frozenset(_names("EQ NE LT LE GT GE"))

ELEMENT_WISE: dict[str, tuple[int, frozenset[str]]] = {
    **dict.fromkeys(_names("add subtract multiply divide maximum minimum remainder"), (2, _NUMBERS)),
    **dict.fromkeys(_names("negate"), (1, _NUMBERS)),
    **dict.fromkeys(_names("abs sign"), (1, FLOATS | SIGNED)),
    **dict.fromkeys(_names("and or xor"), (2, _INTEGERS | _BOOL)),
    **dict.fromkeys(_names("not"), (1, _INTEGERS | _BOOL)),
    **dict.fromkeys(_names("power atan2"), (2, FLOATS)),
    **dict.fromkeys(
        _names("""
            cbrt ceil cosine exponential exponential_minus_one floor log log_plus_one round_nearest_afz
            round_nearest_even rsqrt sine sqrt tan tanh
        """),
        (1, FLOATS),
    ),
    "clamp": (3, _NUMBERS),
}
"""StableHLO's operations whose operands are all of the type that they give: how many, and of which types."""

_IN_LINES = frozenset(_names("add and convert divide maximum minimum multiply not or subtract xor"))
MAX_IN_LINE = 16
"""Operations of a line, and how many there may be: several lines are one kernel, and compile time grows with it."""


class Kind(NamedTuple):
    """The type of a value: its dtype, and whether it is an array of the formula's shape, or a single number."""

    dtype: str
    is_array: bool


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """An operation of StableHLO: its name, the values that it takes, the dtype that it gives; `direction` is that of a
    comparison, and `spec` how its result lies, of `CONSTRAIN`."""

    name: str
    operands: tuple[int, ...]
    dtype: str
    direction: str = ""
    spec: Spec = ()


class Constant(msgspec.Struct, frozen=True, array_like=True):
    """A number, as the bytes that it takes in memory."""

    dtype: str
    value: bytes

    @classmethod
    def of(cls, value: np.ndarray) -> Constant:
        """The constant of an array without dimensions."""
        return cls(name_of(value.dtype), value.tobytes())

    def number(self) -> np.ndarray:
        """Its value, an array without dimensions."""
        return np.frombuffer(self.value, dtype_named(self.dtype)).reshape(())


class Formula(msgspec.Struct, frozen=True, array_like=True):
    """A function of arrays of one shape, and of numbers: see the module. `mesh` has the axes of the slice that it is
    for, each with its size; none where that has one device."""

    shape: tuple[int, ...]
    arguments: tuple[Kind, ...]
    constants: tuple[Constant, ...]
    operations: tuple[Operation, ...]
    results: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...] = ()

    def kinds(self) -> list[Kind]:
        """The types of all values. Raises `ProgramRefused` where the formula makes no sense."""
        if len(self.shape) > MAX_RANK or any(size < 0 for size in self.shape):
            raise ProgramRefused(f"a formula has the shape {self.shape[:8]}")
        if len(self.mesh) > MAX_RANK or any(size < 1 for _, size in self.mesh):
            raise _refused(f"a formula has the mesh {self.mesh[:8]}")
        if 8 * math.prod(size for size in self.shape if size) > limits.MAX_TENSOR_BYTES:  # 0 would hide the others
            raise ProgramRefused(f"a formula has values {self.shape[:8]} of more than {limits.MAX_TENSOR_BYTES} bytes")
        for what in ("arguments", "constants", "operations", "results"):
            if (count := len(getattr(self, what))) > MAX_VALUES:
                raise ProgramRefused(f"a formula has {count} {what}; {MAX_VALUES} are the limit")
        found = [*self.arguments, *(Kind(constant.dtype, False) for constant in self.constants)]
        if unknown := next((kind.dtype for kind in found if kind.dtype not in _ANY), ""):
            raise ProgramRefused(f"a formula has values of type {unknown[:20]!r}")
        for constant in self.constants:
            if len(constant.value) != dtype_named(constant.dtype).itemsize:
                raise ProgramRefused(f"a constant of type {constant.dtype} has {len(constant.value)} bytes")
        for operation in self.operations:
            found.append(_kind_of(operation, found))
            self._check_spec(operation, found[-1])
        if any(not 0 <= result < len(found) for result in self.results):
            raise ProgramRefused(f"a formula of {len(found)} values gives those numbered {self.results[:8]}")
        return found

    def _check_spec(self, operation: Operation, kind: Kind) -> None:
        if operation.name != CONSTRAIN:
            return
        spec = operation.spec
        if sum(map(len, spec)) > len(self.mesh) or len(spec) > (len(self.shape) if kind.is_array else 0):
            raise ProgramRefused(
                "a value of a formula has fewer dimensions, or its mesh axes, than it is laid out over"
            )
        try:
            check_spec(spec, tuple(axis for axis, _ in self.mesh))
        except SpecError as error:
            raise _refused(f"a value of a formula is not laid out on its mesh: {error}") from None

    @property
    def is_line(self) -> bool:
        """Whether it is a *line*: plain arithmetic on one array, one operation behind the other.

        Each operation takes the value before it, alone or with constants that are one number and not NaN; there are at
        most `MAX_IN_LINE`. So XLA makes one kernel of it, alone or between other lines: nothing in it has a second
        user, for which it would be made or rounded by itself, and no two values meet that may both be NaN, of which
        the compiler would choose one. What operations give is said to the last bit by IEEE 754, arithmetic modulo
        2**32, or XLA's rules for divisions by 0 and conversions out of range. None of them only changes a sign, nor
        takes a root, which of a square XLA takes for one that does: LLVM makes it one with a product beside it or not,
        as what stands around them is, and a NaN has another sign then. All values have 32 bits, so that their bits can
        be taken as numbers (`executor.compile.composition`), and lie alike, or devices would exchange parts of them.
        """
        if len(self.arguments) != 1 or len(self.operations) > 2 * MAX_IN_LINE:
            return False
        layouts = {operation.spec for operation in self.operations if operation.name == CONSTRAIN}
        if len(layouts) > 1 or sum(one.name in _IN_LINES for one in self.operations) > MAX_IN_LINE:
            return False
        dtypes = [one.dtype for group in (self.arguments, self.constants, self.operations) for one in group]
        if not {"float32", "int32", "uint32"}.issuperset(dtypes):
            return False
        numbers = {1 + k: float(constant.number()) for k, constant in enumerate(self.constants)}
        value, first = 0, 1 + len(self.constants)
        for number, operation in enumerate(self.operations, first):
            if operation.name == BROADCAST and operation.operands[0] in numbers:
                numbers[number] = numbers[operation.operands[0]]
                continue
            if {operand for operand in operation.operands if operand not in numbers} != {value}:
                return False
            if operation.name != CONSTRAIN and (operation.name not in _IN_LINES or _flips_sign(operation, numbers)):
                return False
            value = number
        is_one = self.arguments[0].is_array == bool(self.shape)
        return is_one and self.results == (value,) and not any(map(math.isnan, numbers.values()))


def _kind_of(operation: Operation, before: list[Kind]) -> Kind:
    """The type of what an operation gives. Raises `ProgramRefused` where it cannot take what it says."""
    name, dtype = operation.name, operation.dtype
    if any(not 0 <= operand < len(before) for operand in operation.operands):
        raise ProgramRefused(f"operation {name[:40]} of a formula takes values that there are not")
    given = [before[operand] for operand in operation.operands]
    taken = [kind.dtype for kind in given]
    is_array = name == BROADCAST or any(kind.is_array for kind in given)
    if name in ELEMENT_WISE:
        count, allowed = ELEMENT_WISE[name]
        fits = taken == [dtype] * count and dtype in allowed
    elif name == COMPARE:
        fits = len(taken) == 2 and taken[0] == taken[1] and dtype == "bool" and operation.direction in DIRECTIONS
    elif name == "is_finite":
        fits = len(taken) == 1 and taken[0] in FLOATS and dtype == "bool"
    elif name == SELECT:
        fits = taken == ["bool", dtype, dtype]
    elif name == CONSTRAIN:
        fits = taken == [dtype]
    elif name == CONVERT:
        fits = len(taken) == 1 and dtype in _NUMBERS
    else:
        fits = name == BROADCAST and taken == [dtype] and not given[0].is_array
    if not fits:
        raise ProgramRefused(f"operation {name[:40]!r} of a formula gives {dtype[:20]!r} of {taken[:4]}")
    return Kind(dtype, is_array)


def _flips_sign(operation: Operation, numbers: dict[int, float]) -> bool:
    """Whether an operation of a line is, or may be simplified to, a change of the sign alone."""
    given = [numbers.get(operand) for operand in operation.operands]
    is_product = operation.name in ("multiply", "divide") and -1 in given
    return operation.dtype == "float32" and (is_product or (operation.name == "subtract" and given[0] == 0))


def packed(formulas: Iterable[Formula]) -> bytes:
    """The bytes of formulas that come as one: number k of those whose bytes have the digest DIGEST is the function
    `DIGEST#k`."""
    return _MARK + msgspec.msgpack.encode(tuple(formulas))


_FORMULAS = msgspec.msgpack.Decoder(tuple[Formula, ...])


def unpacked(blob: bytes) -> tuple[Formula, ...]:
    """Formulas from their bytes; whether each makes sense, its `kinds` say. Raises `ProgramRefused` for other bytes."""
    if len(blob) > MAX_BYTES:
        raise ProgramRefused(f"its formulas have {len(blob)} bytes; {MAX_BYTES} are the limit")
    try:
        found = _FORMULAS.decode(memoryview(blob)[len(_MARK) :])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _refused(f"it has no formulas ({error})") from None
    if len(found) > MAX_MEMBERS:
        raise ProgramRefused(f"{len(found)} formulas come as one; {MAX_MEMBERS} are the limit")
    return found


def is_formulas(blob: bytes) -> bool:
    """Whether bytes of a function are said to be formulas."""
    return blob.startswith(_MARK)


def _refused(text: str) -> ProgramRefused:
    """A refusal that may have words of the client's, as long as they like, in its text."""
    return ProgramRefused(text[:280])
