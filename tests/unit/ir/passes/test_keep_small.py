"""Donated arguments that keep their memory: which, and what else of a graph changes."""

from __future__ import annotations

import pytest

from pathways_ray.ir.graph import Compute, Graph
from pathways_ray.ir.passes import lower
from pathways_ray.ir.passes.keep_small import keep_small
from pathways_ray.ir.verify import verify
from tests.unit.helpers import Sketch


def donations(graph: Graph) -> list[tuple[int, ...]]:
    return [node.donated for node in graph.nodes if isinstance(node, Compute)]


def chain() -> Graph:
    """f takes arguments 0 and 1, of which it is given the first; g what f made, and is given argument 2 as well."""
    sketch = Sketch()
    here = sketch.slice("0.0")
    x, y, z = (sketch.argument(here) for _ in range(3))
    made = sketch.call("f", x, y, slice=here, donated=(0,))
    return sketch.graph(sketch.call("g", made, z, slice=here, donated=(0, 1)))


@pytest.mark.parametrize(("most", "kept"), [(100, True), (99, False), (0, False)])
def test_arguments_keep_their_memory_where_all_that_are_donated_are_small_together(most: int, kept: bool) -> None:
    graph = lower(chain(), fusion=False)
    assert donations(graph) == [(0,), (0, 1)]
    found = keep_small(graph, [60, 1 << 40, 40], most)
    assert donations(verify(found, lowered=True)) == ([(), (0,)] if kept else [(0,), (0, 1)])
    assert found.donated_arguments == (() if kept else (0, 2))


def test_what_a_program_makes_inside_is_still_given_up() -> None:
    sketch = Sketch()
    here = sketch.slice("0.0")
    made = sketch.call("f", sketch.argument(here), slice=here)
    graph = lower(sketch.graph(sketch.call("g", made, slice=here, donated=(0,))), fusion=False)
    assert keep_small(graph, [0], 1 << 40) is graph
    assert donations(graph) == [(), (0,)]
