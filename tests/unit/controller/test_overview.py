"""An overview: the graph of a program, what it moves between hosts, and bounds."""

from __future__ import annotations

import json
from collections import deque

from pathways_ray.controller.overview import MAX_INPUTS, MAX_LAUNCHES, MAX_NEW_PROGRAMS, MAX_NODES, Details, Overview
from pathways_ray.ir.graph import Ref, Regroup
from pathways_ray.ir.types import Layout
from pathways_ray.story import Entry
from tests.unit.controller.harness import SLICES, Harness, program_over, sketch_with_slices
from tests.unit.helpers import VECTOR


def test_the_graph_of_a_program_goes_over_islands() -> None:
    """f0 on island 0, f1 on island 1, f2 back on island 0: an island is walked as far as what the others send it."""
    found = Details(program_over(1, 2, 1))
    assert [(node["name"], node["island"]) for node in found.nodes] == [("f0", 0), ("f1", 1), ("f2", 0)]
    names = {node["id"]: node["name"] for node in found.nodes}
    assert [(names[edge["from"]], names[edge["to"]]) for edge in found.edges] == [("f0", "f1"), ("f1", "f2")]


def test_a_program_moves_its_edges_between_hosts() -> None:
    """Slice 1 is on host 0, slice 2 on host 2; the vector is replicated, and comes to a host once."""
    assert Details(program_over(1, 2, 1)).moved == {(0, 2): VECTOR.nbytes, (2, 0): VECTOR.nbytes}
    assert Details(program_over(1, 1)).moved == {}


def test_a_big_program_is_drawn_in_part() -> None:
    sketch = sketch_with_slices("big")
    value = sketch.argument(1)
    for k in range(MAX_NODES + 10):
        value = sketch.call(f"f{k}", value, slice=1)
    assert len(Details(sketch.planned(value)).nodes) == MAX_NODES


def test_an_edge_is_drawn_once_and_few_of_many_inputs_are_followed() -> None:
    """A program of 64 nodes with half a million inputs kept the controller for ten seconds."""

    class Followed(dict[tuple[int, int], int]):
        count = 0

        def get(self, key: tuple[int, int], default: int = -1) -> int:  # type: ignore[override]
            self.count += 1
            return super().get(key, default)

    sketch = sketch_with_slices("dense")
    first = sketch.call("f0", sketch.argument(1), slice=1, no_fusion=True)
    second = sketch.call("f1", *[first] * (2 * MAX_INPUTS), slice=1, no_fusion=True)
    found = Details(sketch.planned(sketch.call("f2", first, second, first, slice=1, no_fusion=True)))
    assert [(edge["from"], edge["to"]) for edge in found.edges] == [(0, 1), (0, 2), (1, 2)]
    (plan,) = found.program.plans.values()
    found.nodes, found.edges, found._made_by = [], [], Followed()
    found._walk(plan, deque(plan.steps))
    assert found._made_by.count <= MAX_INPUTS + 8


def test_an_overview_counts_launches_and_what_they_moved() -> None:
    front = Harness(sessions=(1, 2))
    front.register(program_over(1, 2), 1)
    front.put(1)
    for number in range(3):
        front.launch(number + 1, (1,), 100 + number)
    front.launches.story.note(Entry(0.0, "host lost", "island 1", "killed", host=2))
    overview = Overview(front.launches)
    found = overview.made()
    (program,) = found["programs"]
    assert (program["name"], program["launches"], program["in_flight"], program["ready"]) == ("1-2", 3, 3, 2)
    assert found["transfers"] == [(0, 2, 3 * VECTOR.nbytes)]
    assert overview.moved_bytes() == 3 * VECTOR.nbytes
    front.launches.programs.clear()
    assert overview.moved_bytes() == 3 * VECTOR.nbytes, "a counter does not fall when a program goes"
    assert [launch["sequence"] for launch in found["launches"]] == [1, 2, 3]
    assert found["events"][0]["event"] == "host lost"
    json.dumps(found)


def test_a_tenant_sees_its_own_in_an_overview() -> None:
    front = Harness(sessions=(1, 2))
    front.register(program_over(1, 2), 1)
    front.put(1)
    front.launch(1, (1,), 100)
    front.launches.story.note(Entry(0.0, "session opened", "secret", session=1))
    found = Overview(front.launches).made(frozenset({2}))
    assert (found["programs"], found["launches"], found["transfers"]) == ([], [], [])
    assert "secret" not in json.dumps(found)


def test_an_overview_is_bounded_and_finds_details_bit_by_bit() -> None:
    front = Harness(sessions=(1,))
    front.put(1)
    for number in range(MAX_NEW_PROGRAMS + 2):
        front.register(program_over(1, key=number + 1), number + 1)
        for k in range(15):
            front.launch(100 * number + k + 1, (1,), 1000 * (number + 1) + k, number + 1)
    overview = Overview(front.launches)
    first = overview.made()
    assert sum(bool(program["nodes"]) for program in first["programs"]) == MAX_NEW_PROGRAMS
    assert all(program["nodes"] for program in overview.made()["programs"])
    assert len(first["launches"]) <= MAX_LAUNCHES


def test_host_functions_are_drawn_as_such_and_what_is_regrouped_leads_on() -> None:
    """f goes to Python, and what that gave to g."""
    sketch = sketch_with_slices("with Python")
    value = sketch.call("f", sketch.argument(1), slice=1)
    value = sketch.call("g", sketch.call("reward", value, slice=1, host_limit_ms=1000), slice=1)
    found = Details(sketch.planned(value))
    names = {node["id"]: node["name"] for node in found.nodes}
    assert list(names.values()) == ["f", "reward (Python)", "g"]
    assert [(names[edge["from"]], names[edge["to"]]) for edge in found.edges] == [
        ("f", "reward (Python)"),
        ("reward (Python)", "g"),
    ]
    sketch = sketch_with_slices("regrouped")
    made = sketch.call("f", sketch.argument(1), slice=1)
    sketch.nodes.append(Regroup((made,), tuple((0, k) for k in range(SLICES[0].mesh.size)), VECTOR, Layout(1, ())))
    found = Details(sketch.planned(sketch.call("g", Ref(len(sketch.nodes) - 1), slice=1)))
    assert [node["name"] for node in found.nodes] == ["f", "regroup", "g"]
    assert [(edge["from"], edge["to"]) for edge in found.edges] == [(0, 1), (1, 2)]


def test_launches_that_wait_at_the_controller_are_there_once_for_each_session() -> None:
    """The second host has not compiled the program: the launch is deferred, and another one waits behind it."""
    front = Harness(sessions=(1, 2))
    program = program_over(1, 2)
    front.launches.register(1, 1, program)
    front.put(1)
    front.launch(7, (1,), 100)
    front.launch(8, (100,), 101)
    (waits,) = Overview(front.launches).made()["launches"]
    assert (waits["sequence"], waits["session"], waits["launch"], waits["program"]) == (0, 1, 7, "1-2")
    assert waits["state"].endswith("with 1 calls behind it")
    assert Overview(front.launches).made(frozenset({2}))["launches"] == []
