"""`pw.priority` on a real cluster: what waits at an island's scheduler is passed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from tests.integration.conftest import Slices, stopped

Equal = Callable[[Any, Any], None]


@pytest.mark.parametrize(
    ("elements", "calls", "most"), [(2048, 100, 30), (3, 300, 130)], ids=["in device queues", "within the call"]
)
def test_an_urgent_call_passes_those_that_wait(
    session: ClusterSession, slices: Slices, equal: Equal, elements: int, calls: int, most: int
) -> None:
    """
    1. The island's host stands still. Many calls are made, then an urgent one, and one that takes what the last of
       the many makes.
    2. The host goes on with what it has: at most 28 computations that lie in a device queue, or a window of those that
       run within the call that enqueues them. Then it goes on with the urgent one. The other urgent call waits for its
       argument.
    """

    @pw.compiled(slice=slices.a1)
    def patient(v: Any) -> Any:
        return v + 1

    @pw.compiled(slice=slices.a1)
    def urgent(v: Any) -> Any:
        return v * 3

    v = pw.put(np.arange(elements, dtype=np.float32), slices.a1)
    patient(v).block_until_ready()
    urgent(v).block_until_ready()
    with pw.recording() as computed:
        with stopped(session, 0):
            made = [patient(v) for _ in range(calls)]
            with pw.priority(10):
                first, second = urgent(v), urgent(made[-1])
            deadline = time.monotonic() + 6.0  # sooner than hosts that stand still count as lost
            while session.status()["in_flight"] < calls + 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert session.status()["in_flight"] >= calls + 2
        for one in made:
            one.block_until_ready()
        equal(first, np.arange(elements, dtype=np.float32) * 3)
        equal(second, (np.arange(elements, dtype=np.float32) + 1) * 3)
    (names,) = [[one.name for one in ran] for ran in computed.values() if ran]
    places = [k for k, name in enumerate(names) if name == "urgent"]
    assert len(names) == calls + 2
    assert places[0] <= most
    assert places[1] == calls + 1
