"""Programs that clients drop, on a real cluster: controller and hosts have them no more, and calls of them go on."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession

V = np.arange(8, dtype=np.float32)
GONE_WITHIN_S = 20.0


def at_hosts(session: ClusterSession) -> int:
    """Programs of the host that has most."""
    return max(host["programs"] for host in ray.get([h.statistics.remote() for h in session.cluster.hosts.values()]))


def at_controller(session: ClusterSession) -> int:
    """Programs of the session that was opened last."""
    count: int = session.status()["sessions"][-1]["programs"]
    return count


def falls_to(limit: int, count: Callable[[ClusterSession], int], session: ClusterSession) -> bool:
    deadline = time.monotonic() + GONE_WITHIN_S
    while count(session) > limit and time.monotonic() < deadline:
        time.sleep(0.05)
    return count(session) <= limit


def made(slices: Any, k: int) -> Callable[[Any], Any]:
    return pw.compiled(lambda v: jnp.cumsum(v) * k + jnp.sort(v), slice=slices.a4, in_specs=P("x"), out_specs=P("x"))


def expected(k: int) -> np.ndarray[Any, Any]:
    return np.cumsum(V) * np.float32(k) + V


def test_dropped_programs_leave_controller_and_hosts(session, slices) -> None:
    """1. Those of functions that nobody has any more. 2. One that somebody has stays, and can be called. 3. The same
    function, made once more, computes the same."""
    kept = made(slices, 100)
    np.testing.assert_array_equal(kept(V), expected(100))
    most = 0
    for k in range(24):
        np.testing.assert_array_equal(made(slices, k)(V), expected(k))
        if k % 6 == 5:
            gc.collect()  # traced functions lie in cycles
            most = max(most, at_hosts(session))
    gc.collect()
    np.testing.assert_array_equal(made(slices, 1)(V), expected(1))  # says which are dropped
    assert falls_to(most, at_hosts, session)
    before = at_hosts(session)
    for k in range(24):
        made(slices, k)(V)
    gc.collect()
    made(slices, 1)(V)
    assert falls_to(before + 3, at_hosts, session)
    np.testing.assert_array_equal(kept(V), expected(100))


def test_launches_of_a_dropped_program_come_to_their_end(session, slices) -> None:
    """Of one whose argument is not there yet, with others behind it; and of a loop that leaves as a few launches."""
    for turn in range(8):
        slow = pw.compiled(
            lambda v, turn=turn: v + turn + 0 * jax.lax.fori_loop(0, 100_000, lambda _, u: jnp.sin(u), v),
            slice=slices.a4, in_specs=P("x"), out_specs=P("x"),
        )  # fmt: skip
        step = made(slices, turn)
        inc = pw.compiled(lambda v, turn=turn: v + turn, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
        x = slow(V)
        y = step(x)
        for _ in range(100):
            x = inc(x)
        del slow, step, inc
        gc.collect()
        z = made(slices, turn + 1)(V)
        np.testing.assert_array_equal(x, V + 101 * turn)
        np.testing.assert_allclose(y, np.cumsum(V + turn) * turn + V + turn)
        np.testing.assert_array_equal(z, expected(turn + 1))


MANY = """
import gc, jax, jax.numpy as jnp
x = jnp.arange(8.0)
for k in range(30):
    assert (jax.jit(lambda v: jnp.cumsum(v) * k)(x) == jnp.cumsum(x) * k).all()
jax.clear_caches()
gc.collect()
print(jax.jit(lambda v: v @ v)(x), flush=True)
input()
"""


@pytest.mark.timeout(300)
def test_programs_that_a_jax_program_drops_leave_with_its_next_one(session, cluster) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    with cluster.proxy(devices=1) as proxy:
        process = subprocess.Popen(
            [sys.executable, "-c", MANY], env=clean | proxy.env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == 140.0
        assert falls_to(10, at_controller, session)
        _, err = process.communicate("\n", timeout=60)
        assert process.returncode == 0, err[-2000:]
