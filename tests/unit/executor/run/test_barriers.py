"""Where a launch waits on a host, and for what."""

from __future__ import annotations

from pathways_ray.executor.run.barriers import InputBarrier, with_barriers
from pathways_ray.ir.graph import Ref, Transfer
from pathways_ray.ir.passes import lower
from pathways_ray.ir.passes.plan_islands import plan_islands
from pathways_ray.ir.types import Layout
from tests.unit.helpers import VECTOR, Sketch, spec


def test_the_inputs_of_a_gang_do_not_wait_for_what_becomes_of_its_results() -> None:
    """
    1. f is on both hosts of an island; it takes a value of another island.
    2. Its result goes to the same hosts in another order: both moves belong to the gang of f, and each has a barrier.
    """
    sketch = Sketch()
    far, here = sketch.slice("5.0", island=1), sketch.slice("0.0", "1.0")
    turned = sketch.slice("1.0", "0.0")
    f = sketch.call("f", sketch.argument(far), slice=here, output_specs="x")
    sketch.nodes.append(Transfer(f, VECTOR, Layout(turned, spec("x"))))
    graph = lower(sketch.graph(Ref(len(sketch.nodes) - 1)), fusion=False)
    plan = next(made for made in plan_islands(graph, sketch.placement) if made.island == 0)
    steps = with_barriers(plan.steps, plan, 0, multi_host=True)
    kinds = [type(step).__name__ for step in steps]
    assert kinds == ["InputBarrier", "Receive", "Execute", "Send", "InputBarrier", "Receive"]
    waits = [step for step in steps if isinstance(step, InputBarrier)]
    assert [barrier.bundles for barrier in waits] == [(0,), (1,)]
    assert len({barrier.number for barrier in waits}) == 2
