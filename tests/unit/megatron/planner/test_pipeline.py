"""Closed forms of the pipeline's time beside the event simulator on the real action lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ptdp.planner.estimate import pipeline_work
from megatron_ptdp.planner.pipeline import StageWork, Work, bounded, placement
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.simulated import costs, pipeline_seconds, timeline
from megatron_ptdp.schedules import build, rules_of, simulate
from tests.drawn import drawn
from tests.unit.megatron.planner.helpers import asked, gpt


def work_of(plan: Plan, stage: tuple[float, float, float], edge: float, transfer: float = 0.0) -> Work:
    """Equal stages, the last one with `edge` more in each pass."""
    stages = [StageWork(*stage) for _ in range(plan.stages)]
    stages[-1] = StageWork(*(part + edge for part in stage))
    return Work(tuple(stages), placement(plan), transfer)


def simulated(plan: Plan, work: Work) -> float:
    return simulate(build(plan.schedule, plan.pipeline, plan.microbatches, plan.chunks), costs(work)).makespan


@settings(max_examples=drawn(40))
@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "looped-bfs"]),
    p=st.integers(2, 6),
    groups=st.integers(1, 4),
    v=st.integers(2, 3),
    stage=st.tuples(st.floats(0.5, 2), st.floats(0.5, 4), st.floats(0.5, 2)),
    edge=st.floats(0, 0.3),
)
def test_classic_schedules_take_what_the_closed_form_says(
    name: str, p: int, groups: int, v: int, stage: tuple[float, float, float], edge: float
) -> None:
    chunks = v if rules_of(name).chunks == 0 else 1
    plan = Plan(pipeline=p, chunks=chunks, batch=p * groups, schedule=name)
    work = work_of(plan, stage, edge)
    assert bounded(plan, work) == pytest.approx(simulated(plan, work), rel=0.02)


@settings(max_examples=drawn(40))
@given(p=st.integers(2, 8), m=st.integers(1, 8), v=st.integers(2, 5), edge=st.floats(0, 0.3))
def test_a_looped_schedule_may_have_fewer_microbatches_than_devices(p: int, m: int, v: int, edge: float) -> None:
    """Each device then waits in every loop until its first microbatch has been round."""
    plan = Plan(pipeline=p, chunks=v, batch=m, schedule="looped-bfs")
    work = work_of(plan, (1.0, 1.3, 0.7), edge)
    assert bounded(plan, work) == pytest.approx(simulated(plan, work), rel=0.05)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("stage", [(1.0, 1.0, 1.0), (1.0, 2.05, 0.95)])
def test_split_schedules_take_nearly_what_the_closed_form_says(name: str, stage: tuple[float, float, float]) -> None:
    plan = Plan(pipeline=8, chunks=rules_of(name).chunks, batch=64, schedule=name)
    work = work_of(plan, stage, edge=0.2)
    assert bounded(plan, work) == pytest.approx(simulated(plan, work), rel=0.035)


def test_the_bubble_is_the_papers() -> None:
    """(p - 1)/m of the work with 1F1B, 1/v of that interleaved (PTD-P section 2.2)."""
    for name, v in (("1f1b", 1), ("interleaved", 4)):
        plan = Plan(pipeline=4, chunks=v, batch=16, schedule=name)
        work = work_of(plan, (1.0, 1.0, 1.0), edge=0.0)
        assert bounded(plan, work) / (16 * 3.0 * v) - 1 == pytest.approx(3 / 16 / v)


def test_edge_stages_slow_the_whole_pipeline() -> None:
    """Figure 14: with one layer per stage the logits set the pace."""
    plan = Plan(pipeline=8, batch=64)
    even, heavy = (work_of(plan, (1.0, 1.0, 1.0), edge) for edge in (0.0, 1.0))
    assert bounded(plan, heavy) > 1.8 * bounded(plan, even)


@pytest.mark.parametrize("plan", [Plan(4, 1, 1, 1, 1, 400), Plan(4, 1, 1, 2, 1, 400, "interleaved")])
def test_a_long_iteration_is_continued_in_a_straight_line(plan: Plan) -> None:
    work, _ = pipeline_work(asked(gpt(), 4, 400), plan)
    assert pipeline_seconds(plan, work, limit=1000) == pytest.approx(timeline(plan, work).makespan, rel=1e-9)
