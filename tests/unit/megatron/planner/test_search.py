"""The search from the outside: fixed settings, what is refused and how, what fits."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from megatron_ptdp.config import load
from megatron_ptdp.config.parallel import split_layers
from megatron_ptdp.errors import BadFigure, Illegal, NothingFits, PlanningError, UnknownName
from megatron_ptdp.planner.estimate import estimate
from megatron_ptdp.planner.pipeline import CLOSED_FORMS
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.search import estimate_exactly, search
from tests.drawn import some
from tests.unit.megatron.planner.helpers import asked, gpt, selene


def test_plans_come_in_order_fit_and_are_simulated() -> None:
    found = search(asked(gpt(), 16, 64), top=4)
    seconds = [one.seconds for one in found.best]
    assert seconds == sorted(seconds)
    assert len({(one.plan.label(), one.plan) for one in found.best}) == 4
    assert all(one.fits and one.simulated for one in found.best)


@pytest.mark.parametrize(
    "fixed", [{"tensor": 4}, {"pipeline": 4, "schedule": "interleaved"}, {"zero": 2}, {"microbatch": 2, "data": 8}]
)
def test_fixed_settings_are_kept(fixed: dict[str, Any]) -> None:
    for one in search(asked(gpt(), 16, 64), fixed, top=3, simulate=False).best:
        assert {name: getattr(one.plan, name) for name in fixed} == fixed


def test_a_trillion_parameters_take_seconds() -> None:
    """A generous limit for a busy machine: the goal is 10 s on a quiet core."""
    question = asked(load.model("gpt-1t"), 3072, 3072)
    start = time.process_time()
    found = search(question, top=2)
    assert time.process_time() - start < 20
    assert found.best[0].fits
    assert found.opened < found.families


def test_the_papers_plan_for_a_trillion_is_found_under_its_conditions() -> None:
    """Full recompute, no sequence parallelism, no ZeRO, the paper's schedules: tensor 8 in the server, as table 1."""
    question = asked(load.model("gpt-1t"), 3072, 3072)
    fixed = {"recompute": "full", "sequence_parallel": False, "zero": 0, "schedule": "1f1b", "microbatch": 1}
    best = search(question, fixed, top=1, simulate=False).best[0]
    assert best.plan.tensor == 8
    printed = estimate(question, Plan(64, 8, 6, 1, 1, 3072))
    assert best.seconds <= printed.seconds


@pytest.mark.parametrize(
    ("name", "value"),
    [("devices", 0), ("devices", -8), ("devices", 10**20), ("batch", 0), ("batch", 10**18), ("tokens", 0.0)],
)
def test_impossible_counts_are_refused(name: str, value: Any) -> None:
    with pytest.raises(BadFigure, match=f"{name} is {value}, must be 1 to [0-9,]*"):
        search(replace(asked(gpt(), 8, 8), **{name: value}))


def test_more_devices_than_there_are_are_refused() -> None:
    cluster = selene()
    small = replace(cluster, levels=(cluster.levels[0],))
    with pytest.raises(BadFigure, match="devices is 16, but the cluster 'a100-80g' has 8"):
        search(asked(gpt(), 16, 16, small))


