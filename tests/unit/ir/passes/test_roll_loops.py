"""Loops in recipes: by example, and by running what was rolled beside what it was made from."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray import limits
from pathways_ray.errors import GraphError
from pathways_ray.ir.evaluate import evaluate
from pathways_ray.ir.graph import Graph, Loop, Part, Recipe, Ref, functions_in
from pathways_ray.ir.passes import lower
from pathways_ray.ir.passes.roll_loops import MAX_PERIOD, MIN_ROUNDS, _Search, rolled
from pathways_ray.ir.text import graph_text, recipe_text
from pathways_ray.ir.verify import verify
from tests.unit.helpers import Sketch
from tests.unit.strategies import repeatable


def recipe(*parts: tuple[str, tuple[tuple[int, int], ...]], outputs: tuple[tuple[int, int], ...]) -> Recipe:
    return Recipe(
        tuple(Part(name, name, tuple(Ref(*ref) for ref in inputs)) for name, inputs in parts),
        tuple(Ref(*ref) for ref in outputs),
    )


def test_a_function_of_its_own_result_is_a_loop() -> None:
    calls = [("f", ((k - 1, 0), (-1, 1))) for k in range(6)]
    body = (Part("f", "f", (Ref(-1, 0), Ref(-1, 1))),)
    loop = Loop(body, 6, (Ref(-1, 0), Ref(-1, 1)), ((0, Ref(0, 0)),), (Ref(0, 0),))
    assert rolled(recipe(*calls, outputs=((5, 0),))) == Recipe((loop,), (Ref(0, 0),))


def test_two_functions_in_turn_are_a_loop() -> None:
    calls = [("fg"[k % 2], ((k - 1, 0),)) for k in range(9)]
    assert recipe_text(rolled(recipe(*calls, outputs=((8, 0),)))) == "4 x (f; g); f"


def test_a_value_in_between_that_is_kept_ends_a_loop_at_its_block() -> None:
    calls = [("f", ((k - 1, 0),)) for k in range(9)]
    made = rolled(recipe(*calls, outputs=((8, 0), (3, 0))))
    assert recipe_text(made) == "4 x (f); 5 x (f)"
    assert made.outputs == (Ref(1, 0), Ref(0, 0))


def test_values_that_are_all_kept_for_later_are_found_out_soon() -> None:
    count = 200  # trying every length for every start would take minutes
    calls = [("f", ((k - 1, 0),)) for k in range(count)] + [("g", ((k, 0),)) for k in range(count)]
    kept = recipe(*calls, outputs=tuple((count + k, 0) for k in range(count)))
    assert rolled(kept) == kept


def test_parts_that_are_alike_and_all_used_at_the_end_are_not_even_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant may send such a recipe; comparing every length from every start would hold up the controller."""
    compared: list[int] = []
    monkeypatch.setattr(_Search, "block", lambda self, at, start, period: compared.append(at))
    count = limits.MAX_FUSED_PARTS - 1
    inputs = tuple((-1, k) for k in range(20))
    calls = [("f", ((k - 1, 0), *inputs)) for k in range(count)] + [("g", tuple((k, 0) for k in range(count)))]
    kept = recipe(*calls, outputs=((count, 0),))
    assert rolled(kept) == kept
    assert len(compared) <= 2 * MAX_PERIOD, "only blocks at the end may feed nothing but the block behind them"


@pytest.mark.parametrize(
    "inputs",
    [[((-1, 0),)] * 5, [((k - 1, 0), (-1, k + 1)) for k in range(5)]],
    ids=["nothing is fed", "other arguments each"],
)
def test_calls_that_do_not_feed_each_other_alike_are_no_loop(inputs: list[tuple[tuple[int, int], ...]]) -> None:
    calls = recipe(*(("f", taken) for taken in inputs), outputs=((4, 0),))
    assert rolled(calls) == calls


def test_a_value_that_is_fed_to_another_place_is_no_repetition() -> None:
    calls = [("f", ((k - 1, 0), (-1, 1)) if k % 2 else ((-1, 1), (k - 1, 0))) for k in range(8)]
    assert recipe_text(rolled(recipe(*calls, outputs=((7, 0),)))) == "4 x (f, 2 times)"


@pytest.mark.parametrize("flag", ["no_fusion", "has_loop"])
def test_functions_that_must_not_be_in_a_loop_are_not(flag: str) -> None:
    calls = recipe(*(("f", ((k - 1, 0),)) for k in range(6)), outputs=((5, 0),))
    marked = msgspec.structs.replace(
        calls, parts=tuple(msgspec.structs.replace(part, **{flag: True}) for part in calls.parts)
    )
    assert rolled(marked) == marked
    assert rolled(calls) != calls


def test_a_recipe_longer_than_the_runtime_composes_is_left_as_it_is() -> None:
    def calls(count: int) -> Recipe:
        return recipe(*(("f", ((k - 1, 0),)) for k in range(count)), outputs=((count - 1, 0),))

    most = limits.MAX_FUSED_PARTS
    assert rolled(calls(most + 1)) == calls(most + 1)
    assert recipe_text(rolled(calls(most))) == f"{most} x (f)"


