"""Fusing chains of calls: what becomes one computation, and what must not."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given

from pathways_ray.ir.graph import Argument, Compute, Graph, Part, Recipe, Ref, inputs_of
from pathways_ray.ir.passes import lower
from pathways_ray.ir.passes.fuse import fuse
from pathways_ray.ir.passes.prune import prune
from pathways_ray.ir.passes.transfers import insert_transfers
from pathways_ray.ir.verify import verify
from tests.unit.helpers import VECTOR, Sketch, calls
from tests.unit.strategies import programs, repeatable


def chain(length: int, names: str = "f") -> Graph:
    """Calls of functions with these names in turn, each of the result of the one before."""
    sketch = Sketch()
    a = sketch.slice("0.0", "0.1")
    x = sketch.argument(a, "x")
    for k in range(length):
        name = names[k % len(names)]
        x = sketch.call(name, x, slice=a, specs="x", output_specs="x", where="user.py:9")
    return sketch.graph(x)


def lengths(graph: Graph) -> list[int]:
    """Of the computations, in parts."""
    return [len(graph.recipes[node.recipe].parts) for node in graph.nodes if isinstance(node, Compute)]


def test_a_long_chain_becomes_few_computations_of_one_recipe() -> None:
    fused = verify(fuse(chain(1024)), lowered=True)
    computes = [node for node in fused.nodes if isinstance(node, Compute)]
    assert len(computes) == 2
    assert len(fused.recipes) == 1
    assert [part.function for part in _parts(fused.recipes[0])] == ["f"] * 512
    assert computes[0].name == "f"
    assert computes[0].where == "user.py:9"
    assert len({msgspec.structs.replace(node, inputs=()) for node in computes}) == 1, "alike but for their input"


@pytest.mark.parametrize(("loop", "line"), [(1, "user.py:1"), (3, "user.py:3"), (9, "user.py:0")])
def test_a_computation_names_the_line_that_may_take_without_end(loop: int, line: str) -> None:
    sketch = Sketch()
    a = sketch.slice("0.0")
    x = sketch.argument(a)
    for k in range(4):
        x = sketch.call(f"f{k}", x, slice=a, where=f"user.py:{k}", has_loop=k == loop)
    (node,) = [node for node in fuse(sketch.graph(x)).nodes if isinstance(node, Compute)]
    assert (node.name, node.where) == ("f0..f3", line)


@pytest.mark.parametrize(("length", "wanted"), [(1, [1]), (2, [2]), (32, [32]), (33, [32, 1]), (65, [32, 32, 1])])
def test_a_computation_has_at_most_32_different_parts(length: int, wanted: list[int]) -> None:
    assert lengths(fuse(chain(length, "fg"))) == wanted


@pytest.mark.parametrize(
    ("names", "lines", "wanted"),
    [("fg", "fg", [128, 72]), ("fg", "", [32] * 6 + [8]), ("fg", "f", [51, 50, 50, 49]), ("fffg", "fg", [200])],
)
def test_four_lines_count_as_one_part(names: str, lines: str, wanted: list[int]) -> None:
    graph = chain(200, names)
    recipes = [
        Recipe(
            tuple(msgspec.structs.replace(part, is_line=part.name in lines) for part in _parts(recipe)), recipe.outputs
        )
        for recipe in graph.recipes
    ]
    assert lengths(fuse(msgspec.structs.replace(graph, recipes=tuple(recipes)))) == wanted


def test_parts_that_repeat_the_one_before_do_not_count() -> None:
    assert lengths(fuse(chain(128))) == [128]
    assert lengths(fuse(chain(128, "f" * 8 + "g" * 8), most=2)) == [16] * 8
    assert lengths(fuse(fuse(chain(128, "f" * 8 + "g" * 8), most=1), most=2)) == [16] * 8


@pytest.mark.parametrize(
    ("estimated_us", "wanted"), [(0, [9]), (1000, [5, 4]), (2500, [2, 2, 2, 2, 1]), (10**9, [1] * 9)]
)
def test_a_computation_has_at_most_5_ms_by_estimate(estimated_us: int, wanted: list[int]) -> None:
    graph = chain(9)
    recipes = [
        msgspec.structs.replace(r, parts=tuple(msgspec.structs.replace(p, estimated_us=estimated_us) for p in r.parts))
        for r in graph.recipes
    ]
    assert lengths(fuse(msgspec.structs.replace(graph, recipes=tuple(recipes)))) == wanted


def test_a_recipe_names_what_each_part_takes() -> None:
    """h(g(f(x), y), y) of three functions becomes one computation of x and y."""
    sketch = Sketch()
    a = sketch.slice("0.0")
    x, y = sketch.argument(a), sketch.argument(a)
    f = sketch.call("f", x, slice=a)
    g = sketch.call("g", f, y, slice=a)
    h = sketch.call("h", g, y, slice=a)
    fused = fuse(sketch.graph(h))
    (recipe,) = fused.recipes
    assert [part.inputs for part in recipe.parts] == [(Ref(-1),), (Ref(0), Ref(-1, 1)), (Ref(1), Ref(-1, 1))]
    assert recipe.outputs == (Ref(2),)
    node = fused.nodes[2]
    assert isinstance(node, Compute)
    assert (node.name, node.inputs) == ("f..h", (x, y))


def fused_calls(build: Callable[[Sketch, int], tuple[Ref, ...]]) -> list[str]:
    sketch = Sketch()
    a = sketch.slice("0.0", "0.1")
    return calls(verify(fuse(insert_transfers(sketch.graph(*build(sketch, a)))), lowered=True))


def test_nothing_is_fused_across_slices() -> None:
    def build(sketch: Sketch, a: int) -> tuple[Ref, ...]:
        b = sketch.slice("0.0", "0.1")
        f = sketch.call("f", sketch.argument(a), slice=a)
        return (sketch.call("g", f, slice=b),)

    assert fused_calls(build) == ["f", "g"]


def test_nothing_is_fused_across_a_change_of_layout() -> None:
    def build(sketch: Sketch, a: int) -> tuple[Ref, ...]:
        f = sketch.call("f", sketch.argument(a), slice=a, output_specs="x")
        return (sketch.call("g", f, slice=a),)

    assert fused_calls(build) == ["f", "g"]


def test_nothing_is_fused_past_another_consumer() -> None:
    def build(sketch: Sketch, a: int) -> tuple[Ref, ...]:
        f = sketch.call("f", sketch.argument(a), slice=a)
        return sketch.call("g", f, slice=a), sketch.call("h", f, slice=a)

    assert fused_calls(build) == ["f", "g", "h"]


def test_a_result_of_the_program_may_be_made_on_the_way() -> None:
    sketch = Sketch()
    a = sketch.slice("0.0", "0.1")
    f = sketch.call("f", sketch.argument(a), slice=a)
    fused = verify(fuse(sketch.graph(f, sketch.call("g", f, slice=a))), lowered=True)
    (node,) = [node for node in fused.nodes if isinstance(node, Compute)]
    assert (node.name, len(node.outputs)) == ("f..g", 2)
    assert fused.recipes[node.recipe].outputs == (Ref(1), Ref(0))
    assert inputs_of(fused.nodes[-1]) == (Ref(1, 1), Ref(1, 0))


def test_results_of_the_rounds_of_a_loop_keep_them_apart() -> None:
    def build(sketch: Sketch, a: int) -> tuple[Ref, ...]:
        f = sketch.call("f", sketch.argument(a), slice=a)
        return f, sketch.call("f", f, slice=a)

    assert fused_calls(build) == ["f", "f"]


def test_another_output_with_another_consumer_keeps_a_node_apart() -> None:
    def build(sketch: Sketch, a: int) -> tuple[Ref, ...]:
        f = sketch.call("f", sketch.argument(a), slice=a, outputs=[VECTOR, VECTOR])
        return sketch.call("g", f, slice=a), sketch.call("h", Ref(f.node, 1), slice=a)

    assert fused_calls(build) == ["f", "g", "h"]


def test_nothing_is_fused_that_would_delay_a_producer() -> None:
    """
    1. f runs, then far (on another slice) works long, then g takes what both made.
    2. Joined with g, f could not start before far has ended. It stays alone.
    """

    def build(sketch: Sketch, a: int) -> tuple[Ref, ...]:
        b = sketch.slice("1.0", "1.1", island=1)
        f = sketch.call("f", sketch.argument(a), slice=a)
        far = sketch.call("far", sketch.argument(b), slice=b)
        return (sketch.call("g", f, far, slice=a),)

    assert fused_calls(build) == ["f", "far", "g"]


def test_a_chain_takes_in_nothing_that_its_head_would_have_to_wait_for() -> None:
    """As above, but far stands between the first two nodes of a chain: those are one, what takes far is apart."""

    def build(sketch: Sketch, a: int) -> tuple[Ref, ...]:
        b = sketch.slice("1.0", "1.1", island=1)
        f = sketch.call("f", sketch.argument(a), slice=a)
        far = sketch.call("far", sketch.argument(b), slice=b)
        g = sketch.call("g", f, slice=a)
        return (sketch.call("h", g, far, slice=a),)

    assert fused_calls(build) == ["far", "f..g", "h"]


def test_what_was_there_before_the_chain_does_not_keep_it_apart() -> None:
    def build(sketch: Sketch, a: int) -> tuple[Ref, ...]:
        b = sketch.slice("1.0", "1.1", island=1)
        far = sketch.call("far", sketch.argument(b), slice=b)
        f = sketch.call("f", sketch.argument(a), slice=a)
        return (sketch.call("g", f, far, slice=a),)

    assert fused_calls(build) == ["far", "f..g"]


def test_an_argument_is_there_from_the_start_wherever_it_stands() -> None:
    """The graph lists an argument before its first use; that may be behind the head of a chain."""

    def build(sketch: Sketch, a: int) -> tuple[Ref, ...]:
        f = sketch.call("f", sketch.argument(a), slice=a)
        late = sketch.argument(a)
        return (sketch.call("g", f, late, slice=a),)

    assert fused_calls(build) == ["f..g"]


def test_an_argument_that_has_to_be_moved_first_keeps_a_node_apart() -> None:
    def build(sketch: Sketch, a: int) -> tuple[Ref, ...]:
        b = sketch.slice("1.0", "1.1", island=1)
        f = sketch.call("f", sketch.argument(a), slice=a)
        late = sketch.argument(b)
        return (sketch.call("g", f, late, slice=a),)

    assert fused_calls(build) == ["f", "g"]


@pytest.mark.parametrize("alone", ["f", "g", "h"])
def test_a_function_that_must_be_alone_is(alone: str) -> None:
    """One with optimisation barriers of its own: inside a composition they would mean something else."""
    sketch = Sketch()
    a = sketch.slice("0.0")
    value = sketch.argument(a)
    for name in ("f", "g", "h"):
        value = sketch.call(name, value, slice=a, no_fusion=name == alone)
    fused = calls(verify(fuse(sketch.graph(value)), lowered=True))
    assert fused == {"f": ["f", "g..h"], "g": ["f", "g", "h"], "h": ["f..g", "h"]}[alone]


def test_a_chain_may_donate_what_its_first_part_reads() -> None:
    """The training step: gradients of the parameters, then an update that takes the parameters' memory."""
    sketch = Sketch()
    a = sketch.slice("0.0")
    parameters, batch = sketch.argument(a), sketch.argument(a)
    gradients = sketch.call("gradients", parameters, batch, slice=a)
    updated = sketch.call("update", parameters, gradients, slice=a, donated=(0, 1))
    fused = lower(sketch.graph(updated))
    node = fused.nodes[2]
    assert isinstance(node, Compute)
    assert (node.inputs, node.donated) == ((parameters, batch), (0,))


