"""The order in which a host compiles."""

from __future__ import annotations

import pytest

from pathways_ray.executor.compile.queue import FairQueue


def test_tenants_take_turns_and_keep_their_own_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for k in range(1000):
        queue.add("many", f"m{k}")
    for k in range(2):
        queue.add("few", f"f{k}")
    assert [queue.take() for _ in range(6)] == ["m0", "f0", "m1", "f1", "m2", "m3"]
    queue.add("late", "l0")
    assert [queue.take() for _ in range(3)] == ["m4", "l0", "m5"]
    assert len(queue) == 1000 - 6


def test_an_empty_queue_gives_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    with pytest.raises(IndexError, match="nothing waits"):
        queue.take()
