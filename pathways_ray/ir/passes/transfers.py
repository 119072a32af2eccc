"""Inserts a transfer wherever a consumer asks for a value in another layout than its producer leaves it in.

A transfer stands right behind the producer, so that it is served as soon as the value is enqueued; one transfer serves
all consumers that ask for the same layout. Transfers that a program has itself (`pw.reshard`) are no stations on the
way: each is a wish for its layout, and the value comes from where it was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from pathways_ray.ir.graph import Compute, Graph, Node, Ref, Transfer, inputs_of, output_count, with_inputs
from pathways_ray.ir.types import Layout

Wish = tuple[Ref, Layout]
"""A value, and the layout in which somebody takes it."""


def insert_transfers(graph: Graph) -> Graph:
    origins = _origins(graph)
    users = _users(graph, origins)
    wanted: dict[Ref, list[Layout]] = {}
    for ref, layout in users:
        wanted.setdefault(ref, []).append(layout)
    moved: dict[tuple[Ref, Layout], Ref] = {}
    nodes: list[Node] = []
    for index, node in enumerate(graph.nodes):
        if isinstance(node, Transfer):
            continue
        asked = _asked(graph, node, origins)
        if isinstance(node, Compute) and node.donated:
            node = _keeping(graph, node, asked, users)
        here = len(nodes)
        nodes.append(with_inputs(node, tuple(moved[one] for one in asked)))
        for output in range(output_count(node)):
            old, new = Ref(index, output), Ref(here, output)
            layout = graph.layout_of(old)
            moved[old, layout] = new
            for other in wanted.get(old, ()):
                if other != layout:
                    moved[old, other] = Ref(len(nodes))
                    nodes.append(Transfer(new, graph.type_of(old), other))
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def _origins(graph: Graph) -> dict[Ref, Ref]:
    """For what transfers of the program bring, the value that something else makes."""
    found: dict[Ref, Ref] = {}
    for index, node in enumerate(graph.nodes):
        if isinstance(node, Transfer):
            found[Ref(index)] = found.get(node.input, node.input)
    return found


def _keeping(graph: Graph, node: Compute, asked: Sequence[Wish], users: Counter[Wish]) -> Compute:
    """A node without the donations of what one transfer brings to others as well, and of what transfers of the program
    have brought to where it was: it takes the original then, which nobody has donated."""

    def keeps(k: int) -> bool:
        origin, layout = asked[k]
        return node.inputs[k] == origin if layout == graph.layout_of(origin) else users[asked[k]] == 1

    donated = tuple(filter(keeps, node.donated))
    return node if donated == node.donated else msgspec.structs.replace(node, donated=donated)


def _asked(graph: Graph, node: Node, origins: dict[Ref, Ref]) -> Sequence[Wish]:
    """The values that `node` takes, each with the layout in which it takes it; a result takes values as they are."""
    layouts = node.input_layouts if isinstance(node, Compute) else [graph.layout_of(ref) for ref in inputs_of(node)]
    return [(origins.get(ref, ref), layout) for ref, layout in zip(inputs_of(node), layouts, strict=True)]


def _users(graph: Graph, origins: dict[Ref, Ref]) -> Counter[Wish]:
    """The number of times that each value is taken in each layout."""
    taken: Counter[Wish] = Counter()
    for node in graph.nodes:
        if not isinstance(node, Transfer):
            taken.update(_asked(graph, node, origins))
    return taken
