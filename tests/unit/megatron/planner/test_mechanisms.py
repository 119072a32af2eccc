"""What hides what, and what does not: each mechanism of the time model by itself, on small cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ptdp.config import load
from megatron_ptdp.config.cluster import Cluster, Software
from megatron_ptdp.errors import BadFigure
from megatron_ptdp.planner.estimate import estimate, overlap_window, pipeline_work, time_split
from megatron_ptdp.planner.layers import Split, layer_cost
from megatron_ptdp.planner.network import Group, all_reduce, gather
from megatron_ptdp.planner.pipeline import StageWork, Work, bounded
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.simulated import pipeline_seconds
from megatron_ptdp.planner.space import families
from tests.unit.megatron.planner.helpers import asked, faster_network, gpt, selene

PTDP = load.software("ptdp")


def slow_nvlink(factor: float) -> Cluster:
    return replace(faster_network(selene(), 0, 1 / factor), name=f"slow-{factor}")


def test_messages_that_follow_one_another_take_twice_as_long() -> None:
    """DeepSpeed's schedule sends a gradient, then receives an activation; Megatron-LM does both at once."""
    plan, turns = Plan(pipeline=4, data=8, batch=64), replace(PTDP, name="turns", paired_messages=False)
    question = asked(gpt(), plan.devices, plan.batch)
    at_once = pipeline_work(question, plan)[1] - PTDP.wait_seconds
    in_turn = pipeline_work(replace(question, software=turns), plan)[1] - PTDP.wait_seconds
    assert in_turn == pytest.approx(2 * at_once)


def test_the_further_gather_of_sequence_parallelism_shows_where_the_network_is_slow() -> None:
    """It hides behind the backward pass to the inputs, and behind no more than that."""
    model, cluster = gpt(), slow_nvlink(1000)
    costs = {sp: layer_cost(model, model.row[0], Split(8, 1, sp, "none"), cluster, PTDP) for sp in (False, True)}
    size = 2.0 * 512 * 1024
    again = 2 * gather(cluster, Group(8), size)
    assert costs[False].inputs_tensor == pytest.approx(2 * all_reduce(cluster, Group(8), size))
    hidden = costs[False].inputs_tensor + again - costs[True].inputs_tensor
    assert 0 < hidden < 0.1 * again
    assert costs[True].hidden == pytest.approx(hidden)


def test_nothing_hides_behind_gradients_of_weights_that_come_later() -> None:
    model, software = gpt(), load.software("megatron-2022")
    costs = [
        layer_cost(model, model.row[0], Split(8, 4, False, "none", later), selene(), software)
        for later in (False, True)
    ]
    sums = 2 * all_reduce(selene(), Group(8), 2.0 * 4 * 512 * 1024)
    assert costs[1].inputs_tensor == pytest.approx(sums)
    assert costs[0].inputs_tensor < sums
    assert costs[0].inputs_tensor + costs[0].hidden == pytest.approx(sums)


def test_fused_attention_is_slower_than_other_products() -> None:
    """With 0.5 of their rate its products take twice as long, and nothing else does."""
    model, software = gpt(sequence=8192, dropout=False), load.software("megatron-core")
    split = Split(1, 1, False, "none")

    def forward(efficiency: float) -> float:
        one = replace(software, name=f"e{efficiency}", attention_efficiency=efficiency)
        return layer_cost(model, model.row[0], split, selene(), one).forward

    whole, half, quarter = forward(1.0), forward(0.5), forward(0.25)
    assert quarter - half == pytest.approx(2 * (half - whole))
    assert half > 1.1 * whole


@pytest.mark.parametrize(
    ("schedule", "chunks", "microbatches", "window"),
    [("1f1b", 1, 16, 1.0), ("interleaved", 4, 16, 1 + 3 * 3 / 4), ("looped-bfs", 4, 16, 1 + 15 * 3 / 4)],
)
def test_gradients_hide_behind_the_chunks_that_are_left(
    schedule: str, chunks: int, microbatches: int, window: float
) -> None:
    assert overlap_window(Plan(4, 1, 1, chunks, 1, microbatches, schedule)) == pytest.approx(window)


def test_computation_hides_communication_once() -> None:
    """On a slow network, gathers of ZeRO-3 do not hide behind what already hides the tensor axis's."""
    plan = Plan(tensor=8, data=16, batch=16, zero=3)
    question = asked(gpt(), plan.devices, plan.batch, slow_nvlink(1000), software="megatron-core")
    software = replace(question.software, name="none", backward_overlap=0.0, forward_overlap=0.0)
    hidden, shown = time_split(question, plan), time_split(replace(question, software=software), plan)
    assert hidden.tensor < shown.tensor
    assert hidden.total >= 0.999 * max(shown.tensor, hidden.data)
    assert hidden.data > shown.data


def test_a_pipeline_is_no_faster_than_its_links() -> None:
    """A middle device sends an activation and a gradient per microbatch; hidden or not, they take their time."""
    plan = Plan(pipeline=4, batch=64)
    work = Work((StageWork(1.0, 1.0, 1.0),) * 4, (0, 1, 2, 3), transfer=10.0)
    assert bounded(plan, work) >= 2 * 64 * 10.0
    cluster = faster_network(slow_nvlink(1e5), 1, 1e-5)
    question = asked(gpt(), 4, 64, replace(cluster, name="slower"), software="megatron-core")
    made, _ = pipeline_work(question, plan)
    assert pipeline_seconds(plan, made) >= 2 * 64 * made.transfer > 64 * max(stage.total for stage in made.stages)


def test_parallel_layers_sum_once_and_have_one_norm() -> None:
    apart, side = (gpt(parallel=parallel) for parallel in (False, True))
    assert apart.layer_parameters(apart.row[0]) - side.layer_parameters(side.row[0]) == 2 * 1024
    split, cluster = Split(8, 1, False, "none"), selene()
    sums = [layer_cost(model, model.row[0], split, cluster, PTDP).forward_tensor for model in (apart, side)]
    assert sums[0] == pytest.approx(2 * sums[1])
    assert side.forward_flops == apart.forward_flops
    with pytest.raises(BadFigure, match="parallel layers are decoders'; encoder_layers is 3"):
        gpt(parallel=True, encoder_layers=3)


def test_flash_attention_has_no_scores_to_run_again() -> None:
    """`selective` is then `none`: it is no plan of its own, but may be asked for."""
    question = asked(gpt(), 4, 8, software="megatron-core")
    assert {family.recompute for family in families(question, {})} == {"none", "full"}
    assert {family.recompute for family in families(question, {"recompute": "selective"})} == {"selective"}
    both = [time_split(question, Plan(data=4, batch=8, recompute=kind)).total for kind in ("none", "selective")]
    assert both[0] == both[1]
    rates = [estimate(question, Plan(data=4, batch=8, recompute=kind)).hardware_flops for kind in ("none", "selective")]
    assert rates[0] == rates[1]
    assert "selective" in {family.recompute for family in families(asked(gpt(), 4, 8), {})}


def test_software_files_of_before_still_load() -> None:
    """What was added to `Software` may be left out, and then changes nothing."""
    fields = {"attention_efficiency", "paired_messages"}
    table = {name: getattr(PTDP, name) for name in Software.__dataclass_fields__ if name not in fields}
    assert load.build(Software, table, "here") == PTDP
