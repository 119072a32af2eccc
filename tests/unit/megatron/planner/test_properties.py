"""What must hold for every plan: more memory, faster networks and cheaper plans never turn an answer round."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_ptdp.config import load
from megatron_ptdp.config.parallel import RECOMPUTE
from megatron_ptdp.planner.estimate import Question, estimate, time_split
from megatron_ptdp.planner.memory import stage_memory
from megatron_ptdp.planner.pipeline import CLOSED_FORMS
from megatron_ptdp.planner.plan import Plan, illegal
from megatron_ptdp.planner.search import search
from megatron_ptdp.planner.space import families, lower_bound, members
from megatron_ptdp.schedules import rules_of, schedule_names
from tests.unit.megatron.planner.helpers import asked, faster_network, gpt, selene
from tests.unit.strategies import repeatable

MODEL = gpt(layers=16, hidden=2048, heads=16)
SOFTWARE = ["ptdp", "megatron-2022", "megatron-core", "xla"]
POWERS = st.sampled_from([1, 2, 4, 8, 16])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A legal plan of `MODEL`."""
    schedule = draw(st.sampled_from(schedule_names()))
    rules = rules_of(schedule)
    pipeline = draw(st.sampled_from([1, 2, 4, 8]))
    chunks = rules.chunks or draw(st.sampled_from([2, 4]))
    data, microbatch = draw(POWERS), draw(st.sampled_from([1, 2, 4]))
    plan = Plan(
        pipeline=pipeline,
        tensor=draw(POWERS),
        data=data,
        chunks=1 if pipeline == 1 else chunks,
        microbatch=microbatch,
        batch=data * microbatch * draw(st.sampled_from([1, 8, 16, 64])),
        schedule="1f1b" if pipeline == 1 else schedule,
        recompute=draw(st.sampled_from(RECOMPUTE)),
        sequence_parallel=draw(st.booleans()),
        zero=draw(st.integers(0, 3)),
        scatter_gather=draw(st.booleans()),
    )
    assume(illegal(plan, MODEL) is None)
    return plan


def question(plan: Plan, software: str = "ptdp") -> Question:
    return asked(MODEL, plan.devices, plan.batch, software=software)


@repeatable(100)
@given(plan=plans(), software=st.sampled_from(SOFTWARE), factor=st.floats(1.0, 4.0))
def test_more_memory_never_makes_a_plan_that_fits_not_fit(plan: Plan, software: str, factor: float) -> None:
    asked_for = question(plan, software)
    device = asked_for.cluster.device
    larger = replace(device, memory_bytes=device.memory_bytes * factor)
    more = replace(asked_for, cluster=replace(asked_for.cluster, device=larger))
    before, after = estimate(asked_for, plan), estimate(more, plan)
    assert after.fits >= before.fits
    assert after.seconds == before.seconds


@st.composite
def slow_questions(draw: st.DrawFn) -> tuple[Question, Plan]:
    """A plan on networks that are as fast as Selene's, or so slow that computation hides little of what they carry."""
    plan = draw(plans())
    asked_for = question(plan, draw(st.sampled_from(SOFTWARE)))
    for level in (0, 1):
        slower = faster_network(asked_for.cluster, level, draw(st.sampled_from([1.0, 0.1, 0.01])))
        asked_for = replace(asked_for, cluster=replace(slower, name=f"{slower.name}-{level}"))
    return asked_for, plan


@repeatable(100)
@given(asked_for=slow_questions(), level=st.integers(0, 1), factor=st.sampled_from([1.01, 2.0, 10.0]))
def test_more_of_a_networks_bandwidth_is_never_slower(
    asked_for: tuple[Question, Plan], level: int, factor: float
) -> None:
    slow, plan = asked_for
    fast = replace(slow, cluster=faster_network(slow.cluster, level, factor))
    assert time_split(fast, plan).total <= time_split(slow, plan).total * (1 + 1e-12)


@repeatable(100)
@given(asked_for=slow_questions(), figure=st.sampled_from(["memory_bandwidth", "peak_flops"]))
def test_a_faster_device_is_never_slower(asked_for: tuple[Question, Plan], figure: str) -> None:
    slow, plan = asked_for
    device = replace(slow.cluster.device, **{figure: 2 * getattr(slow.cluster.device, figure)})
    fast = replace(slow, cluster=replace(slow.cluster, device=device))
    assert time_split(fast, plan).total <= time_split(slow, plan).total * (1 + 1e-12)


