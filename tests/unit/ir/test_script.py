"""Programs with branches and loops, cut into segments: a course through them computes what the graph says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
import pytest

from pathways_ray.errors import GraphError
from pathways_ray.ir.graph import Branch, Graph, Ref, Repeat
from pathways_ray.ir.passes.split import split
from pathways_ray.ir.script import Await, Course, Launch, Rounds, has_control
from pathways_ray.ir.text import graph_text
from pathways_ray.ir.verify import verify
from pathways_ray.simulation.decisions import drawn_decisions
from pathways_ray.simulation.values import made_alone
from tests.unit.courses import run_course
from tests.unit.helpers import SCALAR, VECTOR, Sketch, calls, placed

SLICES = [placed(1, ["0.0", "0.1"]), placed(2, ["1.0", "1.1"], island=1), placed(3, ["1.0", "1.1"], island=1)]


def run(graph: Graph, arguments: Sequence[int], late: random.Random) -> tuple[list[int], list[int]]:
    """The results by the script, and the buffers that were never freed."""
    results, left = run_course(graph, arguments, late, lambda segment, given: made_alone(segment, given)[0])
    return [int(value) for value in results], left


def test_courses_compute_what_graphs_say() -> None:
    decided = 0
    for seed in range(120):
        drawn = drawn_decisions(random.Random(seed), 1, f"p{seed}", SLICES)
        graph = verify(drawn.graph)
        arguments = [101 + k for k in range(len(drawn.arguments))]
        results, left = run(graph, arguments, random.Random(seed))
        assert made_alone(graph, arguments) == (results, None), seed
        assert left == [], seed
        decided += has_control(graph)
    assert decided > 60


def lines(steps: Sequence[object]) -> list[str]:
    return [type(step).__name__ for step in steps]


def one_call(name: str, where: int) -> Callable[[Sketch, list[Ref]], list[Ref]]:
    return lambda sketch, values: [sketch.call(name, values[0], slice=where)]


def decides_before_it_branches() -> tuple[Sketch, Ref]:
    """Slice a decides between two functions on slice b, while c does something else."""
    sketch = Sketch()
    a, b, c = sketch.slice("0.0"), sketch.slice("1.0", island=1), sketch.slice("1.1", island=1)
    x, y = sketch.argument(a), sketch.argument(b)
    slow = sketch.call("slow", x, slice=a)
    index = sketch.call("index", x, slice=a, outputs=(SCALAR,))
    other = sketch.call("other", y, slice=c)
    f, g = (sketch.body([y], one_call(name, b)) for name in "fg")
    chosen = sketch.control(Branch("pick", index, (y,), (f, g), (VECTOR,), (sketch.layout(y),)))
    return sketch, sketch.call("join", chosen, other, slow, slice=c)


def test_what_decides_goes_first_and_what_waits_for_nothing_goes_ahead() -> None:
    sketch, result = decides_before_it_branches()
    script, segments = split(verify(sketch.graph(result)))
    assert lines(script.block.steps) == ["Run", "Run", "Choose"]
    assert [calls(segment) for segment in segments] == [["index"], ["slow", "other"], ["f"], ["g"], ["join"]]
    assert [segment.decides for segment in segments] == [(0,), (), (), (), ()]


def test_a_node_that_takes_memory_waits_for_the_branch_that_reads_it() -> None:
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    x, y = sketch.argument(a), sketch.argument(b)
    index = sketch.call("index", x, slice=a, outputs=(SCALAR,))
    f, g = (sketch.body([y], one_call(name, b)) for name in "fg")
    chosen = sketch.control(Branch("pick", index, (y,), (f, g), (VECTOR,), (sketch.layout(y),)))
    _, segments = split(verify(sketch.graph(chosen, sketch.call("taker", y, slice=b, donated=(0,)))))
    assert [calls(segment) for segment in segments] == [["index"], ["f"], ["g"], ["taker"]]


def test_a_round_says_by_itself_whether_there_is_another() -> None:
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    x = sketch.argument(a)
    body = sketch.body([x], lambda s, v: [s.call("back", s.call("step", v[0], slice=b), slice=a)])
    test = sketch.body([x], lambda s, v: [s.call("test", v[0], slice=b, outputs=(SCALAR,))])
    found = sketch.control(Repeat("loop", (x,), 0, test, body, (VECTOR,), (sketch.layout(x),)))
    script, segments = split(verify(sketch.graph(found)))
    assert [calls(segment) for segment in segments] == [["test"], ["step", "back", "test"], []]
    (rounds,) = script.block.steps
    assert isinstance(rounds, Rounds)
    assert [segment.decides for segment in segments] == [(0,), (1,), ()]


def test_a_course_waits_for_one_value_at_a_time_and_frees_what_nobody_needs() -> None:
    sketch, result = decides_before_it_branches()
    script, _ = split(sketch.graph(result))
    course = Course(script, [7, 8])
    assert course.now == Launch(0, (7,), False)
    course.launched([-1])
    assert course.now == Launch(1, (7, 8), False)
    course.launched([-3, -2])
    assert isinstance(course.now, Await)
    course.decide(0, [5])  # out of range: the last one
    assert course.now == Launch(3, (8,), False)
    course.launched([-4])
    assert course.now == Launch(4, (-4, -2, -3), True)
    assert course.freed == []
    course.launched(())
    assert course.now is None
    assert sorted(course.freed) == [-4, -3, -2, -1]


def test_what_follows_a_decision_is_known_with_the_segment_that_decides() -> None:
    sketch, result = decides_before_it_branches()
    course = Course(split(sketch.graph(result))[0], [7, 8])
    assert course.choices == ()
    course.launched([-1])
    assert course.choices == (Launch(2, (8,), False), Launch(3, (8,), False))
    course.launched([-3, -2])
    assert course.choices == ()


def test_a_branch_that_takes_what_comes_between_or_decides_itself_is_not_known() -> None:
    """The first branch takes what is launched after the value, the second one decides, the third does nothing."""
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    x, y = sketch.argument(a), sketch.argument(b)
    index = sketch.call("index", x, slice=a, outputs=(SCALAR,))
    other = sketch.call("other", y, slice=b)
    takes = sketch.body([y, other], lambda s, v: [s.call("f", v[0], v[1], slice=b)])
    same = sketch.body([y, other], lambda s, v: [v[0]])
    inner = (same, same)

    def again(s: Sketch, v: list[Ref]) -> list[Ref]:
        pick = s.call("pick", v[0], slice=b, outputs=(SCALAR,))
        return [s.control(Branch("inner", pick, (v[0], v[1]), inner, (VECTOR,), (s.layout(v[0]),)))]

    bodies = (takes, sketch.body([y, other], again), same)
    chosen = sketch.control(Branch("pick", index, (y, other), bodies, (VECTOR,), (sketch.layout(y),)))
    course = Course(split(verify(sketch.graph(chosen)))[0], [7, 8])
    course.launched([-1])
    assert course.choices == (None, None, None)


def test_an_abandoned_course_frees_what_it_made() -> None:
    sketch, result = decides_before_it_branches()
    course = Course(split(sketch.graph(result))[0], [7, 8])
    course.launched([-1])
    course.abandon()
    assert course.now is None
    assert course.freed == [-1]


# --- the verifier -----------------------------------------------------------------------------------------------------


def branch(sketch: Sketch, **changes: object) -> Graph:
    a = sketch.slice("0.0")
    x = sketch.argument(a)
    index = sketch.call("index", x, slice=a, outputs=(SCALAR,))
    f, g = (sketch.body([x], one_call(name, a)) for name in "fg")
    made = Branch("pick", index, (x,), (f, g), (VECTOR,), (sketch.layout(x),), "user.py:7")
    return sketch.graph(sketch.control(msgspec.structs.replace(made, **changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bodies": ()}, r"%2 pick \(user.py:7\) has no branch"),
        ({"index": Ref(0)}, "is decided by uint64\\[8\\]"),
        ({"outputs": (VECTOR, VECTOR)}, "does not name one layout for each output"),
        ({"outputs": (SCALAR,)}, "has a body .* that gives uint64\\[8\\]"),
        ({"inputs": ()}, "takes input 0 in a body; it has 0"),
        ({"index": Ref(5)}, "does not come before it"),
    ],
)
def test_branches_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        verify(branch(Sketch(), **changes))


def test_graphs_show_their_bodies() -> None:
    shown = graph_text(branch(Sketch()))
    assert "%2 = switch %1: pick(%0)" in shown
    assert "    branch 1 {    # body.py:1\n      %0 = argument 0" in shown


# --- loops that make nothing ------------------------------------------------------------------------------------------


def turning(sketch: Sketch, inputs: Sequence[Ref], times: int) -> Ref:
    """A loop over a slice whose rounds hand on its inputs, the first one as the last result."""
    body = sketch.body(inputs, lambda s, values: [*values[1:], values[0]])
    layouts = tuple(sketch.layout(ref) for ref in inputs)
    return sketch.control(Repeat("turn", tuple(inputs), times, None, body, (VECTOR,) * len(inputs), layouts))


@pytest.mark.parametrize("times", [0, 1, 2, 3, 4, (1 << 20) - 1])
def test_rounds_that_hand_on_what_they_get_are_no_steps(times: int) -> None:
    sketch = Sketch()
    a = sketch.slice("0.0")
    turned = turning(sketch, [sketch.argument(a) for _ in range(3)], times)
    graph = verify(sketch.graph(*(Ref(turned.node, k) for k in range(3)), sketch.call("f", turned, slice=a)))
    assert split(graph)[0].block.steps == ()
    results, left = run_course(graph, [5, 6, 7], random.Random(0), lambda segment, given: made_alone(segment, given)[0])
    turns = times % 3
    assert results[:3] == [5, 6, 7][turns:] + [5, 6, 7][:turns]
    assert left == []


def test_a_million_rounds_of_a_million_rounds_of_nothing_are_no_steps() -> None:
    """A client could keep the controller in them for ever: nothing is launched that it would wait for."""
    sketch = Sketch()
    x = sketch.argument(sketch.slice("0.0"))

    def never(inner: Sketch, values: list[Ref]) -> list[Ref]:
        body = inner.body(values, one_call("f", 1))
        return [inner.control(Repeat("never", tuple(values), 0, None, body, (VECTOR,), (inner.layout(values[0]),)))]

    def again(inner: Sketch, values: list[Ref]) -> list[Ref]:
        body = inner.body([turning(inner, values, 1 << 20)], never)
        return [inner.control(Repeat("again", tuple(values), 1 << 20, None, body, (VECTOR,), (layout,)))]

    layout = sketch.layout(x)
    outer = Repeat("outer", (x,), 1 << 20, None, sketch.body([x], again), (VECTOR,), (layout,))
    script, segments = split(verify(sketch.graph(sketch.control(outer))))
    assert script.block.steps == ()
    assert len(segments) == 1
    assert Course(script, [7]).now == Launch(0, (7,), True)
