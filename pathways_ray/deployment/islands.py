"""Starting an island: the actors of its scheduler and of its hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from pathways_ray import names
from pathways_ray.deployment import placement
from pathways_ray.deployment.topology import Island
from pathways_ray.executor.actor import HostExecutor
from pathways_ray.scheduler.actor import IslandScheduler
from pathways_ray.transport.endpoints import ListenConfig


@dataclass(frozen=True)
class Processes:
    """Settings that the processes of all islands of a runtime have in common.

    `detached` ones outlive the process that starts them. Schedulers run on the Ray node `near`. `isolated` says that
    each tenant has islands of its own.
    """

    runtime: str
    listen: ListenConfig
    policy: str
    launch_limit_s: float
    compile_limit_s: float
    silence_limit_s: float
    check_order: bool
    detached: bool
    near: str
    placement: str = "pack"
    isolated: bool = False


@dataclass
class IslandActors:
    """The actors of one island."""

    number: int
    scheduler: Any
    hosts: dict[int, Any]

    def all(self) -> list[Any]:
        return [*self.hosts.values(), self.scheduler]

    def started(self) -> list[Any]:
        """Ray's references to the answers of all that run."""
        return [self.scheduler.start.remote(), *(host.ready.remote() for host in self.hosts.values())]


def actor(processes: Processes, kind: type, name: str, **settings: Any) -> Any:
    """A class as an actor of the runtime, which Ray restarts and finds by name."""
    lifetime = {"lifetime": "detached"} if processes.detached else {}
    return ray.remote(name=name, namespace=names.NAMESPACE, max_restarts=-1, **lifetime, **settings)(kind)


def start_island(
    processes: Processes,
    number: int,
    members: Sequence[int],
    island: Island,
    group: PlacementGroup,
    *,
    tenant: str = "",
    base: int = -1,
) -> IslandActors:
    """Starts the processes of an island; does not wait for them.

    Args:
        members: the numbers of its hosts.
        group: has room for each of them.
        tenant: the one that has the island for itself, with the devices of island `base`; its hosts take no room.
    """
    runtime, listen = processes.runtime, processes.listen
    order = actor(processes, IslandScheduler, names.scheduler(runtime, number), num_cpus=0, max_concurrency=100)
    scheduler = order.options(scheduling_strategy=placement.near(processes.near)).remote(
        runtime,
        number,
        list(members),
        listen,
        processes.policy,
        processes.launch_limit_s,
        processes.compile_limit_s,
        processes.silence_limit_s,
    )
    started = IslandActors(number, scheduler, {})
    taken = {"num_cpus": 0} if tenant else _taking(island.bundle())
    for index, host in enumerate(members):
        kind = actor(processes, HostExecutor, names.host(runtime, host), **taken)
        started.hosts[host] = kind.options(scheduling_strategy=placement.bundle(group, index)).remote(
            runtime,
            host,
            number,
            list(members),
            island.devices,
            island.platform,
            listen,
            processes.check_order,
            tenant,
            base,
            island.hardware(index),
            processes.silence_limit_s,
        )
    return started


def kill(actors: Iterable[Any]) -> None:
    """Kills actors for good, whatever state they are in."""
    for one in actors:
        with contextlib.suppress(Exception):
            ray.kill(one)


def _taking(bundle: dict[str, float]) -> dict[str, Any]:
    """A bundle's resources as Ray's options of an actor."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "resources": others}
