"""Islands that are added to a runtime that runs: numbered by the resource manager, started as those before them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, remove_placement_group

from pathways_ray import names
from pathways_ray.deployment import placement
from pathways_ray.deployment.islands import IslandActors, Processes, await_started, start_island
from pathways_ray.deployment.options import START_LIMIT_S
from pathways_ray.deployment.topology import ACCELERATORS, Island, IslandSpec, platform_of
from pathways_ray.errors import PathwaysError, Unschedulable, UsageError, from_failure
from pathways_ray.transport.endpoints import is_loopback
from pathways_ray.transport.messages import Refused

_REFUSED = msgspec.msgpack.Decoder(Refused)

ANSWER_LIMIT_S = 30.0
"""The resource manager answers within this time, a restart of its own included."""

UNDO_LIMIT_S = 5.0
"""And within this one when a start has failed, or the island stays without processes until it is removed."""


def processes_of(runtime: str) -> Processes:
    """The settings that a detached runtime of this name was started with.

    Raises:
        UsageError: no runtime of this name is on the Ray cluster.
    """
    try:
        manager = ray.get_actor(names.resource_manager(runtime), names.NAMESPACE)
    except ValueError as error:
        raise UsageError(f"no runtime named {runtime!r} is on this Ray cluster; 'pathways up' starts one") from error
    return msgspec.msgpack.decode(_answer(manager.described.remote()), type=Processes)


def add_island(
    processes: Processes, island: Island, limit_s: float = START_LIMIT_S, node: str = ""
) -> tuple[IslandActors, PlacementGroup]:
    """Starts another island of a runtime, and waits until its hosts have joined. Nothing of one that fails stays.

    Args:
        island: platform "auto" is the best that the Ray nodes have.
        limit_s: seconds for room on Ray's nodes, and as many for the start.
        node: the Ray node to put it on, if that has room; "" is any.

    Raises:
        UsageError: each tenant of the runtime has islands of its own, which are what it began with; or its processes
            listen on loopback, and the room is on another machine.
        Unschedulable: no Ray node has such a platform, or there is no room.
        PathwaysError: it did not come up in time.
    """
    if processes.isolated:
        raise UsageError("a runtime with isolation='process' keeps the islands that it was started with")
    nodes = [node["Resources"] for node in placement.alive_nodes()]
    if island.platform == "auto":
        island = replace(island, platform=platform_of(nodes))
    needed = ACCELERATORS.get(island.platform)
    if needed is not None and not any(node.get(needed, 0) >= island.devices for node in nodes):
        raise Unschedulable(
            f"no Ray node has {island.devices} devices of platform {island.platform}; {island} has no place"
        )
    manager = ray.get_actor(names.resource_manager(processes.runtime), names.NAMESPACE)
    asked = manager.add_island.remote(island.hosts, msgspec.msgpack.encode(IslandSpec(island, node)))
    with _undone(processes.runtime, manager, asked):
        found = _answer(asked)
        if isinstance(found, bytes):
            raise from_failure(_REFUSED.decode(found).failure)
        number, members = found
        settings = (processes.runtime, processes.placement, processes.detached, limit_s)
        groups = placement.place({number: island}, *settings, {number: node} if node else None)
        _check_reachable(processes, placement.machines_of(groups[number]))
        started = start_island(processes, number, members, island, groups[number])
        await_started(started.started(), limit_s)
    return started, groups[number]


def _check_reachable(processes: Processes, machines: Iterable[str]) -> None:
    """Raises `UsageError` if hosts on these machines could not reach the scheduler, nor be reached."""
    beyond = sorted(address for address in machines if not is_loopback(address))
    known = {node["NodeID"]: node["NodeManagerAddress"] for node in placement.alive_nodes()}
    other = [address for address in beyond if address != known.get(processes.near, address)]
    if other and is_loopback(processes.listen.links):
        raise UsageError(
            f"the processes of the runtime listen at {processes.listen.links}, since it was started on one machine: no "
            f"host at {', '.join(other)} reaches them. Start it with 'pathways up --bind ADDRESS', by which Ray knows "
            "its machine, or when the others are there (--nodes N)"
        )


@contextlib.contextmanager
def _undone(runtime: str, manager: Any, asked: Any) -> Iterator[None]:
    """Ends what was made of an island, a group and actors, if the block fails, and has the number forgotten.

    Args:
        asked: for the numbers of the island and of its hosts.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            found = ray.get(asked, timeout=UNDO_LIMIT_S)
            if not isinstance(found, bytes):
                _end(runtime, manager, *found)
        raise


def _end(runtime: str, manager: Any, number: int, members: Iterable[int]) -> None:
    """Ends what there is of an island, found by its names: an interrupted call may have made what it did not return."""
    for name in (*(names.host(runtime, host) for host in members), names.scheduler(runtime, number)):
        with contextlib.suppress(Exception):
            ray.kill(ray.get_actor(name, names.NAMESPACE))
    with contextlib.suppress(Exception):
        remove_placement_group(get_placement_group(names.group(runtime, number)))
    ray.get(manager.remove_island.remote(number), timeout=UNDO_LIMIT_S)  # waits: this process may end behind it


def _answer(asked: Any) -> Any:
    try:
        return ray.get(asked, timeout=ANSWER_LIMIT_S)
    except ray.exceptions.RayError as error:
        raise PathwaysError(f"the resource manager does not answer: {error}") from error
