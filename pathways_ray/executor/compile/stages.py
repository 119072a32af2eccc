"""Functions that were written for each device (`jax.shard_map`), taken apart at their sums over devices.

What lies between two sums, a *stage*, is a function of one device: element-wise operations, of its own values and of
what was summed. It takes the values that are to be summed of all devices, stacked, and adds them itself, in the order
in which XLA's all-reduce within a process does: to zero, one device behind the other. So the bits are the same. Where
they might not be, as where a stage uses what another one has made, which XLA may make anew and round with what is
behind it, a function has no stages here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy, stablehlo

from pathways_ray.formulas.formula import BROADCAST, COMPARE, CONVERT, ELEMENT_WISE, SELECT

MAX_OPERATIONS = 256
"""Of a function that is taken apart, those that it calls included."""

_LOCAL = frozenset(f"stablehlo.{name}" for name in (*ELEMENT_WISE, COMPARE, SELECT, CONVERT, BROADCAST, "is_finite"))
_SUMMED = {"f32": "float32", "f64": "float64", "i32": "int32", "i64": "int64", "ui32": "uint32", "ui64": "uint64"}
"""Types whose sums XLA makes in themselves."""


class Sum(NamedTuple):
    """A sum over devices before a stage: `value` of all devices of a group, stacked behind zeros, is its value `stack`.
    `groups` has the devices by their places in the slice, each in one."""

    value: int
    stack: int
    shape: tuple[int, ...]
    dtype: str
    groups: tuple[tuple[int, ...], ...]


class Stage(NamedTuple):
    """A part of a function between two of its sums, as a module of one device: the values that it takes and gives, by
    their numbers. Arguments of the function come first among these."""

    sums: tuple[Sum, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    module: Any


class Stages(NamedTuple):
    """The stages of a function, and the numbers of its results."""

    stages: tuple[Stage, ...]
    results: tuple[int, ...]

    @property
    def has_sums(self) -> bool:
        """Whether devices exchange values."""
        return any(stage.sums for stage in self.stages)


def stages_of(lowered: Any, devices: int, here: int, most: int) -> Stages | None:
    """The stages of a computation that JAX has lowered for several devices; None where it has none.

    Args:
        devices: of its slice.
        here: those of them that are of this host. Sums over others are no affair of one host.
        most: it makes fewer elements than this on a device.
    """
    if not most:
        return None
    module = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        body = _body(module, devices)
        found = _Cut(body, devices, most).stages() if body is not None else None
        return found if found is not None and (here == devices or not found.has_sums) else None


class _Step(NamedTuple):
    """An operation, the numbers of the values that it takes, and of those that it makes."""

    operation: Any
    takes: tuple[int, ...]
    makes: tuple[int, ...]


class _Steps:
    """The operations of a function and of those that it calls, in their order, with their values numbered."""

    def __init__(self, module: Any) -> None:
        self.symbols = {_symbol(one): one for one in module.body.operations}
        self.steps: list[_Step] = []
        self.types: list[Any] = []

    def arguments(self, block: Any) -> list[int]:
        """The numbers of new values, of the types of a block's arguments."""
        return [self._new(value.type) for value in block.arguments]

    def read(self, block: Any, given: Sequence[int]) -> tuple[int, ...] | None:
        """Adds the steps of a block; returns the numbers of its results. None where it has too many, or takes values
        from outside."""
        known = dict(zip(block.arguments, given, strict=True))
        for one in (each.operation for each in block.operations):
            if any(value not in known for value in one.operands) or len(self.steps) >= MAX_OPERATIONS:
                return None
            takes = tuple(known[value] for value in one.operands)
            if one.name in ("func.return", "sdy.return"):
                return takes
            if one.name == "func.call":
                called = self.symbols[ir.FlatSymbolRefAttr(one.attributes["callee"]).value]
                if (makes := self.read(called.entry_block, takes)) is None:
                    return None
            else:
                makes = tuple(self._new(value.type) for value in one.results)
                self.steps.append(_Step(one, takes, makes))
            known.update(zip(one.results, makes, strict=True))
        return None

    def _new(self, kind: Any) -> int:
        self.types.append(kind)
        return len(self.types) - 1


