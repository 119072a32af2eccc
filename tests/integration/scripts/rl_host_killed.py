"""The example of reinforcement learning: the sampler's host is killed once in each mode, within a step of the first
two while the update waits for its answers, and between two steps of `streaming`."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

import pathways_ray as pw
from examples.rl import loops

STEPS = 5
WITHIN = ("on-policy", "one-step-off")

with pw.init(islands=2, devices_per_host=1) as session:
    sampler = pw.virtual_slice((1,), ("x",), island=0)
    learner = pw.virtual_slice((1,), ("t",), island=1)

    def victim() -> int:
        (host,) = next(one for one in session.status()["islands"] if one["island"] == 0)["hosts"]
        return int(host["pid"])

    def between(number: int, step: loops.Step) -> None:
        if number == 1:
            os.kill(victim(), signal.SIGKILL)

    def within(train: Any) -> Any:
        """The update of a job, which takes the memory of the state; at the third call the host dies right after it."""
        calls, pid = iter(range(1 << 30)), victim()

        def killed(*args: Any) -> Any:
            found = train(*args)
            if next(calls) == 2:
                os.kill(pid, signal.SIGKILL)
            return found

        return killed

    for mode, lags in (("on-policy", [0] * STEPS), ("one-step-off", None), ("streaming", None)):
        job = loops.Job(sampler, learner, prompts=4)
        if mode in WITHIN:
            job.train = within(job.train)
        found = loops.run(job, mode, STEPS, *([] if mode in WITHIN else [between]))
        assert len(found.steps) == STEPS
        assert all(np.isfinite(step.loss) and 0 <= step.lag <= 2 for step in found.steps), found.steps
        assert lags is None or [step.lag for step in found.steps] == lags
        print(mode, [round(step.seconds, 2) for step in found.steps], [step.lag for step in found.steps], flush=True)
print("went on")
