"""`pw.priority` on a real cluster: what waits at an island's scheduler is passed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from tests.integration.conftest import Slices, stopped

Equal = Callable[[Any, Any], None]


def test_an_urgent_call_passes_those_that_wait(session: ClusterSession, slices: Slices, equal: Equal) -> None:
    """
    1. The island's host stands still. A hundred calls are made, then an urgent one, and one that takes what the last
       of the hundred makes.
    2. The host goes on with what it has, at most 28 computations of those that lie in device queues, and then with the
       urgent one. The other urgent call waits for its argument.
    """

    @pw.compiled(slice=slices.a1)
    def patient(v: Any) -> Any:
        return v + 1

    @pw.compiled(slice=slices.a1)
    def urgent(v: Any) -> Any:
        return v * 3

    v = pw.put(np.arange(2048, dtype=np.float32), slices.a1)  # smaller ones run within the call that enqueues them
    patient(v).block_until_ready()
    urgent(v).block_until_ready()
    with pw.recording() as computed:
        with stopped(session, 0):
            made = [patient(v) for _ in range(100)]
            with pw.priority(10):
                first, second = urgent(v), urgent(made[-1])
            deadline = time.monotonic() + 6.0  # sooner than hosts that stand still count as lost
            while session.status()["in_flight"] < 102 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert session.status()["in_flight"] >= 102
        for one in made:
            one.block_until_ready()
        equal(first, np.arange(2048, dtype=np.float32) * 3)
        equal(second, (np.arange(2048, dtype=np.float32) + 1) * 3)
    (names,) = [[one.name for one in ran] for ran in computed.values() if ran]
    places = [k for k, name in enumerate(names) if name == "urgent"]
    assert len(names) == 102
    assert places[0] <= 30
    assert places[1] == 101
