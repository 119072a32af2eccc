"""Inserts a transfer wherever a consumer asks for a value in another layout than its producer leaves it in.

A transfer stands right behind the producer, so that it is served as soon as the value is enqueued; one transfer serves
all consumers that ask for the same layout.
"""

from __future__ import annotations

import msgspec

from pathways_ray.ir.graph import Compute, Graph, Node, Ref, Transfer, inputs_of, output_count, with_inputs
from pathways_ray.ir.types import Layout


def insert_transfers(graph: Graph) -> Graph:
    wanted = _wanted_layouts(graph)
    moved: dict[tuple[Ref, Layout], Ref] = {}
    nodes: list[Node] = []
    for index, node in enumerate(graph.nodes):
        inputs = tuple(
            moved[ref, layout] for ref, layout in zip(inputs_of(node), _asked_layouts(graph, node), strict=True)
        )
        here = len(nodes)
        nodes.append(with_inputs(node, inputs))
        for output in range(output_count(node)):
            old, new = Ref(index, output), Ref(here, output)
            layout = graph.layout_of(old)
            moved[old, layout] = new
            for other in wanted.get(old, ()):
                if other != layout:
                    moved[old, other] = Ref(len(nodes))
                    nodes.append(Transfer(new, graph.type_of(old), other))
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def _asked_layouts(graph: Graph, node: Node) -> tuple[Layout, ...]:
    """The layout in which `node` takes each input; a result takes values as they are."""
    if isinstance(node, Compute):
        return node.input_layouts
    return tuple(graph.layout_of(ref) for ref in inputs_of(node))


def _wanted_layouts(graph: Graph) -> dict[Ref, list[Layout]]:
    wanted: dict[Ref, list[Layout]] = {}
    for node in graph.nodes:
        for ref, layout in zip(inputs_of(node), _asked_layouts(graph, node), strict=True):
            layouts = wanted.setdefault(ref, [])
            if layout not in layouts:
                layouts.append(layout)
    return wanted
