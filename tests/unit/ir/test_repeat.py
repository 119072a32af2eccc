"""A program repeated is what its calls give one behind the other."""

from __future__ import annotations

import pytest

from pathways_ray.errors import GraphError, TooLarge
from pathways_ray.ir.graph import Argument, Compute, Graph, Ref, Result
from pathways_ray.ir.passes import lower
from pathways_ray.ir.repeat import Feeds, joined, repeated
from pathways_ray.ir.text import graph_text
from pathways_ray.simulation.values import made_alone
from pathways_ray.transport.messages import encode
from tests.unit.helpers import SCALAR, VECTOR, Sketch


def one_by_one(graph: Graph, times: int, feeds: Feeds, arguments: list[int]) -> list[object]:
    given: list[object] = list(arguments)
    for _ in range(times):
        results = made_alone(graph, given)[0]  # type: ignore[arg-type]
        for argument, result in feeds:
            given[argument] = results[result]
    return list(results)


def step(outputs: int = 1, donated: tuple[int, ...] = (), no_fusion: bool = False) -> Graph:
    """f(v, w), and of its first result g(_, w)."""
    sketch = Sketch()
    where = sketch.slice("0.0", "0.1")
    v, w = sketch.argument(where), sketch.argument(where)
    first = sketch.call("f", v, w, slice=where, outputs=(VECTOR,) * outputs, donated=donated)
    last = sketch.call("g", first, w, slice=where, no_fusion=no_fusion)
    return sketch.graph(last, *(Ref(first.node, k) for k in range(1, outputs)))


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize(
    ("outputs", "feeds"), [(1, ((0, 0),)), (2, ((0, 1), (1, 0))), (2, ((1, 0),)), (2, ((0, 0), (1, 0)))]
)
def test_it_gives_what_the_calls_give(times: int, outputs: int, feeds: Feeds) -> None:
    graph = step(outputs)
    for made in (repeated(graph, times, feeds), lower(repeated(graph, times, feeds))):
        assert made_alone(made, [3, 5])[0] == one_by_one(graph, times, feeds, [3, 5])


def computes(graph: Graph) -> int:
    return sum(isinstance(node, Compute) for node in graph.nodes)


def test_calls_of_a_program_that_is_one_computation_are_one_loop() -> None:
    made = repeated(step(), 16, ((0, 0),))
    assert [type(node) for node in made.nodes] == [Argument, Argument, Compute, Result]
    assert "fused=32 as 16 x (f; g)" in graph_text(made)
    assert lower(made) == made
    assert len(encode(made)) < 2 * len(encode(step()))


def test_a_loop_may_be_repeated_again() -> None:
    made = repeated(repeated(step(), 4, ((0, 0),)), 3, ((0, 0),))
    assert "fused=24 as 3 x (4 x (f; g))" in graph_text(made)
    assert made_alone(made, [3, 5])[0] == one_by_one(step(), 12, ((0, 0),), [3, 5])


def test_calls_of_a_program_of_several_computations_are_copies_of_its_nodes() -> None:
    made = repeated(step(no_fusion=True), 16, ((0, 0),))
    assert [type(node) for node in made.nodes[:2]] == [Argument, Argument]
    assert computes(made) == 32


def test_without_fusion_each_call_stays_a_node() -> None:
    made = repeated(step(), 16, ((0, 0),), fusion=False)
    assert computes(made) == computes(lower(made, fusion=False)) == 32
    assert computes(lower(made)) == 1


def test_what_is_fed_may_be_donated_and_what_stays_may_not() -> None:
    assert made_alone(repeated(step(donated=(0,)), 3, ((0, 0),)), [3, 5])[0] == one_by_one(step(), 3, ((0, 0),), [3, 5])
    with pytest.raises(GraphError, match="uses it afterwards"):
        repeated(step(donated=(0,)), 2, ((1, 0),))


