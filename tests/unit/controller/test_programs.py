"""From a graph on the wire to plans and messages for islands."""

from __future__ import annotations

import hashlib
import random

import msgspec
import pytest
from hypothesis import given

from pathways_ray import limits
from pathways_ray.controller.planning import PlanRequest, answer, plan_if_cheap
from pathways_ray.controller.programs import (
    BufferType,
    check_functions,
    decode_graph,
    placed_graph,
    plan_program,
)
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import GraphError, PathwaysError, TooLarge, WireError
from pathways_ray.ir.graph import Argument, Graph, Regroup, Result, Transfer
from pathways_ray.ir.plan import IslandPlan
from pathways_ray.ir.text import order_text
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.transport.messages import encode
from tests.unit.helpers import SCALAR, VECTOR, Sketch, spec
from tests.unit.strategies import programs, repeatable


def two_islands() -> tuple[Sketch, Graph]:
    """f on island 0 takes two arguments, g on island 1 what f made; both results are returned."""
    sketch = Sketch("two")
    a, b = sketch.slice("0.0", "1.0"), sketch.slice("2.0", "2.1", island=1)
    f = sketch.call("f", sketch.argument(a, "x"), sketch.argument(a), slice=a, output_specs="x")
    g = sketch.call("g", f, slice=b, specs="x", outputs=[SCALAR])
    return sketch, sketch.graph(g, f)


def test_a_planned_program_has_what_a_launch_needs() -> None:
    sketch, graph = two_islands()
    functions = {"f": b"code of f", "g": b"code of g", "unused": b"?"}
    made = plan_program(7, 3, graph, functions, sketch.placement, fusion=True)
    assert (made.key, made.session, made.name, made.failure) == (7, 3, "two", None)
    assert made.arguments == (
        BufferType(VECTOR, 1, spec("x"), VECTOR.nbytes),
        BufferType(VECTOR, 1, (), 2 * VECTOR.nbytes),
    )
    assert made.results == (
        BufferType(SCALAR, 2, (), 2 * SCALAR.nbytes),
        BufferType(VECTOR, 1, spec("x"), VECTOR.nbytes),
    )
    assert made.hosts == {0, 1, 2}
    assert made.gang_islands == ((0,), (1,))
    assert sorted(made.plans) == sorted(made.messages) == [0, 1]


@pytest.mark.parametrize(("kept_bytes", "takes"), [(2 * VECTOR.nbytes, False), (2 * VECTOR.nbytes - 1, True)])
def test_a_program_takes_the_memory_of_arguments_that_are_large_on_all_devices(kept_bytes: int, takes: bool) -> None:
    sketch = Sketch()
    here = sketch.slice("0.0", "0.1")
    made = sketch.call("f", sketch.argument(here), slice=here, donated=(0,))
    planned = sketch.planned(made, kept_bytes=kept_bytes)
    assert planned.takes_memory == takes
    assert planned.donated == (0,)
    assert [one.donated for one in planned.plans[0].executables] == [(0,) if takes else ()]


def test_each_island_gets_the_functions_it_runs_and_no_others() -> None:
    sketch, graph = two_islands()
    functions = {"f": b"code of f", "g": b"code of g", "unused": b"?"}
    made = plan_program(7, 3, graph, functions, sketch.placement, fusion=True)
    assert made.messages[0].functions == {"f": b"code of f"}
    assert made.messages[1].functions == {"g": b"code of g"}
    for island, message in made.messages.items():
        assert message.program == 7
        assert msgspec.msgpack.decode(message.plan, type=IslandPlan) == made.plans[island]


def test_a_function_nobody_sent_is_missed() -> None:
    sketch, graph = two_islands()
    with pytest.raises(GraphError, match="'two' needs functions that were not sent: g"):
        plan_program(1, 1, graph, {"f": b""}, sketch.placement, fusion=True)


