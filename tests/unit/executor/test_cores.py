"""The cores of CPU devices: which, and that only threads made inside stay on them."""

from __future__ import annotations

import os
import threading

import pytest

from pathways_ray.executor.compile.cpu_affinity import core_of, pinned


@pytest.mark.parametrize(
    "host, listed, core",
    [(0, "", None), (3, " ", None), (0, "5", 5), (4, "5", 5), (0, "0,1", 0), (1, "0, 1", 1), (2, "0,1", 0)],
)
def test_hosts_go_round_the_cores(host: int, listed: str, core: int | None) -> None:
    assert core_of(host, listed) == core


def test_what_is_no_core_is_named() -> None:
    with pytest.raises(ValueError, match="lists cores, such as 0,1, and is 'first'"):
        core_of(0, "first")


def test_threads_made_inside_stay_there() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    seen: list[set[int]] = []
    go = threading.Event()

    def look() -> None:
        go.wait(10)
        seen.append(os.sched_getaffinity(0))

    with pinned(core):
        thread = threading.Thread(target=look)
        thread.start()
    assert os.sched_getaffinity(0) == before
    go.set()
    thread.join(10)
    assert seen == [{core}]


def test_without_a_core_nothing_changes() -> None:
    before = os.sched_getaffinity(0)
    with pinned(None):
        assert os.sched_getaffinity(0) == before
