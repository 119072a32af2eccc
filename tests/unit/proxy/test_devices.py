"""The devices that a client of a proxy gets are of one platform: the best that has as many."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_ray.client.session import Session
from pathways_ray.errors import Unschedulable
from pathways_ray.proxy.devices import open_session

GPU, CPU, MORE = ("gpu", 1), ("cpu", 4), ("gpu", 3)


class Cluster:
    """A session on islands, each with a platform and as many devices as one slice can have."""

    def __init__(self, *islands: tuple[str, int]) -> None:
        self.islands = islands
        self.platforms: tuple[str, ...] = ("cpu", "cuda")
        self.closed = False

    def wait_for_islands(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def status(self) -> dict[str, Any]:
        hosts = [[{"up": True, "devices": [None] * size}] for _, size in self.islands]
        named = enumerate(zip(self.islands, hosts, strict=True))
        islands = [{"island": k, "platform": one[0], "state": "up", "hosts": there} for k, (one, there) in named]
        return {"islands": islands}

    def virtual_slice(
        self, shape: Any, axes: Any, island: int | None = None, platform: str | None = None, name: str = ""
    ) -> Any:
        chosen = [
            k
            for k, (kind, size) in enumerate(self.islands)
            if island in (None, k) and platform in (None, kind) and (shape is None or shape[0] <= size)
        ]
        if not chosen:
            raise Unschedulable(f"no island has {shape}")
        made = type("Slice", (), {"shape": shape or (self.islands[chosen[0]][1],), "island": chosen[0]})
        return made()


@pytest.mark.parametrize(
    ("islands", "devices", "found", "platforms"),
    [
        ([CPU, GPU], 1, [1], ("cuda",)),
        ([CPU, GPU], 4, [0], ("cpu",)),  # the GPUs are too few
        ([CPU, GPU, MORE], 0, [1], ("cuda",)),
        ([CPU, GPU, MORE], 4, [1, 2], ("cuda",)),  # over several islands, of GPUs all
        ([CPU], 2, [0], ("cpu",)),
        ([CPU, CPU], 6, [0, 1], ("cpu",)),
    ],
    ids=str,
)
def test_slices_are_of_the_best_platform_that_has_as_many(
    islands: Any, devices: int, found: list[int], platforms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(*islands)
    monkeypatch.setattr(Session, "connect", lambda *_, **__: cluster)
    _, slices = open_session("", "", "", devices, "")
    assert [one.island for one in slices] == found
    assert cluster.platforms == platforms


@pytest.mark.parametrize(
    ("states", "refusing", "devices", "found"),
    [
        ({0: "draining"}, (), 6, [1, 2]),
        ({0: "lost", 1: "away"}, (), 6, [2, 1]),  # what is up comes first
        ({}, (1,), 6, [0, 2]),
        ({}, (1,), 10, None),
        ({0: "draining", 1: "lost"}, (), 6, None),
    ],
)
def test_islands_that_take_no_slices_are_left_out(
    states: dict[int, str],
    refusing: tuple[int, ...],
    devices: int,
    found: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was made on others is released where these are too few."""
    cluster = Cluster(CPU, CPU, CPU)
    seen = cluster.status()
    for island in seen["islands"]:
        island["state"] = states.get(island["island"], "up")
    made: list[Any] = []
    released: list[int] = []

    def virtual_slice(shape: Any, axes: Any, island: int = -1, **options: Any) -> Any:
        if island in refusing or (island >= 0 and seen["islands"][island]["state"] not in ("up", "away")):
            raise Unschedulable(f"island {island} is draining")
        made.append(Cluster.virtual_slice(cluster, shape, axes, island if island >= 0 else None, **options))
        made[-1].release = lambda: released.append(island)
        return made[-1]

    monkeypatch.setattr(cluster, "status", lambda: seen)
    monkeypatch.setattr(cluster, "virtual_slice", virtual_slice)
    monkeypatch.setattr(Session, "connect", lambda *_, **__: cluster)
    if found is None:
        with pytest.raises(Unschedulable, match="no island has"):
            open_session("", "", "", devices, "")
        assert released == [one.island for one in made]
    else:
        _, slices = open_session("", "", "", devices, "")
        assert ([one.island for one in slices], sum(one.shape[0] for one in slices)) == (found, devices)


def test_an_island_that_a_tenant_has_for_itself_is_not_for_the_operators_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(CPU, CPU, CPU)
    seen = cluster.status()
    seen["islands"][1]["tenant"] = "bob"
    monkeypatch.setattr(cluster, "status", lambda: seen)
    monkeypatch.setattr(Session, "connect", lambda *_, **__: cluster)
    _, slices = open_session("", "", "", 6, "")
    assert [one.island for one in slices] == [0, 2]


@pytest.mark.parametrize("islands", [[], [CPU], [CPU, GPU]], ids=str)
def test_a_session_without_as_many_devices_is_closed(islands: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(*islands)
    monkeypatch.setattr(Session, "connect", lambda *_, **__: cluster)
    with pytest.raises(Unschedulable):
        open_session("", "", "", 8, "")
    assert cluster.closed