def test_a_gang_is_of_every_island_that_takes_a_step_of_it() -> None:
    """The transfer of an argument goes with its first consumer, on both islands."""
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("2.0", island=1)
    x = sketch.argument(a)
    f = sketch.call("f", slice=b)
    g = sketch.call("g", x, f, slice=b)
    assert sketch.planned(g).gang_islands == ((1,), (0, 1))


def test_a_program_without_calls_hands_its_arguments_through() -> None:
    sketch = Sketch()
    a = sketch.slice("0.0")
    made = sketch.planned(sketch.argument(a))
    assert made.gang_islands == ((0,),)
    assert made.results == made.arguments == (BufferType(VECTOR, a, (), VECTOR.nbytes),)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_slices_must_be_the_sessions_own_and_as_they_are() -> None:
    sketch, graph = two_islands()
    with pytest.raises(GraphError, match=r"'two' uses slice 2, which this session does not hold \(released\?\)"):
        placed_graph(graph, {1: sketch.placement[1]}, fusion=True)
    wrong = msgspec.structs.replace(graph.slices[1], shape=(1, 2), axes=("x", "y"))
    lying = msgspec.structs.replace(graph, slices=(graph.slices[0], wrong))
    with pytest.raises(GraphError, match=r"takes slice 2 for slice2\(x=1, y=2\); it is slice2\(x=2\)"):
        placed_graph(lying, sketch.placement, fusion=True)


@pytest.mark.parametrize("indices", [(1, 2), (0, 2), (-1, 0), (0, 0), (1, 1)])
def test_arguments_are_numbered_from_nought_each_once(indices: tuple[int, ...]) -> None:
    """Two nodes of one number would be checked as one and run as two."""
    sketch = Sketch()
    a = sketch.slice("0.0")
    sketch.nodes = [Argument(index, VECTOR, Layout(a, ())) for index in indices]
    graph = Graph("p", (sketch.placement[a].mesh,), (), (*sketch.nodes, Result(())))
    with pytest.raises(GraphError, match="'p' numbers its arguments"):
        plan_program(1, 1, graph, {}, sketch.placement, fusion=True)


def test_functions_are_what_their_names_say() -> None:
    blob = b"StableHLO"
    check_functions({hashlib.sha256(blob).hexdigest(): blob})
    with pytest.raises(WireError, match="function abcdef012345 does not match its digest"):
        check_functions({"abcdef0123456789": blob})


def test_functions_have_a_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CONSTANT_BYTES", 100)
    small, big = bytes(200), bytes(201)
    check_functions({hashlib.sha256(small).hexdigest(): small})
    with pytest.raises(TooLarge, match=r"has 201 bytes; the limit is 200\. Pass big constants as arguments"):
        check_functions({hashlib.sha256(big).hexdigest(): big})


@repeatable(50)
@given(programs())
def test_a_graph_is_its_own_message(case: tuple[Sketch, Graph]) -> None:
    assert decode_graph(encode(case[1])) == case[1]


@pytest.mark.parametrize("decides", [(0,), (0, 0), (-1,), (99,)])
def test_a_client_does_not_say_which_results_decide(decides: tuple[int, ...]) -> None:
    """A host ended where such a result was no whole number: it says the value once it is there."""
    sketch, graph = two_islands()
    slices = tuple(sketch.placement.values())
    assert answer(PlanRequest(encode(graph), slices, True, Tenant("t"))).failure is None
    said = PlanRequest(encode(msgspec.structs.replace(graph, decides=decides)), slices, True, Tenant("t"))
    for reply in (answer(said), plan_if_cheap(said)):
        assert reply is not None
        assert reply.failure is not None
        assert reply.failure.kind == "WireError"
        assert "says that results of it decide, which is not a client's to say" in reply.failure.message


