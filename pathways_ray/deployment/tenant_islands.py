"""The actor that starts and ends the islands that tenants have for themselves (`controller.isolation` says which)."""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from pathways_ray import limits, names
from pathways_ray.deployment import detached
from pathways_ray.deployment.islands import IslandActors, Processes, kill, start_island
from pathways_ray.deployment.topology import Topology

START_LIMIT_S = 60.0
"""An island of a tenant has to start within this time."""


class TenantIslands:
    """One for a runtime with `isolation="process"`. Its thread brings what runs in line with what is wanted.

    The islands of a tenant are numbered behind those of the runtime and of the tenants before it. Ray restarts this
    actor when its process dies; what it had started is ended then, since nobody knows whose it was.
    """

    def __init__(self, processes: Processes, topology: Topology, groups: Sequence[PlacementGroup]) -> None:
        self.processes, self.topology, self.groups = processes, topology, groups
        self.manager = ray.get_actor(names.resource_manager(processes.runtime), names.NAMESPACE)
        self.wanted: tuple[str, ...] = ()
        self.running: dict[str, list[IslandActors]] = {}
        self.failures: dict[str, str] = {}
        self.changed = threading.Event()
        threading.Thread(target=self._serve, name="serve", daemon=True).start()

    def want(self, tenants: tuple[str, ...]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Has islands run for these tenants alone, soon.

        Returns:
            The islands of each tenant that has some now, and why others could not start.
        """
        self.wanted = tenants
        self.changed.set()
        failures, self.failures = self.failures, {}
        return {
            tenant: tuple(island.number for island in islands) for tenant, islands in self.running.items()
        }, failures

    def _serve(self) -> None:
        self._end_all()
        while self.changed.wait():
            self.changed.clear()
            for tenant in [tenant for tenant in self.running if tenant not in self.wanted]:
                self._stop(tenant)
            for tenant in self.wanted:
                if tenant not in self.running:
                    try:
                        self._start(tenant)
                    except Exception as error:
                        traceback.print_exc()
                        self.failures[tenant] = str(error)
                        self._stop(tenant)

    def _start(self, tenant: str) -> None:
        members = self.topology.members()
        taken = {islands[0].number // len(members) for islands in self.running.values() if islands}
        place = next(k for k in range(1, len(taken) + 2) if k not in taken)
        if (place + 1) * self.topology.hosts > limits.MAX_HOSTS:
            raise RuntimeError(f"{place} tenants have islands, and a runtime has at most {limits.MAX_HOSTS} hosts")
        islands = self.running[tenant] = []
        for base, hosts in members.items():
            island, group = self.topology.islands[base], self.groups[base]
            number = place * len(members) + base
            numbers = [place * self.topology.hosts + host for host in hosts]
            islands.append(start_island(self.processes, number, numbers, island, group, tenant=tenant, base=base))
        ray.get([answer for island in islands for answer in island.started()], timeout=START_LIMIT_S)

    def _stop(self, tenant: str) -> None:
        for island in self.running.pop(tenant, ()):
            kill(island.all())
            ray.get(self.manager.remove_island.remote(island.number))

    def _end_all(self) -> None:
        """Ends what a process of this actor before this one had started."""
        own = self.topology.members()
        for name in detached.actors(self.processes.runtime):
            kind, number = _numbered(name)
            if (kind == "host" and number >= self.topology.hosts) or (kind == "scheduler" and number not in own):
                kill([ray.get_actor(name, names.NAMESPACE)])
            if kind == "scheduler" and number not in own:
                ray.get(self.manager.remove_island.remote(number))


def _numbered(name: str) -> tuple[str, int]:
    """The kind of an actor and its number; -1 where it has none."""
    found: Any = re.search(r"-(host|scheduler)-(\d+)$", name)
    return (found[1], int(found[2])) if found else ("", -1)
