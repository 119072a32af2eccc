"""The graph of a program called again and again, each time with what the call before gave: one graph for all calls."""

from __future__ import annotations

from pathways_ray.errors import GraphError
from pathways_ray.ir.graph import Argument, Graph, Node, Ref, Result, inputs_of, with_inputs
from pathways_ray.ir.verify import verify

Feeds = tuple[tuple[int, int], ...]
"""(argument, result of the call before) pairs; all other arguments are the same for all calls."""


def repeated(graph: Graph, times: int, feeds: Feeds) -> Graph:
    """`times` calls of a program as one. It takes what the first call takes and gives what the last one gives.

    Raises:
        GraphError: a result has another type or layout than the argument that it is fed to, or what all calls take is
            donated by one.
    """
    fed = dict(feeds)
    arguments = {node.index: Ref(k) for k, node in enumerate(graph.nodes) if isinstance(node, Argument)}
    for argument, result in feeds:
        taken, given = arguments[argument], graph.result.inputs[result]
        for of in (graph.type_of, graph.layout_of):
            if of(taken) != of(given):
                raise GraphError(f"result {result} is {of(given)}; argument {argument}, its next place, {of(taken)}")
    nodes: list[Node] = []
    shared: dict[int, Ref] = {}
    before: tuple[Ref, ...] = ()
    for _ in range(times):
        new: dict[int, int] = {}

        def moved(ref: Ref, new: dict[int, int] = new, before: tuple[Ref, ...] = before) -> Ref:
            node = graph.nodes[ref.node]
            if isinstance(node, Argument):
                return before[fed[node.index]] if before and node.index in fed else shared[node.index]
            return Ref(new[ref.node], ref.output)

        for number, node in enumerate(graph.nodes[:-1]):
            if isinstance(node, Argument):
                if node.index not in shared:
                    shared[node.index] = Ref(len(nodes))
                    nodes.append(node)
                continue
            new[number] = len(nodes)
            nodes.append(with_inputs(node, tuple(map(moved, inputs_of(node)))))
        before = tuple(map(moved, graph.result.inputs))
    nodes.append(Result(before))
    return verify(Graph(graph.name, graph.slices, graph.recipes, tuple(nodes)))
