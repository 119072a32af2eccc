"""Starting an island: the actors of its scheduler and of its hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from pathways_ray import names
from pathways_ray.deployment import placement
from pathways_ray.deployment.ray_connection import cause_text
from pathways_ray.deployment.topology import Island
from pathways_ray.errors import PathwaysError
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

    def started(self) -> dict[str, Any]:
        """Ray's references to what each answers once it serves, by its name."""
        hosts = {f"host {host}": actor.ready.remote() for host, actor in self.hosts.items()}
        return {f"the scheduler of island {self.number}": self.scheduler.start.remote(), **hosts}


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


def await_started(answers: Mapping[str, Any], limit_s: float) -> list[Any]:
    """The answers of all who start.

    Args:
        answers: Ray's references, by the names of those who are to answer.
        limit_s: for all of them.

    Raises:
        PathwaysError: one did not answer in time, or cannot start.
    """
    try:
        found: list[Any] = ray.get([*answers.values()], timeout=max(0.0, limit_s))
        return found
    except ray.exceptions.GetTimeoutError as error:
        late = set(ray.wait([*answers.values()], num_returns=len(answers), timeout=0)[1])
        what = ", ".join(name for name, answer in answers.items() if answer in late)
        there = placement.resources_text([ray.cluster_resources()])
        raise PathwaysError(f"not started in time: {what}; Ray's nodes have {there}") from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PathwaysError):
            raise error.cause from error
        raise PathwaysError(f"one of these did not start: {', '.join(answers)}: {error}") from error
    except ray.exceptions.RayError as error:
        raise PathwaysError(f"one of these did not start: {', '.join(answers)}: {cause_text(error)}") from error


def kill(actors: Iterable[Any]) -> None:
    """Kills actors for good, whatever state they are in."""
    for one in actors:
        with contextlib.suppress(Exception):
            ray.kill(one)


def _taking(bundle: dict[str, float]) -> dict[str, Any]:
    """A bundle's resources as Ray's options of an actor."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "resources": others}
