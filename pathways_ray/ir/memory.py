"""Device memory that a program needs: the peak of live bytes on each slice, estimated from the graph alone."""

from __future__ import annotations

import math

from pathways_ray.ir.graph import Argument, Graph, Ref, Result, inputs_of, output_count
from pathways_ray.ir.regions import shard_shape
from pathways_ray.ir.types import item_bytes


def shard_bytes(graph: Graph, ref: Ref) -> int:
    """Bytes that one device of the value's slice holds of it."""
    array, layout = graph.type_of(ref), graph.layout_of(ref)
    return math.prod(shard_shape(array, layout.spec, graph.slice_types[layout.slice])) * item_bytes(array.dtype)


def peak_bytes(graph: Graph) -> dict[int, int]:
    """Most bytes that one device of each slice holds at once, arguments and results included.

    Computed by walking the graph in order; a value lives from its node to its last use. What a computation needs inside
    comes on top: only the compiler knows it.
    """
    last = {ref: users[-1] for ref, users in graph.consumers().items()}
    live: dict[int, int] = {s.id: 0 for s in graph.slices}
    peak = dict(live)
    for index, node in enumerate(graph.nodes):
        for output in range(output_count(node)):
            ref = Ref(index, output)
            live[graph.layout_of(ref).slice] += shard_bytes(graph, ref)
        for slice_id, held in live.items():
            peak[slice_id] = max(peak[slice_id], held)
        if isinstance(node, Result):
            continue
        ended = {ref for ref in inputs_of(node) if last.get(ref) == index and not _is_argument(graph, ref)}
        ended |= {
            Ref(index, k)
            for k in range(output_count(node))
            if Ref(index, k) not in last and not isinstance(node, Argument)
        }
        for ref in ended:
            live[graph.layout_of(ref).slice] -= shard_bytes(graph, ref)
    return peak


def _is_argument(graph: Graph, ref: Ref) -> bool:
    return isinstance(graph.nodes[ref.node], Argument)
