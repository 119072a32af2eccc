"""Traffic: what each level carries is what its time is counted for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ptdp.config.cluster import Cluster
from megatron_ptdp.planner import simulated
from megatron_ptdp.planner.estimate import estimate
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.traffic import traffic
from tests.unit.megatron.planner.helpers import asked, gpt, selene


def test_gradients_cross_the_network_with_each_update() -> None:
    """A schedule that updates on the way sums gradients many times in an iteration, in bytes as in seconds."""
    model, carried, seconds = gpt(tied=False), {}, {}
    for schedule in ("1f1b", "pipedream", "pipedream-2bw"):
        plan = Plan(pipeline=2, data=8, batch=64, schedule=schedule)
        question = asked(model, plan.devices, plan.batch)
        one = estimate(question, plan)
        times = simulated.updates(plan)
        carried[schedule] = [level.data / times for level in traffic(question, one)]
        seconds[schedule] = one.time.data / times
        assert times == {"1f1b": 1, "pipedream": 8, "pipedream-2bw": 4}[schedule]
    assert sum(carried["1f1b"]) > 0
    assert carried["pipedream"] == carried["pipedream-2bw"] == carried["1f1b"]
    assert seconds["pipedream"] == seconds["pipedream-2bw"] == seconds["1f1b"]


def without_latency(cluster: Cluster) -> Cluster:
    return replace(cluster, levels=tuple(replace(level, latency=0.0) for level in cluster.levels))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tensor=8, batch=8, recompute="none"),
        Plan(tensor=8, batch=8, microbatch=2, recompute="full"),
        Plan(tensor=2, pipeline=2, chunks=2, batch=8, schedule="zb-v", recompute="none"),
        Plan(pipeline=2, batch=8),
        Plan(pipeline=16, batch=16),
        Plan(pipeline=4, tensor=2, data=4, batch=16),
    ],
    ids=Plan.label,
)
@pytest.mark.parametrize("encoder_layers", [0, 16])
def test_bytes_take_the_time_that_is_counted_for_them(plan: Plan, encoder_layers: int) -> None:
    """Where nothing is hidden, and no collective has to begin; of the tensor axis on the device that has both ends."""
    model = gpt(layers=16, encoder_layers=encoder_layers)
    question = asked(model, plan.devices, plan.batch, without_latency(selene()))
    one = estimate(question, plan)
    rates = {level.name: level.rate for level in question.cluster.levels}
    carried = traffic(question, one)
    if plan.data == 1 or not encoder_layers:  # else another device than the first has the most parameters
        assert sum(level.data / rates[level.level] for level in carried) == pytest.approx(one.time.data)
    if plan.pipeline == 1 or plan.schedule == "zb-v":
        assert sum(level.tensor / rates[level.level] for level in carried) == pytest.approx(one.time.tensor)
