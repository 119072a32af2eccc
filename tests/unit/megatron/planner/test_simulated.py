"""Schedules without closed forms: interleaved-zb and a user's own are planned from their action lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_ptdp.config import load
from megatron_ptdp.errors import BadFigure, Illegal, UnknownName
from megatron_ptdp.planner.estimate import pipeline_work
from megatron_ptdp.planner.memory import in_flight, stage_memory
from megatron_ptdp.planner.pipeline import CLOSED_FORMS
from megatron_ptdp.planner.plan import Plan, illegal
from megatron_ptdp.planner.search import estimate_exactly, search
from megatron_ptdp.planner.simulated import costs, pipeline_seconds, waiting
from megatron_ptdp.schedules import Action, Schedule, build, loop, register, registry, schedule_names, simulate
from tests.unit.megatron.planner.helpers import asked, gpt, selene

ZB = Plan(pipeline=4, chunks=2, batch=16, schedule="interleaved-zb")


def turned(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """GPipe whose backwards take the microbatches in the opposite order; for an even number of them."""
    if microbatches % 2:
        raise ValueError("an odd number of microbatches")
    numbers = range(microbatches)
    rows = [
        [*(Action(stage, "F", k) for k in numbers), *(Action(stage, "B", k) for k in reversed(numbers))]
        for stage in range(devices)
    ]
    return Schedule.of("turned", microbatches, loop(devices), rows)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a schedule of a user's own, registered for one test."""
    monkeypatch.setattr(registry, "_GENERATORS", {**registry._GENERATORS})
    register("turned")(turned)
    yield "turned"
    registry._observed.cache_clear()


def test_every_registered_schedule_can_be_planned() -> None:
    for name in schedule_names():
        chunks, model = registry.rules_of(name).chunks or 2, gpt(tied=not registry.rules_of(name).stale)
        plan = Plan(pipeline=2, chunks=chunks, batch=8, schedule=name)
        assert illegal(plan, model) is None
        assert estimate_exactly(asked(model, 2, 8), plan).simulated


def test_a_schedule_without_a_closed_form_takes_what_its_action_lists_take() -> None:
    question = asked(gpt(), 4, 16)
    assert ZB.schedule not in CLOSED_FORMS
    work, _ = pipeline_work(question, ZB)
    one = estimate_exactly(question, ZB)
    assert one.closed_form == one.seconds
    makespan = simulate(build("interleaved-zb", 4, 16, 2), costs(work)).makespan
    assert one.time.compute + one.time.tensor + one.time.pipeline + one.time.bubble == pytest.approx(makespan)


def test_a_search_takes_it_where_it_is_asked_for_by_name() -> None:
    question = asked(gpt(), 8, 32)
    best = search(question, {"schedule": "interleaved-zb"}, top=2).best
    assert {one.plan.schedule for one in best} == {"interleaved-zb"}
    everything = search(question, {"pipeline": 4}, top=20, simulate=False).best
    assert "interleaved-zb" not in {one.plan.schedule for one in everything}


@pytest.mark.parametrize(("name", "kept", "updates"), [("pipedream", (4, 3, 1), 16), ("pipedream-2bw", (2, 2, 2), 4)])
def test_a_schedule_without_a_flush_keeps_versions_and_updates_often(
    name: str, kept: tuple[int, ...], updates: int
) -> None:
    """A search finds it by name only: what it computes is another rule than that of the others."""
    question = asked(gpt(tied=False), 4, 16)
    flushed, stale = (estimate_exactly(question, Plan(pipeline=4, batch=16, schedule=each)) for each in ("1f1b", name))
    for position, versions in zip(("first", "middle", "last"), kept, strict=True):
        once, here = (getattr(one.memory, position) for one in (flushed, stale))
        assert here.weights == versions * once.weights
        assert here.activations == once.activations
    step = question.cluster.device.step
    assert stale.time.optimizer - step == pytest.approx(updates * (flushed.time.optimizer - step))
    assert stale.time.bubble == pytest.approx(flushed.time.bubble)
    assert search(question, {"schedule": name, "pipeline": 4}, top=1).best[0].plan.schedule == name
    assert name not in {one.plan.schedule for one in search(question, {}, top=20, simulate=False).best}


def test_a_schedule_without_a_flush_is_not_planned_where_it_cannot_be_trained() -> None:
    plan = Plan(pipeline=2, data=2, batch=16, schedule="pipedream")
    assert illegal(plan, gpt(tied=False)) is None
    assert "two stages share: the embedding; set tied = false" in (illegal(plan, gpt()) or "")
    assert "it takes zero 0, not 1" in (illegal(replace(plan, zero=1), gpt(tied=False)) or "")
    assert "8 is not a multiple of 3" in (
        illegal(Plan(pipeline=3, batch=8, schedule="pipedream-2bw"), gpt(layers=9, tied=False)) or ""
    )


