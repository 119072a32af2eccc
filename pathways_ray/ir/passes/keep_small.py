"""Leaves small donated arguments their memory.

To reuse it saves as much as is freed when the launch is over, and costs more: a computation that overwrites what it is
given cannot begin before the launch is known to be sent, nor be done again. The array is gone for its client all the
same.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pathways_ray.ir.graph import Argument, Compute, Graph, Node, Ref


def keep_small(graph: Graph, sizes: Sequence[int], most: int) -> Graph:
    """The same graph, where no node takes the memory of arguments, if those that are donated have few bytes together.

    Args:
        sizes: the bytes of each argument on all devices.
        most: so many at the most.
    """
    donated = graph.donated_arguments
    if not donated or sum([sizes[k] for k in donated]) > most:
        return graph
    arguments = {Ref(at) for at, node in enumerate(graph.nodes) if isinstance(node, Argument)}

    def kept(node: Node) -> Node:
        if not isinstance(node, Compute) or not node.donated:
            return node
        taken = tuple(k for k in node.donated if node.inputs[k] not in arguments)
        return node if taken == node.donated else msgspec.structs.replace(node, donated=taken)

    return msgspec.structs.replace(graph, nodes=tuple(map(kept, graph.nodes)))
