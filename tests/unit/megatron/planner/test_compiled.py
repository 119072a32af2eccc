"""Software whose stages are compiled programs: what its actions, its messages and its backward passes cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_ptdp.config import load
from megatron_ptdp.config.cluster import Cluster, Level
from megatron_ptdp.parallel.action_order import fused_last_stage
from megatron_ptdp.planner.estimate import Question, action_costs, pipeline_work, split_of, stage_costs, time_split
from megatron_ptdp.planner.layers import logits_cost
from megatron_ptdp.planner.memory import stage_memory
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.schedules import build
from tests.unit.megatron.planner.helpers import gpt

MODEL = gpt(layers=8, hidden=128, heads=4, tied=False, dropout=False)
ACTION = 1e-3


def here(**device: Any) -> Cluster:
    cluster = load.cluster("this-machine")
    return replace(cluster, device=replace(cluster.device, action=ACTION, **device))


def asked(plan: Plan, cluster: Cluster | None = None, software: str = "xla-f32") -> Question:
    return Question(MODEL, cluster or here(), load.software(software), plan.devices, plan.batch)


@pytest.mark.parametrize(
    ("plan", "actions"),
    [
        (Plan(batch=4), [(0, 1, 0)]),  # one stage: forward and backward of a microbatch are one launch
        (Plan(pipeline=2, batch=4), [(1, 1, 0), (0, 1, 0)]),
        (Plan(pipeline=2, batch=4, schedule="gpipe", recompute="none"), [(1, 1, 0), (1, 1, 0)]),
        (Plan(pipeline=2, batch=4, schedule="gpipe"), [(1, 1, 0), (0, 1, 0)]),  # recomputed: the backward has it inside
        (Plan(pipeline=2, chunks=2, batch=4, schedule="interleaved"), [(1, 1, 0)] * 3 + [(0, 1, 0)]),
    ],
)
def test_each_action_is_a_launch(plan: Plan, actions: list[tuple[int, int, int]]) -> None:
    question = asked(plan)
    plain = stage_costs(MODEL, question.cluster, question.software, split_of(plan), plan.pipeline, plan.chunks)
    for cost, before, (forward, inputs, weights) in zip(action_costs(question, plan), plain, actions, strict=True):
        assert cost.forward - before.forward == pytest.approx(forward * ACTION)
        assert cost.inputs - before.inputs == pytest.approx(inputs * ACTION)
        assert cost.weights - before.weights == pytest.approx(weights * ACTION)


def test_a_split_backward_pass_has_two_launches_and_the_first_stage_gives_no_gradients_of_inputs() -> None:
    plan = Plan(pipeline=2, batch=4, schedule="zb-h1", recompute="none")
    question = asked(plan)
    plain = stage_costs(MODEL, question.cluster, question.software, split_of(plan), 2, 1)
    first, last = action_costs(question, plan)
    whole = [cost.inputs + cost.weights for cost in plain]
    assert (first.inputs, first.weights) == (ACTION, pytest.approx(whole[0] + ACTION))
    assert last.inputs == pytest.approx(question.software.inputs_share * whole[1] + ACTION)
    assert last.inputs + last.weights == pytest.approx(whole[1] + 2 * ACTION)


@pytest.mark.parametrize(("schedule", "chunks", "again"), [("gpipe", 1, 0), ("1f1b", 1, 0), ("looped-bfs", 2, 1)])
def test_a_whole_backward_computes_the_logits_again_where_it_comes_in_another_order(
    schedule: str, chunks: int, again: int
) -> None:
    plan = Plan(pipeline=2, chunks=chunks, batch=4, schedule=schedule, recompute="full")
    question = asked(plan)
    plain = stage_costs(MODEL, question.cluster, question.software, split_of(plan), 2, chunks)
    head = logits_cost(MODEL, split_of(plan), question.cluster, question.software)
    last = action_costs(question, plan)[-1]
    assert last.inputs == pytest.approx(plain[-1].inputs + again * head.forward + ACTION)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 9), (4, 8), (4, 16)])
def test_backward_passes_with_their_forward_inside_compute_no_logits_again(p: int, m: int) -> None:
    schedule = build("dualpipe-v", p, m)
    plan = Plan(pipeline=p, chunks=2, batch=m, schedule="dualpipe-v", recompute="full")
    question = asked(plan)
    plain = stage_costs(MODEL, question.cluster, question.software, split_of(plan), p, 2)[-1]
    head = logits_cost(MODEL, split_of(plan), question.cluster, question.software)
    apart = 1 - len(fused_last_stage(schedule, True)) / m
    last = action_costs(question, plan)[-1]
    assert last.inputs == pytest.approx(plain.inputs + apart * head.forward + ACTION)
    assert last.forward == pytest.approx(plain.forward + apart * ACTION)


def test_a_last_stage_of_terapipe_that_cuts_no_sequence_runs_as_any_other() -> None:
    of_slices, whole = (
        Plan(pipeline=2, batch=4, schedule=schedule, recompute="full") for schedule in ("terapipe", "gpipe")
    )
    assert action_costs(asked(of_slices), of_slices)[-1] == action_costs(asked(whole), whole)[-1]


def test_a_slice_of_tokens_has_a_forward_pass_on_the_last_stage_and_its_backward_pass_all_of_it_again() -> None:
    plan = Plan(pipeline=2, batch=4, schedule="terapipe", recompute="full", token_slices=4)
    question = asked(plan)
    plain = stage_costs(MODEL, question.cluster, question.software, split_of(plan), 2, 1)[-1]
    head = logits_cost(MODEL, split_of(plan), question.cluster, question.software)
    last = action_costs(question, plan)[-1]
    assert last.forward == pytest.approx(plain.forward / 4 + ACTION)
    assert last.inputs == pytest.approx((plain.inputs + head.forward) / 4 + ACTION)


def test_both_parts_of_a_backward_pass_compute_the_layers_again() -> None:
    plan = Plan(pipeline=2, tensor=2, batch=4, schedule="zb-h1", recompute="full")
    question = asked(plan)
    plain = stage_costs(MODEL, question.cluster, question.software, split_of(plan), 2, 1)
    head = logits_cost(MODEL, split_of(plan), question.cluster, question.software)  # which is computed again as well
    first, last = action_costs(question, plan)
    assert (first.inputs, first.weights) == (ACTION, pytest.approx(plain[0].inputs + plain[0].weights + ACTION))
    inputs, inputs_tensor = plain[1].inputs + head.forward, plain[1].inputs_tensor + head.forward_tensor
    assert last.inputs == pytest.approx(inputs + ACTION)
    assert last.inputs_tensor == inputs_tensor > 0
    assert last.weights == pytest.approx(inputs + inputs_tensor + plain[1].weights + ACTION)


def test_nothing_that_was_recomputed_waits_for_the_gradients_of_weights() -> None:
    """Both parts recompute it; other software keeps it from the first to the second, the most on the last device."""
    plan = Plan(pipeline=4, tensor=1, batch=8, schedule="zb-h1", recompute="full")
    question = asked(plan)
    compiled = stage_memory(plan, MODEL, question.cluster, question.software)
    others = stage_memory(plan, MODEL, question.cluster, replace(question.software, compiled_stages=False))
    inputs = 4 * MODEL.sequence * MODEL.hidden * 2  # float32, of two layers
    for device in (compiled.first, compiled.middle, compiled.last):
        assert device.activations == pytest.approx(4 * inputs)  # of as many microbatches as devices
    assert 4 * inputs < others.first.activations < others.middle.activations < others.last.activations


def test_other_software_pays_for_no_action() -> None:
    plan = Plan(pipeline=2, tensor=1, batch=4, schedule="zb-h1")
    question = asked(plan, software="megatron-2022")
    assert action_costs(question, plan) == stage_costs(MODEL, question.cluster, question.software, split_of(plan), 2, 1)


def test_a_message_takes_its_share_from_both_stages_although_it_is_overlapped() -> None:
    cluster = here()
    level = Level("island", 2, 1e9, 1.0, 1e-5, 1.0, message_bandwidth=1e8, message_latency=1e-3, message_share=0.25)
    cluster = replace(cluster, levels=(level,))
    plan = Plan(pipeline=2, batch=4)
    work, blocked = pipeline_work(asked(plan, cluster), plan)
    seconds = 1e-3 + 4 * MODEL.sequence * MODEL.hidden / 1e8
    assert (work.transfer, blocked) == (pytest.approx(seconds), pytest.approx(0.25 * seconds))


def test_an_iteration_has_a_part_that_no_microbatch_has() -> None:
    plan = Plan(batch=4)
    more = time_split(asked(plan, here(step=0.5)), plan)
    assert more.total - time_split(asked(plan, here(step=0.0)), plan).total == pytest.approx(0.5)


def test_activations_in_single_precision_take_twice_the_memory() -> None:
    plan, software = Plan(batch=4, recompute="none"), load.software("xla-f32")
    half = replace(software, name="half", element_bytes=2)
    full, less = (stage_memory(plan, MODEL, here(), one).first.activations for one in (software, half))
    assert full == pytest.approx(2 * less)
