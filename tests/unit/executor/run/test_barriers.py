"""Where a launch waits on a host, and for what."""

from __future__ import annotations

from hypothesis import given

from pathways_ray.executor.run.barriers import InputBarrier, with_barriers
from pathways_ray.ir.graph import Graph, Ref, Transfer
from pathways_ray.ir.passes import lower
from pathways_ray.ir.passes.plan_islands import plan_islands
from pathways_ray.ir.types import Layout
from tests.unit import strategies
from tests.unit.helpers import VECTOR, Sketch, spec


def check_barriers(sketch: Sketch, graph: Graph) -> None:
    """Each has a number of its own on its host, and the hosts of an island meet in the same order."""
    for plan in plan_islands(lower(graph, fusion=False), sketch.placement):
        hosts = sorted({host for placed in plan.slices for host in placed.hosts})
        for steps in (plan.steps, sorted(plan.steps, key=lambda step: step.gang)):
            met = set()
            for host in hosts:
                found = with_barriers(steps, plan, host, multi_host=len(hosts) > 1)
                barriers = [step for step in found if isinstance(step, InputBarrier)]
                assert len({barrier.number for barrier in barriers}) == len(barriers), barriers
                met.add(tuple(barrier.number for barrier in barriers if barrier.rendezvous))
            assert len(met) == 1


@given(strategies.programs())
def test_barriers_have_numbers_of_their_own(made: tuple[Sketch, Graph]) -> None:
    check_barriers(*made)


def test_two_rendezvous_before_steps_of_one_gang_are_two() -> None:
    """An argument is used in two layouts of a slice on two hosts, and the second is made where the first is used.
    Before each of these uses a value goes from one host to the other."""
    sketch = Sketch()
    left, right, both = sketch.slice("0.0"), sketch.slice("1.0"), sketch.slice("0.0", "1.0")
    p = sketch.call("f", sketch.argument(left), slice=left)
    q = sketch.call("g", p, slice=right)
    a = sketch.argument(both, spec="x")
    r = sketch.call("h", a, slice=both, specs="x", output_specs="x")
    s = sketch.call("g", sketch.call("f", p, slice=left), slice=right)
    t = sketch.call("k", a, slice=both)
    check_barriers(sketch, sketch.graph(q, r, s, t))


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
