"""The resource manager's calls, and which of them may keep others from being made."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pathways_ray import limits
from pathways_ray.resource_manager import actor, events
from pathways_ray.resource_manager.actor import CLIENTS, GROUPS, WAITING, ResourceManager


def test_calls_that_wait_for_others_keep_none_of_these_out() -> None:
    """Each host of a cluster may wait for its island or its scheduler, and ask several times. What ends that are calls
    of the usual group, and of clients."""
    group = {name: getattr(method, "__ray_concurrency_group__", "") for name, method in vars(ResourceManager).items()}
    assert {name for name, found in group.items() if found == WAITING} == {"join", "lookup"}
    assert group["publish"] == group["describe"] == group["controller_serves"] == ""
    assert group["create_slice"] == CLIENTS
    assert GROUPS[WAITING] >= 4 * limits.MAX_HOSTS


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
