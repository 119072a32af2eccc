"""A program under which a host is killed three times, and which is then refused."""

from __future__ import annotations

import os
import signal
import time

import jax
import numpy as np

import pathways_ray as pw

with pw.init(1, 1, 1) as session:
    s = pw.virtual_slice((1,))
    long = pw.compiled(lambda v: jax.lax.fori_loop(0, (1 << 31) - 1, lambda i, c: c * 1.0000001, v), slice=s)
    short = pw.compiled(lambda v: v + 1, slice=s)
    x = np.ones(64, np.float32)
    for _attempt in range(3):
        assert np.asarray(short(x))[0] == 2
        y = long(x)
        time.sleep(1.0)
        os.kill(pw.islands()[0]["hosts"][0]["pid"], signal.SIGKILL)
        try:
            y.block_until_ready(timeout=15)
            raise SystemExit("it ended")
        except (pw.errors.HostLost, pw.errors.BufferLost):
            pass
    try:
        long(x).block_until_ready(timeout=20)
        raise SystemExit("it ran")
    except pw.errors.ProgramRefused as error:
        assert "ended a host 3 times" in str(error), error
    assert np.asarray(short(x))[0] == 2
    print("refused")
