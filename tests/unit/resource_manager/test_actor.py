"""The resource manager's calls, and which of them may keep others from being made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.experimental import internal_kv

from pathways_ray import limits
from pathways_ray.resource_manager import actor, events
from pathways_ray.resource_manager.actor import CLIENTS, GROUPS, WAITING, ResourceManager
from pathways_ray.resource_manager.islands import KeptIslands


def test_calls_that_wait_for_others_keep_none_of_these_out() -> None:
    """Each host of a cluster may wait for its island or its scheduler, and ask several times. What ends that are calls
    of the usual group, and of clients."""
    group = {name: getattr(method, "__ray_concurrency_group__", "") for name, method in vars(ResourceManager).items()}
    assert {name for name, found in group.items() if found == WAITING} == {"join", "lookup"}
    assert group["publish"] == group["describe"] == group["controller_serves"] == ""
    assert group["create_slice"] == CLIENTS
    assert GROUPS[WAITING] >= 4 * limits.MAX_HOSTS


def test_the_newest_list_of_islands_is_kept_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread changes it, and has it kept, before the first has had its own kept."""
    manager: Any = ResourceManager.__new__(ResourceManager)
    manager.lock, manager.keeping, manager.ticking = threading.Lock(), threading.Lock(), True
    manager.runtime, manager.data_secret = "r", "s"
    lists: list[KeptIslands] = []

    def handle(event: Any, now: float) -> Iterator[events.Command]:
        lists.append(KeptIslands({event: (0,)}))
        return kept(lists[-1])

    def kept(found: KeptIslands) -> Iterator[events.Command]:
        if len(lists) == 1:
            manager._handle(2)
        yield events.Keep(found)

    manager.core = SimpleNamespace(handle=handle, shared=SimpleNamespace(kept=lambda: lists[-1]))
    stored: list[bytes] = []
    monkeypatch.setattr(internal_kv, "_internal_kv_put", lambda key, found, namespace: stored.append(found))
    manager._handle(1)
    found = [msgspec.msgpack.decode(one, type=KeptIslands).members for one in stored]
    assert found == [{2: (0,)}, {2: (0,)}]


def test_a_look_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be killed is asked of Ray, which may be away for a moment."""
    manager: Any = ResourceManager.__new__(ResourceManager)
    looks: list[events.Event] = []

    def handle(event: events.Event) -> None:
        looks.append(event)
        if len(looks) == 1:
            raise RuntimeError("Ray is away")
        raise asyncio.CancelledError

    manager._handle = handle
    monkeypatch.setattr(actor, "tick_s", lambda _: 0.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(manager._tick())
    assert len(looks) == 2
