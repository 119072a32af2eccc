"""Lowers a traced graph to one that can be planned: prune, insert transfers, fuse, roll loops. Each takes and gives
a frozen graph.

`lower` is the whole pipeline in order, with the verifier after every pass.
"""

from __future__ import annotations

from pathways_ray.ir.graph import Graph
from pathways_ray.ir.passes.fuse import fuse
from pathways_ray.ir.passes.prune import prune
from pathways_ray.ir.passes.roll_loops import roll_loops
from pathways_ray.ir.passes.transfers import insert_transfers
from pathways_ray.ir.verify import verify


def lower(graph: Graph, fusion: bool = True) -> Graph:
    """The graph in the form that can be planned: every input in the layout its consumer asks for."""
    graph = verify(prune(verify(graph)))
    graph = verify(insert_transfers(graph), lowered=True)
    if not fusion:
        return graph
    graph = verify(fuse(graph), lowered=True)
    return verify(roll_loops(graph), lowered=True)