def test_slices_of_tokens_shrink_the_bubble_and_hold_what_whole_microbatches_hold() -> None:
    question = asked(gpt(tied=False), 4, 4)
    found = [
        estimate_exactly(question, Plan(pipeline=4, batch=4, schedule="terapipe", token_slices=n)) for n in (1, 4, 8)
    ]
    for fewer, more in pairwise(found):
        assert more.memory == fewer.memory
        assert more.time.compute == pytest.approx(fewer.time.compute)
        assert more.time.bubble < 0.75 * fewer.time.bubble
        assert more.time.pipeline > fewer.time.pipeline  # each slice has a message of its own
    best = search(question, {"schedule": "terapipe", "token_slices": 4, "pipeline": 4}, top=1).best[0].plan
    assert (best.schedule, best.token_slices) == ("terapipe", 4)
    assert "takes microbatches whole" in (illegal(replace(best, schedule="gpipe"), question.model) or "")
    assert "more than the 512 tokens" in (illegal(replace(best, token_slices=513), question.model) or "")
    assert "an embedding that two stages share" in (illegal(best, gpt()) or "")
    assert "need a layer on each stage" in (illegal(best, gpt(layers=3, tied=False)) or "")
    assert best.recompute == "full", "which is what is trained"
    assert "recompute is full, not none" in (illegal(replace(best, recompute="none"), question.model) or "")


def test_a_schedule_of_ones_own_is_known_when_it_is_registered(own: str) -> None:
    question, plan = asked(gpt(), 4, 16), Plan(pipeline=4, batch=16, schedule=own)
    one = estimate_exactly(question, plan)
    gpipe = estimate_exactly(question, Plan(pipeline=4, batch=16, schedule="gpipe"))
    assert one.memory == gpipe.memory
    assert one.seconds == pytest.approx(gpipe.seconds)
    assert search(question, {"schedule": own}, top=1).best[0].plan.schedule == own


def test_a_generator_that_always_fails_cannot_be_planned(own: str) -> None:
    register("broken")(lambda p, m, v=1: 1 // 0)  # type: ignore[type-var]
    with pytest.raises(BadFigure, match="schedule broken cannot be planned: the rule of 'broken' failed for 3, 9"):
        search(asked(gpt(), 4, 16), {"schedule": "broken"})


def test_an_unregistered_schedule_is_unknown() -> None:
    with pytest.raises(UnknownName, match="there is no schedule 'turned'"):
        search(asked(gpt(), 4, 16), {"schedule": "turned"})


def test_sizes_that_its_generator_refuses_are_illegal(own: str) -> None:
    with pytest.raises(Illegal, match="the rule of 'turned' failed for 4, 15, 1: ValueError: an odd number of micro"):
        estimate_exactly(asked(gpt(), 4, 15), Plan(pipeline=4, batch=15, schedule=own))
    with pytest.raises(Illegal, match="turned was asked for 2 chunks on each of 4 devices, and made 4 stages"):
        estimate_exactly(asked(gpt(), 4, 16), Plan(pipeline=4, chunks=2, batch=16, schedule=own))


@pytest.mark.parametrize(("p", "v", "m"), [(16, 8, 72), (16, 8, 68), (8, 16, 63)])
def test_groups_of_equal_size_are_planned_with_all_microbatches(p: int, v: int, m: int) -> None:
    """Fewer microbatches with the same rest make no equal groups, or other ones."""
    question, plan = asked(gpt(layers=128), p, m), Plan(pipeline=p, chunks=v, batch=m, schedule="interleaved-zb")
    assert illegal(plan, question.model) is None
    work, _ = pipeline_work(question, plan)
    makespan = simulate(build("interleaved-zb", p, m, v), costs(work)).makespan
    assert pipeline_seconds(plan, work) == makespan
    assert [in_flight(plan, 0) > 0, waiting(plan, 0) > 0] == [True, True]


def test_a_schedule_of_ones_own_that_does_not_take_the_shorter_runs_is_planned_with_all(own: str) -> None:
    """Of the two that would be continued, three devices have one with an odd number of microbatches."""
    plan = Plan(pipeline=3, batch=3000, schedule=own)
    assert illegal(plan, gpt(layers=9)) is None
    assert in_flight(plan, 0) == 3000


def test_memory_of_a_long_iteration_is_continued_in_a_straight_line(own: str) -> None:
    """All of its 10,000 microbatches are in flight, as under GPipe; fewer are counted."""
    software, model = load.software("ptdp"), gpt()
    long = Plan(pipeline=4, batch=10_000, schedule=own)
    assert [in_flight(long, position) for position in range(4)] == [10_000] * 4
    like = Plan(pipeline=4, batch=10_000, schedule="gpipe")
    assert stage_memory(long, model, selene(), software) == stage_memory(like, model, selene(), software)
