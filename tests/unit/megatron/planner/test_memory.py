"""Memory: the published formulas, the schedules' own action lists, ZeRO's table."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_ptdp.config import load
from megatron_ptdp.config.parallel import RECOMPUTE
from megatron_ptdp.planner.estimate import Question, time_split
from megatron_ptdp.planner.memory import (
    _device_memory,
    in_flight,
    layer_activations,
    logits_held,
    stage_memory,
    waiting,
)
from megatron_ptdp.planner.plan import Plan, illegal
from megatron_ptdp.planner.search import search
from megatron_ptdp.schedules import build, peak_memory, rules_of, schedule_names
from tests.drawn import some
from tests.unit.megatron.planner.helpers import asked, gpt, selene

FORMULAS = [  # Korthikanti et al. 2022, table 2: bytes over s b h, of a, s, h, t
    ("none", False, lambda a, s, h, t: 10 + 24 / t + 5 * a * s / (h * t)),
    ("none", True, lambda a, s, h, t: 34 / t + 5 * a * s / (h * t)),
    ("selective", False, lambda a, s, h, t: 10 + 24 / t),
    ("selective", True, lambda a, s, h, t: 34 / t),
    ("full", False, lambda a, s, h, t: 2),
    ("full", True, lambda a, s, h, t: 2 / t),
]


@pytest.mark.parametrize(("recompute", "sp", "formula"), FORMULAS)
@pytest.mark.parametrize("t", [1, 2, 8])
def test_activations_equal_the_published_formulas(recompute: str, sp: bool, formula: object, t: int) -> None:
    model = load.model("gpt3-175b")
    assert callable(formula)
    wanted = 2048 * 12288 * formula(96, 2048, 12288, t)
    found = layer_activations(model, model.row[0], t, sp, recompute, flash=False)
    assert found == pytest.approx(wanted, rel=1e-12)


def test_flash_attention_keeps_no_scores() -> None:
    model = gpt()
    kept = {flash: layer_activations(model, model.row[0], 1, False, "none", flash) for flash in (False, True)}
    assert kept[True] == layer_activations(model, model.row[0], 1, False, "selective", False) < kept[False]


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 16), (8, 16)])
def test_microbatches_in_flight_equal_those_of_the_action_lists(name: str, p: int, m: int) -> None:
    v = rules_of(name).chunks or 2
    held = peak_memory(build(name, p, m, v), (1.0,) * (p * v), (1.0,) * (p * v))
    plan = Plan(pipeline=p, chunks=v, batch=m, schedule=name)
    assert [in_flight(plan, position) for position in range(p)] == [chunks / v for chunks in held]


@pytest.mark.parametrize("name", ["zb-h1", "interleaved-zb", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (8, 16)])
def test_waiting_gradients_equal_those_of_the_action_lists(name: str, p: int, m: int) -> None:
    v = rules_of(name).chunks or 2
    held = peak_memory(build(name, p, m, v), (0.0,) * (p * v), (1.0,) * (p * v))
    plan = Plan(pipeline=p, chunks=v, batch=m, schedule=name)
    assert [waiting(plan, position) for position in range(p)] == [chunks / v for chunks in held]


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 16), (8, 16)])
def test_logits_that_are_held_equal_those_of_the_action_lists(name: str, p: int, m: int) -> None:
    v = rules_of(name).chunks or 2
    before = (0.0,) * (p * v - 1)
    held = peak_memory(build(name, p, m, v), (*before, 4.0), (*before, 2.0))
    assert logits_held(Plan(pipeline=p, chunks=v, batch=m, schedule=name), 4.0, 2.0) == max(held)


@pytest.mark.parametrize(
    ("schedule", "recompute", "more"),
    [
        *(("gpipe", "none", 7 * 4), ("zb-h1", "none", 2), ("1f1b", "none", 0), ("gpipe", "selective", 7 * 4)),
        *(("gpipe", "full", 0), ("zb-h1", "full", 0)),
    ],
)
def test_the_last_stage_holds_a_softmax_of_each_microbatch_in_flight(schedule: str, recompute: str, more: int) -> None:
    """Or, where that of the weights waits, the logits' gradient in half precision; nothing where both are computed
    again. Twice the vocabulary has that much more of each logit."""
    plan = Plan(pipeline=2, batch=8, schedule=schedule, recompute=recompute)
    small, large = (
        stage_memory(plan, gpt(vocabulary=vocabulary, sequence=64), selene(), load.software("xla")).last.activations
        for vocabulary in (1 << 14, 1 << 15)
    )
    assert large - small == pytest.approx(more * 64 * (1 << 14))


@pytest.mark.parametrize("p", [2, 3, 4, 7])
def test_a_v_that_is_never_full_holds_what_its_action_lists_hold(p: int) -> None:
    for m in range(p, 2 * p):
        schedule, plan = build("zb-v", p, m), Plan(pipeline=p, chunks=2, batch=m, schedule="zb-v")
        kept, waits = (peak_memory(schedule, (stash,) * (2 * p), (1.0,) * (2 * p)) for stash in (1.0, 0.0))
        assert [in_flight(plan, position) for position in range(p)] == [chunks / 2 for chunks in kept]
        least = [chunks / 2 for chunks in waits]
        bound = [waiting(plan, position) for position in range(p)]
        assert bound[-1] == least[-1]
        assert all(one <= other for one, other in zip(least, bound, strict=True))
        assert bound == least or p < m < 2 * p - 1


def test_a_v_that_is_never_full_fits_where_its_fullest_device_does() -> None:
    """39 billion parameters over 32 devices, with as many microbatches as stages."""
    model, cluster = load.model("gpt-39b"), selene()
    plan = Plan(8, 4, chunks=2, microbatch=4, batch=32, schedule="zb-v", recompute="selective")
    assert illegal(plan, model) is None
    assert stage_memory(plan, model, cluster, load.software("ptdp")).most <= cluster.device.memory_bytes


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_equals_its_papers_example(zero: int, gigabytes: float) -> None:
    """7.5 billion parameters on 64 devices, 2 + 2 + 12 bytes each (Rajbhandari et al. 2020, figure 1)."""
    model = gpt(layers=36, hidden=4096, heads=32, positions=False)
    model = replace(model, vocabulary=128 * int((7.5e9 - 36 * 12 * 4096**2) / 4096 / 128))
    software = replace(load.software("ptdp"), optimizer_bytes=12.0)
    memory = stage_memory(Plan(data=64, batch=64, zero=zero), model, selene(), software).first
    assert (memory.weights + memory.gradients + memory.optimizer) / 1e9 == pytest.approx(
        gigabytes, abs=0.6 if zero == 0 else 0.11
    )


def test_stages_hold_every_parameter_once_and_the_shared_matrix_twice() -> None:
    model, plan = gpt(layers=8), Plan(pipeline=4, tensor=2, data=1, batch=4)
    memory = stage_memory(plan, model, selene(), load.software("ptdp"))
    total = memory.first.weights + 2 * memory.middle.weights + memory.last.weights
    positions = 512 * 1024  # whole on each device of the group
    assert total * 2 == 2 * (model.parameters + 1024 * 1024 + positions)


def test_a_long_schedule_needs_more_than_a_short_one() -> None:
    software, model = load.software("ptdp"), gpt()
    sizes = {
        name: stage_memory(Plan(pipeline=4, batch=32, schedule=name), model, selene(), software).most
        for name in ("gpipe", "1f1b")
    }
    assert sizes["gpipe"] > sizes["1f1b"]


@pytest.mark.parametrize("name", some(["gpt3-175b", "llama3-405b", "t5-11b", "palm-540b", "bloom-176b"]))
@pytest.mark.parametrize("schedule", schedule_names())
def test_a_plan_needs_what_its_fullest_device_needs(name: str, schedule: str) -> None:
    """In zb-h1 with full recomputation the last but one, in a T5 one at the end of the encoder."""
    cluster, software, seen = selene(), load.software("ptdp"), 0
    model = load.model(name)
    if rules_of(schedule).stale:
        model = replace(model, tied=False)
    sizes = itertools.product((2, 4, 7, 12, 14, 16, 24), (1, 2, 3), RECOMPUTE, (1, 2))
    for p, v, recompute, rounds in sizes:
        plan = Plan(pipeline=p, tensor=8, chunks=v, batch=rounds * p, schedule=schedule, recompute=recompute)
        if illegal(plan, model):
            continue
        seen += 1
        each = [_device_memory(plan, model, cluster, software, position).total for position in range(p)]
        assert stage_memory(plan, model, cluster, software).most == max(each), plan.label()
    assert seen


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("encoder_layers", [0, 4])
def test_members_hold_one_head_of_keys_at_least(recompute: str, encoder_layers: int) -> None:
    """Two heads over eight members are as many on each as eight over eight, in memory as in time."""
    plan = Plan(tensor=8, pipeline=2, data=2, batch=8, recompute=recompute)
    two, eight = (
        gpt(name=f"{heads} heads of keys", key_heads=heads, encoder_layers=encoder_layers) for heads in (2, 8)
    )
    assert two.parameters < eight.parameters
    shares = [stage_memory(plan, model, selene(), load.software("ptdp")) for model in (two, eight)]
    assert shares[0] == shares[1]
    times = [time_split(asked(model, plan.devices, plan.batch), plan) for model in (two, eight)]
    assert times[0] == times[1]


def test_heads_of_keys_that_members_can_neither_share_nor_hold_are_refused() -> None:
    model = gpt(heads=24, hidden=24 * 64, key_heads=6)
    faults = {t: illegal(Plan(tensor=t, batch=1), model) for t in (1, 2, 3, 4, 6, 8, 12)}
    assert [t for t, fault in faults.items() if fault] == [4, 8]
    assert (faults[4] or "").startswith("key_heads 6 is neither a multiple nor a divisor of tensor 4")


def test_a_plan_whose_last_device_but_one_is_over_the_limit_does_not_fit() -> None:
    model, h100 = load.model("llama3-405b"), load.cluster("h100")
    question = Question(model, h100, load.software(h100.software), 2048, 1024)
    for one in search(question, {"schedule": "zb-h1", "recompute": "full"}, top=3, simulate=False).best:
        positions = range(one.plan.pipeline)
        each = [_device_memory(one.plan, model, h100, question.software, position).total for position in positions]
        assert max(each) <= one.limit
