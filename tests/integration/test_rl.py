"""The example of reinforcement learning on the shared cluster, each mode; two of them against plain JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from examples.rl import loops, task
from pathways_ray.client.api import ClusterSession


def test_the_reward_is_the_share_of_the_answer_that_is_right() -> None:
    rows = np.concatenate([task.prompts(3, 2), np.zeros((2, task.ANSWER), np.int32)], 1)
    rows[0, task.PROMPT :] = [*np.sort(rows[0, : task.DIGITS]), task.END]
    rows[1, task.PROMPT :] = [*np.sort(rows[1, : task.DIGITS]), task.PAD]
    assert task.grade(rows).tolist() == [1.0, np.float32(0.8)]


@pytest.mark.parametrize(("mode", "lag"), [("on-policy", 0), ("one-step-off", 1)])
def test_it_learns_with_the_bits_of_plain_jax(session: ClusterSession, mode: str, lag: int) -> None:
    with (
        session.virtual_slice((1,), ("x",), island=0) as sampler,
        session.virtual_slice((1,), ("t",), island=1) as learner,
    ):
        # One prompt: of longer sums the bits depend on the number of XLA's threads, which hosts have more of.
        found = loops.run(loops.Job(sampler, learner, prompts=1), mode, 3)
        assert [step.lag for step in found.steps] == [0, lag, lag]
        assert loops.same_bits(found, loops.plain(3, lag=lag, prompts=1))


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_each_mode_goes_on_when_the_samplers_host_is_killed(python: Any) -> None:
    assert "went on" in python.run("rl_host_killed", timeout=140)


def test_groups_stream_with_bounded_staleness(session: ClusterSession) -> None:
    with (
        session.virtual_slice((2,), ("x",), island=0) as sampler,
        session.virtual_slice((2,), ("t",), island=1) as learner,
    ):
        found = loops.run(loops.Job(sampler, learner, prompts=8), "streaming", 2)
        assert len(found.steps) == 2
        assert all(0 <= step.lag <= 2 and np.isfinite(step.loss) for step in found.steps)
