"""What a step moves between slices, counted from the layouts before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from megatron_ptdp.models.interface import Value
from megatron_ptdp.parallel.shapes import StageShapes, is_float, wire_spec
from pathways_ray.client.specs import spec_from_user
from pathways_ray.ir.exchange import exchange
from pathways_ray.ir.plan import Edge
from pathways_ray.ir.regions import shard_shape
from pathways_ray.ir.types import ArrayType, Layout


@dataclass(frozen=True)
class Moved:
    """What one microbatch moves over one boundary of stages, there (values) and back (their gradients), in bytes.

    Attributes:
        to_devices: what all receiving devices together are sent
        between_hosts: what of it passes between hosts: a host is sent each piece once, and copies it to its devices
    """

    to_devices: int = 0
    between_hosts: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.to_devices + other.to_devices, self.between_hosts + other.between_hosts)


def boundary(source: StageShapes, here: pw.VirtualSlice, there: pw.VirtualSlice, scatter: bool) -> Moved:
    """Of the boundary behind `source`, with or without scatter/gather."""
    if here is there:
        return Moved()
    total = Moved()
    tensor = here.shape[1]
    for value in jax.tree.leaves(source.outgoing):
        spec = wire_spec(value, tensor, scatter)
        total += _moved(value, spec, here, there)
        if is_float(value):
            total += _moved(value, spec, there, here)
    return total


def _moved(value: Value, spec: P, source: pw.VirtualSlice, target: pw.VirtualSlice) -> Moved:
    array = ArrayType(value.shape, value.dtype)
    canonical = spec_from_user(spec, source.axes)
    edge = Edge(array, Layout(source.id, canonical), Layout(target.id, canonical))
    found = exchange(edge, source.placed, target.placed)
    item = jax.numpy.dtype(value.dtype).itemsize
    each = 1
    for size in shard_shape(array, canonical, target.type):
        each *= size
    return Moved(each * item * target.size, found.bytes_between_hosts(item))


def explained(shapes: Sequence[StageShapes], slices: Sequence[pw.VirtualSlice], microbatches: int) -> str:
    """A line for each boundary, with and without scatter/gather; bytes of one step of one group of replicas."""
    lines = ["bytes between stages per step, activations and their gradients (with scatter/gather; without):"]
    sums = [Moved(), Moved()]
    for number, (shape, here, there) in enumerate(zip(shapes, slices, slices[1:], strict=False)):
        both = [boundary(shape, here, there, scatter) for scatter in (True, False)]
        sums = [total + one for total, one in zip(sums, both, strict=True)]
        lines.append(f"  stage {number} and {number + 1}: {_line(both, microbatches)}")
    lines.append(f"  all: {_line(sums, microbatches)}")
    return "\n".join(lines)


def _line(both: Sequence[Moved], microbatches: int) -> str:
    with_it, without = ((one.to_devices * microbatches, one.between_hosts * microbatches) for one in both)
    return f"to devices {with_it[0]:,}; {without[0]:,}, between hosts {with_it[1]:,}; {without[1]:,}"


def unshared(shapes: Sequence[StageShapes]) -> list[Any]:
    """Parameters (stage, path) that members of DATA cannot share, as no dimension divides."""
    return [
        (number, name)
        for number, stage in enumerate(shapes)
        if stage.zero
        for name, dimension in zip(stage.names(), jax.tree.leaves(stage.shared), strict=True)
        if dimension < 0
    ]
