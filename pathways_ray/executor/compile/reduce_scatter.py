"""Modules without reduce-scatters, for hosts whose collectives have a wrong one: all is reduced, and a part taken.

It moves twice as many bytes. Only those that a module has itself are seen here; XLA may make more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from pathways_ray.compat import module_of, serialized_module

_NAME = b"reduce_scatter"
_KEPT = ("replica_groups", "channel_handle", "use_global_device_ids")


def without_reduce_scatter(module: bytes) -> bytes:
    """A serialised module that computes the same without `stablehlo.reduce_scatter`."""
    if _NAME not in module:
        return module
    read = module_of(module)
    found: list[Any] = []

    def look(op: Any) -> ir.WalkResult:
        if op.name == "stablehlo.reduce_scatter" and _KEPT[2] in op.attributes:
            found.append(op)
        return ir.WalkResult.ADVANCE

    with read.context, ir.Location.unknown():
        read.operation.walk(look)
        for op in found:
            _replace(op)
    return serialized_module(read) if found else module


def _replace(op: Any) -> None:
    groups = ir.DenseIntElementsAttr(op.attributes["replica_groups"])
    listed = np.array([groups[k] for k in range(len(groups))]).reshape(ir.RankedTensorType(groups.type).shape)
    places = np.zeros(listed.max() + 1, np.int32)
    for group in listed:
        places[group] = np.arange(len(group))
    dimension = ir.IntegerAttr(op.attributes["scatter_dimension"]).value
    shape = list(ir.RankedTensorType(op.results[0].type).shape)
    i32 = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))

    def number(value: Any) -> Any:
        return stablehlo.constant(ir.DenseElementsAttr.get(np.asarray(value, np.int32).data))

    with ir.InsertionPoint(op):
        kept = {name: op.attributes[name] for name in _KEPT if name in op.attributes}
        whole = ir.Operation.create(
            "stablehlo.all_reduce", [op.operands[0].type], [op.operands[0]], attributes=kept, regions=1
        )
        op.regions[0].blocks[0].append_to(whole.regions[0])
        device = stablehlo.convert(i32, stablehlo.partition_id())
        place = stablehlo.reshape(i32, stablehlo.dynamic_slice(number(places), [device], [1]))
        starts = [number(0)] * len(shape)
        starts[dimension] = stablehlo.multiply(place, number(shape[dimension]))
        part = stablehlo.dynamic_slice(whole.results[0], starts, shape)
    op.results[0].replace_all_uses_with(part)
    op.erase()
