"""Traffic: what each level carries is what its time is counted for."""

from __future__ import annotations

from megatron_ptdp.planner import simulated
from megatron_ptdp.planner.estimate import estimate
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.traffic import traffic
from tests.unit.megatron.planner.helpers import asked, gpt


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
