"""Waits of more than a second, each interrupted by Ctrl-C."""

from __future__ import annotations

import jax
import numpy as np

import pathways_ray as pw

STEPS = 1_000_000_000  # of a loop that XLA does not shorten; more than a second on any machine


def long(v: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, STEPS, lambda i, x: x * 0.5 + 1.0, v)


with pw.init(islands=1, devices_per_host=2) as session:
    slow = pw.compiled(long, slice=pw.virtual_slice((1,)))
    quick = pw.compiled(lambda v: v + 1, slice=pw.virtual_slice((1,)))
    assert float(quick(np.float32(1))) == 2
    for wait in (np.asarray, pw.Array.block_until_ready):
        y = slow(np.float32(1))
        try:
            print("waiting", flush=True)
            wait(y)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        else:
            print("not interrupted", flush=True)
        assert float(quick(np.float32(2))) == 3
    assert float(y) == 2  # what was waited for can be waited for again
    print("usable", flush=True)
    print("waiting", flush=True)
    np.asarray(slow(np.float32(1)))
