"""Starting a cluster: Ray, the actors, and the first session. The only module that imports actors.

Who starts whom: `start` starts Ray where none runs, then all actors at once. They find each other through the resource
manager: controller and schedulers publish their addresses there, hosts ask for their scheduler's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pathways_ray.controller.actor import Controller
from pathways_ray.errors import AuthenticationError, PathwaysError, Unschedulable, UsageError
from pathways_ray.executor.actor import HostExecutor
from pathways_ray.resource_manager.actor import ResourceManager
from pathways_ray.scheduler.actor import IslandScheduler

START_LIMIT_S = 90.0
CPUS_PER_HOST = 0.01
"""A host's logical CPUs in Ray: a trace, so that virtual devices may outnumber cores; Ray then only spreads them."""


@dataclass
class Shape:
    """How many islands, hosts and devices. Units: devices are per host."""

    islands: int = 1
    hosts_per_island: int = 1
    devices_per_host: int = 1

    def check(self) -> None:
        for name in ("islands", "hosts_per_island", "devices_per_host"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")

    def members(self, island: int) -> list[int]:
        """The numbers of an island's hosts."""
        return list(range(island * self.hosts_per_island, (island + 1) * self.hosts_per_island))


@dataclass
class Cluster:
    """The processes of a running cluster, as their owner holds them."""

    url: str
    token: str
    resource_manager: Any
    controller: Any
    schedulers: list[Any]
    hosts: dict[int, Any]
    group: Any
    owns_ray: bool
    pids: list[int] = field(default_factory=list)

    def stop(self) -> None:
        """Kills every actor; leaves Ray, or stops it, where `start` had joined or started it."""
        for actor in [*self.hosts.values(), *self.schedulers, self.controller, self.resource_manager]:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        with contextlib.suppress(Exception):
            remove_placement_group(self.group)
        if self.owns_ray:
            ray.shutdown()


def start(
    shape: Shape, address: str | None, dispatch: str, fusion: bool, platform: str, ray_options: dict[str, Any]
) -> Cluster:
    """Starts a cluster and waits until every host has joined.

    Raises:
        UsageError: a bad option.
        Unschedulable: Ray cannot place the hosts.
        PathwaysError: a process did not come up in time.
    """
    shape.check()
    if dispatch not in ("parallel", "sequential"):
        raise UsageError(f"dispatch must be 'parallel' or 'sequential', not {dispatch!r}")
    owns_ray = _connect_ray(address, ray_options)
    try:
        return _start_actors(shape, owns_ray, dispatch == "parallel", fusion, platform)
    except BaseException:
        if owns_ray:
            ray.shutdown()
        raise


def _connect_ray(address: str | None, options: dict[str, Any]) -> bool:
    """Joins or starts Ray; True when this process was not connected before, so that `ray.shutdown()` is ours to call.

    In a driver of an existing cluster `ray.shutdown()` ends the connection and nothing else.
    """
    if ray.is_initialized():
        return False
    if address is not None:
        try:
            _check_reachable(os.environ.get("RAY_ADDRESS") or address if address == "auto" else address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
        except (OSError, ValueError, RuntimeError, ray.exceptions.AuthenticationError) as error:
            if _is_about_tokens(error):
                raise AuthenticationError(
                    f"the Ray cluster at {address!r} wants a token that it knows: set RAY_AUTH_MODE=token, and "
                    "RAY_AUTH_TOKEN to what 'ray get-auth-token' prints where it was started"
                ) from error
            raise UsageError(f"no Ray cluster at {address!r} ({error}); start one with 'ray start --head'") from error
        return True
    defaults = {
        "address": "local",
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "object_store_memory": 100 << 20,  # no array goes through Ray
    }
    ray.init(**{**defaults, **options})
    return True


def _check_reachable(address: str) -> None:
    """Raises `OSError` where nobody listens: Ray itself would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()


def _is_about_tokens(error: BaseException | None) -> bool:
    """Whether Ray's error, or one it came from, is that a token is missing or wrong."""
    while error is not None:
        if isinstance(error, ray.exceptions.AuthenticationError) or "InvalidAuthToken" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _start_actors(shape: Shape, owns_ray: bool, parallel: bool, fusion: bool, platform: str) -> Cluster:
    islands = {island: shape.members(island) for island in range(shape.islands)}
    total = shape.islands * shape.hosts_per_island
    bind = _bind_address()
    token = secrets.token_hex(16)
    resources: dict[str, float] = {"CPU": CPUS_PER_HOST}
    if platform != "cpu":
        resources["TPU" if platform == "tpu" else "GPU"] = shape.devices_per_host
    group = placement_group([resources] * total, strategy="SPREAD")
    made: list[Any] = []
    try:
        # Hosts find the resource manager by name: a handle among the arguments would keep Ray from restarting them.
        name = f"pathways-{secrets.token_hex(8)}"
        manager = _actor(ResourceManager, max_concurrency=1000, name=name).remote(islands)
        controller = _actor(Controller, max_concurrency=1000).remote(manager, bind, token, parallel, fusion)
        made += [manager, controller]
        schedulers = []
        hosts: dict[int, Any] = {}
        for island, numbers in islands.items():
            scheduler = _actor(IslandScheduler, max_concurrency=100, max_restarts=-1).remote(
                name, island, numbers, bind
            )
            schedulers.append(scheduler)
            for number in numbers:
                hosts[number] = _host_actor(group, number, resources).remote(
                    name, number, island, numbers, shape.devices_per_host, platform, bind, fusion
                )
        made += [*schedulers, *hosts.values()]
        _await(group.ready(), "Ray has no room for the hosts", Unschedulable)
        url = _await(controller.start.remote(), "the controller did not start", PathwaysError)
        _await([s.start.remote() for s in schedulers], "a scheduler did not start", PathwaysError)
        _await([h.ready.remote() for h in hosts.values()], "a host did not start", PathwaysError)
        return Cluster(f"grpc://{url}", token, manager, controller, schedulers, hosts, group, owns_ray)
    except BaseException:
        for actor in made:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        with contextlib.suppress(Exception):
            remove_placement_group(group)
        raise


def _actor(kind: type, **options: Any) -> Any:
    return ray.remote(num_cpus=0, **options)(kind)


def _host_actor(group: Any, number: int, resources: dict[str, float]) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    return ray.remote(
        num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0),
        resources={k: v for k, v in resources.items() if k not in ("CPU", "GPU")},
        max_restarts=-1,
        scheduling_strategy=strategy,
    )(HostExecutor)


def _await(refs: Any, what: str, kind: type[PathwaysError]) -> Any:
    try:
        return ray.get(refs, timeout=START_LIMIT_S)
    except ray.exceptions.GetTimeoutError as error:
        raise kind(f"{what} within {START_LIMIT_S:.0f} s; the cluster has {ray.cluster_resources()}") from error
    except ray.exceptions.RayError as error:
        raise kind(f"{what}: {error}") from error


def _bind_address() -> str:
    """Loopback while all Ray nodes are on this machine; else "", each process serves where Ray reaches its machine."""
    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return "127.0.0.1" if len(addresses) == 1 else ""