def test_a_result_has_to_fit_where_it_is_fed() -> None:
    sketch = Sketch()
    where = sketch.slice("0.0", "0.1")
    graph = sketch.graph(sketch.call("f", sketch.argument(where, "x"), slice=where, specs="x", outputs=(SCALAR,)))
    with pytest.raises(GraphError, match="result 0"):
        repeated(graph, 2, ((0, 0),))
    sketch = Sketch()
    where = sketch.slice("0.0", "0.1")
    graph = sketch.graph(sketch.call("f", sketch.argument(where, "x"), slice=where, specs="x"))
    with pytest.raises(GraphError, match="result 0"):
        repeated(graph, 2, ((0, 0),))


def test_more_nodes_than_a_program_may_have_are_refused_and_rounds_of_a_loop_are_no_nodes() -> None:
    with pytest.raises(TooLarge, match="8192"):
        repeated(step(no_fusion=True), 5000, ((0, 0),))
    assert computes(repeated(step(), 5000, ((0, 0),))) == 1


def two_in_turn(donated: tuple[int, ...] = ()) -> tuple[Graph, Graph]:
    """f(v, w) with two results, and g(a, b)."""
    graphs = []
    for name, outputs in (("f", 2), ("g", 1)):
        sketch = Sketch(name)
        where = sketch.slice("0.0", "0.1")
        a, b = sketch.argument(where), sketch.argument(where)
        made = sketch.call(name, a, b, slice=where, outputs=(VECTOR,) * outputs, donated=donated)
        graphs.append(sketch.graph(*(Ref(made.node, k) for k in range(outputs))))
    return graphs[0], graphs[1]


def test_programs_in_turn_are_one_that_gives_what_they_give() -> None:
    """x, y = f(a, b); z = g(y, a)."""
    f, g = two_in_turn()
    taken = ((Ref(-1, 0), Ref(-1, 1)), (Ref(0, 1), Ref(-1, 0)))
    made = joined((f, g), taken, (Ref(0, 0), Ref(1, 0)))
    x, y = made_alone(f, [3, 5])[0]
    (z,) = made_alone(g, [y, 3])[0]
    assert made_alone(made, [3, 5])[0] == [x, z]
    assert computes(made) == 2
    assert "fused=32 as 16 x (f; g)" in graph_text(repeated(made, 16, ((0, 1),)))


def test_programs_in_turn_that_do_not_fit_are_refused() -> None:
    """A value that was donated is used again; results of another type; an argument that nobody takes."""
    f, g = two_in_turn(donated=(0,))
    with pytest.raises(GraphError, match="uses it afterwards"):
        joined((f, g), ((Ref(-1, 0), Ref(-1, 1)), (Ref(0, 1), Ref(-1, 0))), (Ref(1, 0),))
    sketch = Sketch("small")
    where = sketch.slice("0.0", "0.1")
    small = sketch.graph(sketch.call("s", sketch.argument(where), slice=where, outputs=(SCALAR,)))
    with pytest.raises(GraphError, match="argument 1, its next place"):
        joined((small, g), ((Ref(-1, 0),), (Ref(-1, 0), Ref(0, 0))), (Ref(1, 0),))
    with pytest.raises(GraphError, match=r"only the arguments \[0, 2\]"):
        joined((g,), ((Ref(-1, 0), Ref(-1, 2)),), (Ref(0, 0),))


@pytest.mark.parametrize("fusion", [True, False])
def test_arguments_that_vary_come_behind_those_of_the_first_call(fusion: bool) -> None:
    graph = step()
    made = repeated(graph, 3, ((0, 0),), fusion, varied=(1,))
    value = 3
    for w in (5, 7, 9):
        (value,) = made_alone(graph, [value, w])[0]  # type: ignore[assignment]
    assert made_alone(lower(made, fusion=fusion), [3, 5, 7, 9])[0] == [value]
    assert [node.index for node in made.arguments] == [0, 1, 2, 3]
