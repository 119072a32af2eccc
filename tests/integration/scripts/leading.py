"""An island of two hosts, one of which takes the calls of a client that waits for each value, through what ends that.

It prints what it has seen of each.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import psutil
import ray
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from tests.integration.test_control_plane import processes

LIMIT_S = 60.0
X = np.arange(16, dtype=np.float32).reshape(4, 4)
LOST = (pw.errors.HostLost, pw.errors.ControllerLost, pw.errors.BufferDeleted)


def taken() -> list[int]:
    """The calls that each host has taken."""
    hosts = [session.cluster.hosts[number] for number in sorted(session.cluster.hosts)]
    return [ray.get(host.statistics.remote())["early"] for host in hosts]


def until_taken(call: Any) -> None:
    """Calls, and waits for each value, until the host takes calls that leads, and the other one begins them too."""
    before, deadline = taken(), time.monotonic() + LIMIT_S
    while not all(now > then for now, then in zip(taken(), before, strict=True)):
        assert time.monotonic() < deadline, f"no call began on both hosts: {before}, {taken()}"
        for _ in range(50):
            call().block_until_ready()


def chain(v: Any, count: int) -> list[Any]:
    """Values that follow each other, each of them waited for."""
    found = []
    for _ in range(count):
        v = step(v)
        found.append(np.asarray(v))
    return found


with pw.init(1, 2, 2, check_order=True) as session:
    where = session.virtual_slice((4,), ("x",))
    step = pw.compiled(lambda v: v / v.sum() + v.T * 0.25, slice=where, in_specs=P("x"), out_specs=P("x"))
    apart = pw.compiled(lambda v: v + 1.0, slice=where, in_specs=P("x"), out_specs=P("x"))
    kept = pw.put(X, where, P("x"))
    y, sent = kept, []
    for _ in range(100):
        y = step(y)
        sent.append(y)
    expected = [np.asarray(one) for one in sent]  # a stream is only sent
    del y, sent

    until_taken(lambda: step(kept))
    before = taken()
    for _ in range(3):
        np.testing.assert_array_equal(chain(kept, 100), expected)
    assert all(now - then > 150 for now, then in zip(taken(), before, strict=True)), (before, taken())
    for k in range(20):  # on each host by itself, with what the call carries, an upload, and a stream between
        np.testing.assert_array_equal(np.asarray(apart(X + k)), X + k + 1)
        fresh = pw.put(X * k, where, P("x"))
        np.testing.assert_array_equal(np.asarray(apart(fresh)), X * k + 1)
        many = [step(kept) for _ in range(10)]
        apart(fresh).block_until_ready()
        np.testing.assert_array_equal(np.asarray(many[-1]), expected[0])
    print("values are those of launches that are sent", flush=True)

    with pw.connect(session.url, session.token, name="other") as other:
        place = other.virtual_slice((4,), ("x",))
        there = pw.compiled(lambda v: v * 2.0, slice=place, in_specs=P("x"), out_specs=P("x"))
        for k in range(30):
            np.testing.assert_array_equal(np.asarray(there(X + k)), (X + k) * 2)
            np.testing.assert_array_equal(chain(kept, 5), expected[:5])
    print("another client takes turns", flush=True)

    for _ in range(4):
        until_taken(lambda: step(kept))
        pids = processes(session)
        scheduler = next(pid for title, pid in pids.items() if "IslandScheduler" in title)
        lost = 0
        for k in range(8):
            if k == 4:
                psutil.Process(scheduler).kill()
            try:
                np.testing.assert_array_equal(chain(kept, 30), expected[:30])
            except LOST:
                lost += 1
        retried = pw.retry(lambda: chain(kept, 30), on=LOST)()
        np.testing.assert_array_equal(retried, expected[:30])
        np.testing.assert_array_equal(np.asarray(kept), X)
        ended = set(pids.values()) - set(processes(session).values())
        assert ended == {scheduler}, [title for title, pid in pids.items() if pid in ended]
        print(f"a scheduler died: {lost} of 8 chains lost", flush=True)

    for host in (0, 1):
        until_taken(lambda fresh=kept: step(fresh))
        pid = session.status()["islands"][0]["hosts"][host]["pid"]
        psutil.Process(pid).kill()
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                kept = pw.put(X, where, P("x"))
                np.testing.assert_array_equal(chain(kept, 30), expected[:30])
                break
            except pw.errors.PathwaysError as error:
                assert time.monotonic() < deadline, error
                time.sleep(0.1)
        until_taken(lambda fresh=kept: step(fresh))
        np.testing.assert_array_equal(chain(kept, 100), expected)
        print(f"host {host} died, and its island led again", flush=True)
print("nothing was wrong")
