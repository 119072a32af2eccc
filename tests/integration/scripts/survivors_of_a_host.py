"""A host stops while launches to and from it are under way: nothing of them stays on the other island."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import ray

import pathways_ray as pw

EDGE_BYTES = 8 << 20
LAUNCHES = 24
MOST_LEFT_MB = 60.0
"""Of some 200 that launches with the stopped host hold meanwhile."""


def resident(pid: int) -> float:
    """Megabytes of memory that a process has."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


with pw.init(2, 1, 1) as session:
    survivor, victim = (pw.virtual_slice((1,), ("x",), island=k) for k in (0, 1))
    # No argument of a call is uploaded while the host is stopped: later calls would wait behind that.
    on_survivor = pw.compiled(lambda v: v + 1, slice=survivor)
    on_victim = pw.compiled(lambda v: v + 1, slice=victim)
    first = pw.compiled(lambda v: v[:1], slice=survivor)

    @pw.program
    def away(v: Any) -> Any:
        return on_victim(on_survivor(v))

    @pw.program
    def back(v: Any) -> Any:
        return first(on_survivor(on_victim(v)))

    v = pw.put(np.zeros(EDGE_BYTES // 4, np.float32), survivor)
    w = pw.put(np.zeros(EDGE_BYTES // 4, np.float32), victim)
    assert np.asarray(first(on_survivor(v)))[0] == 1.0
    for program, argument in ((away, v), (back, w)):
        program(argument).block_until_ready(timeout=30)
    kept = on_survivor(on_survivor(v)).block_until_ready()
    pids = {host["host"]: host["pid"] for island in pw.islands() for host in island["hosts"]}
    handle = session.cluster.hosts[0]
    before = resident(pids[0])

    os.kill(pids[1], signal.SIGSTOP)
    stopped = time.monotonic()
    results = [program(argument) for _ in range(LAUNCHES) for program, argument in ((away, v), (back, w))]
    slowest = 0.0
    while time.monotonic() - stopped < 7.0:
        begun = time.monotonic()
        np.asarray(first(on_survivor(v)))
        slowest = max(slowest, time.monotonic() - begun)
    while_stopped = resident(pids[0])
    kinds = set()
    for result in results:
        try:
            result.block_until_ready(timeout=30)
        except pw.errors.PathwaysError as error:
            kinds.add(type(error).__name__)
    known = time.monotonic() - stopped
    del results
    left: dict[str, int] = {}
    while time.monotonic() - stopped < 30.0:
        left = ray.get(handle.statistics.remote())
        if not left["active"]:
            break
        time.sleep(0.2)
    cleared = time.monotonic() - stopped
    assert np.asarray(kept)[0] == 2.0
    print(f"outcomes {sorted(kinds)} after {known:.1f} s; meanwhile the slowest launch took {slowest:.3f} s")
    while (after := resident(pids[0]) - before) > MOST_LEFT_MB and time.monotonic() - stopped < 30.0:
        time.sleep(0.2)
    print(f"memory: {while_stopped - before:.0f} MB more while it was stopped, {after:.0f} after")
    print(f"active launches left: {left['active']}; cleared after {cleared:.1f} s")
    assert kinds <= {"HostLost", "BufferLost"}, kinds
    assert cleared < 15.0, cleared
    assert after <= MOST_LEFT_MB, after
print("left: 0")
