"""Which transfers travel together, and what becomes of those that a program has itself."""

from __future__ import annotations

from typing import TypeVar

from pathways_ray.ir.graph import Compute, Graph, Ref, Transfer
from pathways_ray.ir.passes import bundles as bundles_module
from pathways_ray.ir.passes import lower
from pathways_ray.ir.passes.plan_islands import plan_islands
from pathways_ray.ir.plan import Execute, IslandPlan, Receive, Reshard, Send
from pathways_ray.ir.types import Layout
from tests.unit.helpers import VECTOR, Sketch, spec

S = TypeVar("S")


def plans(sketch: Sketch, graph: Graph) -> tuple[IslandPlan, ...]:
    return plan_islands(lower(graph, fusion=False), sketch.placement)


def steps(plan: IslandPlan, kind: type[S]) -> list[S]:
    return [step for step in plan.steps if isinstance(step, kind)]


def test_results_of_one_gang_that_one_gang_takes_travel_together() -> None:
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    f = sketch.call("f", slice=a, outputs=[VECTOR] * 3)
    g = sketch.call("g", *(Ref(f.node, k) for k in range(3)), slice=b)
    here, there = plans(sketch, sketch.graph(g))
    assert [(type(step), len(step.sources)) for step in steps(here, Send)] == [(Send, 3)]
    assert [(type(step), len(step.targets)) for step in steps(there, Receive)] == [(Receive, 3)]
    assert [len(bundle.edges) for bundle in here.bundles] == [3]


def test_nothing_waits_for_what_comes_later_or_is_asked_for_earlier() -> None:
    """
    1. early and late both send to h: late's value must not hold up early's, which g takes before.
    2. x and y are there from the start; the first gang takes x alone, so it does not wait for y.
    """
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    x, y = sketch.argument(a), sketch.argument(a)
    first = sketch.call("first", x, slice=b)
    early, late = sketch.call("early", slice=a), sketch.call("late", slice=a)
    g = sketch.call("g", early, slice=b)
    h = sketch.call("h", early, late, y, slice=b)
    here, there = plans(sketch, sketch.graph(first, g, h))
    assert [len(bundle.edges) for bundle in here.bundles] == [1, 1, 1, 1]
    assert len(steps(here, Send)) == len(steps(there, Receive)) == 4


def test_arguments_travel_together_however_many_there_are() -> None:
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    given = [sketch.argument(a) for _ in range(bundles_module.MAX_EDGES + 3)]
    f = sketch.call("f", *given, slice=b)
    here, _ = plans(sketch, sketch.graph(f))
    assert [len(bundle.edges) for bundle in here.bundles] == [bundles_module.MAX_EDGES, 3]


def test_layouts_on_the_same_devices_change_in_one_computation() -> None:
    sketch = Sketch()
    a = sketch.slice("0.0", "0.1")
    f = sketch.call("f", sketch.argument(a, "x"), sketch.argument(a, "x"), slice=a)
    (plan,) = plans(sketch, sketch.graph(f))
    (step,) = steps(plan, Reshard)
    assert (len(step.sources), len(step.targets)) == (2, 2)


def moved(sketch: Sketch, ref: Ref, slice: int, where: str = "") -> Ref:
    sketch.nodes.append(Transfer(ref, VECTOR, Layout(slice, spec(where) if where else ())))
    return Ref(len(sketch.nodes) - 1)


def test_a_value_comes_straight_from_where_it_was_made() -> None:
    """By way of b, says the program; nobody else wants it there, so it never goes there."""
    sketch = Sketch()
    a, b, c = sketch.slice("0.0"), sketch.slice("1.0", island=1), sketch.slice("2.0", island=2)
    f = sketch.call("f", slice=a)
    graph = sketch.graph(moved(sketch, moved(sketch, f, b), c))
    lowered = lower(graph)
    assert [node.layout.slice for node in lowered.nodes if isinstance(node, Transfer)] == [c]
    assert [plan.island for plan in plans(sketch, graph)] == [0, 2]


def test_one_transfer_serves_the_program_and_the_consumers() -> None:
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    f = sketch.call("f", slice=a)
    there = moved(sketch, f, b)
    g = sketch.call("g", f, slice=b)
    lowered = lower(sketch.graph(there, g))
    assert sum(isinstance(node, Transfer) for node in lowered.nodes) == 1


def test_what_a_transfer_of_the_program_brings_is_not_given_away() -> None:
    """Both transfers are one: h would take the memory of what k reads."""
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    f = sketch.call("f", slice=a)
    one, other = moved(sketch, f, b), moved(sketch, f, b)
    h, k = sketch.call("h", one, slice=b, donated=(0,)), sketch.call("k", other, slice=b)
    lowered = lower(sketch.graph(h, k), fusion=False)
    assert all(node.donated == () for node in lowered.nodes if isinstance(node, Compute))
    assert len(steps(plans(sketch, sketch.graph(h, k))[1], Execute)) == 2
