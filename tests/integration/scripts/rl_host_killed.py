"""The example of reinforcement learning: the sampler's host is killed between two steps of each mode."""

from __future__ import annotations

import os
import signal

import numpy as np

import pathways_ray as pw
from examples.rl import loops

STEPS = 5

with pw.init(islands=2, devices_per_host=1) as session:
    sampler = pw.virtual_slice((1,), ("x",), island=0)
    learner = pw.virtual_slice((1,), ("t",), island=1)

    def kill(number: int, step: loops.Step) -> None:
        if number == 1:
            (host,) = next(one for one in session.status()["islands"] if one["island"] == 0)["hosts"]
            os.kill(host["pid"], signal.SIGKILL)

    for mode, lags in (("on-policy", [0] * STEPS), ("one-step-off", None), ("streaming", None)):
        found = loops.run(loops.Job(sampler, learner, prompts=4), mode, STEPS, kill)
        assert len(found.steps) == STEPS
        assert all(np.isfinite(step.loss) and 0 <= step.lag <= 2 for step in found.steps), found.steps
        assert lags is None or [step.lag for step in found.steps] == lags
        print(mode, [round(step.seconds, 2) for step in found.steps], [step.lag for step in found.steps], flush=True)
print("went on")
