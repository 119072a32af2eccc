"""Results that failed on their devices: fetched, sent, copied or donated, they fail, and nothing else does."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from pathways_ray.errors import ExecutionError

V = np.arange(4, dtype=np.float32)
ROUNDS = 5


def host_pids(session: ClusterSession) -> list[int]:
    return [ray.get(host.statistics.remote())["pid"] for host in session.cluster.hosts.values()]


@pytest.mark.parametrize("use", ["fetch", "send", "copy", "donate", "take", "call"])
def test_a_result_that_ran_out_of_memory_takes_nothing_with_it(session, slices, use: str) -> None:
    """
    1. A function asks for 256 GiB, behind one that takes a while, so that it fails when it runs.
    2. Its result is looked at, or handed to a computation of another island, other devices or the same, or donated, or
       a host function is called with it, which is called with others afterwards.
    3. The client gets the typed error, the first time and each time; hosts, and arrays of others, are as before.
    """

    def big(a: jax.Array) -> jax.Array:
        return jnp.outer(jnp.arange(1 << 20, dtype=np.float32), jnp.arange(1 << 16, dtype=np.float32)) * a[1]

    def power(a: jax.Array) -> jax.Array:
        return jnp.linalg.matrix_power(jnp.ones((300, 300)) * a[1] * 1e-3, 40)[0, :4] + a

    busy = pw.compiled(power, slice=slices.a1)
    all_of_it = pw.compiled(big, slice=slices.a1)
    some_of_it = pw.compiled(lambda a: jnp.sort(big(a), axis=1)[-1, :4], slice=slices.a1)
    there = pw.compiled(lambda v: v + 1, slice={"send": slices.b2, "copy": slices.a22}.get(use, slices.a1))
    donates = pw.compiled(lambda v: v * 2, slice=slices.a1, donate_argnums=0)
    called = pw.host(lambda v: v + 1, slice=slices.a1, result=lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype))
    others = pw.put(V, slices.a1, P())
    pids = host_pids(session)
    for _ in range(ROUNDS):
        x = busy(pw.put(V, slices.a1, P()))
        y = all_of_it(x) if use == "fetch" else some_of_it(x)
        if use == "donate":
            y = donates(y)
        elif use in ("send", "copy"):
            y = pw.program(there)(y)
        elif use == "take":
            y = there(y)
        elif use == "call":
            y = called(y)
        started = time.monotonic()
        for _ in range(2):
            with pytest.raises(ExecutionError, match=r"Out of memory|RESOURCE_EXHAUSTED"):
                np.asarray(y)
        assert time.monotonic() - started < 20
        np.testing.assert_array_equal(np.asarray(others), V)
        if use == "call":
            np.testing.assert_array_equal(np.asarray(called(others)), V + 1)
        del x, y
    assert host_pids(session) == pids


def test_who_waits_for_an_upload_is_woken_by_its_arrival(session, slices) -> None:
    """The slices of waiting are half a second long."""
    took = []
    for _ in range(20):
        started = time.monotonic()
        pw.put(V, slices.a1, P()).block_until_ready()
        took.append(time.monotonic() - started)
    assert sorted(took)[10] < 0.1, took
