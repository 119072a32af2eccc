"""Repetitions in recipes: by example, and by running what was found as loops."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pathways_ray import limits
from pathways_ray.executor.compile.loops import Repetition, repetitions
from pathways_ray.ir.graph import Part, Recipe, Ref
from tests.unit.strategies import repeatable


def recipe(*parts: tuple[str, tuple[tuple[int, int], ...]], outputs: tuple[tuple[int, int], ...]) -> Recipe:
    return Recipe(
        tuple(Part(name, name, tuple(Ref(*ref) for ref in inputs)) for name, inputs in parts),
        tuple(Ref(*ref) for ref in outputs),
    )


def test_a_function_of_its_own_result_is_a_loop() -> None:
    calls = [("f", ((k - 1, 0), (-1, 1))) for k in range(6)]
    assert repetitions(recipe(*calls, outputs=((5, 0),))) == [Repetition(0, 1, 6, (Ref(0, 0),))]


def test_two_functions_in_turn_are_a_loop() -> None:
    calls = [("fg"[k % 2], ((k - 1, 0),)) for k in range(9)]
    assert repetitions(recipe(*calls, outputs=((8, 0),))) == [Repetition(0, 2, 4, (Ref(1, 0),))]


def test_a_value_in_between_that_is_kept_ends_a_loop_at_its_block() -> None:
    calls = [("f", ((k - 1, 0),)) for k in range(9)]
    assert repetitions(recipe(*calls, outputs=((8, 0), (3, 0)))) == [
        Repetition(0, 1, 4, (Ref(0, 0),)),
        Repetition(4, 1, 5, (Ref(0, 0),)),
    ]


def test_values_that_are_all_kept_for_later_are_found_out_soon() -> None:
    count = 200  # trying every length for every start would take minutes
    calls = [("f", ((k - 1, 0),)) for k in range(count)] + [("g", ((k, 0),)) for k in range(count)]
    assert repetitions(recipe(*calls, outputs=tuple((count + k, 0) for k in range(count)))) == []


def test_calls_that_do_not_feed_each_other_are_no_loop() -> None:
    assert repetitions(recipe(*[("f", ((-1, 0),))] * 5, outputs=((4, 0),))) == []


def test_calls_with_other_arguments_each_are_no_loop() -> None:
    calls = [("f", ((k - 1, 0), (-1, k + 1))) for k in range(5)]
    assert repetitions(recipe(*calls, outputs=((4, 0),))) == []


def test_what_is_fed_to_another_place_is_no_repetition() -> None:
    calls = [("f", ((k - 1, 0), (-1, 1)) if k % 2 else ((-1, 1), (k - 1, 0))) for k in range(8)]
    assert repetitions(recipe(*calls, outputs=((7, 0),))) == [Repetition(0, 2, 4, (Ref(1, 0),))]


def test_nothing_is_looked_for_in_what_is_longer_than_the_runtime_composes() -> None:
    calls = [("f", ((k - 1, 0),)) for k in range(limits.MAX_FUSED_PARTS + 1)]
    assert repetitions(recipe(*calls, outputs=((limits.MAX_FUSED_PARTS, 0),))) == []
    (found,) = repetitions(recipe(*calls[:-1], outputs=((limits.MAX_FUSED_PARTS - 1, 0),)))
    assert found.times == limits.MAX_FUSED_PARTS


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


@repeatable(400)
@given(recipes())
def test_loops_give_what_the_calls_give(case: Recipe) -> None:
    """The parts are run as `compile/compiler.py` runs them, on texts: a value that is not carried is not there."""
    values = {Ref(-1, k): f"x{k}" for k in range(2)}

    def block(start: int, end: int, known: dict[Ref, str]) -> dict[Ref, str]:
        made = dict(known)
        for number in range(start, end):
            part = case.parts[number]
            text = f"{part.function}({','.join(made[ref] for ref in part.inputs)})"
            made |= {Ref(number, k): f"{text}.{k}" for k in range(2)}
        return made

    wanted = block(0, len(case.parts), values)
    at = 0
    for start, period, times, carried in repetitions(case):
        assert at <= start
        assert times >= 3
        known = block(at, start + period, values)
        given = [known[Ref(start + ref.node, ref.output)] for ref in carried]
        for _ in range(times - 1):
            before = {Ref(start + ref.node, ref.output): value for ref, value in zip(carried, given, strict=True)}
            others = {ref: value for ref, value in known.items() if ref.node < start}
            made = block(start + period, start + 2 * period, others | before)
            given = [made[Ref(start + period + ref.node, ref.output)] for ref in carried]
        last = start + period * (times - 1)
        others = {ref: value for ref, value in known.items() if ref.node < start}
        values = others | {Ref(last + ref.node, ref.output): value for ref, value in zip(carried, given, strict=True)}
        at = start + period * times
    values = block(at, len(case.parts), values)
    assert [values[ref] for ref in case.outputs] == [wanted[ref] for ref in case.outputs]
