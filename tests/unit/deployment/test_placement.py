"""Room for islands on Ray's nodes: what is said where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_ray.deployment import placement
from pathways_ray.deployment.topology import Island
from pathways_ray.errors import Unschedulable


class Group:
    def wait(self, limit_s: float) -> bool:
        return False


def test_what_has_no_room_says_what_matters_of_the_nodes_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own resources of nodes and groups, of which there may be sixty, are nobody's concern."""
    removed: list[Any] = []
    own = {"node:10.0.0.1": 1.0, "bundle_group_0_abc": 1000.0, "memory": 5e9}
    monkeypatch.setattr(placement, "alive_nodes", lambda: [{"Resources": {"CPU": 2.0, **own}}])
    monkeypatch.setattr("ray.available_resources", lambda: {"CPU": 1.0, **own})
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: Group())
    monkeypatch.setattr(placement, "remove_placement_group", removed.append)
    with pytest.raises(Unschedulable, match=r"within 0 s; its nodes have 2 CPU, of which 1 CPU is free$"):
        placement.place({0: Island("gpu", 1, 1)}, "see", "pack", False, 0.0)
    assert len(removed) == 1


def test_nodes_are_waited_for_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [1, 1, 2]
    monkeypatch.setattr(placement, "alive_nodes", lambda: [{}] * (there.pop(0) if len(there) > 1 else there[0]))
    monkeypatch.setattr(placement, "LOOK_S", 0.0)
    placement.await_nodes(2, 60.0)
    assert there == [2]
    with pytest.raises(Unschedulable, match=r"has 2 node\(s\) after 0 s, and 3 are waited for"):
        placement.await_nodes(3, 0.0)
