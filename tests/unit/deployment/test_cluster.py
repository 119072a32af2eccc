"""The end of a cluster, also while others change it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import auto_init_hook

from pathways_ray.deployment import cluster, growing, keeper, placement
from pathways_ray.deployment.cluster import Cluster
from pathways_ray.deployment.following import IslandSeen, Looked
from pathways_ray.deployment.islands import IslandActors
from pathways_ray.deployment.options import Options
from pathways_ray.deployment.topology import Island, Topology
from pathways_ray.errors import PathwaysError, Unschedulable
from pathways_ray.executor.profiling import crash_log


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


def test_islands_that_were_replaced_before_one_that_cannot_be_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their actors have ended. A record that asks them too gets no answer of any host."""
    one, spec = a_cluster([]), Island("cpu")
    one.processes = SimpleNamespace(runtime="r")  # type: ignore[assignment]
    one.islands = [IslandActors(number, f"scheduler {number}", {number: f"host {number}"}) for number in (0, 1)]
    one.actors = [actor for island in one.islands for actor in island.all()]

    def add(processes: Any, island: Island, node: str) -> tuple[IslandActors, Any]:
        number = one.islands[-1].number + 1
        return IslandActors(number, f"scheduler {number}", {number: f"host {number}"}), None

    def drain(url: str, token: str, island: int, deadline_s: float, ca: str) -> None:
        if island == 0:
            raise PathwaysError("the controller is away")

    monkeypatch.setattr(growing, "add_island", add)
    monkeypatch.setattr(keeper, "look", lambda runtime: Looked((), ()))
    both = [(IslandSeen(island, ("a",), "up", 0, spec), "b") for island in (1, 0)]
    monkeypatch.setattr(keeper, "crowded", lambda nodes, islands: both)
    monkeypatch.setattr(keeper, "changing", SimpleNamespace(drain=drain, remove=lambda *_: None))
    with pytest.raises(PathwaysError, match="the controller is away"):
        one.spread(1.0)
    assert [island.number for island in one.islands] == [0, 2, 3]
    assert one.actors == [actor for island in one.islands for actor in island.all()]


def test_the_end_of_a_cluster_whose_ray_was_ended_before_starts_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray starts"))
    left: list[str] = []
    a_cluster(left).stop()
    assert left == ["Ray"]


def test_a_start_that_finds_its_name_taken_leaves_what_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The notes of the other runtime's hosts lie under the same name."""
    note = tmp_path / "crash-r-0"
    note.write_text("")
    monkeypatch.setattr(crash_log, "user_folder", lambda: tmp_path)
    starting: Any = SimpleNamespace(common=SimpleNamespace(detached=True), made=[], groups=[], runtime="r")
    cluster.Starting.undo(starting)
    assert note.exists()


@pytest.mark.parametrize(
    ("starts_here", "gpus", "refused"),
    [(True, 0, True), (True, 7, True), (True, 8, False), (False, 0, False)],
)
def test_a_machine_without_the_gpus_that_are_asked_for_is_refused_at_once_where_no_other_can_come(
    starts_here: bool, gpus: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ray cluster that is there already may grow, and what its nodes have is waited for."""
    left: list[str] = []
    monkeypatch.setattr(cluster, "connect_ray", lambda *_: (lambda: left.append("Ray")) if starts_here else None)
    node = {"NodeID": "n", "Alive": True, "Resources": {"CPU": 4.0, **({"GPU": float(gpus)} if gpus else {})}}
    monkeypatch.setattr(placement, "alive_nodes", lambda: [node])

    def starting(*_: Any) -> Any:
        raise InterruptedError("actors start")

    monkeypatch.setattr(cluster, "Starting", starting)
    says = f"this machine has {gpus} GPUs, and its islands take 8: ask for fewer, have CPU devices"
    with pytest.raises(Unschedulable if refused else InterruptedError, match=says if refused else "actors start"):
        cluster.start(lambda _: Topology((Island("gpu", devices=8), Island("cpu"))), None, Options(), {})
    assert left == ["Ray"] * starts_here