class _Body(NamedTuple):
    """The function of one device: its steps, and its arguments and results. `arguments` has the place of each among
    those of the computation, and `places` those of the computation's results among its own. `varying` are arguments of
    which each device has another part."""

    steps: _Steps
    given: tuple[int, ...]
    varying: frozenset[int]
    results: tuple[int, ...]
    arguments: tuple[int, ...]
    places: tuple[int, ...]


def _body(module: Any, devices: int) -> _Body | None:
    """The function of each device that a computation consists of: in whole, without anything before or behind it."""
    outer = _Steps(module)
    main = outer.symbols["main"]
    given = outer.arguments(main.entry_block)
    results = outer.read(main.entry_block, given)
    manual = [step for step in outer.steps if step.operation.name == "sdy.manual_computation"]
    if results is None or len(manual) != 1 or not all(name in main.attributes for name in ("arg_attrs", "res_attrs")):
        return None
    lies = {value: _layout(said) for value, said in zip(given, main.attributes["arg_attrs"], strict=True)}
    same: dict[int, int] = {}
    for step in outer.steps:
        one, name = step.operation, step.operation.name
        if name == "sdy.sharding_constraint":
            if one.attributes["sharding"] != lies.get(step.takes[0]):
                return None
            lies[step.makes[0]] = lies[step.takes[0]]
            same[step.makes[0]] = same.get(step.takes[0], step.takes[0])
        elif name == "sdy.manual_computation":
            said = _shardings(one, "in_shardings")
            if any(lies.get(value) != how for value, how in zip(step.takes, said, strict=True)):
                return None
            lies.update(zip(step.makes, _shardings(one, "out_shardings"), strict=True))
        elif name != "stablehlo.constant":
            return None
    (step,) = manual
    taken = [same.get(value, value) for value in step.takes]
    *ends, _ = (same.get(value, value) for value in results)
    wanted = [_layout(said) for said in main.attributes["res_attrs"]]
    if any(lies.get(value) != how for value, how in zip(ends, wanted, strict=False)):
        return None
    split = _split(step, outer, devices)
    if not ends or not set(ends) <= set(step.makes) or not set(taken) <= set(given) or split is None:
        return None
    inner, block = _Steps(module), step.operation.regions[0].blocks[0]
    arguments = inner.arguments(block)
    if (made := inner.read(block, arguments)) is None:
        return None
    places = tuple(step.makes.index(value) for value in ends)
    varying = frozenset(value for value, is_split in zip(arguments, split, strict=True) if is_split)
    return _Body(inner, tuple(arguments), varying, made, tuple(given.index(value) for value in taken), places)


def _symbol(one: Any) -> str:
    return str(ir.StringAttr(one.attributes["sym_name"]).value) if "sym_name" in one.attributes else ""


def _layout(attributes: Any) -> Any:
    said = ir.DictAttr(attributes)
    return said["sdy.sharding"] if "sdy.sharding" in said else None  # noqa: SIM401 - it has no `get` in all versions


def _shardings(manual: Any, name: str) -> list[Any]:
    made: Any = sdy.TensorShardingPerValueAttr(manual.attributes[name])
    return list(made.shardings)