@repeatable(100)
@given(plan=plans(), software=st.sampled_from(SOFTWARE))
def test_the_parts_are_the_whole_and_none_is_negative(plan: Plan, software: str) -> None:
    one = estimate(question(plan, software), plan)
    parts = [one.time.compute, one.time.tensor, one.time.pipeline, one.time.data, one.time.bubble, one.time.optimizer]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(one.seconds)
    assert one.tokens_per_second * one.seconds == pytest.approx(plan.batch * MODEL.sequence)
    assert one.model_flops <= one.hardware_flops <= one.peak_flops


@repeatable(100)
@given(plan=plans(), software=st.sampled_from(SOFTWARE))
def test_no_plan_is_faster_than_its_familys_bound(plan: Plan, software: str) -> None:
    asked_for = question(plan, software)
    assert lower_bound(asked_for, plan) <= time_split(asked_for, plan).total * (1 + 1e-9)


@repeatable(100)
@given(plan=plans(), software=st.sampled_from(SOFTWARE))
def test_zero_and_recomputation_never_need_more_memory(plan: Plan, software: str) -> None:
    def needed(one: Plan) -> float:
        return stage_memory(one, MODEL, selene(), load.software(software)).most

    if plan.data > 1 and plan.zero == 0:
        assert needed(replace(plan, zero=1)) <= needed(plan)
    if plan.recompute == "none":
        working = stage_memory(plan, MODEL, selene(), load.software(software)).first.working
        assert needed(replace(plan, recompute="selective")) <= needed(plan) + 1.1 * working + 3e9


@pytest.mark.parametrize(
    ("devices", "batch", "fixed"), [(8, 16, {}), (16, 32, {"recompute": "full"}), (12, 24, {"zero": 0})]
)
def test_the_search_loses_nothing(devices: int, batch: int, fixed: dict[str, object]) -> None:
    """The best of the search is the best of all legal plans that fit, timed one by one."""
    asked_for = asked(gpt(layers=12, hidden=3072, heads=24), devices, batch)
    limit = asked_for.cluster.device.memory_bytes
    fitting = [
        time_split(asked_for, plan).total
        for family in families(asked_for, fixed)
        for plan in members(asked_for, family, fixed)
        if stage_memory(plan, asked_for.model, asked_for.cluster, asked_for.software).most <= limit
    ]
    found = search(asked_for, fixed, top=1, simulate=False)
    assert found.best[0].seconds == pytest.approx(min(fitting))
    assert found.opened <= found.families


@pytest.mark.parametrize("factor", [1.2, 2.0, 8.0])
def test_more_memory_never_makes_the_answer_slower(factor: float) -> None:
    asked_for = asked(load.model("gpt-18b"), 64, 128, selene(memory_bytes=40e9))
    larger = replace(asked_for, cluster=selene(memory_bytes=40e9 * factor))
    seconds = [search(one, {}, top=1, simulate=False).best[0].seconds for one in (asked_for, larger)]
    assert seconds[1] <= seconds[0]


def test_members_are_all_legal_plans() -> None:
    """Every legal plan that can be written down is in the space, once."""
    model = gpt(layers=4, heads=4)
    asked_for = asked(model, 4, 8)
    found = [plan for family in families(asked_for, {}) for plan in members(asked_for, family, {})]
    assert len(found) == len(set(found))
    assert all(illegal(plan, model) is None and plan.devices == 4 and plan.batch == 8 for plan in found)
    by_hand = set()
    for t in (1, 2, 4):
        for p in (1, 2, 4):
            for schedule in sorted(CLOSED_FORMS):
                for v in (1, 2, 3, 4, 5, 6):
                    for b in (1, 2, 4, 8):
                        for zero in range(4):
                            for sp in (False, True):
                                for recompute in RECOMPUTE:
                                    if t * p <= 4:
                                        d = 4 // (t * p)
                                        plan = Plan(p, t, d, v, b, 8, schedule, recompute, sp, zero)
                                        if plan.microbatches and illegal(plan, model) is None:
                                            by_hand.add(plan)
    assert {plan for plan in found if plan.scatter_gather} == by_hand
