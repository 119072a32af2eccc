"""Results that failed on their devices: fetched, sent, copied or donated, they fail, and nothing else does."""

from __future__ import annotations

import time

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


@pytest.mark.parametrize("use", ["fetch", "send", "copy", "donate", "reshard"])
def test_a_result_that_ran_out_of_memory_takes_nothing_with_it(session, slices, use: str) -> None:
    """
    1. A function asks for 64 TiB, behind one that takes a while, so that it fails when it runs.
    2. Its result is looked at, or handed to a computation of another island, device or layout, or donated.
    3. The client gets the typed error, the first time and each time; hosts, and arrays of others, are as before.
    """
    busy = pw.compiled(
        lambda a: jnp.linalg.matrix_power(jnp.ones((300, 300)) * 1e-3, 40)[0, :4] * 0 + a, slice=slices.a1
    )
    asks = pw.compiled(lambda a: (jnp.zeros((1 << 22, 1 << 22), np.float32) + a[0])[:4, :4].sum(0) + a, slice=slices.a1)
    asks_all = pw.compiled(lambda a: jnp.zeros((1 << 22, 1 << 22), np.float32) + a[0], slice=slices.a1)
    there = pw.compiled(lambda v: v.ravel()[:4] + 1, slice={"send": slices.b2, "copy": slices.a4}.get(use, slices.a1))
    donates = pw.compiled(lambda v: v * 2, slice=slices.a1, donate_argnums=0)
    others = pw.put(V, slices.a1, P())
    pids = host_pids(session)
    for _ in range(ROUNDS):
        x = busy(pw.put(V, slices.a1, P()))
        y = asks_all(x) if use == "fetch" else asks(x)
        if use == "donate":
            y = donates(y)
        elif use in ("send", "copy"):
            y = pw.program(there)(y)
        elif use == "reshard":
            y = there(y)
        started = time.monotonic()
        for _ in range(2):
            with pytest.raises(ExecutionError, match=r"Out of memory|RESOURCE_EXHAUSTED"):
                np.asarray(y)
        assert time.monotonic() - started < 20
        np.testing.assert_array_equal(np.asarray(others), V)
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
