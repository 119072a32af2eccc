"""The analysis that shows that every device of a collective's group enters it.

On islands of several CPU hosts all clients with slices on the same devices share a communicator, which pairs
collectives by their order. A collective that one device enters and another one does not would meet the next client's:
each would see the other's data. So a collective passes only where all devices of its group are sure to take the same
branches and the same number of rounds.

For each value the analysis knows on which devices it is sure to be equal: a *partition* of the devices, as a tuple of
labels; devices with the same label hold equal values. Constants are equal everywhere, the number of a device differs
everywhere, results of operations are as fine as their operands together, and collectives make partitions coarser again.
A branch or a loop puts all that is inside under the partition of its predicate.

Outside of manual computations (`shard_map`) a value is one array, however it lies on devices: its partition says that
all devices see the same one, and what XLA's partitioner inserts there stands under uniform predicates. Two ways lead
out of that: the number of a device, and a manual computation that calls a result replicated though it differs
(`check_vma=False`); the analysis follows both. Where the partitioner may insert collectives under a predicate that
differs, it is not known which; there nothing but scalars is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

from pathways_ray.errors import ProgramRefused
from pathways_ray.executor.compile.attributes import Value, integers, maker, matrix
from pathways_ray.executor.compile.partitions import UNIFORM, Mesh, Partition, Partitions

_GROUPED = frozenset(
    f"stablehlo.{name}" for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_broadcast")
)
_BY_DEVICES = ("stablehlo.all_reduce", "stablehlo.all_gather", "stablehlo.reduce_scatter")
"""Those that may count replicas instead."""

COLLECTIVES = _GROUPED | {"stablehlo.collective_permute"}
_DIFFER = frozenset(("stablehlo.partition_id", "stablehlo.replica_id", "stablehlo.rng"))
"""Operations whose result is a device's own. `rng` draws from a state of the device (outside of manual computations
XLA's partitioner draws once, for all); `rng_bit_generator` and what `jax.random` makes depend on their operands."""

_RETURNS = ("stablehlo.return", "func.return", "sdy.return")
_HARMLESS = frozenset((*_RETURNS, "sdy.constant", "stablehlo.constant"))
_INSTEAD = "move the collective out of the branch or loop, or make the predicate equal on all of them"


@dataclass(frozen=True)
class _Place:
    """The place of an operation.

    `under` is the partition of the branches and loops around it, `manual` the axes for which code is written device by
    device, `free` whether the mesh has others, over which the partitioner may insert collectives. `because` is the
    location of the innermost predicate that differs. `opaque` is set in functions that operations call by themselves.
    """

    under: Partition = UNIFORM
    manual: frozenset[str] = frozenset()
    free: bool = True
    because: str = field(default="", compare=False)
    opaque: bool = False


_Values: TypeAlias = dict[Any, Partition]


def check_collectives(functions: Mapping[str, ir.Operation], meshes: Mapping[str, ir.Attribute]) -> int:
    """The number of devices that a module was made for. Without a mesh it is one: of a `shard_map` over one device JAX
    leaves the collectives alone, and the number of the device.

    Args:
        functions: the module's functions, by name; calls are known to end.
        meshes: its meshes, by name.

    Raises:
        ProgramRefused: not all devices of a collective's group are sure to enter it; or a result is not sure to be one
            array, of which all devices hold the same where they hold the same part.
    """
    found = {name: Mesh.read(attribute) for name, attribute in meshes.items()}
    sizes = {len(mesh.coordinates) for mesh in found.values() if mesh.axes}
    if len(sizes) > 1:
        raise ProgramRefused(f"its meshes have {sorted(sizes)} devices; they must have the same")
    devices = max(sizes, default=1)
    analysis = _Analysis(functions, found, Partitions(devices))
    main = functions["main"]
    results = analysis.function("main", (UNIFORM,) * len(main.regions[0].blocks[0].arguments), _Place())
    for number, partition in enumerate(results):
        if partition != UNIFORM:  # the next program takes it for the same on all devices
            raise ProgramRefused(
                f"its result {number} may differ among devices that should hold the same of it: out_specs of a "
                "jax.shard_map with check_vma=False leave out axes along which it varies. Name them there, or use "
                "jax.lax.psum or all_gather over them"
            )
    return devices


