"""Memory: no process grows over thousands of launches, no call runs ahead without bound, devices hold what fits."""

from __future__ import annotations

import contextlib
import gc
import time

import jax
import numpy as np
import psutil
import pytest
import ray
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray import limits
from pathways_ray.client.api import ClusterSession

V = np.arange(8, dtype=np.float32)
WARM_UP, LAUNCHES = 4000, 10_000
BYTES_A_LAUNCH = 1024


def processes(session: ClusterSession) -> dict[str, psutil.Process]:
    """Every process of the cluster, this one included."""
    cluster = session.cluster
    hosts = {f"host {k}": ray.get(h.statistics.remote())["pid"] for k, h in cluster.hosts.items()}
    names = {"client": psutil.Process().pid, "controller": session.status()["controller"]["pid"], **hosts}
    parts = ("IslandScheduler", "ResourceManager")
    relatives = psutil.Process(hosts["host 0"]).parent().children()
    for process in relatives:
        with contextlib.suppress(psutil.Error):  # a worker that Ray has just ended
            title = " ".join(process.cmdline())
            names.update({f"{part} {process.pid}": process.pid for part in parts if part in title})
    assert len(names) >= 7, names
    return {name: psutil.Process(pid) for name, pid in names.items()}


def resident(found: dict[str, psutil.Process]) -> dict[str, int]:
    gc.collect()
    return {name: process.memory_info().rss for name, process in found.items()}


@pytest.mark.long
def test_10000_launches_leave_memory_flat(session, slices, held, equal) -> None:
    """State goes from call to call over both islands, each result dropped after its use."""
    here = pw.compiled(lambda v: v * 0.5 + 1, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    there = pw.compiled(lambda v: v + 0, slice=slices.b2, in_specs=P("x"), out_specs=P("x"))
    alone = pw.compiled(lambda v: v + 1, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    program = pw.program(lambda v: there(here(v)))
    buffers = held(session)

    def run(launches: int) -> None:
        x, y = here(V), alone(V * 0)
        for k in range(launches):
            if k % 8 == 0:
                x = program(x)
            else:
                y = alone(y)
        equal(x, np.full(8, 2, np.float32))
        equal(y, V * 0 + np.float32(launches - launches // 8 + 1))

    run(WARM_UP)
    found = processes(session)
    before = resident(found)
    run(LAUNCHES)
    after = resident(found)
    growth = {name: (after[name] - before[name]) / LAUNCHES for name in found}
    print({name: f"{bytes_:.0f} B a launch" for name, bytes_ in growth.items()})
    assert max(growth.values()) <= BYTES_A_LAUNCH, growth
    deadline = time.monotonic() + 20  # a value may be here before its launch is over for the controller
    while (left := (session.status()["in_flight"], held(session))) > (0, buffers + 2):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_calls_wait_when_too_many_launches_are_open(session, slices) -> None:
    inc = pw.compiled(lambda v: v + 1, slice=slices.a1)
    results = []
    most = 0
    for k in range(3 * limits.MAX_LAUNCHES_IN_FLIGHT):
        results.append(inc(np.float32(k)))
        most = max(most, sum(not r.is_ready() for r in results[-2 * limits.MAX_LAUNCHES_IN_FLIGHT :: 64]) * 64)
    assert [float(r) for r in results[::100]] == [k + 1.0 for k in range(0, len(results), 100)]
    assert most <= limits.MAX_LAUNCHES_IN_FLIGHT + 64


def test_launches_wait_for_the_memory_of_their_devices(python) -> None:
    assert "left: 0" in python.run("memory_of_devices")


def test_a_launch_larger_than_the_machine_fails_at_once(session, slices) -> None:
    """Its host goes on, and what others have there."""
    kept = pw.put(V, slice=slices.b4)
    huge = pw.compiled(lambda v: jax.numpy.zeros((1 << 20, 1 << 16)) + v[0], slice=slices.b4)
    for _ in range(3):
        with pytest.raises(pw.errors.OutOfMemory, match=r"can never fit: it takes 1024\.0 GiB for results"):
            np.asarray(huge(V))
    np.testing.assert_array_equal(kept, V)
