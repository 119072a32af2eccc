"""The actor that has a runtime's islands follow Ray's nodes: `following.Following` decides, this carries out."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec
import ray

from pathways_ray import names
from pathways_ray.client import islands as changing
from pathways_ray.client.asking import call
from pathways_ray.compat import ray_draining_nodes
from pathways_ray.deployment import detached, growing, placement
from pathways_ray.deployment.following import (
    LOOK_S,
    Add,
    Command,
    Drain,
    Event,
    Following,
    IslandSeen,
    Looked,
    NodeSeen,
    Remove,
    Started,
    crowded,
)
from pathways_ray.deployment.islands import Processes
from pathways_ray.deployment.topology import Auto, IslandSpec
from pathways_ray.transport.messages import DrainIsland

ANSWER_LIMIT_S = 10.0
"""The resource manager answers within this time, or the next look asks again."""


class IslandKeeper:
    """One for a runtime that stays. Ray restarts it when its process dies; then it looks again."""

    def __init__(self, processes: Processes, auto: Auto | None) -> None:
        self.processes = processes
        self.following = Following(auto)
        self.lock = threading.Lock()
        threading.Thread(target=self._serve, name="serve", daemon=True).start()

    def _serve(self) -> None:
        """Looks again and again; what fails is tried again with the next look."""
        while True:
            time.sleep(LOOK_S)
            try:
                self._handle(look(self.processes.runtime))
            except Exception:
                traceback.print_exc()

    def _handle(self, event: Event) -> None:
        """Carries out what an event leads to. The controller may refuse some of it, as to end the last island."""
        with self.lock:
            commands = self.following.handle(event, time.monotonic())
        for command in commands:
            try:
                self._do(command)
            except Exception as error:  # is decided again with the next look; those behind it may not be
                print(f"{command}: {error}", flush=True)

    def _do(self, command: Command) -> None:
        match command:
            case Add():
                threading.Thread(target=self._add, args=(command,), daemon=True).start()
            case Drain(island, deadline_s, reason):
                url, token, ca = detached.find(self.processes.runtime)
                call(url, token, DrainIsland(0, island, deadline_s, reason), ca=ca)
            case Remove(island):
                url, token, ca = detached.find(self.processes.runtime)
                changing.remove(url, token, island, ca)

    def _add(self, command: Add) -> None:
        island = -1
        try:
            island = growing.add_island(self.processes, command.spec, node=command.node)[0].number
        except Exception:
            traceback.print_exc()
        self._handle(Started(command.cause, island))


def look(runtime: str) -> Looked:
    """All nodes of the Ray cluster, and all islands of a runtime that its tenants share."""
    manager: Any = ray.get_actor(names.resource_manager(runtime), names.NAMESPACE)
    text, specs = ray.get([manager.status.remote(), manager.specs.remote()], timeout=ANSWER_LIMIT_S)
    return Looked(nodes_seen(), islands_seen(json.loads(text), specs))


def nodes_seen() -> list[NodeSeen]:
    """The Ray nodes that live, and which of them are drained."""
    leaving = ray_draining_nodes(time.time())
    return [
        NodeSeen(node["NodeID"], node["Resources"], leaving.get(node["NodeID"])) for node in placement.alive_nodes()
    ]


def islands_seen(status: dict[str, Any], specs: dict[int, bytes]) -> list[IslandSeen]:
    """The islands that have a spec, as the resource manager's status has them; some may not have joined."""
    held = [one["island"] for one in status["slices"]]
    joined = {one["island"]: one for one in status["islands"]}
    away: dict[str, Any] = {"hosts": (), "state": "away"}
    found = {island: msgspec.msgpack.decode(spec, type=IslandSpec) for island, spec in specs.items()}
    return [
        IslandSeen(
            island,
            tuple(host["node"] for host in joined.get(island, away)["hosts"] if host["up"]),
            joined.get(island, away)["state"],
            held.count(island),
            spec.island,
            spec.node,
        )
        for island, spec in found.items()
    ]


def spread(
    processes: Processes, access: tuple[str, str, str], deadline_s: float, add: Any = None
) -> Iterator[tuple[int, int]]:
    """Replaces islands that share a Ray node while another one has fewer, one after the other: another island like it
    is started there, its slices move, and it is removed.

    Args:
        access: url, token and CA file of the runtime.
        deadline_s: seconds for the slices of each; those that have not moved then are mapped again without their
            arrays.
        add: starts an island on a node and returns its number; left out, `growing.add_island`.

    Yields:
        The number of each island that was replaced, once it is removed, and of its successor.

    Raises:
        PathwaysError: an island could not be started, drained or removed; those before it have been replaced.
    """
    url, token, ca = access
    seen = look(processes.runtime)
    for one, node in crowded(seen.nodes, seen.islands):
        number = add(one.spec, node) if add else growing.add_island(processes, one.spec, node=node)[0].number
        changing.drain(url, token, one.island, deadline_s, ca)
        changing.remove(url, token, one.island, ca)
        yield one.island, number
