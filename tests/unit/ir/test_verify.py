"""The verifier: every way in which a graph can be wrong is found, and the message names the node."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given

from pathways_ray import limits
from pathways_ray.errors import GraphError, SpecError, TooLarge
from pathways_ray.ir.graph import Argument, Compute, Graph, Loop, Part, Recipe, Ref, Result, Transfer
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.ir.verify import verify
from tests.unit.helpers import VECTOR, Sketch, spec
from tests.unit.strategies import programs, repeatable

MATRIX = ArrayType((8, 4), "uint64")


def good() -> Graph:
    """%0 argument, %1 = f(%0), %2 = g(%1, %0), result %2; all on slice 1 of two devices."""
    sketch = Sketch("p")
    a = sketch.slice("0.0", "0.1")
    x = sketch.argument(a, "x")
    f = sketch.call("f", x, slice=a, specs="x", output_specs="x", where="user.py:3")
    return sketch.graph(sketch.call("g", f, x, slice=a, specs="x", output_specs="x", where="user.py:4"))


def changed(index: int, **fields: Any) -> Graph:
    """`good()` with some fields of one node replaced."""
    graph = good()
    nodes = list(graph.nodes)
    nodes[index] = msgspec.structs.replace(nodes[index], **fields)
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


@repeatable(50)
@given(programs())
def test_good_graphs_pass(case: tuple[Sketch, Graph]) -> None:
    _, graph = case
    assert verify(graph) is graph


X = Layout(1, spec("x"))
ELSEWHERE = Layout(2, ())
WRONG = {
    "an argument on a slice that is not there": (changed(0, layout=ELSEWHERE), "%0 lies on slice 2"),
    "a call on a slice that is not there": (changed(1, slice=2), r"%1 f \(user.py:3\) runs on slice 2"),
    "a cycle": (changed(1, inputs=(Ref(2),)), "%1 consumes %2, which does not come before it"),
    "a node of its own value": (changed(1, inputs=(Ref(1),)), "%1 consumes %1, which does not come before it"),
    "a node before the first": (changed(1, inputs=(Ref(-1),)), "does not come before it"),
    "an output that is not there": (changed(2, inputs=(Ref(1, 1), Ref(0))), "%2 consumes %1.1; %1 has 1 outputs"),
    "an output before the first": (changed(2, inputs=(Ref(1, -1), Ref(0))), "has 1 outputs"),
    "a recipe that is not there": (changed(1, recipe=7), "runs recipe 7; there are 2"),
    "a recipe before the first": (changed(1, recipe=-1), "runs recipe -1"),
    "a layout too few": (changed(2, input_layouts=(X,)), "does not name one layout for each input and output"),
    "an output layout too many": (changed(1, output_layouts=(X, X)), "does not name one layout for each"),
    "an input asked for elsewhere": (changed(1, input_layouts=(ELSEWHERE,)), "asks for input 0 on slice 2, but runs"),
    "an output put elsewhere": (changed(1, output_layouts=(ELSEWHERE,)), "puts output 0 on slice 2, but runs"),
    "an output its recipe lacks": (
        changed(1, outputs=(VECTOR, VECTOR), output_layouts=(X, X)),
        "has 2 outputs, its recipe 1",
    ),
    "a donation of an input it lacks": (changed(1, donated=(1,)), "donates input 1; it has 1"),
    "a second result": (changed(1, inputs=(Ref(0),)).__class__("p", good().slices, (), (Result(()),) * 2), "second"),
    "no result": (msgspec.structs.replace(good(), nodes=good().nodes[:-1]), "does not end with a result node"),
    "no node at all": (msgspec.structs.replace(good(), nodes=()), "does not end with a result node"),
    "a recipe with a gap": (
        msgspec.structs.replace(good(), recipes=(Recipe((Part("f", "f", (Ref(0),)),), (Ref(0),)), good().recipes[1])),
        "part 0 of its recipe consumes %0, which is not there",
    ),
    "a recipe with an input too many": (
        msgspec.structs.replace(good(), recipes=(good().recipes[1], good().recipes[1])),
        "part 0 of its recipe consumes %-1.1, which is not there",
    ),
    "a recipe whose output is no part's": (
        msgspec.structs.replace(good(), recipes=(Recipe((), (Ref(-1),)), good().recipes[1])),
        "an output of its recipe is made by no part",
    ),
}


@pytest.mark.parametrize(("graph", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_graph_is_refused(graph: Graph, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        verify(graph)


def hosting(twice: bool = False) -> Graph:
    """%0 and %1 arguments, %2 = h(%0, %1) a host function with two outputs; with `twice` %3 is the same again."""
    sketch = Sketch()
    a = sketch.slice("0.0")
    inputs = sketch.argument(a), sketch.argument(a)
    for _ in range(1 + twice):
        sketch.call("h", *inputs, slice=a, outputs=(VECTOR, VECTOR), host_limit_ms=1000)
    return sketch.graph()


H = Part("h", "h", (Ref(-1, 0), Ref(-1, 1)), True, host_limit_ms=1000)
GIVEN = (Ref(0, 0), Ref(0, 1))


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        (Recipe((H, Part("f", "f", (Ref(0),))), GIVEN), {}),
        (Recipe((Part("f", "f", (Ref(-1),)), H), (Ref(1), Ref(1, 1))), {}),
        (Recipe((Loop((H,), 2, H.inputs, (), GIVEN),), GIVEN), {}),
        (Recipe((msgspec.structs.replace(H, inputs=H.inputs[::-1]),), GIVEN), {}),
        (Recipe((msgspec.structs.replace(H, inputs=H.inputs[:1]),), GIVEN), {}),
        (Recipe((H,), GIVEN[::-1]), {}),
        (Recipe((H,), (GIVEN[0],) * 2), {}),
        (Recipe((H,), ()), {"outputs": (), "output_layouts": ()}),
        (Recipe((H,), GIVEN), {"donated": (1,)}),
    ],
    ids=["before", "behind", "loop", "inputs", "input", "outputs", "output twice", "no output", "donation"],
)
def test_a_host_function_stands_alone_and_takes_and_gives_in_order(recipe: Recipe, fields: dict[str, Any]) -> None:
    graph = hosting()
    assert graph.recipes == (Recipe((H,), GIVEN),)
    assert verify(graph) is graph
    nodes = list(graph.nodes)
    nodes[2] = msgspec.structs.replace(nodes[2], **fields)
    with pytest.raises(GraphError, match="%2 h: a host function stands alone in its node"):
        verify(msgspec.structs.replace(graph, recipes=(recipe,), nodes=tuple(nodes)))


def test_each_node_of_a_host_function_is_looked_at() -> None:
    graph = hosting(twice=True)
    assert verify(graph) is graph
    nodes = list(graph.nodes)
    nodes[3] = msgspec.structs.replace(nodes[3], donated=(0,))
    with pytest.raises(GraphError, match="%3 h: a host function stands alone in its node"):
        verify(msgspec.structs.replace(graph, nodes=tuple(nodes)))


def test_layouts_must_divide_and_the_message_names_the_line() -> None:
    with pytest.raises(SpecError, match=r"%1 f \(user.py:3\), input 0: P\(None, x\) partitions dimension 1"):
        verify(changed(1, input_layouts=(Layout(1, spec("- x")),)))
    with pytest.raises(SpecError, match=r"%1 f \(user.py:3\), output 0: dimension 0 of uint64\[7\] has size 7"):
        verify(changed(1, outputs=(ArrayType((7,), "uint64"),)))
    with pytest.raises(SpecError, match="%0: axis 'q'"):
        verify(changed(0, layout=Layout(1, spec("q"))))
    with pytest.raises(GraphError, match="%0: there is no dtype 'float33'"):
        verify(changed(0, type=ArrayType((8,), "float33")))


def test_a_lowered_graph_has_every_input_in_the_layout_it_is_asked_for() -> None:
    graph = changed(1, input_layouts=(Layout(1, ()),))
    verify(graph)
    with pytest.raises(GraphError, match=r"%1 f .* gets input 0 as slice1:P\(x\), but asks for slice1:P\(\)"):
        verify(graph, lowered=True)


def test_what_is_donated_is_used_by_nobody_afterwards() -> None:
    with pytest.raises(GraphError, match=r"f \(user.py:3\) donates %0 as argument 0, but g uses it afterwards"):
        verify(changed(1, donated=(0,)))
    verify(changed(2, donated=(0, 1)))


def test_what_is_donated_is_no_result() -> None:
    sketch = Sketch()
    a = sketch.slice("0.0")
    x = sketch.argument(a)
    sketch.call("f", x, slice=a, donated=(0,))
    with pytest.raises(GraphError, match="donates %0 as argument 0, but the result uses it afterwards"):
        verify(sketch.graph(x))


def test_what_is_donated_is_not_used_beside_the_donation() -> None:
    sketch = Sketch()
    a = sketch.slice("0.0")
    x = sketch.argument(a)
    y = sketch.call("f", x, x, slice=a, donated=(1,))
    with pytest.raises(GraphError, match="donates %0 as argument 1, but f uses it afterwards"):
        verify(sketch.graph(y))


def test_a_transfer_counts_as_a_use() -> None:
    graph = changed(1, donated=(0,))
    nodes = (*graph.nodes[:2], Transfer(Ref(0), VECTOR, Layout(1, ())), Result((Ref(1), Ref(2))))
    with pytest.raises(GraphError, match="but a transfer uses it afterwards"):
        verify(msgspec.structs.replace(graph, nodes=nodes))


def test_a_program_has_a_size_limit() -> None:
    graph = good()
    padding = tuple(Argument(k, MATRIX, Layout(1, ())) for k in range(limits.MAX_NODES))
    with pytest.raises(TooLarge, match=f"'p' has 8193 nodes; the limit is {limits.MAX_NODES}"):
        verify(msgspec.structs.replace(graph, nodes=(*padding, Result(()))))
    verify(msgspec.structs.replace(graph, nodes=(*padding[1:], Result(()))))


def test_the_graph_is_left_as_it_is() -> None:
    graph = good()
    assert verify(graph) is graph
    assert isinstance(graph.nodes[1], Compute)
    assert graph == good()
