"""The actor that starts and ends the islands that tenants have for themselves (`controller.isolation` says which)."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from pathways_ray import limits, names
from pathways_ray.controller.isolation import START_LIMIT_S
from pathways_ray.deployment import detached
from pathways_ray.deployment.islands import IslandActors, Processes, await_started, kill, start_island
from pathways_ray.deployment.topology import Topology

RETRY_S = 0.5
"""Seconds until the resource manager is asked again, after it has died."""


class Places:
    """The numbers of the islands that tenants have for themselves, and of their hosts.

    There are up to `limits.MAX_HOSTS` numbers of hosts, so they come again. Those of islands do not: the tag of a slice
    names its island, and is good for as long as the runtime is.

    Args:
        members: the hosts of each island of the runtime.
        last: how many times tenants have got islands, or more.
    """

    def __init__(self, members: Mapping[int, Sequence[int]], last: int = 0) -> None:
        self.members, self.last = members, last
        self.taken: dict[str, int] = {}

    def take(self, tenant: str) -> dict[int, tuple[int, list[int]]]:
        """The numbers of an island and of its hosts for each island of the runtime.

        Raises:
            RuntimeError: there are no numbers left for so many hosts.
        """
        count = sum(map(len, self.members.values()))
        used = set(self.taken.values())
        place = next(k for k in range(1, len(used) + 2) if k not in used)
        if (place + 1) * count > limits.MAX_HOSTS:
            raise RuntimeError(f"{place} tenants have islands, and a runtime has at most {limits.MAX_HOSTS} hosts")
        self.taken[tenant], self.last = place, self.last + 1
        first = self.last * len(self.members)
        return {base: (first + base, [place * count + host for host in hosts]) for base, hosts in self.members.items()}

    def give_back(self, tenant: str) -> None:
        """The islands of a tenant have ended."""
        self.taken.pop(tenant, None)


class TenantIslands:
    """One for a runtime with `isolation="process"`. Its thread brings what runs in line with what is wanted.

    Ray restarts this actor when its process dies; what it had started is ended then, since nobody knows whose it was.
    """

    def __init__(self, processes: Processes, topology: Topology, groups: Sequence[PlacementGroup]) -> None:
        self.processes, self.topology, self.groups = processes, topology, groups
        self.manager = ray.get_actor(names.resource_manager(processes.runtime), names.NAMESPACE)
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        # As sessions are, by the clock: nobody knows how many there were.
        self.places = Places(topology.members(), int(time.time() * 100) if restarted else 0)
        self.wanted: tuple[str, ...] = ()
        self.running: dict[str, list[IslandActors]] = {}
        self.failures: dict[str, str] = {}
        self.changed, self.begun = threading.Event(), threading.Event()
        threading.Thread(target=self._serve, name="serve", daemon=True).start()

    def want(self, tenants: tuple[str, ...]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Has islands run for these tenants alone, soon.

        Returns:
            The islands of each tenant that has some now, and why others could not start.

        Raises:
            RuntimeError: what a process of this actor before this one had started has not ended yet. Sessions hear of
                that by the answer, and would get slices there again.
        """
        if not self.begun.wait(START_LIMIT_S):
            raise RuntimeError("the islands of a process of this actor before this one have not ended yet")
        self.wanted = tenants
        self.changed.set()
        failures, self.failures = self.failures, {}
        return {
            tenant: tuple(island.number for island in islands) for tenant, islands in self.running.items()
        }, failures

    def _serve(self) -> None:
        self._end_all()
        self.begun.set()
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
        found = self.places.take(tenant)
        islands = self.running[tenant] = []
        for base, (number, hosts) in found.items():
            island, group = self.topology.islands[base], self.groups[base]
            islands.append(start_island(self.processes, number, hosts, island, group, tenant=tenant, base=base))
        answers = {name: answer for island in islands for name, answer in island.started().items()}
        await_started(answers, START_LIMIT_S)

    def _stop(self, tenant: str) -> None:
        for island in self.running.pop(tenant, ()):
            kill(island.all())
            self._of_manager("remove_island", island.number)
        self.places.give_back(tenant)

    def _end_all(self) -> None:
        """Ends what a process of this actor before this one had started, and what of that has ended with it."""
        own, ended = self.topology.members(), set(self._of_manager("tenant_islands"))
        for name in detached.actors(self.processes.runtime):
            kind, number = _numbered(name)
            if (kind == "host" and number >= self.topology.hosts) or (kind == "scheduler" and number not in own):
                with contextlib.suppress(ValueError):  # it has ended since it was listed
                    kill([ray.get_actor(name, names.NAMESPACE)])
            if kind == "scheduler" and number not in own:
                ended.add(number)
        for number in ended:
            self._of_manager("remove_island", number)

    def _of_manager(self, method: str, *arguments: Any) -> Any:
        """An answer of the resource manager; waits while that restarts."""
        while True:
            try:
                return ray.get(getattr(self.manager, method).remote(*arguments))
            except ray.exceptions.RayActorError:
                traceback.print_exc()
                time.sleep(RETRY_S)


def _numbered(name: str) -> tuple[str, int]:
    """The kind of an actor and its number; -1 where it has none."""
    found: Any = re.search(r"-(host|scheduler)-(\d+)$", name)
    return (found[1], int(found[2])) if found else ("", -1)
