"""The keeper carries out what is decided, also beside what is refused."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pathways_ray.client import islands as changing
from pathways_ray.deployment import detached, growing, keeper
from pathways_ray.deployment.following import Following, IslandSeen, Looked, NodeSeen
from pathways_ray.deployment.keeper import IslandKeeper, islands_seen
from pathways_ray.deployment.topology import Auto, Island, Topology
from pathways_ray.errors import UsageError


@pytest.mark.parametrize("away", [False, True], ids=["the last island is not removed", "the controller is away"])
def test_a_node_gets_its_island_although_the_end_of_another_one_is_refused(
    away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The node of the only island dies, and the island is lost. 2. Another node comes: the lost island is to be
    removed, which is refused, and the node gets an island all the same."""
    added: list[str] = []
    done = threading.Event()

    def find(_: str) -> tuple[str, str, str]:
        if away:
            raise UsageError("no runtime named 'r' serves")
        return "url", "token", ""

    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError("island 0 is the last one that takes slices")

    def add(_: Any, __: Island, node: str) -> Any:
        added.append(node)
        done.set()
        return [SimpleNamespace(number=1)]

    monkeypatch.setattr(detached, "find", find)
    monkeypatch.setattr(changing, "remove", refuse)
    monkeypatch.setattr(keeper, "call", refuse)
    monkeypatch.setattr(growing, "add_island", add)
    one: Any = IslandKeeper.__new__(IslandKeeper)
    one.processes, one.following = SimpleNamespace(runtime="r"), Following(Auto("cpu"))
    one.lock = threading.Lock()
    spec = Island("cpu", 1, 2)
    one._handle(Looked([NodeSeen("a", {"CPU": 2.0})], [IslandSeen(0, ("a",), "up", 0, spec)]))
    one._handle(Looked([], [IslandSeen(0, (), "away", 0, spec)]))
    one._handle(Looked([NodeSeen("b", {"CPU": 2.0})], [IslandSeen(0, (), "lost", 0, spec)]))
    assert done.wait(5.0)
    assert added == ["b"]


def test_a_look_has_the_node_that_each_island_was_started_for() -> None:
    spec = Island("cpu", 1, 2, topology=(2,), memory=7)
    nothing: dict[str, Any] = {"islands": [], "slices": []}
    assert islands_seen(nothing, Topology((spec,), ("b",)).specs()) == [IslandSeen(0, (), "away", 0, spec, "b")]
    assert islands_seen(nothing, Topology((spec,)).specs()) == [IslandSeen(0, (), "away", 0, spec)]
