"""The end of a cluster, also while others change it."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray._private import auto_init_hook

from pathways_ray.deployment import cluster, growing
from pathways_ray.deployment.cluster import Cluster
from pathways_ray.deployment.topology import Island, Topology
from pathways_ray.errors import PathwaysError


def a_cluster(left: list[str]) -> Cluster:
    nothing: Any = None
    topology = Topology((Island("cpu"),))
    return Cluster("u", "t", "r", topology, nothing, [], ["one"], [], lambda: left.append("Ray"), nothing)


def test_an_interrupted_end_leaves_ray_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    left: list[str] = []
    monkeypatch.setattr(cluster, "kill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        a_cluster(left).stop()
    assert left == ["Ray"]


def test_an_island_that_is_added_to_a_cluster_that_ends_starts_no_other_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)
    one = a_cluster([])

    def add(*_: Any, **__: Any) -> Any:
        one.stop()
        assert not auto_init_hook.enable_auto_connect
        raise RuntimeError("Ray has not been started yet")

    monkeypatch.setattr(growing, "add_island", add)
    with pytest.raises(PathwaysError, match="the cluster was stopped while the island was started"):
        one.add_island("cpu", 1, 1)
    assert auto_init_hook.enable_auto_connect


def test_the_end_of_a_cluster_whose_ray_was_ended_before_starts_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray starts"))
    left: list[str] = []
    a_cluster(left).stop()
    assert left == ["Ray"]
