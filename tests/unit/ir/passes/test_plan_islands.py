"""Plans: what each island does for a launch, by example and against a reference executor of plans."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray import limits
from pathways_ray.ir.graph import Graph
from pathways_ray.ir.passes import lower
from pathways_ray.ir.passes.plan_islands import plan_islands
from pathways_ray.ir.plan import (
    Block,
    Call,
    Device,
    Execute,
    IslandPlan,
    PlacedSlice,
    Receive,
    Reshard,
    Return,
    Send,
    transfer_id,
)
from pathways_ray.ir.text import graph_text, plan_text
from pathways_ray.ir.types import SliceType
from pathways_ray.transport.messages import encode
from tests.unit.helpers import SCALAR, Sketch
from tests.unit.interpreters import PlanRun, run_graph, sample
from tests.unit.strategies import programs, repeatable


def plans_of(sketch: Sketch, graph: Graph, fusion: bool = False) -> dict[int, IslandPlan]:
    return {made.island: made for made in plan_islands(lower(graph, fusion), sketch.placement)}


def text_of(sketch: Sketch, graph: Graph) -> list[str]:
    return plan_text(tuple(plans_of(sketch, graph).values())).splitlines()


# --- slices -----------------------------------------------------------------------------------------------------------


@repeatable(200)
@given(st.lists(st.builds(Device, st.integers(0, 3), st.integers(0, 3)), max_size=20))
def test_blocks_stand_for_the_devices_in_their_order(devices: list[Device]) -> None:
    made = PlacedSlice.on(SliceType(1, (len(devices),), ("x",)), 0, devices)
    assert list(made.devices) == devices
    assert made.hosts == tuple(sorted({device.host for device in devices}))


@pytest.mark.parametrize("hosts", [1, 16, 4096])
def test_whole_hosts_side_by_side_are_one_block(hosts: int) -> None:
    """So the size of a plan does not grow with the devices of a slice, but for the digits of their number."""
    devices = [Device(host, index) for host in range(hosts) for index in range(8)]
    made = PlacedSlice.on(SliceType(1, (len(devices),), ("x",)), 0, devices)
    assert made.blocks == (Block(0, hosts, 0, 8),)
    assert len(encode(made)) < 24


def test_parts_of_hosts_are_blocks_of_their_own() -> None:
    devices = [Device(0, 2), Device(0, 3), Device(1, 0), Device(1, 1), Device(2, 0), Device(2, 1), Device(4, 0)]
    made = PlacedSlice.on(SliceType(1, (7,), ("x",)), 0, devices)
    assert made.blocks == (Block(0, 1, 2, 2), Block(1, 2, 0, 2), Block(4, 1, 0, 1))


# --- against the reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("by_gang", [False, True], ids=["parallel", "sequential"])
@repeatable(75)
@given(case=programs(), rng=st.randoms(use_true_random=False))
def test_plans_compute_what_the_graph_says(
    fusion: bool, by_gang: bool, case: tuple[Sketch, Graph], rng: random.Random
) -> None:
    """In any interleaving of the islands, at once or gang by gang, with dropped and donated values poisoned."""
    sketch, graph = case
    arguments = [sample(node.type, node.index) for node in graph.arguments]
    plans = plan_islands(lower(graph, fusion), sketch.placement)
    found = PlanRun(plans, arguments, sketch.signatures, rng.choice).run(by_gang)
    wanted = run_graph(graph, arguments, sketch.signatures)
    assert [value.tolist() for value in found] == [value.tolist() for value in wanted]


@repeatable(60)
@given(programs())
def test_plans_agree_with_each_other(case: tuple[Sketch, Graph]) -> None:
    sketch, graph = case
    plans = plan_islands(lower(graph), sketch.placement)
    assert [made.island for made in plans] == sorted({made.island for made in plans})
    results = [number for made in plans for _, number in made.results]
    assert sorted(results) == list(range(len(graph.result.inputs))), "every result lies on one island"
    for made in plans:
        assert (made.gangs, made.bundles, made.labels, made.slices) == (
            plans[0].gangs,
            plans[0].bundles,
            plans[0].labels,
            plans[0].slices,
        )
    sends, receives = (
        sorted(step.bundle for made in plans for step in made.steps if isinstance(step, kind))
        for kind in (Send, Receive)
    )
    assert sends == receives, "every bundle that is sent is received, once"


@repeatable(60)
@given(programs())
def test_a_plan_keeps_its_own_rules(case: tuple[Sketch, Graph]) -> None:
    sketch, graph = case
    for made in plan_islands(lower(graph), sketch.placement):
        executes = [step.gang for step in made.steps if isinstance(step, Execute)]
        assert executes == sorted(set(executes)), "each gang runs once, in order"
        dropped = [slot for step in made.steps if not isinstance(step, Receive | Call) for slot in step.drops]
        assert len(dropped) == len(set(dropped))
        kept = {slot for slot, _ in made.results} | set(made.awaited)
        assert not kept & set(dropped)
        assert all(made.placed(e.slice).island == made.island for e in made.executables)
        for step in made.steps:
            if isinstance(step, Execute | Return):
                executable = made.executables[step.executable]
                slices = [made.slots[slot] for slot in step.inputs + step.outputs]
                assert slices == [layout.slice for layout in executable.input_layouts + executable.output_layouts]
        assert made.awaited or not executes, "an island with work to do has something to wait for"


@repeatable(30)
@given(programs())
def test_a_plan_crosses_the_wire_unchanged(case: tuple[Sketch, Graph]) -> None:
    sketch, graph = case
    for made in plan_islands(lower(graph), sketch.placement):
        assert msgspec.msgpack.decode(encode(made), type=IslandPlan) == made


# --- by example -------------------------------------------------------------------------------------------------------


def pipeline() -> tuple[Sketch, Graph]:
    """f on island 0, g on island 1 with what f made, and back again to h on island 0."""
    sketch = Sketch()
    a, b = sketch.slice("0.0", "0.1"), sketch.slice("1.0", "1.1", island=1)
    f = sketch.call("f", sketch.argument(a, "x"), slice=a, specs="x", output_specs="x")
    g = sketch.call("g", f, slice=b, specs="x", output_specs="x")
    h = sketch.call("h", g, slice=a, specs="x", output_specs="x")
    return sketch, sketch.graph(h)


def test_the_text_of_a_plan() -> None:
    assert text_of(*pipeline()) == [
        "island 0 {",
        "  slice1(x=2) = devices 0.0, 0.1",
        "  s0 = argument 0",
        "  [0] s1 = execute f(s0); drop s0",
        "  [0] send s1 bundle 0: uint64[8] slice1:P(x) -> slice2:P(x); drop s1",
        "  [2] s2 = receive bundle 1: uint64[8] slice2:P(x) -> slice1:P(x)",
        "  [2] s3 = execute h(s2); drop s2",
        "  result 0 = s3",
        "}",
        "island 1 {",
        "  slice2(x=2) = devices 1.0, 1.1",
        "  [1] s0 = receive bundle 0: uint64[8] slice1:P(x) -> slice2:P(x)",
        "  [1] s1 = execute g(s0); drop s0",
        "  [1] send s1 bundle 1: uint64[8] slice2:P(x) -> slice1:P(x)",
        "}",
    ]


def test_an_island_without_results_waits_for_its_last_computation() -> None:
    """What is awaited may be sent away before; it is kept until the launch ends."""
    plans = plans_of(*pipeline())
    assert plans[0].awaited == (3,)
    assert (plans[1].awaited, plans[1].results) == ((1,), ())
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    early, late = sketch.call("early", slice=b), sketch.call("late", slice=b)
    plans = plans_of(sketch, sketch.graph(sketch.call("f", early, late, slice=a)))
    last = [step for step in plans[1].steps if isinstance(step, Execute)][-1]
    assert plans[1].awaited == last.outputs


def test_an_island_that_only_sends_waits_for_nothing() -> None:
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    y = sketch.call("f", sketch.argument(a), slice=b)
    plans = plans_of(sketch, sketch.graph(y))
    assert [type(step) for step in plans[0].steps] == [Send]
    assert plans[0].awaited == ()


def test_a_value_returned_twice_over_is_awaited_once() -> None:
    sketch = Sketch()
    a = sketch.slice("0.0")
    x = sketch.argument(a)
    f = sketch.call("f", x, slice=a, outputs=[SCALAR, SCALAR])
    made = plans_of(sketch, sketch.graph(f, x, f))[0]
    assert made.results == ((1, 0), (0, 1), (1, 2))
    assert made.awaited == (1, 0)


def test_equal_computations_are_one_executable() -> None:
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("0.1")
    x = sketch.argument(a)
    y = sketch.call("f", sketch.call("f", x, slice=a), slice=a)
    z = sketch.call("f", y, slice=b)
    made = plans_of(sketch, sketch.graph(z))[0]
    executes = [step for step in made.steps if isinstance(step, Execute)]
    assert [step.executable for step in executes] == [0, 0, 1], "the slice is part of what is compiled"
    assert len(made.executables) == 2


def test_on_the_same_devices_a_transfer_is_a_reshard() -> None:
    sketch = Sketch()
    a = sketch.slice("0.0", "0.1")
    turned = sketch.slice("0.0", "0.1", shape=(2, 1))
    other = sketch.slice("0.1", "0.0")
    x = sketch.argument(a, "x")
    results = [sketch.call("f", x, slice=s, specs="") for s in (a, turned, other)]
    kinds = [type(step) for step in plans_of(sketch, sketch.graph(*results))[0].steps]
    assert kinds == [Reshard, Reshard, Send, Execute, Execute, Receive, Execute]


def donated(sketch: Sketch, graph: Graph) -> dict[str, tuple[int, ...]]:
    return {
        made.labels[step.node].name: made.executables[step.executable].donated
        for made in plans_of(sketch, graph).values()
        for step in made.steps
        if isinstance(step, Execute)
    }


def test_memory_is_taken_only_from_values_that_nothing_else_uses() -> None:
    """
    1. alone donates a value that only it uses: its memory is reused.
    2. second donates x, which first read before it: left alone, x may still be read when second starts.
    3. moved donates what a transfer brought, sent donates what a transfer takes: a peer may read those at any time.
    """
    sketch = Sketch()
    a, b = sketch.slice("0.0", "0.1"), sketch.slice("1.0", "1.1", island=1)
    x, y, z, w = (sketch.argument(a) for _ in range(4))
    alone = sketch.call("alone", w, slice=a, donated=(0,))
    first = sketch.call("first", x, slice=a)
    second = sketch.call("second", x, slice=a, donated=(0,))
    moved = sketch.call("moved", y, slice=b, donated=(0,))
    far = sketch.call("far", z, slice=b)
    sent = sketch.call("sent", z, slice=a, donated=(0,))
    assert donated(sketch, sketch.graph(alone, first, second, moved, far, sent)) == {
        "alone": (0,),
        "first": (),
        "second": (),
        "moved": (),
        "far": (),
        "sent": (),
    }


def test_an_argument_that_is_sent_late_stays_until_then() -> None:
    """Gang by gang, the transfer of x runs with its consumer g, after f has used x too.

    1. The plan lists the transfer first, since x is there from the start: x may leave as early as can be.
    2. With sequential dispatch gang 0 (f) runs before gang 1 (the transfer and g). f must not drop x.
    """
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    x = sketch.argument(a)
    f = sketch.call("f", x, slice=a)
    g = sketch.call("g", x, slice=b)
    graph = sketch.graph(f, g)
    send, execute = plans_of(sketch, graph)[0].steps
    assert isinstance(send, Send)
    assert isinstance(execute, Execute)
    assert (send.gang, execute.gang) == (1, 0)
    assert (send.drops, execute.drops) == ((), ())


def test_a_transfer_runs_with_its_producer() -> None:
    """An unused result of f leaves with gang 0, though its consumer is gang 2."""
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    f = sketch.call("f", slice=a)
    g = sketch.call("g", slice=a)
    h = sketch.call("h", f, slice=b)
    plans = plans_of(sketch, sketch.graph(g, h))
    assert [(type(step), step.gang) for step in plans[0].steps] == [(Execute, 0), (Send, 0), (Execute, 1)]
    assert [(type(step), step.gang) for step in plans[1].steps] == [(Receive, 2), (Execute, 2)]


def test_slices_that_the_program_no_longer_touches_have_no_plan() -> None:
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    kept = sketch.call("kept", slice=a)
    sketch.call("unused", slice=b)
    plans = plans_of(sketch, sketch.graph(kept))
    assert list(plans) == [0]
    assert [slice.mesh.id for slice in plans[0].slices] == [a]


# --- transfer ids -----------------------------------------------------------------------------------------------------

EDGES = st.integers(0, limits.MAX_NODES - 1)
HOSTS = st.integers(0, limits.MAX_HOSTS - 1)
LAUNCHES = st.integers(0, 2**38 - 1)


@repeatable(150)
@given(st.tuples(LAUNCHES, EDGES, HOSTS), st.tuples(LAUNCHES, EDGES, HOSTS))
def test_different_transfers_have_different_names(one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    assert (transfer_id(*one) == transfer_id(*other)) == (one == other)


def test_names_of_neighbours_differ_and_fit_into_64_bits() -> None:
    last_edge, last_host = limits.MAX_NODES - 1, limits.MAX_HOSTS - 1
    names = [
        transfer_id(launch, edge, host)
        for launch in (1, 2, 2**38 - 1)
        for edge in (0, 1, last_edge)
        for host in (0, 1, last_host)
    ]
    assert len(set(names)) == len(names)
    assert max(names) < 2**63


# --- host functions ---------------------------------------------------------------------------------------------------


def test_a_call_returns_before_the_first_who_needs_it_and_other_work_goes_between() -> None:
    """
    1. `h` is a host function of what f made; g does not need it, k does.
    2. g is enqueued while `h` runs; the input of `h` stays until it has returned.
    """
    sketch = Sketch()
    a = sketch.slice("0.0", "0.1")
    f = sketch.call("f", sketch.argument(a), slice=a)
    h = sketch.call("h", f, slice=a, host_limit_ms=500)
    g = sketch.call("g", sketch.argument(a), slice=a)
    graph = sketch.graph(sketch.call("k", h, g, slice=a))
    assert text_of(sketch, graph)[2:-2] == [
        "  s0 = argument 0",
        "  s3 = argument 1",
        "  [0] s1 = execute f(s0); drop s0",
        "  [1] call h(s1)",
        "  [3] s4 = execute g(s3); drop s3",
        "  [2] s2 = return of h; drop s1",
        "  [4] s5 = execute k(s2, s4); drop s2, s4",
    ]
    assert "host h(%1)" in graph_text(graph)
    assert plans_of(sketch, graph)[0].gangs == 5
    assert [len(made.executables) for made in plans_of(sketch, graph, fusion=True).values()] == [3], (
        "g and k are joined"
    )


def test_what_another_island_takes_of_a_call_is_sent_as_soon_as_it_has_returned() -> None:
    """Otherwise an island could wait at its own barrier for what follows from what it has yet to send."""
    sketch = Sketch()
    a, b = sketch.slice("0.0"), sketch.slice("1.0", island=1)
    h = sketch.call("h", sketch.argument(a), slice=a, host_limit_ms=500)
    there = sketch.call("there", h, slice=b)
    graph = sketch.graph(sketch.call("back", there, slice=a))
    kinds = [type(step).__name__ for step in plans_of(sketch, graph)[0].steps]
    assert kinds == ["Call", "Return", "Send", "Receive", "Execute"]
