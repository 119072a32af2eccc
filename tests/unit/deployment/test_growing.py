"""Nothing stays of an island whose start fails or is interrupted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from pathways_ray.deployment import growing, placement
from pathways_ray.deployment.topology import Island
from pathways_ray.errors import UsageError
from pathways_ray.transport.endpoints import ListenConfig


@pytest.mark.parametrize("step", ["_answer", "place", "start_island", "await_started"])
def test_an_interrupted_start_ends_what_it_had_not_returned(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made is found by its name: the call that made it was interrupted before it returned."""
    there = {f"r-{name}" for name in ("host-0", "scheduler-0", "island-0", "scheduler-7", "host-4", "island-7")}
    forgotten: list[int] = []

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    def found(name: str, *_: str) -> str:
        if name not in there:
            raise ValueError(name)
        return name

    manager = SimpleNamespace(
        add_island=SimpleNamespace(remote=lambda *_: (7, (4, 5))),
        remove_island=SimpleNamespace(remote=forgotten.append),
    )
    island: Any = SimpleNamespace(started=dict, number=7)
    monkeypatch.setattr(placement, "alive_nodes", list)
    monkeypatch.setattr(placement, "place", lambda *_: {7: "r-island-7"})
    monkeypatch.setattr(placement, "machines_of", lambda _: set())
    monkeypatch.setattr(growing, "start_island", lambda *_: island)
    monkeypatch.setattr(placement if step == "place" else growing, step, interrupted)
    monkeypatch.setattr(ray, "get", lambda asked, timeout: asked)
    monkeypatch.setattr(ray, "get_actor", lambda *name: manager if "manager" in name[0] else found(*name))
    monkeypatch.setattr(ray, "kill", there.discard)
    monkeypatch.setattr(growing, "get_placement_group", found)
    monkeypatch.setattr(growing, "remove_placement_group", there.discard)
    processes: Any = SimpleNamespace(
        runtime="r", placement="pack", detached=True, isolated=False, near="", listen=ListenConfig()
    )
    with pytest.raises(KeyboardInterrupt):
        growing.add_island(processes, Island("cpu", 2, 1))
    assert there == {"r-host-0", "r-scheduler-0", "r-island-0"}
    assert forgotten == [7]


@pytest.mark.parametrize(
    ("links", "machines", "said"),
    [
        ("127.0.0.1", {"10.0.0.2"}, "no host at 10.0.0.2 reaches them"),
        ("127.0.0.1", {"10.0.0.1", "127.0.0.3"}, ""),
        ("", {"10.0.0.2"}, ""),
    ],
)
def test_a_runtime_that_listens_on_loopback_gets_no_island_on_another_machine(
    links: str, machines: set[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "alive_nodes", lambda: [{"NodeID": "a", "NodeManagerAddress": "10.0.0.1"}])
    processes: Any = SimpleNamespace(near="a", listen=ListenConfig(links=links))
    if said:
        with pytest.raises(UsageError, match=said):
            growing._check_reachable(processes, machines)
    else:
        growing._check_reachable(processes, machines)
