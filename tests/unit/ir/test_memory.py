"""Peak memory by the graph alone, compared with a count of what is live at each node."""

from __future__ import annotations

from hypothesis import given

from pathways_ray.ir.graph import Argument, Graph, Ref, output_count
from pathways_ray.ir.memory import peak_bytes, shard_bytes
from pathways_ray.ir.passes import lower
from tests.unit.helpers import SCALAR, VECTOR, Sketch
from tests.unit.strategies import programs, repeatable


def test_bytes_are_those_of_one_device() -> None:
    sketch = Sketch()
    a = sketch.slice("0.0", "0.1", "0.2", "0.3", shape=(2, 2))
    refs = [sketch.argument(a, text) for text in ("", "x", "x+y")]
    graph = sketch.graph(*refs)
    assert [shard_bytes(graph, ref) for ref in refs] == [64, 32, 16]


def test_a_value_lives_from_its_node_to_its_last_use() -> None:
    """
    1. Argument x (64 bytes) stays to the end: its owner holds it.
    2. f makes 64 bytes from it, g a scalar (8) from that: both of f's and g's are there while g runs.
    3. When h runs, f's value is gone: 64 + 8 + 64.
    """
    sketch = Sketch()
    a = sketch.slice("0.0")
    f = sketch.call("f", sketch.argument(a), slice=a)
    g = sketch.call("g", f, slice=a, outputs=[SCALAR])
    assert peak_bytes(sketch.graph(g)) == {a: 64 + 64 + 8}
    h = sketch.call("h", g, slice=a)
    i = sketch.call("i", h, slice=a)
    assert peak_bytes(sketch.graph(i)) == {a: 64 + 64 + 64}


def test_each_slice_has_its_own_peak() -> None:
    sketch = Sketch()
    a, b, idle = sketch.slice("0.0"), sketch.slice("1.0", "1.1"), sketch.slice("2.0")
    y = sketch.call("f", sketch.argument(a), slice=b, specs="x", output_specs="x")
    assert peak_bytes(lower(sketch.graph(y))) == {a: 64, b: 32 + 32, idle: 0}


def test_an_output_nobody_wants_still_takes_its_place() -> None:
    sketch = Sketch()
    a = sketch.slice("0.0")
    f = sketch.call("f", slice=a, outputs=[SCALAR, VECTOR])
    g = sketch.call("g", f, slice=a, outputs=[SCALAR])
    assert peak_bytes(sketch.graph(g)) == {a: 8 + 64}


@repeatable(80)
@given(programs())
def test_the_peak_is_the_most_that_is_live_at_any_node(case: tuple[Sketch, Graph]) -> None:
    graph = lower(case[1], fusion=False)
    users = graph.consumers()
    values = [Ref(index, k) for index, node in enumerate(graph.nodes) for k in range(output_count(node))]

    def live(ref: Ref, at: int) -> bool:
        held_by_caller = isinstance(graph.nodes[ref.node], Argument)
        return ref.node <= at and (held_by_caller or at == ref.node or max(users.get(ref, [0])) >= at)

    for slice_id, peak in peak_bytes(graph).items():
        here = [ref for ref in values if graph.layout_of(ref).slice == slice_id]
        assert peak == max(
            sum(shard_bytes(graph, ref) for ref in here if live(ref, at)) for at in range(len(graph.nodes))
        )