def _split(manual: _Step, steps: _Steps, devices: int) -> list[bool] | None:
    """For each argument of a manual computation whether it is split over all axes of the mesh. None unless it is one of
    single devices, which the mesh has in the order of the slice."""
    one = manual.operation
    said: Any = sdy.ManualAxesAttr(one.attributes["manual_axes"])
    names = {said[k] for k in range(len(said))}
    found = []
    for made in (*_shardings(one, "in_shardings"), *_shardings(one, "out_shardings")):
        sharding: Any = sdy.TensorShardingAttr(made)
        mesh: Any = sharding.mesh_or_ref
        if isinstance(mesh, ir.FlatSymbolRefAttr):
            mesh = steps.symbols[mesh.value].attributes["mesh"]
        axes: list[Any] = [sdy.MeshAxisAttr(axis) for axis in sdy.MeshAttr(mesh).axes]
        if list(sdy.MeshAttr(mesh).device_ids) or math.prod(axis.size for axis in axes) != devices:
            return None
        if names != {axis.name for axis in axes}:
            return None
        dimensions: list[Any] = [sdy.DimensionShardingAttr(each) for each in sharding.dimension_shardings]
        over: list[Any] = [sdy.AxisRefAttr(axis) for each in dimensions for axis in each.axes]
        found.append(names == {axis.name for axis in over if axis.sub_axis_info is None})
    return found[: len(manual.takes)]


class _Cut:
    """A function of one device while it is taken apart.

    `numbers` has what its values are in stages; `same`, for each value, the first that an equal operation makes of
    equal values: XLA takes both for one.
    """

    def __init__(self, body: _Body, devices: int, most: int) -> None:
        self.body, self.devices, self.most = body, devices, most
        self.types = body.steps.types
        self.numbers = dict(zip(body.given, body.arguments, strict=True))
        self.level = dict.fromkeys(body.given, 0)
        self.varying = set(body.varying)
        self.sums: dict[int, tuple[int, tuple[tuple[int, ...], ...]]] = {}
        self.makers: dict[int, _Step] = {}
        self.constant: set[int] = set()
        self.used: set[int] = set()
        self.same = {value: value for value in body.given}
        self._first: dict[tuple[str | int, ...], int] = {}
        self._fresh = itertools.count(1 + max(body.arguments, default=0))
        self._stacks: dict[int, int] = {}

    def stages(self) -> Stages | None:
        """The stages of the function; None where an operation is none that these may have."""
        if not self._read():
            return None
        last = max((self.level[value] for value in self.body.results), default=0)
        found: list[Stage] = []
        for level in range(last + 1):
            stage = self._stage(level, level == last)
            if stage is None:
                return None
            found.append(stage)
        return Stages(tuple(found), tuple(found[-1].gives[place] for place in self.body.places))

    def _read(self) -> bool:
        """Whether all steps are known, and few enough."""
        elements = 0
        for step in self.body.steps.steps:
            one, name = step.operation, step.operation.name
            if len(step.makes) != 1:
                return False
            (made,) = step.makes
            said = [str(one.attributes[k].attr) for k in range(len(one.attributes))]
            taken = sorted(self.same[value] for value in step.takes)  # of a sum either may come first
            self.same[made] = self._first.setdefault((name, *said, *taken, str(self.types[made])), made)
            if name == "stablehlo.all_reduce":
                groups = _groups(one, self.devices)
                if groups is None:
                    return False
                (value,) = step.takes
                if value not in self.varying:  # XLA may multiply instead
                    return False
                self.sums[made] = value, groups
                self.level[made] = self.level[value] + 1
                self._stacks[made] = next(self._fresh)
                elements += (1 + len(groups[0])) * self._count(made)
            elif name in _LOCAL or name == "stablehlo.constant":
                self.makers[made] = step
                self.level[made] = max((self.level[value] for value in step.takes), default=0)
                if self.constant.issuperset(step.takes):
                    self.constant.add(made)
                if not self.varying.isdisjoint(step.takes):
                    self.varying.add(made)
                elements += self._count(made)
            else:
                return False
        return elements < self.most

    def _count(self, value: int) -> int:
        return math.prod(ir.RankedTensorType(self.types[value]).shape)

    def _stage(self, level: int, is_last: bool) -> Stage | None:
        """What stands between the sums of one level and of the next; the last stage gives the results."""
        sums = tuple(
            Sum(self.numbers[value], self._stacks[made], *_type(self.types[made]), groups)
            for made, (value, groups) in self.sums.items()
            if self.level[made] == level
        )
        wanted = list(self.body.results)
        if not is_last:
            summed = dict.fromkeys(value for value, _ in self.sums.values() if self.level[value] == level)
            wanted = [value for value in summed if value not in self.numbers]
            if not wanted:
                return Stage(sums, (), (), None)
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
        return Stage(sums, takes, gives, module) if taken else None

    def _needed(self, wanted: Sequence[int]) -> set[int]:
        """What steps make of that which some values are made of."""
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
        module.operation.attributes["sym_name"] = ir.StringAttr.get("stage")
        with ir.InsertionPoint(module.body):
            main: Any = func.FuncOp("main", (types, [self.types[value] for value in wanted]))
        with ir.InsertionPoint(main.add_entry_block()):
            here: dict[int, Any] = dict(zip(taken, main.arguments, strict=True))
            here.update((value, _summed(here[value], self.types[value])) for value in taken if value in self.sums)
            for value, step in self.makers.items():
                if value in needed:
                    copy = step.operation.clone().operation
                    for place, operand in enumerate(step.takes):
                        copy.operands[place] = here[operand]
                    here[value] = copy.results[0]
            func.ReturnOp([here[value] for value in wanted])
        return module, taken


