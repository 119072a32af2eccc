"""Failures and money: the best interval is the best, the limits are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ptdp.config import load
from megatron_ptdp.planner.estimate import Estimate, Question
from megatron_ptdp.planner.explain.records import estimate_record
from megatron_ptdp.planner.goodput import best_interval, expected_stretch, goodput
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.search import estimate_exactly
from tests.unit.megatron.planner.helpers import asked


def trillion(**operations: float) -> tuple[Question, Estimate]:
    question = asked(load.model("gpt-1t"), 3072, 3072)
    cluster = question.cluster
    question = replace(question, cluster=replace(cluster, operations=replace(cluster.operations, **operations)))
    return question, estimate_exactly(question, Plan(64, 8, 6, 1, 1, 3072))


def test_a_checkpoint_of_a_trillion_is_what_the_paper_prints() -> None:
    """13.8 TB, saved at 273 GB/s (PTD-P section 5.10)."""
    run = goodput(*trillion())
    assert run.checkpoint_bytes / 1e12 == pytest.approx(13.8, rel=0.03)
    assert run.save == pytest.approx(13.8e12 / 273e9, rel=0.03)


@given(save=st.floats(1, 600), hours=st.floats(3, 1000), other=st.floats(0.2, 5))
def test_no_interval_is_much_better_than_the_best(save: float, hours: float, other: float) -> None:
    mtbf = hours * 3600
    best = best_interval(save, mtbf)
    wasted = expected_stretch(best, save, 60, mtbf) - 1
    assert wasted <= (expected_stretch(best * other, save, 60, mtbf) - 1) * 1.02


def test_without_failures_nothing_is_lost_but_saves() -> None:
    assert goodput(*trillion(mtbf_hours=1e12)).share == pytest.approx(1.0, abs=1e-3)


def test_more_failures_cost_more_days_and_money() -> None:
    often, seldom = (goodput(*trillion(mtbf_hours=hours)) for hours in (5_000, 50_000))
    assert often.share < seldom.share < 1
    assert often.days > seldom.days
    assert often.price > seldom.price
    assert often.failures > seldom.failures


def test_a_system_that_always_fails_never_ends() -> None:
    question, one = trillion(mtbf_hours=1e-3)
    run = goodput(question, one)
    assert run.days == float("inf")
    assert run.share == 0
    assert estimate_record(question, one)["failures"]["days"] is None  # JSON has no infinity
