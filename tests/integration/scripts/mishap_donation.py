"""Reinforcement learning in small: what was donated to a launch that fails with another island's host lives on."""

from __future__ import annotations

import os
import signal
import time

import jax.numpy as jnp
import numpy as np

import pathways_ray as pw

with pw.init(2, 1, 1) as session:
    rollout, learner = (pw.virtual_slice((1,), island=k) for k in (0, 1))
    sample = pw.compiled(lambda seed: jnp.ones(4) * seed, slice=rollout)
    update = pw.compiled(lambda p, o, t: (p + t.sum(), o + 1.0), slice=learner, donate_argnums=(0, 1))

    @pw.program
    def step(p, o, seed):
        return update(p, o, sample(seed))

    params, moments = pw.put(np.zeros(4, np.float32), learner), pw.put(np.zeros(4, np.float32), learner)
    for seed in (1.0, 2.0):
        params, moments = step(params, moments, np.float32(seed))
    assert np.asarray(params)[0] == 12, params
    before = pw.islands()

    # 1. The host of the rollout dies between making the tokens and the step that takes them.
    tokens = sample(np.float32(3.0)).block_until_ready()
    os.kill(before[0]["hosts"][0]["pid"], signal.SIGKILL)
    for call, last in ((update, tokens), (step, np.float32(3.0))):
        made = call(params, moments, last)
        try:
            made[0].block_until_ready(timeout=60)
        except (pw.errors.HostLost, pw.errors.BufferLost) as error:
            print(type(error).__name__, str(error)[-70:], flush=True)
            # 2. The learner's island is well, and so is what lies there.
            assert np.asarray(params)[0] == 12
            assert np.asarray(moments)[0] == 2
        else:
            params, moments = made
            break
    else:
        # 3. The same step once more, and the loop goes on.
        deadline = time.monotonic() + 60
        while not all(host["up"] for island in pw.islands() for host in island["hosts"]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        params, moments = step(params, moments, np.float32(3.0))
    print(np.asarray(params)[0], np.asarray(moments)[0])
    assert np.asarray(params)[0] == 24
    assert np.asarray(moments)[0] == 3
    print("lives on")
