from hypothesis import given, strategies as st
import numpy as np
from pathways_ray.ir.passes import lower
from pathways_ray.ir.passes.fuse import fuse
from pathways_ray.ir.plan import plan
from pathways_ray.ir.verify import verify
from tests.unit.interpreters import *
from tests.unit.strategies import programs, repeatable
@repeatable(1000)
@given(programs())
def test_lower(case):
    sketch, graph = case
    verify(graph)
    args = [sample(n.type, n.index) for n in graph.arguments]
    want = run_graph(graph, args, sketch.signatures)
    for fusion in (False, True):
        low = lower(graph, fusion)
        got = run_graph(low, args, sketch.signatures)
        assert all(np.array_equal(a,b) for a,b in zip(want,got, strict=True))
@repeatable(1000)
@given(programs(), st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_plan(case, fusion, by_gang, rng):
    sketch, graph = case
    args = [sample(n.type, n.index) for n in graph.arguments]
    want = run_graph(graph, args, sketch.signatures)
    low = lower(graph, fusion)
    plans = plan(low, sketch.placement)
    got = PlanRun(plans, args, sketch.signatures, rng.choice).run(by_gang)
    assert all(np.array_equal(a,b) for a,b in zip(want,got, strict=True))
