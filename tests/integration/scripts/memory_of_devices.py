"""A device of 8 MiB: two sessions share it, one waits for the other, and what can never fit fails at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import pathways_ray as pw

MIB = 1 << 20
with pw.init(islands=[pw.Island("cpu", devices=1, memory=8 * MIB)]) as session:
    one = session.virtual_slice((1,), island=0)

    def filled(mebibytes: int) -> Any:
        return pw.compiled(lambda x: jnp.full((mebibytes, MIB // 4), x, jnp.float32), slice=one)

    mine = filled(5)(1.0)
    mine.block_until_ready()
    began = time.monotonic()
    try:
        filled(4)(1.0).block_until_ready()
    except pw.errors.OutOfMemory as error:
        assert "can never fit" in str(error) and "4.0 MiB for results" in str(error), error
    else:
        raise AssertionError("9 MiB lie in 8")
    assert time.monotonic() - began < 10

    put = pw.put(np.zeros((9, MIB // 4), np.float32), slice=one)

    def refusal(use: Callable[[Any], Any]) -> str:
        """The host has the array before the controller refuses it, so a fetch may be quicker."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                use(put)
            except pw.errors.OutOfMemory as error:
                return str(error)
        raise AssertionError("9 MiB lie in 8")

    for use in (np.asarray, lambda x: np.asarray(pw.compiled(jnp.sum, slice=one)(x))):
        assert "can never fit: it takes 9.0 MiB on device 0.0, which has 8.0 MiB" in refusal(use)

    with pw.connect(session.url, session.token, name="other") as other:
        there = other.virtual_slice((1,), island=0)
        waits = pw.compiled(lambda x: jnp.full((4, MIB // 4), x, jnp.float32), slice=there)(2.0)
        time.sleep(1.0)
        assert not waits.is_ready()
        (pool,) = session.status()["memory"]
        assert (pool["bytes"], pool["tenants"]["session 1"]) == (8 * MIB, 5 * MIB), pool
        threading.Timer(0.5, mine.delete).start()
        np.testing.assert_array_equal(np.asarray(waits)[0, :2], 2.0)
    print("left:", session.status()["in_flight"])
