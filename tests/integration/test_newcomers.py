"""A session that comes to a host that another one keeps busy."""

from __future__ import annotations

import jax
import numpy as np

import pathways_ray as pw

TURNS = 1_500_000_000
"""Of a loop that divides in each: some seconds. It ends with the cluster."""


def test_cheap_calls_behind_a_loop_keep_nobody_from_other_devices() -> None:
    """
    1. A session is alone. Its loop of seconds is on one device, and a hundred cheap calls take what the loop makes: on
       CPUs they lie in the device's queue, though each runs within the call that enqueues it where its arguments are
       there.
    2. Another session comes and computes on another device of the same host while the loop runs.
    """
    with pw.init(devices_per_host=2, fusion=False, coalesce=False) as cluster:
        where = pw.virtual_slice((1,), ("x",))
        loop = pw.compiled(lambda n, v: jax.lax.fori_loop(0, n, lambda k, c: (c * 3 + k) % 7919, v), slice=where)
        cheap = pw.compiled(lambda v: v + 1, slice=where)
        start = pw.put(np.int32(1), where)
        np.asarray(loop(np.int32(3), start))
        value = start
        for _ in range(200):
            value = cheap(value)
        np.asarray(value)

        value = looped = loop(np.int32(TURNS), start)
        for _ in range(100):
            value = cheap(value)
        with pw.connect(cluster.url, cluster.token) as newcomer:
            places = [newcomer.virtual_slice((1,), ("x",)) for _ in range(2)]
            there = next(one for one in places if one.devices != where.devices)
            double = pw.compiled(lambda v: v * 2, slice=there)
            assert np.asarray(double(np.float32(3))) == 6
            assert not looped.is_ready(), "the newcomer waited for the loop"
