"""Bytes that a step moves between slices, counted from the layouts before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

import pathways_ray as pw
from megatron_ptdp.parallel.shapes import StageShapes, is_float, names_of, wire_spec


def boundary(source: StageShapes, here: pw.VirtualSlice, there: pw.VirtualSlice, scatter: bool) -> pw.TransferBytes:
    """Bytes of one microbatch over the boundary behind `source`: values there, and their gradients back.

    Args:
        here, there: slices of the stage and of the next one
        scatter: with scatter/gather
    """
    total = pw.TransferBytes()
    if here is there:
        return total
    for value in jax.tree.leaves(source.outgoing):
        spec = wire_spec(value, here.shape[1], scatter)
        total += pw.transfer_bytes(value, here, there, spec)
        if is_float(value):
            total += pw.transfer_bytes(value, there, here, spec)
    return total


def explained(shapes: Sequence[StageShapes], slices: Sequence[pw.VirtualSlice], microbatches: int) -> str:
    """A line for each boundary, with and without scatter/gather; bytes of one step of one group of replicas."""
    lines = ["bytes between stages per step, activations and their gradients (with scatter/gather; without):"]
    sums = [pw.TransferBytes(), pw.TransferBytes()]
    for number, (shape, here, there) in enumerate(zip(shapes, slices, slices[1:], strict=False)):
        both = [boundary(shape, here, there, scatter) for scatter in (True, False)]
        sums = [total + one for total, one in zip(sums, both, strict=True)]
        lines.append(f"  stage {number} and {number + 1}: {_line(both, microbatches)}")
    lines.append(f"  all: {_line(sums, microbatches)}")
    return "\n".join(lines)


def _line(both: Sequence[pw.TransferBytes], microbatches: int) -> str:
    with_it, without = ((one.to_devices * microbatches, one.between_hosts * microbatches) for one in both)
    return f"to devices {with_it[0]:,}; {without[0]:,}, between hosts {with_it[1]:,}; {without[1]:,}"


def unshared(shapes: Sequence[StageShapes]) -> list[Any]:
    """Parameters (stage, path) that members of DATA cannot share, because they divide no dimension."""
    return [
        (number, name)
        for number, stage in enumerate(shapes)
        if stage.zero
        for name, dimension in zip(names_of(stage.parameters), jax.tree.leaves(stage.shared), strict=True)
        if dimension < 0
    ]
