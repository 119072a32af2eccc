"""Drops compute nodes whose results are unused. Arguments stay: their number is the caller's contract."""

from __future__ import annotations

import msgspec

from pathways_ray.ir.graph import Argument, Graph, Result, inputs_of, renumbered


def prune(graph: Graph) -> Graph:
    needed: set[int] = set()
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        if isinstance(node, Argument | Result) or index in needed:
            needed.add(index)
            needed.update(ref.node for ref in inputs_of(node))
    nodes = renumbered((i, node) for i, node in enumerate(graph.nodes) if i in needed)
    return msgspec.structs.replace(graph, nodes=nodes)
