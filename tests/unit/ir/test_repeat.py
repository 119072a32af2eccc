"""A program repeated is what its calls give one behind the other."""

from __future__ import annotations

import pytest

from pathways_ray.errors import GraphError, TooLarge
from pathways_ray.ir.graph import Argument, Compute, Graph, Ref
from pathways_ray.ir.passes import lower
from pathways_ray.ir.repeat import Feeds, repeated
from pathways_ray.simulation.values import run_alone
from tests.unit.helpers import SCALAR, VECTOR, Sketch


def one_by_one(graph: Graph, times: int, feeds: Feeds, arguments: list[int]) -> list[object]:
    given: list[object] = list(arguments)
    for _ in range(times):
        results = run_alone(graph, given)  # type: ignore[arg-type]
        for argument, result in feeds:
            given[argument] = results[result]
    return list(results)


def step(outputs: int = 1, donated: tuple[int, ...] = ()) -> Graph:
    """f(v, w), and of its first result g(_, w)."""
    sketch = Sketch()
    where = sketch.slice("0.0", "0.1")
    v, w = sketch.argument(where), sketch.argument(where)
    first = sketch.call("f", v, w, slice=where, outputs=(VECTOR,) * outputs, donated=donated)
    last = sketch.call("g", first, w, slice=where)
    return sketch.graph(last, *(Ref(first.node, k) for k in range(1, outputs)))


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize(
    ("outputs", "feeds"), [(1, ((0, 0),)), (2, ((0, 1), (1, 0))), (2, ((1, 0),)), (2, ((0, 0), (1, 0)))]
)
def test_it_gives_what_the_calls_give(times: int, outputs: int, feeds: Feeds) -> None:
    graph = step(outputs)
    for made in (repeated(graph, times, feeds), lower(repeated(graph, times, feeds))):
        assert run_alone(made, [3, 5]) == one_by_one(graph, times, feeds, [3, 5])


def test_a_run_is_one_computation_where_nodes_are_fused() -> None:
    made = repeated(step(), 16, ((0, 0),))
    assert [type(node) for node in made.nodes[:2]] == [Argument, Argument]
    assert sum(isinstance(node, Compute) for node in made.nodes) == 32
    assert sum(isinstance(node, Compute) for node in lower(made).nodes) == 1
    assert sum(isinstance(node, Compute) for node in lower(made, fusion=False).nodes) == 32


def test_what_is_fed_may_be_donated_and_what_stays_may_not() -> None:
    assert run_alone(repeated(step(donated=(0,)), 3, ((0, 0),)), [3, 5]) == one_by_one(step(), 3, ((0, 0),), [3, 5])
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


def test_a_run_of_any_length_is_refused() -> None:
    with pytest.raises(TooLarge):
        repeated(step(), 5000, ((0, 0),))
