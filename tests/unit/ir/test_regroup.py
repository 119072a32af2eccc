"""Values made of shards of others, where they lie; and transfers that are results."""

from __future__ import annotations

import msgspec
import pytest

from pathways_ray.errors import GraphError
from pathways_ray.ir import plan
from pathways_ray.ir.graph import Argument, Graph, Ref, Regroup, Result, Transfer
from pathways_ray.ir.passes import lower
from pathways_ray.ir.passes.plan_islands import plan_islands
from pathways_ray.ir.plan import IslandPlan, PlacedSlice
from pathways_ray.ir.text import graph_text, plan_text
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.ir.verify import verify
from tests.unit.helpers import placed

ROW, PIECE = ArrayType((8,), "float32"), ArrayType((4,), "float32")
LEFT, RIGHT, BOTH = placed(1, ["0.0"]), placed(2, ["0.1"]), placed(3, ["0.0", "0.1"])
TURNED = placed(4, ["0.1", "0.0"])
SPLIT = Layout(3, (("x",),))
NODE = Regroup((Ref(0), Ref(1)), ((0, 0), (1, 0)), ROW, SPLIT)


def graph(node: Regroup | Transfer = NODE, *slices: PlacedSlice) -> Graph:
    used = slices or (LEFT, RIGHT, BOTH)
    arguments = (Argument(0, PIECE, Layout(1, ())), Argument(1, PIECE, Layout(2, ())))
    return Graph("g", tuple(s.mesh for s in used), (), (*arguments, node, Result((Ref(2),))))


def planned(made: Graph, *slices: PlacedSlice) -> tuple[IslandPlan, ...]:
    return plan_islands(lower(made), {s.mesh.id: s for s in (LEFT, RIGHT, BOTH, *slices)})


def test_a_regroup_is_one_step_that_moves_nothing() -> None:
    (made,) = planned(graph())
    (step,) = made.steps
    assert step == plan.Regroup(0, (0, 1), ((0, 0), (1, 0)), ROW, SPLIT, 2, (0, 1))
    assert made.results == ((2, 0),)
    assert "%2 = regroup %0, %1 : float32[8] @ slice3:P(x)" in graph_text(graph())
    assert "s2 = regroup s0, s1: float32[8] @ slice3:P(x); drop s0, s1" in plan_text((made,))


def test_a_regroup_of_shards_on_other_devices_cannot_be_planned() -> None:
    turned = msgspec.structs.replace(NODE, layout=Layout(4, (("x",),)))
    with pytest.raises(GraphError, match=r"takes a shard on device 0\.0 as one on device 0\.1"):
        planned(graph(turned, LEFT, RIGHT, TURNED), TURNED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": ((0, 0),)}, "made of 1 shards"),
        ({"shards": ((0, 0), (2, 0))}, "made of input 2; it has 2"),
        ({"shards": ((0, 0), (1, 1))}, "made of shard 1 of %1; it has 1"),
        ({"type": ArrayType((6,), "float32")}, r"shards of type float32\[3\]"),
        ({"type": ArrayType((8,), "int32")}, r"shards of type int32\[4\]"),
        ({"layout": Layout(9, ())}, "does not have"),
        ({"inputs": (Ref(0), Ref(3))}, "does not come before it"),
    ],
)
def test_regroups_that_do_not_fit_together_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        verify(graph(msgspec.structs.replace(NODE, **change)))


def test_a_transfer_that_is_a_result_arrives_before_the_end() -> None:
    """On another island, which has no computation at all."""
    far = placed(5, ["7.0"], island=1)
    here, there = planned(graph(Transfer(Ref(0), PIECE, Layout(5, ())), LEFT, RIGHT, far), far)
    assert [type(step) for step in here.steps] == [plan.Send]
    (step,) = there.steps
    assert isinstance(step, plan.Receive)
    assert there.results == ((step.targets[0], 0),)
    assert there.awaited == step.targets
    assert here.results == ()
