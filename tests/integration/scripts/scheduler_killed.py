"""The scheduler of an island of two hosts, killed under a chain of launches with collectives. Arguments: how often.

It prints how many launches were lost, and how long it took until the next one had its value.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import psutil
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from tests.integration.test_control_plane import processes

times = int(sys.argv[1])
X = np.arange(16, dtype=np.float32).reshape(4, 4)

with pw.init(2, 2, 2, check_order=True) as session:
    here = session.virtual_slice((4,), ("x",), island=0)
    there = session.virtual_slice((4,), ("x",), island=1)

    on_here, on_there = (
        pw.compiled(lambda v: v / v.sum() + v.T * 0.25, slice=place, in_specs=P("x"), out_specs=P("x"))
        for place in (here, there)
    )
    chained = pw.program(lambda v: on_here(on_here(v)), name="chained")
    crossing = pw.program(lambda v: on_there(on_here(v)), name="crossing")
    kept = [pw.put(X, place, P("x")) for place in (here, there)]
    made = chained(kept[0]).block_until_ready()
    expected = [np.asarray(made)]
    y: Any = kept[0]
    for _ in range(60):
        y = chained(y)
        expected.append(np.asarray(y))
    crossed = np.asarray(crossing(kept[0]))
    for _ in range(times):
        before = processes(session)
        scheduler = next(pid for title, pid in sorted(before.items()) if "IslandScheduler" in title)
        y, launches = kept[0], []
        for k in range(60):
            y = chained(y)
            launches += [y, crossing(kept[0])]
            if k == 30:
                psutil.Process(scheduler).kill()
                struck = time.monotonic()
        for array in kept:
            np.testing.assert_array_equal(np.asarray(array), X)
        np.testing.assert_array_equal(np.asarray(made), expected[0])
        lost = 0
        for k, one in enumerate(launches):
            try:
                np.testing.assert_array_equal(np.asarray(one), crossed if k % 2 else expected[k // 2 + 1])
            except pw.errors.HostLost:
                lost += 1
        again = pw.retry(lambda: chained(kept[0]), on=pw.errors.HostLost)()
        np.testing.assert_array_equal(np.asarray(again), expected[0])
        print(f"{lost} of {len(launches)} lost, computing again after {time.monotonic() - struck:.1f} s", flush=True)
        y = kept[0]
        for k in range(20):
            y = chained(y)
            np.testing.assert_array_equal(np.asarray(y), expected[k + 1])
        np.testing.assert_array_equal(np.asarray(crossing(kept[0])), crossed)
        for array in kept:
            np.testing.assert_array_equal(np.asarray(array), X)
        ended = set(before.values()) - set(processes(session).values())
        assert ended == {scheduler}, [title for title, pid in before.items() if pid in ended]
print("nothing was lost")
