"""Launches on one island, called after others that wait for the lost host of another island."""

from __future__ import annotations

import os
import signal
import time

import jax.numpy as jnp
import numpy as np
import psutil

import pathways_ray as pw

with pw.init(2, 1, 1) as session:
    ones = [pw.compiled(lambda: jnp.ones(3), slice=pw.virtual_slice((1,), island=k)) for k in (0, 1)]
    twice = pw.compiled(lambda v: 2 * v, slice=ones[0].slice)
    for f in ones:
        np.asarray(twice(ones[0]())) if f is ones[0] else np.asarray(f())
    host = pw.islands()[0]["hosts"][0]["pid"]
    raylet = psutil.Process(host).parent()
    raylet.suspend()  # it would restart the host
    try:
        os.kill(host, signal.SIGKILL)
        while pw.islands()[0]["hosts"][0]["up"]:
            time.sleep(0.01)
        waiting = [ones[0]()]
        waiting.append(twice(waiting[0]))
        passing = [ones[1]() for _ in range(100)]
        for y in passing:
            assert np.asarray(y).tolist() == [1, 1, 1]
        print("ready before:", [y.is_ready() for y in waiting])
    finally:
        raylet.resume()
    print([np.asarray(y)[0] for y in waiting])
