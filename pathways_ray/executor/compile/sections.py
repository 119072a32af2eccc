"""Functions that were written for each device (`jax.shard_map`), taken apart at their sums over devices.

What lies between two sums, a *section*, is a function of one device: small operations, of its own values and of what
was summed. It takes the values that are to be summed of all devices, stacked, and adds them itself, in the order
in which XLA's all-reduce does: within a process to zero, one device behind the other; by gloo, which it has for groups
of several processes, two devices as a ring does, of which each adds one part. So the bits are the same. Where they
might not be, as where a section uses what another one has made, which XLA may make again and round with what is behind
it, a function has no sections here.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from pathways_ray.executor.compile.per_device import Body, Step, body_of
from pathways_ray.formulas.formula import BROADCAST, COMPARE, CONVERT, ELEMENT_WISE, SELECT
from pathways_ray.jax_types import dtype_named

_LOG = logging.getLogger(__name__)

MAX_SUMS = 4
"""Of a function that is taken apart: each may be a section more, and holds the thread that enqueues for some 100 us."""

MAX_EXCHANGED_BYTES = 1 << 15
"""Of all hosts of a computation, between two sections."""

SEGMENTS = 4
"""Parts into which gloo's ring cuts a value of two devices: of two each one adds."""

PAIR = 2
"""Devices whose sums gloo makes in an order that is known here. With more of them each adds another part of a value."""

OPERATIONS_OF_A_SUM = 4
"""XLA's operations for each element that is added: the sum, and what keeps its NaN."""

_OTHERS = ("constant", "is_finite", "reduce", "reshape", "slice", "concatenate", "transpose")
_LOCAL = frozenset(f"stablehlo.{name}" for name in (*ELEMENT_WISE, COMPARE, SELECT, CONVERT, BROADCAST, *_OTHERS))
_REDUCERS = frozenset(f"stablehlo.{name}" for name in ("add", "multiply", "maximum", "minimum", "and", "or"))
_OF_SUMS = ("channel_handle", "replica_groups", "use_global_device_ids")
_OF_SHAPES = (
    "broadcast_dimensions",
    "dimension",
    "dimensions",
    "limit_indices",
    "permutation",
    "start_indices",
    "strides",
)
_ATTRIBUTES = frozenset((*_OF_SUMS, *_OF_SHAPES, "compare_type", "comparison_direction", "result_accuracy", "value"))
"""Those of operations that are taken apart. Others say nothing that is known here, at any length."""

_DTYPES = {
    "i1": "bool",
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"ui{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "bf16": "bfloat16",
}
"""The types of values, by the names that MLIR has for them."""

_SUMMED = frozenset(["f32", "f64", "i32", "i64", "ui32", "ui64"])
"""Types whose sums XLA makes in themselves."""


class Sum(NamedTuple):
    """A sum over devices before a section: `value` of all devices of a group, stacked behind zeros, is its value
    `stack`. `groups` has the devices by their places in the slice, each in one."""

    value: int
    stack: int
    type: jax.ShapeDtypeStruct
    groups: tuple[tuple[int, ...], ...]


