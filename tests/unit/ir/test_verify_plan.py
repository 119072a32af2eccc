"""Plans that are broken are refused with the step that breaks them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given

from pathways_ray.errors import GraphError
from pathways_ray.ir.graph import Graph
from pathways_ray.ir.passes import lower
from pathways_ray.ir.passes.plan_islands import plan_islands
from pathways_ray.ir.plan import Call, Execute, IslandPlan, Receive, Regroup, Reshard, Return, Send
from pathways_ray.ir.verify_plan import verify_plan
from tests.unit.helpers import Sketch
from tests.unit.strategies import programs, repeatable


def plans() -> tuple[IslandPlan, IslandPlan]:
    """f on island 0, its value resharded and sent to island 1, where g takes it."""
    sketch = Sketch()
    here, same, there = sketch.slice("0.0", "0.1"), sketch.slice("0.0", "0.1"), sketch.slice("1.0", "1.1", island=1)
    value = sketch.call("f", sketch.argument(here), slice=here)
    beside = sketch.call("h", value, slice=same)
    result = sketch.call("g", value, slice=there)
    first, second = plan_islands(lower(sketch.graph(result, beside)), sketch.placement)
    return first, second


def changed(plan: IslandPlan, kind: type, **fields: Any) -> IslandPlan:
    """The plan with the first step of a kind changed."""
    steps = list(plan.steps)
    at = next(k for k, step in enumerate(steps) if isinstance(step, kind))
    steps[at] = msgspec.structs.replace(steps[at], **fields)
    return msgspec.structs.replace(plan, steps=tuple(steps))


def test_the_example_has_a_step_of_each_kind() -> None:
    first, second = plans()
    kinds = {type(step) for step in (*first.steps, *second.steps)}
    assert kinds == {Execute, Send, Receive, Reshard}
    assert verify_plan(first) is first


@pytest.mark.parametrize(
    ("island", "kind", "fields", "message"),
    [
        (0, Execute, {"executable": 7}, "step 0 runs executable 7; there are 2"),
        (0, Execute, {"node": 99}, "step 0 is labelled as node 99"),
        (0, Execute, {"inputs": (9,)}, "step 0 uses slot 9, which holds no value yet"),
        (0, Execute, {"inputs": ()}, "step 0 names 0 slots for the 1 values"),
        (0, Execute, {"outputs": (0,)}, "step 0 makes slot 0 a second time"),
        (0, Execute, {"outputs": (50,)}, "step 0 makes slot 50; there are"),
        (0, Execute, {"outputs": (2,)}, "slot 2 on slice 1; it lies on slice 2"),
        (0, Execute, {"gang": 8}, "step 0 belongs to gang 8; there are 3"),
        (0, Execute, {"drops": (1,)}, "uses slot 1, which was dropped before"),
        (0, Send, {"bundle": 5}, "is about bundle 5; there are 2"),
        (0, Send, {"sources": (3,)}, "uses slot 3, which holds no value yet"),
        (0, Reshard, {"targets": (0,)}, "makes slot 0 a second time"),
        (1, Receive, {"targets": (4,)}, "makes slot 4; there are 2"),
        (1, Receive, {"targets": ()}, "names 0 slots for the 1 edges of its bundle"),
        (1, Receive, {"bundle": -1}, "is about bundle -1"),
        (1, Execute, {"drops": (1,)}, "slot 1 is a result or awaited, but holds no value at the end"),
    ],
)
def test_a_broken_step_is_refused(island: int, kind: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        verify_plan(changed(plans()[island], kind, **fields))


def test_gangs_run_in_order_and_once() -> None:
    first, _ = plans()
    with pytest.raises(GraphError, match="runs gang 0 after gang"):
        verify_plan(msgspec.structs.replace(first, steps=(*first.steps, first.steps[0])))


def test_executables_lie_on_the_island_and_results_have_numbers_of_their_own() -> None:
    first, _ = plans()
    with pytest.raises(GraphError, match="executable 0 runs on slice 1, which is not on this island"):
        verify_plan(msgspec.structs.replace(first, island=5))
    with pytest.raises(GraphError, match=r"its results are numbered \[1, 1\]"):
        verify_plan(msgspec.structs.replace(first, results=first.results * 2))


def test_what_is_called_returns() -> None:
    sketch = Sketch()
    here = sketch.slice("0.0")
    called = sketch.call("h", sketch.argument(here), slice=here, host_limit_ms=1000)
    (plan,) = plan_islands(lower(sketch.graph(called)), sketch.placement)
    assert [type(step) for step in plan.steps] == [Call, Return]
    assert verify_plan(plan) is plan
    with pytest.raises(GraphError, match=r"calls of nodes \[\d+\] never return"):
        verify_plan(msgspec.structs.replace(plan, steps=plan.steps[:1], results=(), awaited=()))


@repeatable(60)
@given(programs())
def test_a_plan_without_one_of_its_steps_is_refused(case: tuple[Sketch, Graph]) -> None:
    """Unless the step was a send, whose value another island uses."""
    sketch, graph = case
    for plan in plan_islands(lower(graph), sketch.placement):
        for number, step in enumerate(plan.steps):
            without = msgspec.structs.replace(plan, steps=plan.steps[:number] + plan.steps[number + 1 :])
            if isinstance(step, Call):
                with pytest.raises(GraphError, match="returns what was not called so"):
                    verify_plan(without)
                continue
            if isinstance(step, Execute | Return):
                outputs = step.outputs
            else:
                outputs = () if isinstance(step, Send) else _made(step)
            used = {slot for slot, _ in plan.results} | set(plan.awaited)
            for other in plan.steps[number + 1 :]:
                if isinstance(other, Execute | Call | Return):
                    used.update(other.inputs)
                elif isinstance(other, Regroup) or not isinstance(other, Receive):
                    used.update(other.sources)
            if used & set(outputs):
                with pytest.raises(GraphError, match="holds no value"):
                    verify_plan(without)


def _made(step: Receive | Reshard | Regroup) -> tuple[int, ...]:
    return (step.target,) if isinstance(step, Regroup) else step.targets