def test_a_chain_is_not_moved_behind_a_node_that_takes_what_it_reads() -> None:
    """
    1. f reads x, then taker takes x's memory, then g goes on with what f made.
    2. f..g would stand where g stood, after taker: x is gone by then. They stay apart.
    """

    def build(sketch: Sketch, a: int) -> tuple[Ref, ...]:
        x = sketch.argument(a)
        f = sketch.call("f", x, slice=a)
        taker = sketch.call("taker", x, slice=a, donated=(0,))
        return sketch.call("g", f, slice=a), taker

    assert fused_calls(build) == ["f", "taker", "g"]


@repeatable(45)
@given(programs(calls=12))
def test_fusing_keeps_every_call_once_and_in_order(case: tuple[Sketch, Graph]) -> None:
    before = insert_transfers(prune(case[1]))
    after = fuse(before)
    parts = [part.name for node in after.nodes if isinstance(node, Compute) for part in _parts(_recipe(after, node))]
    assert sorted(parts) == sorted(calls(before))
    assert {node.recipe for node in after.nodes if isinstance(node, Compute)} == set(range(len(after.recipes)))
    assert [n for n in after.nodes if isinstance(n, Argument)] == [n for n in before.nodes if isinstance(n, Argument)]


def _parts(recipe: Recipe) -> list[Part]:
    """The parts of a recipe without loops."""
    parts = [part for part in recipe.parts if isinstance(part, Part)]
    assert len(parts) == len(recipe.parts)
    return parts


def _recipe(graph: Graph, node: Compute) -> Recipe:
    return graph.recipes[node.recipe]
