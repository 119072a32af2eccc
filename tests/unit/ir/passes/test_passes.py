"""All passes against an interpreter of graphs; prune and insert transfers by example."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given

from pathways_ray.ir.graph import Compute, Graph, Ref, Transfer
from pathways_ray.ir.passes import lower
from pathways_ray.ir.passes.fuse import fuse
from pathways_ray.ir.passes.prune import prune
from pathways_ray.ir.passes.transfers import insert_transfers
from pathways_ray.ir.types import Layout
from pathways_ray.ir.verify import verify
from tests.unit.helpers import VECTOR, Sketch, calls, spec
from tests.unit.interpreters import run_graph, sample
from tests.unit.strategies import programs, repeatable

STEPS: dict[str, Callable[[Graph], Graph]] = {
    "prune": prune,
    "transfers": insert_transfers,
    "fuse": lambda graph: fuse(insert_transfers(graph)),
    "fuse in twos": lambda graph: fuse(fuse(insert_transfers(graph), most=2), most=2),
    "all": lower,
    "all but fuse": lambda graph: lower(graph, fusion=False),
}


@pytest.mark.parametrize("step", STEPS)
@repeatable(45)
@given(programs())
def test_no_pass_changes_what_a_program_computes(step: str, case: tuple[Sketch, Graph]) -> None:
    """Also of programs that donate: the interpreter takes donated values away."""
    sketch, graph = case
    arguments = [sample(node.type, node.index) for node in graph.arguments]
    after = verify(STEPS[step](graph), lowered=step not in ("prune",))
    wanted, found = (run_graph(g, arguments, sketch.signatures) for g in (graph, after))
    assert [value.tolist() for value in found] == [value.tolist() for value in wanted]
    assert after.arguments == graph.arguments
    assert [after.layout_of(ref) for ref in after.result.inputs] == [
        graph.layout_of(ref) for ref in graph.result.inputs
    ], "results stay where the program put them"


# --- prune ------------------------------------------------------------------------------------------------------------


def test_prune_drops_what_nobody_uses_and_keeps_arguments() -> None:
    """
    1. `lost` feeds only `dead`, and nobody uses `dead`.
    2. Both go; the unused argument stays, as the caller passes it.
    """
    sketch = Sketch()
    a = sketch.slice("0.0")
    x, unused = sketch.argument(a), sketch.argument(a)
    lost = sketch.call("lost", x, slice=a)
    kept = sketch.call("kept", x, slice=a)
    sketch.call("dead", lost, slice=a)
    pruned = verify(prune(sketch.graph(kept)))
    assert calls(pruned) == ["kept"]
    assert [node.index for node in pruned.arguments] == [0, 1]
    assert pruned.result.inputs == (Ref(2),)
    assert unused == Ref(1)


@repeatable(40)
@given(programs())
def test_prune_leaves_no_call_without_a_user(case: tuple[Sketch, Graph]) -> None:
    pruned = prune(case[1])
    users = {ref.node for ref in pruned.consumers()}
    assert all(index in users for index, node in enumerate(pruned.nodes) if isinstance(node, Compute))
    assert prune(pruned) == pruned


# --- transfers --------------------------------------------------------------------------------------------------------


def test_a_transfer_stands_right_behind_its_producer_and_serves_all_who_ask_for_its_layout() -> None:
    """
    1. x is produced on slice 1, sharded over its axis.
    2. One consumer takes it as it is, two want it whole on slice 1, one wants it on slice 2.
    3. Two transfers follow x at once: one for each layout but its own.
    """
    sketch = Sketch()
    a, b = sketch.slice("0.0", "0.1"), sketch.slice("1.0", "1.1")
    x = sketch.argument(a, "x")
    same = sketch.call("same", x, slice=a, specs="x")
    whole = [sketch.call(name, x, slice=a) for name in ("whole", "whole too")]
    far = sketch.call("far", x, slice=b, specs="x")
    graph = insert_transfers(sketch.graph(same, *whole, far))
    assert graph.nodes[1:3] == (Transfer(x, VECTOR, Layout(a, ())), Transfer(x, VECTOR, Layout(b, spec("x"))))
    assert sum(isinstance(node, Transfer) for node in graph.nodes) == 2
    assert [node.inputs for node in graph.nodes if isinstance(node, Compute)] == [
        (Ref(0),),
        (Ref(1),),
        (Ref(1),),
        (Ref(2),),
    ]


@repeatable(45)
@given(programs())
def test_transfers_are_as_few_as_can_be_and_as_early(case: tuple[Sketch, Graph]) -> None:
    graph = insert_transfers(case[1])
    made = [(node.input, node.layout) for node in graph.nodes if isinstance(node, Transfer)]
    assert len(made) == len(set(made))
    for index, node in enumerate(graph.nodes):
        if isinstance(node, Transfer):
            assert node.layout != graph.layout_of(node.input)
            assert all(isinstance(between, Transfer) for between in graph.nodes[node.input.node + 1 : index])
    assert insert_transfers(graph) == graph


def test_a_result_is_taken_as_it_lies() -> None:
    sketch = Sketch()
    a = sketch.slice("0.0", "0.1")
    y = sketch.call("f", slice=a, output_specs="x")
    assert insert_transfers(sketch.graph(y)) == sketch.graph(y)


def test_interpreting_shows_a_difference() -> None:
    """The reference itself: another function, another input or another order gives another value."""
    sketch = Sketch()
    a = sketch.slice("0.0")
    x, y = sketch.argument(a), sketch.argument(a)
    results = [
        sketch.call("f", x, y, slice=a),
        sketch.call("f", y, x, slice=a),
        sketch.call("g", x, y, slice=a),
        sketch.call("f", x, x, slice=a),
    ]
    values = run_graph(sketch.graph(*results), [sample(VECTOR, 0), sample(VECTOR, 1)], sketch.signatures)
    assert len({value.tobytes() for value in values}) == 4
    assert all(np.unique(value).size == 8 for value in values)
