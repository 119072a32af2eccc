"""The graph's nouns and its text."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given

from pathways_ray.ir.graph import Argument, Compute, Graph, Ref, inputs_of, output_count, renumbered, with_inputs
from pathways_ray.ir.passes import lower
from pathways_ray.ir.text import graph_text
from pathways_ray.transport.messages import encode
from tests.unit.helpers import SCALAR, VECTOR, Sketch
from tests.unit.strategies import programs, repeatable


def two_islands() -> Graph:
    """x on slice 1; f on slice 1 (two outputs); g on slice 2 takes the second one and donates it."""
    sketch = Sketch("two")
    a, b = sketch.slice("0.0", "0.1"), sketch.slice("1.0", "1.1", island=1)
    x = sketch.argument(a, "x")
    f = sketch.call("f", x, slice=a, specs="x", outputs=[VECTOR, SCALAR], where="train.py:7")
    g = sketch.call("g", Ref(f.node, 1), x, slice=b, outputs=[VECTOR], output_specs="x", donated=(0,))
    return sketch.graph(g, f)


def test_every_value_has_a_type_and_a_layout() -> None:
    graph = two_islands()
    assert [str(graph.type_of(ref)) for ref in (Ref(0), Ref(1, 1), Ref(2))] == ["uint64[8]", "uint64[]", "uint64[8]"]
    assert str(graph.layout_of(Ref(0))) == "slice1:P(x)"
    assert str(graph.layout_of(Ref(1, 1))) == "slice1:P()"
    assert graph.consumers() == {Ref(0): [1, 2], Ref(1, 1): [2], Ref(2): [3], Ref(1): [3]}
    assert [node.index for node in graph.arguments] == [0]
    assert [output_count(node) for node in graph.nodes] == [1, 2, 1, 0]


def test_the_text_of_a_graph() -> None:
    assert graph_text(two_islands()).splitlines() == [
        "program two {",
        "  slice1(x=2)",
        "  slice2(x=2)",
        "  %0 = argument 0 : uint64[8] @ slice1:P(x)",
        "  %1 = f(%0) : uint64[8] @ slice1:P(), uint64[] @ slice1:P()    # train.py:7",
        "  %2 = g(%1.1, %0) donating %1.1 : uint64[8] @ slice2:P(x)",
        "  result %2, %1",
        "}",
    ]


def test_the_text_of_a_lowered_graph_shows_transfers_and_fused_parts() -> None:
    sketch = Sketch()
    a = sketch.slice("0.0")
    b = sketch.slice("1.0", island=1)
    x = sketch.argument(a)
    y = sketch.call("f", sketch.call("f", x, slice=b), slice=b)
    assert graph_text(lower(sketch.graph(y))).splitlines()[3:6] == [
        "  %0 = argument 0 : uint64[8] @ slice1:P()",
        "  %1 = transfer %0 : uint64[8] slice1:P() -> slice2:P()",
        "  %2 = f(%1) fused=2 : uint64[8] @ slice2:P()",
    ]


@repeatable(30)
@given(programs())
def test_a_graph_crosses_the_wire_unchanged(case: tuple[Sketch, Graph]) -> None:
    _, graph = case
    assert msgspec.msgpack.decode(encode(graph), type=Graph) == graph
    assert msgspec.msgpack.decode(encode(lower(graph)), type=Graph) == lower(graph)


@repeatable(30)
@given(programs())
def test_renumbering_all_nodes_changes_nothing(case: tuple[Sketch, Graph]) -> None:
    _, graph = case
    assert renumbered(enumerate(graph.nodes)) == graph.nodes
    assert all(with_inputs(node, inputs_of(node)) == node for node in graph.nodes)


def test_renumbering_moves_references_and_refuses_dangling_ones() -> None:
    nodes = two_islands().nodes
    kept = renumbered(iter([(0, nodes[0]), (1, nodes[1]), (9, nodes[1]), (3, nodes[3])][:3]))
    assert isinstance(kept[0], Argument)
    assert isinstance(kept[2], Compute)
    assert kept[2].inputs == (Ref(0),)
    with pytest.raises(KeyError):
        renumbered(iter([(1, nodes[1])]))
