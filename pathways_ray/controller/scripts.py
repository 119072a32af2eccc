"""Planning of programs with branches and loops: each segment of their script is lowered and planned by itself."""

from __future__ import annotations

from collections.abc import Mapping

from pathways_ray import limits
from pathways_ray.controller.programs import (
    Lowered,
    buffer_types,
    check_size,
    check_slices,
    lowered_program,
    placed_graph,
)
from pathways_ray.errors import TooLarge
from pathways_ray.ir.graph import Graph
from pathways_ray.ir.passes.split import split
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.script import Script
from pathways_ray.ir.text import order_text, plan_text
from pathways_ray.ir.verify import verify

MAX_SEGMENT_NODES = 4 * limits.MAX_NODES
"""Nodes of all segments: those of a loop's test are in two of them, and in more where loops are nested in tests."""


def lowered_script(graph: Graph, slices: Mapping[int, PlacedSlice], fusion: bool, kept_bytes: int) -> Lowered:
    """The part of a program with branches and loops that the controller keeps; raises what `placed_graph` and
    `lowered_program` raise."""
    script, segments = _segments(graph, slices)
    made = tuple(lowered_program(one, *placed_graph(one, slices, fusion, kept_bytes), slices) for one in segments)
    return Lowered(
        name=graph.name,
        arguments=buffer_types(graph, slices),
        results=made[script.last].results,
        donated=graph.donated_arguments,
        islands={},
        hosts=(),
        gang_islands=(),
        digest="",
        devices=1,
        script=script,
        segments=made,
        takes_memory=any(one.takes_memory for one in made),
    )


def script_texts(graph: Graph, slices: Mapping[int, PlacedSlice], fusion: bool, kept_bytes: int) -> tuple[str, str]:
    """The plan and the order of a program with branches and loops, segment by segment."""
    plans, orders = [], []
    for number, segment in enumerate(_segments(graph, slices)[1]):
        _, placed = placed_graph(segment, slices, fusion, kept_bytes)
        plans.append(f"segment {number}\n{plan_text(placed)}")
        orders.append(f"segment {number}\n{order_text({p.island: p for p in placed})}")
    return "\n".join(plans), "\n".join(orders)


def _segments(graph: Graph, slices: Mapping[int, PlacedSlice]) -> tuple[Script, list[Graph]]:
    check_slices(graph, slices)
    script, segments = split(verify(graph))
    nodes = sum(len(segment.nodes) for segment in segments)
    if nodes > MAX_SEGMENT_NODES:
        raise TooLarge(f"the segments of program {graph.name!r} have {nodes} nodes; the limit is {MAX_SEGMENT_NODES}")
    for segment in segments:
        check_size(segment)
    return script, segments
