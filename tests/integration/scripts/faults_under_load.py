"""Hosts killed or stopped while launches are under way on both islands and across them."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from tests.integration.scripts.two_tenants import gang

hosts_per_island, kills, sign, seed = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
choose = random.Random(seed)


with pw.init(2, hosts_per_island, 2) as session:
    size = 2 * hosts_per_island
    a, b = (pw.virtual_slice((size,), ("x",), island=k) for k in (0, 1))
    here, there = gang(a), gang(b)

    @pw.program
    def both(v: Any) -> Any:
        for _ in range(3):
            v = there(here(v)) / 100
        return v

    x = np.arange(8, dtype=np.float32)
    expected: dict[Any, np.ndarray] = {f: np.asarray(f(x)) for f in (here, there, both)}
    for _kill in range(kills):
        v, w = pw.put(x, a, P("x")), pw.put(x, b, P("x"))
        launches = [(f, f(w if f is there else v)) for _ in range(40) for f in (both, here, there)]
        host = choose.choice([h for island in pw.islands() for h in island["hosts"]])
        time.sleep(choose.random() * 0.03)
        os.kill(host["pid"], getattr(signal, sign))
        start = time.monotonic()
        good = 0
        bad: dict[str, int] = {}
        for f, y in launches:
            try:
                value = np.asarray(y.block_until_ready(timeout=30))
            except pw.errors.WaitTimeout:
                raise
            except (pw.errors.HostLost, pw.errors.BufferLost) as error:
                bad[type(error).__name__] = bad.get(type(error).__name__, 0) + 1
            else:
                assert np.array_equal(value, expected[f]), (value, expected[f])
                good += 1
        known = time.monotonic() - start
        while True:
            try:
                assert np.array_equal(np.asarray(both(x)), expected[both])
                break
            except (pw.errors.HostLost, pw.errors.BufferLost):
                assert time.monotonic() - start < 40
        print(
            f"host {host['host']}: {good} good, {bad}, known in {known:.1f} s, "
            f"serving in {time.monotonic() - start:.1f} s",
            flush=True,
        )
        assert good + sum(bad.values()) == len(launches)
        assert known < 20, known
        del launches, v, w, y
    print("left:", session.status()["in_flight"])