def test_a_loop_that_repeats_is_rolled_again_up_to_a_depth() -> None:
    made = recipe(*(("fg"[k % 4 == 3], ((k - 1, 0),)) for k in range(64)), outputs=((63, 0),))
    once = rolled(made)
    assert recipe_text(once) == "16 x (f, 3 times; g)"
    nested = once
    for _ in range(limits.MAX_LOOP_DEPTH - 1):
        (loop,) = nested.parts
        again = tuple(msgspec.structs.replace(loop, inputs=(Ref(k - 1),)) for k in range(3))
        nested = rolled(Recipe(again, (Ref(2),)))
        assert len(nested.parts) == 1
    (loop,) = nested.parts
    deepest = Recipe(tuple(msgspec.structs.replace(loop, inputs=(Ref(k - 1),)) for k in range(3)), (Ref(2),))
    assert rolled(deepest) == deepest


def chain(length: int) -> Graph:
    sketch = Sketch()
    where = sketch.slice("0.0", "0.1")
    value = sketch.argument(where)
    for _ in range(length):
        value = sketch.call("f", value, slice=where)
    return sketch.graph(value)


def test_a_loop_written_in_python_is_one_part_with_a_count() -> None:
    lowered = lower(chain(100))
    assert "f(%0) fused=100 as 100 x (f)" in graph_text(lowered)
    assert len(lowered.nodes) == 3
    assert " x (" not in graph_text(lower(chain(MIN_ROUNDS - 1)))
    assert " x (" not in graph_text(lower(chain(100), fusion=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"carried": ((1, Ref(0)),)}, r"carries values to inputs \[1\]; it has 1"),
        ({"carried": ((0, Ref(0)), (0, Ref(0)))}, r"carries values to inputs \[0, 0\]"),
        ({"carried": ((0, Ref(1)),)}, "carries or gives a value that its body does not make"),
        ({"outputs": (Ref(-1),)}, "carries or gives a value that its body does not make"),
        ({"outputs": ()}, "an output of its recipe is made by no part"),
        ({"inputs": (), "carried": ()}, "consumes %-1, which is not there"),
        ({"inputs": (Ref(0),)}, "consumes %0, which is not there"),
        ({"body": (Part("f", "f", (Ref(-1, 1),)),)}, r"consumes %-1\.1, which is not there"),
    ],
)
def test_a_broken_loop_is_refused(change: dict[str, object], message: str) -> None:
    lowered = lower(chain(5))
    (made,) = lowered.recipes
    (loop,) = made.parts
    broken = msgspec.structs.replace(made, parts=(msgspec.structs.replace(loop, **change),))
    with pytest.raises(GraphError, match=message):
        verify(msgspec.structs.replace(lowered, recipes=(broken,)))


def test_loops_are_nested_to_a_bounded_depth() -> None:
    lowered = lower(chain(5))
    part: Loop = lowered.recipes[0].parts[0]  # type: ignore[assignment]
    for depth in range(2, limits.MAX_LOOP_DEPTH + 2):
        part = Loop((part,), 2, (Ref(-1),), ((0, Ref(0)),), (Ref(0),))
        graph = msgspec.structs.replace(lowered, recipes=(Recipe((part,), (Ref(0),)),))
        if depth <= limits.MAX_LOOP_DEPTH:
            assert verify(graph) is graph
    with pytest.raises(GraphError, match=f"nested deeper than {limits.MAX_LOOP_DEPTH}"):
        verify(graph)


@pytest.mark.parametrize("times", [0, -1, 1 << 21])
def test_a_number_of_rounds_that_cannot_be_does_not_cross_the_wire(times: int) -> None:
    loop = Loop((Part("f", "f", (Ref(-1),)),), times, (Ref(-1),), ((0, Ref(0)),), (Ref(0),))
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Recipe((loop,), (Ref(0),))), type=Recipe)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Parts in a pattern with disturbances, so that there is something to find and something to get wrong."""
    pattern = draw(
        st.lists(st.tuples(st.sampled_from("fgh"), st.lists(st.integers(1, 4), max_size=2)), min_size=1, max_size=3)
    )
    parts: list[tuple[str, tuple[tuple[int, int], ...]]] = []
    for number in range(draw(st.integers(0, 14))):
        name, back = pattern[number % len(pattern)]
        if draw(st.integers(0, 9)) == 0:
            name, back = "k", draw(st.lists(st.integers(1, 5), max_size=2))
        parts.append((name, tuple((max(number - k, -1), draw(st.integers(0, 1))) for k in back)))
    known = [(-1, 0), (-1, 1), *((k, o) for k in range(len(parts)) for o in (0, 1))]
    outputs = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
    return recipe(*parts, outputs=tuple(outputs))


def run(case: Recipe) -> list[str]:
    def call(part: Part, taken: list[str]) -> Callable[[int], str]:
        return lambda k: f"{part.function}({','.join(taken)}).{k}"

    return evaluate(case, ["x0", "x1"], call)


@repeatable(400)
@given(recipes())
def test_loops_give_what_the_calls_give(case: Recipe) -> None:
    made = rolled(case)
    assert run(made) == run(case)
    assert all(loop.times >= MIN_ROUNDS for loop in made.parts if isinstance(loop, Loop))
    assert len(list(functions_in(made.parts))) <= len(case.parts)
    assert rolled(made) == made or len(rolled(made).parts) < len(made.parts)
