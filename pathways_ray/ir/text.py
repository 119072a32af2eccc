"""Graphs and plans as text that a person can read."""

from __future__ import annotations

from collections.abc import Iterable

from pathways_ray.ir.graph import Argument, Compute, Graph, Node, Ref, Result, Transfer


def graph_text(graph: Graph) -> str:
    """One line per node.

    The text of a program does not depend on how many devices its slices have, but for the line that names the slice.
    """
    lines = [f"program {graph.name} {{"]
    lines += [f"  {s}" for s in graph.slices]
    lines += [f"  {node_text(graph, index)}" for index in range(len(graph.nodes))]
    return "\n".join([*lines, "}"])


def node_text(graph: Graph, index: int) -> str:
    node: Node = graph.nodes[index]
    match node:
        case Argument():
            return f"%{index} = argument {node.index} : {node.type} @ {node.layout}"
        case Transfer():
            origin = graph.layout_of(node.input)
            return f"%{index} = transfer {node.input} : {node.type} {origin} -> {node.layout}"
        case Result():
            return f"result {_refs(node.inputs)}"
        case Compute():
            outputs = ", ".join(f"{t} @ {p}" for t, p in zip(node.outputs, node.output_layouts, strict=True))
            donated = f" donating {', '.join(str(node.inputs[k]) for k in node.donated)}" if node.donated else ""
            fused = len(graph.recipes[node.recipe].parts)
            parts = f" fused={fused}" if fused > 1 else ""
            where = f"    # {node.where}" if node.where else ""
            return f"%{index} = {node.name}({_refs(node.inputs)}){parts}{donated} : {outputs}{where}"


def _refs(refs: Iterable[Ref]) -> str:
    return ", ".join(map(str, refs))
