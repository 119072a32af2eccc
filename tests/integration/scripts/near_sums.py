"""Islands of hosts of one machine, with one device each, which exchange what they sum: streams, late and failed
arguments, and hosts that are killed."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import ray
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

LIMIT_S = 60.0
MANY = 400


def exchanged(session: Any) -> list[int]:
    """The calls in which each host has exchanged sums."""
    hosts = [session.cluster.hosts[number] for number in sorted(session.cluster.hosts)]
    return [ray.get(host.statistics.remote())["exchanged"] for host in hosts]


def per_device(where: Any, function: Any) -> Any:
    mapped = jax.shard_map(function, mesh=where.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return pw.compiled(mapped, slice=where, in_specs=P("x"), out_specs=P("x"))


def slow(v: Any) -> Any:
    """The same values, which host 1 has later than others."""
    rounds = jnp.where(jax.lax.axis_index("x") == 1, 30, 1)
    busy = jax.lax.fori_loop(0, rounds, lambda _, m: m @ m / 600, jnp.ones((600, 600), jnp.float32))
    return v * busy[0, 0]


def too_much(v: Any) -> Any:
    return jnp.sort(jnp.arange(1 << 41, dtype=np.float32) * v[0])[:1]  # 8 TiB


def check(session: Any, hosts: int) -> tuple[Any, Any]:
    where = session.virtual_slice((hosts,), ("x",))
    mean = per_device(where, lambda v: jax.lax.psum(v, "x") / hosts + 1.0)
    start = pw.put(np.arange(hosts, dtype=np.float32), where, P("x"))
    wanted = (hosts - 1) / 2
    for waits in (False, True):
        x = start
        for _ in range(MANY):
            x = mean(x)
            if waits:
                x.block_until_ready()
        assert np.asarray(x).tolist() == [wanted + MANY] * hosts, np.asarray(x)
    seen = exchanged(session)
    assert all(count >= MANY for count in seen), seen
    assert len(set(seen)) == 1, seen
    print(f"{hosts} hosts have exchanged sums {seen[0]} times")

    late = per_device(where, slow)
    found = [mean(late(start)) if k % 2 else mean(start) for k in range(20)]
    assert all(np.asarray(one).tolist() == [wanted + 1] * hosts for one in found)
    before = exchanged(session)
    for _ in range(100):
        mean(start).block_until_ready()
    assert all(now > then for now, then in zip(exchanged(session), before, strict=True))
    return mean, start


with pw.init(1, 4, 1, check_order=True) as session:
    where = session.virtual_slice((2, 2), ("x", "y"))
    both = P(("x", "y"))
    pairs = jax.shard_map(lambda v: jax.lax.psum(v, "x") / 2, mesh=where.mesh, in_specs=both, out_specs=both)
    mean = pw.compiled(pairs, slice=where, in_specs=both, out_specs=both)
    x = pw.put(np.arange(4, dtype=np.float32), where, both)
    for _ in range(50):
        x = mean(x)
        assert np.asarray(x).tolist() == [1.0, 2.0, 1.0, 2.0]
    seen = exchanged(session)
    assert seen == [seen[0]] * 4, seen
    assert seen[0] > 0
    print(f"4 hosts have exchanged sums {seen[0]} times")

with pw.init(1, 2, 1, check_order=True) as session:
    mean, start = check(session, 2)
    where = start.slice

    failing = per_device(where, too_much)
    began = time.monotonic()
    try:
        np.asarray(mean(failing(start)))
        raise AssertionError("it has a value")
    except pw.errors.PathwaysError as error:
        print(f"a failed argument: {str(error)[:80]!r}, after {time.monotonic() - began:.1f} s")
    assert np.asarray(mean(start)).tolist() == [1.5, 1.5]
    assert time.monotonic() - began < LIMIT_S

    for host in (0, 1):
        began, lost = time.monotonic(), ""
        x = start
        try:
            for k in range(100_000):
                x = mean(x)
                if k == 500:
                    psutil.Process(session.status()["islands"][0]["hosts"][host]["pid"]).kill()
                if k % 50 == 0:
                    x.block_until_ready()
        except (pw.errors.HostLost, pw.errors.BufferDeleted) as error:
            lost = type(error).__name__
        assert lost, "the host that was killed is not missed"
        assert time.monotonic() - began < LIMIT_S
        print(f"host {host} was killed: {lost} after {time.monotonic() - began:.1f} s")
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                start = pw.put(np.arange(2, dtype=np.float32), where, P("x"))
                for _ in range(100):
                    mean(start).block_until_ready()
                assert np.asarray(mean(start)).tolist() == [1.5, 1.5]
                break
            except pw.errors.PathwaysError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        assert all(count >= 50 for count in exchanged(session)), exchanged(session)

print("nothing was wrong")