class Section(NamedTuple):
    """A part of a function between two of its sums, as a module of one device, or none where nothing is done there:
    the values that it takes and gives, by their numbers. Arguments of the function come first among these. `types` are
    those of what it gives."""

    sums: tuple[Sum, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    types: tuple[jax.ShapeDtypeStruct, ...]
    module: Any


class Sections(NamedTuple):
    """The sections of a function, and the numbers of its results."""

    sections: tuple[Section, ...]
    results: tuple[int, ...]

    @property
    def sums(self) -> int:
        """The number of values that devices exchange."""
        return sum(len(section.sums) for section in self.sections)

    def fits(self, devices: int) -> bool:
        """Whether what some devices exchange between two sections goes in one packet."""
        sizes = [
            sum(math.prod(one.type.shape) * one.type.dtype.itemsize for one in section.sums)
            for section in self.sections
        ]
        return devices * max(sizes) <= MAX_EXCHANGED_BYTES

    @property
    def are_same(self) -> bool:
        """Whether the last section makes the same on all devices: of nothing but sums over all of them."""
        over_all = {one.stack for section in self.sections for one in section.sums if len(one.groups) == 1}
        return over_all.issuperset(self.sections[-1].takes)


def sections_of(lowered: Any, devices: int, most: int, several: bool) -> Sections | None:
    """The sections of a computation that JAX has lowered for several devices; None where it has none, or its code is
    not as this JAX writes it. Then it is one call.

    Args:
        devices: of its slice.
        most: it makes fewer elements than this on a device.
        several: whether hosts form a group, whose sums XLA has gloo make.
    """
    if not most:
        return None
    module = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        try:
            body = body_of(module, devices)
            return _Cut(body, devices, most, several).sections() if body is not None else None
        except Exception:
            _LOG.debug("a computation is not taken apart", exc_info=True)
            return None


def sums_in(compiled: Any) -> int:
    """The number of values that XLA sums over devices in a computation that it has compiled. It knows better what is
    the same on all, and makes a product of that."""
    return sum(found.count("%") for found in re.findall(r" all-reduce\(([^)]*)\)", str(compiled.as_text())))


class _Cut:
    """A function of one device while it is taken apart.

    `numbers` has what its values are in sections; `same`, for each value, the first that an equal operation makes of
    equal values: XLA takes both for one.
    """

    def __init__(self, body: Body, devices: int, most: int, several: bool) -> None:
        self.body, self.devices, self.most, self.several = body, devices, most, several
        self.types = body.steps.types
        self.numbers = dict(zip(body.given, body.arguments, strict=True))
        self.level = dict.fromkeys(body.given, 0)
        self.varying = set(body.varying)
        self.sums: dict[int, tuple[int, tuple[tuple[int, ...], ...]]] = {}
        self.makers: dict[int, Step] = {}
        self.constant: set[int] = set()
        self.used: set[int] = set()
        self.same = {value: value for value in body.given}
        self._first: dict[tuple[str | int, ...], int] = {}
        self._fresh = itertools.count(1 + max(body.arguments, default=0))
        self._stacks: dict[int, int] = {}

    def sections(self) -> Sections | None:
        """The sections of the function; None where it has an operation that these cannot have."""
        repeated = any(len(set(some)) < len(some) for some in (self.body.arguments, self.body.places))
        if repeated or not self._read():
            return None
        last = max((self.level[value] for value in self.body.results), default=0)
        found: list[Section] = []
        for level in range(last + 1):
            section = self._section(level, level == last)
            if section is None:
                return None
            found.append(section)
        return Sections(tuple(found), tuple(found[-1].gives[place] for place in self.body.places))

    def _read(self) -> bool:
        """Whether all steps are known, and few enough."""
        elements = 0
        for step in self.body.steps.steps:
            one, name = step.operation, step.operation.name
            if len(step.makes) != 1:
                return False
            (made,) = step.makes
            names = [one.attributes[k].name for k in range(len(one.attributes))]
            if _element(self.types[made]) not in _DTYPES or not _ATTRIBUTES.issuperset(names):
                return False
            elements += max(map(self._count, (made, *step.takes)))
            if elements >= self.most:
                return False
            said = [str(one.attributes[name]) for name in names]
            taken = sorted(self.same[value] for value in step.takes)  # of a sum either may come first
            self.same[made] = self._first.setdefault((name, *said, *taken, str(self.types[made])), made)
            if name == "stablehlo.all_reduce":
                groups = _groups(one, self.devices)
                if groups is None or (self.several and len(groups[0]) != PAIR):
                    return False
                (value,) = step.takes
                if value not in self.varying or self.same[made] != made:  # XLA may multiply instead; makes one of two
                    return False
                self.sums[made] = value, groups
                self.level[made] = self.level[value] + 1
                self._stacks[made] = next(self._fresh)
                elements += OPERATIONS_OF_A_SUM * len(groups[0]) * self._count(made)
            elif name in _LOCAL and _is_plain(one):
                self.makers[made] = step
                self.level[made] = max((self.level[value] for value in step.takes), default=0)
                if self.constant.issuperset(step.takes):
                    self.constant.add(made)
                if not self.varying.isdisjoint(step.takes):
                    self.varying.add(made)
            else:
                return False
        return elements < self.most and len(self.sums) <= MAX_SUMS

    def _count(self, value: int) -> int:
        return max(1, math.prod(ir.RankedTensorType(self.types[value]).shape))

    def _section(self, level: int, is_last: bool) -> Section | None:
        """The section between the sums of one level and of the next; the last one gives the results."""
        sums = tuple(
            Sum(self.numbers[value], self._stacks[made], _type(self.types[made]), groups)
            for made, (value, groups) in self.sums.items()
            if self.level[made] == level
        )
        wanted = list(self.body.results)
        if not is_last:
            summed = dict.fromkeys(value for value, _ in self.sums.values() if self.level[value] == level)
            wanted = [value for value in summed if value not in self.numbers]
            if not wanted:
                return Section(sums, (), (), (), None)
        needed = self._needed(wanted)
        makes = {self.same[value] for value in needed - self.constant}
        if not self.used.isdisjoint(makes):
            return None
        self.used |= makes
        module, taken = self._module(wanted, needed)
        gives = tuple(next(self._fresh) for _ in wanted)
        if not is_last:
            self.numbers.update(zip(wanted, gives, strict=True))
        takes = tuple(self._stacks[value] if value in self._stacks else self.numbers[value] for value in taken)
        types = [_type(self.types[value]) for value in wanted]
        return Section(sums, takes, gives, tuple(types), module) if taken else None

    def _needed(self, wanted: Sequence[int]) -> set[int]:
        """Those values, made by steps, of which others are made, and these."""
        found: set[int] = set()
        left = [value for value in wanted if value in self.makers]
        while left:
            value = left.pop()
            if value not in found:
                found.add(value)
                left += [operand for operand in self.makers[value].takes if operand in self.makers]
        return found

    def _module(self, wanted: Sequence[int], needed: set[int]) -> tuple[Any, list[int]]:
        """A module that makes some values, and the arguments and sums that it takes."""
        operands = {value for made in needed for value in self.makers[made].takes} | set(wanted)
        taken = [value for value in (*self.body.given, *self.sums) if value in operands]
        types = [
            _stacked(self.types[value], self.sums[value][1]) if value in self.sums else self.types[value]
            for value in taken
        ]
        module = ir.Module.create()
        module.operation.attributes["sym_name"] = ir.StringAttr.get("section")
        with ir.InsertionPoint(module.body):
            main: Any = func.FuncOp("main", (types, [self.types[value] for value in wanted]))
        with ir.InsertionPoint(main.add_entry_block()):
            here: dict[int, Any] = dict(zip(taken, main.arguments, strict=True))
            add = _added_by_gloo if self.several else _added_within
            here.update((value, _summed(here[value], self.types[value], add)) for value in taken if value in self.sums)
            for value, step in self.makers.items():
                if value in needed:
                    copy = step.operation.clone().operation
                    for place, operand in enumerate(step.takes):
                        copy.operands[place] = here[operand]
                    here[value] = copy.results[0]
            func.ReturnOp([here[value] for value in wanted])
        module.operation.verify()
        return module, taken


def _groups(one: Any, devices: int) -> tuple[tuple[int, ...], ...] | None:
    """The groups of devices over which an all-reduce adds; None where it does anything else, or in another type."""
    if _reducer(one) != "stablehlo.add" or "use_global_device_ids" not in one.attributes:
        return None
    groups = np.array(ir.DenseIntElementsAttr(one.attributes["replica_groups"]))
    if sorted(groups.flat) != list(range(devices)) or _element(one.results[0].type) not in _SUMMED:
        return None
    return tuple(tuple(map(int, group)) for group in groups)


def _reducer(one: Any) -> str:
    """The one operation, of its two arguments, that the region of an operation consists of; empty for any other. A copy
    of a region that takes values from outside would take them from another module."""
    (block,) = one.regions[0].blocks
    inside = [each.operation for each in block.operations]
    if len(inside) != 2 or list(inside[0].operands) != list(block.arguments) or inside[0].regions:
        return ""
    gives = inside[1].name == "stablehlo.return" and list(inside[1].operands) == list(inside[0].results)
    return str(inside[0].name) if gives else ""


def _is_plain(one: Any) -> bool:
    """Whether an operation has no region but that of a reduction by one operation."""
    return _reducer(one) in _REDUCERS if one.name == "stablehlo.reduce" else not len(one.regions)


def _element(kind: Any) -> str:
    return str(ir.RankedTensorType(kind).element_type)


def _type(kind: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(ir.RankedTensorType(kind).shape), dtype_named(_DTYPES[_element(kind)]))


def _stacked(kind: Any, groups: Sequence[Sequence[int]]) -> Any:
    """The type of zeros and the values of a group, one behind the other."""
    one = ir.RankedTensorType(kind)
    return ir.RankedTensorType.get((1 + len(groups[0]), *one.shape), one.element_type)


def _summed(stack: Any, kind: Any, add: Callable[[Any, list[Any], Any], Any]) -> Any:
    """The sum of a stack, behind a barrier: what follows is compiled as it is behind an all-reduce."""
    sizes = list(ir.RankedTensorType(stack.type).shape)
    rows = []
    for place in range(sizes[0]):
        cut = [place, *[0] * (len(sizes) - 1)], [place + 1, *sizes[1:]], [1] * len(sizes)
        rows.append(stablehlo.reshape(kind, stablehlo.slice(stack, *map(ir.DenseI64ArrayAttr.get, cut))))
    zeros, *values = rows
    barrier: Any = stablehlo.OptimizationBarrierOp([add(zeros, values, kind)])
    return barrier.results[0]


def _added_within(zeros: Any, values: list[Any], kind: Any) -> Any:
    """Values added as XLA's all-reduce within a process does. Of several NaNs that keeps the last one, a kernel any."""
    total = zeros
    for value in values:
        total = _where_nan(value, zeros, stablehlo.add(total, value), kind)
    return total


def _added_by_gloo(zeros: Any, values: list[Any], kind: Any) -> Any:
    """Two values added as gloo's ring does: each device adds the other's to its own in one part of the elements, the
    first device in the first part, and of two NaNs its own stays."""
    first, second = values
    total = stablehlo.add(first, second)
    one = ir.RankedTensorType(kind)
    count = math.prod(one.shape)
    if not isinstance(one.element_type, ir.FloatType):
        return total
    if count > 2:  # the first part is all of less
        halves = (np.arange(count) < 2 * -(-count // SEGMENTS)).reshape(one.shape)
        is_first = stablehlo.constant(ir.DenseElementsAttr.get(halves.data))
        first = stablehlo.select(is_first, first, second)
    return _where_nan(first, zeros, total, kind)


def _where_nan(value: Any, zeros: Any, otherwise: Any, kind: Any) -> Any:
    """A value where it is NaN, with the bits that sums of it have, and something else where it is not."""
    if not isinstance(ir.RankedTensorType(kind).element_type, ir.FloatType):
        return otherwise
    differ = stablehlo.ComparisonDirectionAttr.get("NE")
    return stablehlo.select(stablehlo.compare(value, value, differ), stablehlo.add(value, zeros), otherwise)
