"""The function of one device that a computation of several consists of (`jax.shard_map`), as XLA would get it.

Its operations are read in their order, those of functions that it calls among them: MLIR's own inliner knows nothing of
calls here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

MAX_OPERATIONS = 256
"""Of a function that is read, calls and what they call included."""


class Step(NamedTuple):
    """An operation, the numbers of the values that it takes, and of those that it makes."""

    operation: Any
    takes: tuple[int, ...]
    makes: tuple[int, ...]


class Steps:
    """The operations of a function and of those that it calls, in their order, with their values numbered."""

    def __init__(self, module: Any) -> None:
        self.symbols = {_symbol(one): one for one in module.body.operations}
        self.steps: list[Step] = []
        self.types: list[Any] = []
        self._left = MAX_OPERATIONS

    def arguments(self, block: Any) -> list[int]:
        """The numbers of new values, of the types of a block's arguments."""
        return [self._new(value.type) for value in block.arguments]

    def read(self, block: Any, given: Sequence[int]) -> tuple[int, ...] | None:
        """Adds the steps of a block; returns the numbers of its results. None where it has too many, or takes values
        from outside."""
        known = dict(zip(block.arguments, given, strict=True))
        for one in (each.operation for each in block.operations):
            self._left -= 1
            if self._left < 0 or any(value not in known for value in one.operands):
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
                self.steps.append(Step(one, takes, makes))
            known.update(zip(one.results, makes, strict=True))
        return None

    def _new(self, kind: Any) -> int:
        self.types.append(kind)
        return len(self.types) - 1


class Body(NamedTuple):
    """The function of one device: its steps, and its arguments and results. `arguments` has the place of each among
    those of the computation, and `places` those of the computation's results among its own. `varying` are arguments of
    which each device has another part."""

    steps: Steps
    given: tuple[int, ...]
    varying: frozenset[int]
    results: tuple[int, ...]
    arguments: tuple[int, ...]
    places: tuple[int, ...]


def body_of(module: Any, devices: int) -> Body | None:
    """The function of each device that a computation consists of: in whole, without anything before or behind it."""
    outer = Steps(module)
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
            if not _are_equal(one.attributes["sharding"], lies.get(step.takes[0])):
                return None
            lies[step.makes[0]] = lies[step.takes[0]]
            same[step.makes[0]] = same.get(step.takes[0], step.takes[0])
        elif name == "sdy.manual_computation":
            said = _shardings(one, "in_shardings")
            if not all(_are_equal(lies.get(value), how) for value, how in zip(step.takes, said, strict=True)):
                return None
            lies.update(zip(step.makes, _shardings(one, "out_shardings"), strict=True))
        elif name != "stablehlo.constant":
            return None
    (step,) = manual
    taken = [same.get(value, value) for value in step.takes]
    *ends, _ = (same.get(value, value) for value in results)
    wanted = [_layout(said) for said in main.attributes["res_attrs"]]
    if not all(_are_equal(lies.get(value), how) for value, how in zip(ends, wanted, strict=False)):
        return None
    split = _split(step, outer, devices)
    if not ends or not set(ends) <= set(step.makes) or not set(taken) <= set(given) or split is None:
        return None
    inner, block = Steps(module), step.operation.regions[0].blocks[0]
    arguments = inner.arguments(block)
    if (made := inner.read(block, arguments)) is None:
        return None
    places = tuple(step.makes.index(value) for value in ends)
    varying = frozenset(value for value, is_split in zip(arguments, split, strict=True) if is_split)
    return Body(inner, tuple(arguments), varying, made, tuple(given.index(value) for value in taken), places)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two layouts are known, and are the same."""
    return one is not None and other is not None and one == other


def _symbol(one: Any) -> str:
    return str(ir.StringAttr(one.attributes["sym_name"]).value) if "sym_name" in one.attributes else ""


def _layout(attributes: Any) -> Any:
    said = ir.DictAttr(attributes)
    return said["sdy.sharding"] if "sdy.sharding" in said else None  # noqa: SIM401 - it has no `get` in all versions


def _shardings(manual: Any, name: str) -> list[Any]:
    made: Any = sdy.TensorShardingPerValueAttr(manual.attributes[name])
    return list(made.shardings)


def _split(manual: Step, steps: Steps, devices: int) -> list[bool] | None:
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