@pytest.mark.parametrize(
    ("fixed", "error", "text"),
    [
        ({"tensr": 8}, UnknownName, "did you mean 'tensor'"),
        ({"schedule": "1fb1"}, UnknownName, "did you mean '1f1b'"),
        ({"recompute": "ful"}, UnknownName, "did you mean 'full'"),
        ({"tensor": 0}, BadFigure, "tensor is 0, must be at least 1"),
        ({"tensor": 2.5}, BadFigure, "tensor is 2.5, must be a whole number"),
        ({"zero": 4}, BadFigure, "zero is 4, must be 0, 1, 2 or 3"),
        ({"sequence_parallel": 1}, BadFigure, "must be true or false"),
        ({"tensor": 3}, Illegal, "tensor 3 does not divide 16 devices"),
        ({"pipeline": 16, "zero": 3}, Illegal, "without pipeline=16 there are some"),
        ({"pipeline": 16}, Illegal, "without pipeline=16 there are some"),
        (
            {"schedule": "pipedream"},
            Illegal,
            "is legal: schedule pipedream cannot update an array that two stages share: the embedding; set tied = false"
            "; without schedule=pipedream there are some",
        ),
        (
            {"schedule": "pipedream", "token_slices": 2},
            Illegal,
            "token_slices=2 is legal: schedule pipedream cannot update an array that two stages share: the embedding",
        ),
        ({"pipeline": 2, "zero": 3}, Illegal, "is legal: zero 3 needs pipeline = 1: .*; without pipeline=2 there are"),
    ],
)
def test_fixed_settings_that_cannot_be_are_refused(fixed: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        search(asked(gpt(), 16, 64), fixed)


def test_a_batch_that_no_replicas_divide_is_refused() -> None:
    """1 example cannot be spread over 1,000 replicas, and there are too few layers and heads for so many devices."""
    with pytest.raises(Illegal, match="a batch of 1 divides over 1 replicas at most, which leaves 1000 devices each"):
        search(asked(gpt(layers=2, heads=2), 1000, 1))


def test_nothing_fits_says_by_how_much_and_what_would() -> None:
    question = asked(load.model("gpt-1t"), 64, 64)
    with pytest.raises(NothingFits) as caught:
        search(question)
    text = str(caught.value)
    assert "needs at least 319.7 GB per device" in text
    assert "234,5" in text  # bytes
    assert "it fits on 256 devices" in text
    search(replace(question, devices=256), top=1, simulate=False)  # and it does


def test_a_fixed_setting_in_the_way_is_named() -> None:
    with pytest.raises(NothingFits, match="without zero=0 it fits"):
        search(asked(load.model("gpt-39b"), 64, 64), {"zero": 0, "pipeline": 1, "tensor": 2})


def test_no_devices_help_when_one_layer_is_too_large() -> None:
    tiny = selene(memory_bytes=4e9)
    with pytest.raises(NothingFits, match="no number of such devices helps"):
        search(asked(load.model("gpt-1t"), 8, 8, tiny), {"zero": 0})


def test_a_plan_for_other_devices_is_refused() -> None:
    with pytest.raises(PlanningError, match="the plan is for 8 devices and a batch of 8, the question for 16 and 8"):
        estimate_exactly(asked(gpt(), 16, 8), Plan(tensor=8, batch=8))


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(tensor=3, data=1, batch=4), "heads 16 is no multiple of tensor 3"),
        (Plan(data=3, batch=4), "batch 4 is no multiple of data 3 × microbatch 1"),
        (Plan(pipeline=11, batch=11), "8 layers do not divide into 11 × 1 stages"),
        (Plan(pipeline=2, chunks=2, batch=3, schedule="interleaved"), r"microbatches \(3\) in multiples of pipeline 2"),
        (Plan(pipeline=2, chunks=2, batch=2), "schedule 1f1b has 1 chunks on each device, not 2"),
        (Plan(pipeline=2, batch=2, schedule="interleaved"), "needs chunks of 2 or more"),
        (
            Plan(pipeline=2, chunks=2, batch=2, schedule="dualpipe-v"),
            "as many microbatches as stages, but there are 2 microbatches and 2 × 2 ",
        ),
        (Plan(chunks=2, batch=2), "needs a pipeline of 2 or more"),
        (Plan(sequence_parallel=True, batch=2), "sequence parallel needs tensor > 1"),
        (Plan(zero=1, batch=2), "zero 1 needs data > 1"),
        (Plan(pipeline=2, data=2, zero=2, batch=4), "zero 2 needs pipeline = 1"),
    ],
)
def test_illegal_plans_are_refused_with_the_reason(plan: Plan, text: str) -> None:
    with pytest.raises(Illegal, match=text):
        estimate_exactly(asked(gpt(), plan.devices, plan.batch), plan)


@pytest.mark.parametrize(
    ("layers", "stages", "wanted"),
    [
        (8, 4, (2, 2, 2, 2)),
        (62, 4, (15, 16, 16, 15)),  # Pathways table 2
        (126, 16, (7, *(8,) * 14, 7)),  # Llama 3 405B
        (7, 4, (2, 2, 2, 1)),
        (5, 4, None),
        (2, 4, (0, 1, 1, 0)),
    ],
)
def test_layers_split_evenly_or_with_lighter_ends(layers: int, stages: int, wanted: tuple[int, ...] | None) -> None:
    assert split_layers(layers, stages) == wanted


@pytest.mark.parametrize(("devices", "batch"), some([(64, 32), (256, 64), (576, 144)]))
def test_no_condition_makes_the_answer_faster(devices: int, batch: int) -> None:
    """Few microbatches: closed forms are least exact there, and the search must not lose the best to one of them."""
    question = asked(gpt(layers=24, hidden=4096, heads=32), devices, batch, software="megatron-core")
    best = search(question, {}, top=1).best[0].seconds
    for schedule in sorted(CLOSED_FORMS):
        try:
            under = search(question, {"schedule": schedule}, top=1).best[0].seconds
        except PlanningError:
            continue
        assert best <= under * (1 + 1e-9)