class _Analysis:
    def __init__(
        self, functions: Mapping[str, ir.Operation], meshes: Mapping[str, Mesh], partitions: Partitions
    ) -> None:
        self.functions = functions
        self.meshes = meshes
        self.partitions = partitions
        self._numbers: dict[Any, tuple[int, ...]] = {}
        self._known: dict[tuple[str, tuple[Partition, ...], _Place], tuple[Partition, ...]] = {}

    def function(self, name: str, arguments: tuple[Partition, ...], place: _Place) -> tuple[Partition, ...]:
        """The partitions of what a function returns, for arguments with these."""
        key = (name, arguments, place)
        if key not in self._known:
            self._known[key] = self._region(self.functions[name].regions[0], arguments, {}, place)
        return self._known[key]

    def _region(
        self, region: ir.Region, arguments: Sequence[Partition], values: _Values, place: _Place
    ) -> tuple[Partition, ...]:
        """Enters the values of a region's operations into `values`; the partitions of what it returns."""
        if len(region.blocks) != 1:
            raise ProgramRefused(f"a region of it has {len(region.blocks)} blocks")
        block = region.blocks[0]
        values.update(zip(block.arguments, arguments, strict=True))
        for op in (each.operation for each in block):
            given = [values[operand] for operand in op.operands]
            if op.name in _RETURNS:
                return tuple(given)
            values.update(zip(op.results, self._operation(op, given, values, place), strict=True))
        return ()

    def _operation(
        self, op: ir.Operation, given: list[Partition], values: _Values, place: _Place
    ) -> Sequence[Partition]:
        name, join = op.name, self.partitions.join
        if place.free and place.under != UNIFORM:
            self._check_free(op, place)
        if name in COLLECTIVES:
            return [self._collective(op, given, place)] * len(op.results)
        if (numbers := self._coordinate(op)) is not None:
            self._numbers[op.results[0]] = numbers
            return [self.partitions.of(numbers)]
        if name in _DIFFER and (place.manual or name != "stablehlo.rng"):
            return [self.partitions.of(range(self.partitions.devices))]
        match name:
            case "stablehlo.if" | "stablehlo.case":
                inner = self._under(place, given[0], op)
                branches = [self._region(region, (), values, inner) for region in op.regions]
                return [join(given[0], *each) for each in zip(*branches, strict=True)]
            case "stablehlo.while":
                return self._while(op, given, values, place)
            case "func.call":
                return self.function(ir.FlatSymbolRefAttr(op.attributes["callee"]).value, tuple(given), place)
            case "stablehlo.composite":
                # XLA may have an operation of its own in place of the decomposition, as it has for `chlo.erf`.
                symbol = ir.FlatSymbolRefAttr(op.attributes["decomposition"])
                return [join(made, *given) for made in self.function(symbol.value, tuple(given), place)]
            case "sdy.manual_computation":
                return self._manual(op, given, values, place)
            case "sdy.named_computation":
                return self._region(op.regions[0], given, values, place)
            case "stablehlo.optimization_barrier":
                return given
        return [self._plain(op, given, values, place)] * len(op.results)

    def _coordinate(self, op: ir.Operation) -> tuple[int, ...] | None:
        """An integer of each device, where that follows from the device's number: `jax.lax.axis_index` divides it, and
        takes the remainder. It differs along its own axis only."""
        if op.name == "stablehlo.partition_id":
            return tuple(range(self.partitions.devices))
        if op.name not in ("stablehlo.convert", "stablehlo.divide", "stablehlo.remainder"):
            return None
        numbers = self._numbers.get(op.operands[0])
        element = ir.RankedTensorType(op.results[0].type).element_type
        if numbers is None or not isinstance(element, ir.IntegerType) or element.width < 32:
            return None
        if op.name == "stablehlo.convert":
            return numbers
        by = _constant(op.operands[1])
        if by is None or by <= 0:
            return None
        return tuple(number // by if op.name == "stablehlo.divide" else number % by for number in numbers)

    def _plain(self, op: ir.Operation, given: list[Partition], values: _Values, place: _Place) -> Partition:
        """Of an operation whose results depend on its operands, and on what its regions take from outside."""
        inside = _Place(place.under, place.manual, place.free, place.because, opaque=True)
        taken = self.partitions.join(*given)
        for region in op.regions:
            for block in region:
                result = self._region(region, (taken,) * len(block.arguments), values, inside)
                taken = self.partitions.join(taken, *result)
        if "called_computations" in op.attributes:
            for symbol in ir.ArrayAttr(op.attributes["called_computations"]):
                name = ir.FlatSymbolRefAttr(symbol).value
                arguments = self.functions[name].regions[0].blocks[0].arguments
                taken = self.partitions.join(taken, *self.function(name, (taken,) * len(arguments), inside))
        return taken

    def _while(self, op: ir.Operation, given: list[Partition], values: _Values, place: _Place) -> list[Partition]:
        """Carried values grow finer until they do not change any more."""
        condition, body = op.regions
        carried, inner = list(given), place
        while True:
            (predicate,) = self._region(condition, carried, values, inner)
            following = self._under(inner, predicate, op)
            made = self._region(body, carried, values, following)
            after = [self.partitions.join(predicate, *pair) for pair in zip(carried, made, strict=True)]
            if after == carried and following == inner:
                return after
            carried, inner = after, following

    def _under(self, place: _Place, predicate: Partition, op: ir.Operation) -> _Place:
        if predicate == UNIFORM:
            return place
        under = self.partitions.join(place.under, predicate)
        found = _Place(under, place.manual, place.free, f"{op.name}{where(op)}", place.opaque)
        if place.free:
            self._check_free(op, found)  # branches may have to bring their results into one layout
        return found

    # --- collectives --------------------------------------------------------------------------------------------------

    def _collective(self, op: ir.Operation, given: list[Partition], place: _Place) -> Partition:
        what = f"{op.name}{where(op)}"
        if place.opaque:
            raise ProgramRefused(f"{what} stands inside an operation that is no branch or loop")
        if not place.manual and self.partitions.devices > 1:
            raise ProgramRefused(f"{what} stands outside of a manual computation (jax.shard_map)")
        handle = op.attributes.get("channel_handle")
        # XLA drops one below 1, and counts on from the highest for those of its partitioner.
        if handle is None or not 0 < stablehlo.ChannelHandle(handle).handle < 1 << 31:
            raise ProgramRefused(f"{what} has no channel, so it would not be among the devices of its mesh")
        devices, of = self.partitions.devices, self.partitions.of
        labels = self.partitions.labels(self.partitions.join(*given))
        if op.name == "stablehlo.collective_permute":
            # XLA has all devices meet in it, whether they send or not.
            self._check_entered(what, [range(devices)], place)
            sources: dict[int, int] = {}
            for source, target in _places(op.attributes["source_target_pairs"]).tolist():
                if not (0 <= source < devices and 0 <= target < devices) or target in sources:
                    raise ProgramRefused(f"{what} sends from device {source} to {target} of {devices}")
                sources[target] = source
            return of(labels[sources[device]] if device in sources else -1 for device in range(devices))
        if op.name in _BY_DEVICES and "use_global_device_ids" not in op.attributes:
            raise ProgramRefused(f"{what} does not name its groups by devices")
        groups = [[k for k in group if k != -1] for group in _places(op.attributes["replica_groups"]).tolist()]
        if sorted(k for group in groups for k in group) != list(range(devices)):
            raise ProgramRefused(
                f"{what} has groups {str(groups)[:200]}, which are not all of its {devices} devices once"
            )
        self._check_entered(what, groups, place)
        found: list[Any] = [None] * devices
        for group in groups:
            taken = tuple(labels[device] for device in group)
            for position, device in enumerate(group):
                own = op.name in ("stablehlo.reduce_scatter", "stablehlo.all_to_all")
                found[device] = (taken, position) if own else taken
        return of(found)

    def _check_entered(self, what: str, groups: Sequence[Sequence[int]], place: _Place) -> None:
        for group in groups:
            if not self.partitions.equal_on(place.under, group):
                raise ProgramRefused(
                    f"{what} may be entered by some of devices {list(group)[:8]} only: the predicate of "
                    f"{place.because} may differ among them. Devices that wait there would meet other "
                    f"computations; {_INSTEAD} (jax.lax.psum or all_gather of it, over the same axes)"
                )

    def _check_free(self, op: ir.Operation, place: _Place) -> None:
        """Raises for what the partitioner may need collectives for, under a predicate that differs."""
        if op.name in _HARMLESS or all(ir.RankedTensorType(v.type).rank == 0 for v in (*op.operands, *op.results)):
            return
        raise ProgramRefused(
            f"{op.name}{where(op)} may need collectives that some devices only would enter: the predicate of "
            f"{place.because} may differ among devices, and the mesh has axes that XLA partitions by itself; "
            f"{_INSTEAD}, or make all axes of the mesh manual (axis_names of jax.shard_map)"
        )

    # --- manual computations ------------------------------------------------------------------------------------------

    def _manual(self, op: ir.Operation, given: list[Partition], values: _Values, place: _Place) -> list[Partition]:
        named = sdy.ManualAxesAttr(op.attributes["manual_axes"])
        axes = frozenset(named[k] for k in range(len(named)))
        inputs, outputs = (
            [sdy.TensorShardingAttr(each) for each in sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings]
            for name in ("in_shardings", "out_shardings")
        )
        mesh = self._mesh([*inputs, *outputs])
        manual = place.manual | axes
        free = mesh is not None and any(
            size > 1 for axis, size in zip(mesh.axes, mesh.coordinates.max(0) + 1, strict=True) if axis not in manual
        )
        if mesh is None:
            arguments, made = given, self._region(op.regions[0], given, values, place)
            return list(made)
        join, of = self.partitions.join, self.partitions.of
        arguments = [
            join(partition, of(mesh.along(_axes(sharding) & axes)))
            for partition, sharding in zip(given, inputs, strict=True)
        ]
        inner = _Place(place.under, manual, free, place.because, place.opaque)
        made = self._region(op.regions[0], arguments, values, inner)
        return [self._assembled(m, mesh, _axes(s) & axes) for m, s in zip(made, outputs, strict=True)]

    def _mesh(self, shardings: Sequence[sdy.TensorShardingAttr]) -> Mesh | None:
        """The mesh of a manual computation; None when there is but one device."""
        for sharding in shardings:
            said = sharding.mesh_or_ref
            mesh = self.meshes[ir.FlatSymbolRefAttr(said).value] if "@" in str(said) else Mesh.read(said)
            if len(mesh.coordinates) == self.partitions.devices:
                return mesh
            if len(mesh.coordinates) != 1:
                raise ProgramRefused(f"its meshes have {len(mesh.coordinates)} and {self.partitions.devices} devices")
        if self.partitions.devices > 1:
            raise ProgramRefused("a manual computation (jax.shard_map) of it has no mesh")
        return None

    def _assembled(self, partition: Partition, mesh: Mesh, axes: set[str]) -> Partition:
        """Of an array that was put together from the devices along some axes: each sees what all of them hold."""
        labels = self.partitions.labels(partition)
        rest = mesh.along(set(mesh.axes) - axes)
        held: dict[tuple[int, ...], list[int]] = {}
        for device in np.lexsort(mesh.coordinates.T[::-1]).tolist():
            held.setdefault(rest[device], []).append(labels[device])
        return self.partitions.of(tuple(held[each]) for each in rest)


def _axes(sharding: sdy.TensorShardingAttr) -> set[str]:
    """The axes along which shards differ; a part of an axis counts as all of it."""
    dims = [sdy.DimensionShardingAttr(dim).axes for dim in sharding.dimension_shardings]
    return {sdy.AxisRefAttr(axis).name for axes in (*dims, sharding.unreduced_axes) for axis in axes}


def _places(attribute: ir.Attribute) -> np.ndarray[Any, np.dtype[np.int64]]:
    if not isinstance(attribute, ir.DenseIntElementsAttr):
        raise ProgramRefused(f"a collective has groups in a form that is not known: {str(attribute)[:200]}")
    return matrix(attribute)


def _constant(value: Value) -> int | None:
    op = maker(value)
    if op is None or op.name != "stablehlo.constant" or not isinstance(op.attributes["value"], ir.DenseIntElementsAttr):
        return None
    found = integers(op.attributes["value"]) if ir.RankedTensorType(op.results[0].type).rank == 0 else []
    return found[0] if found else None


_LINE = re.compile(r'"([^"]+)":(\d+)')


def where(op: ir.Operation) -> str:
    """The user's line of an operation, if the module says it: " (train.py:12)"."""
    found = _LINE.search(str(op.location))
    return f" ({found[1]}:{found[2]})" if found else ""
