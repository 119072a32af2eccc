"""The threads of XLA in CPU hosts, on the real runtime."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray

POOL = "tf_XLAEigen"


def policies(_: Any) -> dict[str, set[int]]:
    """The scheduling policies of the threads of this process, by their names."""
    found: dict[str, set[int]] = {}
    for thread in Path("/proc/self/task").iterdir():
        name = (thread / "comm").read_text().strip()
        found.setdefault(name, set()).add(os.sched_getscheduler(int(thread.name)))
    return found


def test_threads_that_compute_interrupt_nobody(session: Any) -> None:
    before = os.sched_getscheduler(0)
    if before != os.SCHED_OTHER:
        pytest.skip("all threads here are scheduled in another way")
    for host in session.cluster.hosts.values():
        found = ray.get(host.__ray_call__.remote(policies))
        assert found[POOL] == {os.SCHED_BATCH}, "XLA's pool"
        assert os.SCHED_OTHER in found["ray::HostExecut"], "those that read, enqueue and answer"
