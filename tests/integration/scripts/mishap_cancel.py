"""A loop without end: what stands behind it is cancelled, others are not held up, and the limit ends it."""

from __future__ import annotations

import time

import jax
import numpy as np

import pathways_ray as pw

LIMIT_S = 25.0

with pw.init(1, 1, 2, launch_limit_s=LIMIT_S) as session:
    visitor = pw.connect(session.url, session.token)
    mine, others = visitor.virtual_slice((1,), island=0), session.virtual_slice((1,), island=0)
    good = pw.compiled(lambda v: v + 1, slice=others)
    small = pw.compiled(lambda v: v * 2, slice=mine)

    @pw.compiled(slice=mine)
    def endless(v: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c[0] >= 0, lambda c: c * 0.5, v)

    x = np.ones(2, np.float32)
    assert np.asarray(good(x))[0] == 2
    there = small(x).block_until_ready()
    start = time.monotonic()
    loop = endless(there)
    time.sleep(3.0)
    behind = [small(there) for _ in range(200)]
    last = small(behind[-1])

    # 1. The host is not held up by what stands in the queue of one device.
    assert np.asarray(good(x).block_until_ready(timeout=15))[0] == 2

    # 2. What has not begun is cancelled, with what depends on it; what has begun is only marked.
    assert behind[-1].cancel()
    for y in (behind[-1], last):
        try:
            y.block_until_ready(timeout=15)
            raise SystemExit("it ran")
        except pw.errors.Cancelled as error:
            print(error, flush=True)
    assert not behind[-1].cancel(), "there is nothing to cancel any more"
    assert not loop.cancel(), "it has begun"
    try:
        loop.block_until_ready(timeout=15)
        raise SystemExit("it ended")
    except pw.errors.Cancelled as error:
        print(error, flush=True)

    # 3. The session ends: nothing of it waits in the scheduler, and others go on.
    visitor.close()
    assert np.asarray(good(x).block_until_ready(timeout=15))[0] == 2
    assert time.monotonic() - start < LIMIT_S, "all of this before the limit"

    # 4. At the limit the host starts again, and the device is everybody's.
    everywhere = pw.compiled(lambda v: v + 3, slice=pw.virtual_slice((2,), ("x",), island=0))
    while True:
        assert time.monotonic() - start < 110.0
        try:
            assert np.asarray(everywhere(x).block_until_ready(timeout=30))[0] == 4
            break
        except (pw.errors.LaunchTimeout, pw.errors.HostLost, pw.errors.BufferLost, pw.errors.WaitTimeout) as error:
            print(type(error).__name__, flush=True)
            time.sleep(0.5)
    print("cancelled")