def test_broken_graphs_are_refused_and_never_break_the_planner() -> None:
    """A client may send anything. What decodes is planned or refused with an error of the tree, and with no other."""
    sketch, graph = two_islands()
    data = encode(graph)
    rng = random.Random(3)
    functions = dict.fromkeys(sketch.signatures, b"")
    planned = refused = undecodable = 0
    for _ in range(6000):
        broken = bytearray(data)
        for _ in range(rng.choice((1, 1, 2))):
            broken[rng.randrange(len(broken))] = rng.choice((0, 1, 2, 3, 0x7F, 0xC3, 0xD0, 0xFF, rng.randrange(256)))
        try:
            found = decode_graph(bytes(broken))
        except WireError:
            undecodable += 1
            continue
        try:
            plan_program(1, 1, found, functions, sketch.placement, fusion=True)
            planned += 1
        except PathwaysError:
            refused += 1
    assert min(planned, refused, undecodable) > 100


def test_a_dtype_that_is_none_is_refused_before_anybody_counts_its_bytes() -> None:
    sketch, graph = two_islands()
    bad = msgspec.structs.replace(graph.nodes[0], type=ArrayType((8,), "bfloat17"))
    with pytest.raises(GraphError, match="%0: there is no dtype 'bfloat17'"):
        placed_graph(msgspec.structs.replace(graph, nodes=(bad, *graph.nodes[1:])), sketch.placement, fusion=True)


# --- text -------------------------------------------------------------------------------------------------------------


def test_the_order_as_text() -> None:
    """One line for each gang over all islands."""
    sketch, graph = two_islands()
    made = plan_program(1, 1, graph, {"f": b"", "g": b""}, sketch.placement, fusion=True)
    assert order_text(made.plans).splitlines() == [
        "gang 0: reshard on island 0; f on island 0; send uint64[8] (64 bytes) from island 0",
        "gang 1: receive on island 1; g on island 1",
    ]


def test_programs_that_do_not_fit_into_a_message_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function came in a message of its own, from a client that does not look at its limits."""
    sketch, graph = two_islands()
    monkeypatch.setattr(limits, "MAX_PROGRAM_BYTES", 200)
    for size, unused in ((100, 500), (101, 0)):
        functions = {"f": b"f" * size, "g": b"g" * 100, "unused": b"?" * unused}
        if size == 100:
            plan_program(7, 3, graph, functions, sketch.placement, fusion=True)
            continue
        with pytest.raises(
            TooLarge, match=r"the functions of program 'two' take 201 bytes, constants included; .* 200\."
        ):
            plan_program(7, 3, graph, functions, sketch.placement, fusion=True)
    functions = {"f": b"", "g": b""}
    monkeypatch.setattr(limits, "MAX_PLAN_BYTES", 100)
    with pytest.raises(
        TooLarge, match=r"the plan of program 'two' takes \d+ bytes on island 0; the limit is 100\. Split"
    ):
        plan_program(7, 3, graph, functions, sketch.placement, fusion=True)


def test_what_a_program_may_have_fits_into_a_message() -> None:
    assert limits.MAX_PROGRAM_BYTES + 2 * limits.MAX_PLAN_BYTES < limits.MAX_MESSAGE_BYTES


def test_a_program_of_many_nodes_that_compute_nothing_is_not_planned_at_once() -> None:
    """Others would wait: 700 arguments take ten times as long as a turn has."""
    sketch = Sketch("wide")
    a = sketch.slice("0.0", "0.1")
    x = sketch.argument(a, "x")
    layout = Layout(a, spec("x"))
    arguments = [Argument(k, VECTOR, layout) for k in range(250)]
    transfers = [Transfer(x, VECTOR, layout)] * 250
    regroups = [Regroup((x,), ((0, 0), (0, 1)), VECTOR, layout)] * 63
    for nodes in (arguments, [*sketch.nodes, *transfers], [*sketch.nodes, *regroups]):
        sketch.nodes = list(nodes)
        request = PlanRequest(encode(sketch.graph(x)), tuple(sketch.placement.values()), True, Tenant("t"))
        assert plan_if_cheap(request) is None
        assert answer(request).failure is None