def _groups(one: Any, devices: int) -> tuple[tuple[int, ...], ...] | None:
    """The groups of devices over which an all-reduce adds; None where it is none of plain sums."""
    (block,) = one.regions[0].blocks
    inside = [each.operation for each in block.operations]
    is_sum = [each.name for each in inside] == ["stablehlo.add", "stablehlo.return"]
    if not is_sum or list(inside[0].operands) != list(block.arguments) or "use_global_device_ids" not in one.attributes:
        return None
    groups = np.array(ir.DenseIntElementsAttr(one.attributes["replica_groups"]))
    if sorted(groups.flat) != list(range(devices)) or _element(one.results[0].type) not in _SUMMED:
        return None
    return tuple(tuple(map(int, group)) for group in groups)


def _element(kind: Any) -> str:
    return str(ir.RankedTensorType(kind).element_type)


def _type(kind: Any) -> tuple[tuple[int, ...], str]:
    return tuple(ir.RankedTensorType(kind).shape), _SUMMED[_element(kind)]


def _stacked(kind: Any, groups: Sequence[Sequence[int]]) -> Any:
    """The type of zeros and the values of a group, one behind the other."""
    one = ir.RankedTensorType(kind)
    return ir.RankedTensorType.get((1 + len(groups[0]), *one.shape), one.element_type)


def _summed(stack: Any, kind: Any) -> Any:
    """The sum of a stack, behind a barrier: what follows is compiled as it is behind an all-reduce. Of several NaNs XLA's
    all-reduce keeps the last one, a kernel any."""
    sizes = list(ir.RankedTensorType(stack.type).shape)
    rows = []
    for place in range(sizes[0]):
        cut = [place, *[0] * (len(sizes) - 1)], [place + 1, *sizes[1:]], [1] * len(sizes)
        rows.append(stablehlo.reshape(kind, stablehlo.slice(stack, *map(ir.DenseI64ArrayAttr.get, cut))))
    zeros, *values = rows
    total = zeros
    for value in values:
        total = stablehlo.add(total, value)
        if isinstance(ir.RankedTensorType(kind).element_type, ir.FloatType):
            differ = stablehlo.ComparisonDirectionAttr.get("NE")
            is_nan = stablehlo.compare(value, value, differ)
            total = stablehlo.select(is_nan, stablehlo.add(value, zeros), total)
    barrier: Any = stablehlo.OptimizationBarrierOp([total])
    return barrier.results[0]
