"""Two tenants on an island of two hosts, whose order is compared: one waits for values of calls on one host, which go
there before they are sent, between launches on both hosts; then the other one launches on both beside it."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import numpy as np
import ray
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

LIMIT_S = 30.0


def step_on(where: pw.VirtualSlice) -> Any:
    """A mean over the devices of a slice, and 1 more."""
    inner = jax.shard_map(
        lambda v: jax.lax.psum(v, "x") / where.mesh.size + 1.0, mesh=where.mesh, in_specs=P("x"), out_specs=P("x")
    )
    return pw.compiled(inner, slice=where, in_specs=P("x"), out_specs=P("x"))


def taken(session: Any) -> dict[int, int]:
    """The calls that each host has taken from clients."""
    hosts = session.cluster.hosts
    return {number: ray.get(host.statistics.remote())["early"] for number, host in hosts.items()}


def walk(narrow: Any, wide: Any, turns: int) -> None:
    """Calls on one host, each waited for, and now and then one on both, some of which take a value of the other."""
    x, y = (pw.put(np.zeros(f.slice.mesh.size, np.float32), slice=f.slice, spec=P("x")) for f in (narrow, wide))
    for k in range(1, turns + 1):
        x = narrow(x)
        if k % 3:
            assert np.asarray(x).tolist() == [k] * 2
        else:
            x.block_until_ready()
        if k % 5 == 0:
            y = wide(y)
            assert np.asarray(y).tolist() == [k / 5] * 4


with pw.init(hosts_per_island=2, devices_per_host=2, check_order=True, launch_limit_s=60.0) as session:
    narrow, wide = (step_on(pw.virtual_slice((n,), ("x",))) for n in (2, 4))
    (host,) = narrow.slice.placed.hosts
    deadline = time.monotonic() + LIMIT_S
    while not taken(session)[host]:
        assert time.monotonic() < deadline, "no call went to its host before it was sent"
        walk(narrow, wide, 20)
    before = taken(session)
    walk(narrow, wide, 200)
    found = taken(session)
    assert found[host] > before[host], found
    assert found[1 - host] == 0, found

    def another() -> None:
        with pw.connect(session.url, session.token, name="another") as other:
            for_both = step_on(other.virtual_slice((4,), ("x",)))
            y = pw.put(np.zeros(4, np.float32), slice=for_both.slice, spec=P("x"))
            for k in range(1, 101):
                y = for_both(y)
                if k % 10 == 0:
                    assert np.asarray(y).tolist() == [k] * 4
                    time.sleep(0.3)  # the first one is alone again meanwhile
            done.append(True)

    done: list[bool] = []
    thread = threading.Thread(target=another)
    thread.start()
    while thread.is_alive():
        walk(narrow, wide, 20)
    assert done
    print("one order")
