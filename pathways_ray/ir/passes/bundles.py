"""Groups transfers of a lowered graph into bundles: what leaves together, for one place, and is waited for together.

A bundle is sent, pulled and put together as one, so a tree of many leaves costs about what one array of its bytes does.
Transfers are in one bundle only if none of them has to wait for another one: the same node makes what they take, or all
of it is there from the start; and the same node is the first that asks for what they bring.
"""

from __future__ import annotations

from collections.abc import Mapping

from pathways_ray.ir.graph import Argument, Graph, Ref, Transfer

MAX_EDGES = 256
"""Edges of one bundle: hosts compile one computation that cuts all of them, and one that joins them."""


def bundles(graph: Graph, gangs: Mapping[int, int]) -> list[tuple[int, ...]]:
    """The transfers of a graph by their numbers, those that travel together in one group, in the order of the first
    ones.

    Args:
        gangs: the gang of each node.
    """
    consumers = graph.consumers()
    found: dict[tuple[int, ...], list[list[int]]] = {}
    made: list[list[int]] = []
    for index, node in enumerate(graph.nodes):
        if not isinstance(node, Transfer):
            continue
        producer = -1 if isinstance(graph.nodes[node.input.node], Argument) else node.input.node
        first = min(consumers.get(Ref(index), ()), default=-1)
        source, target = graph.layout_of(node.input).slice, node.layout.slice
        groups = found.setdefault((source, target, producer, first, gangs[index]), [])
        if not groups or len(groups[-1]) == MAX_EDGES:
            groups.append([])
            made.append(groups[-1])
        groups[-1].append(index)
    return [tuple(group) for group in made]
