"""Placement of a runtime's processes: a placement group for each island, the control plane on one node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from pathways_ray import names
from pathways_ray.deployment.topology import Island, fits_one_node
from pathways_ray.errors import Unschedulable

PACK_LIMIT_S = 5.0
"""An island waits this long for one node that has room for all its hosts; then it takes what several have."""


LOOK_S = 0.5
"""Between looks at the Ray nodes."""


def alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def await_nodes(count: int, limit_s: float) -> None:
    """Waits until the Ray cluster has so many nodes.

    Raises:
        Unschedulable: it has fewer after `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    while (there := len(alive_nodes())) < count:
        if time.monotonic() > deadline:
            raise Unschedulable(
                f"the Ray cluster has {there} node(s) after {limit_s:.0f} s, and {count} are waited for; look at what "
                "'ray start' says on the other machines, or ask for fewer"
            )
        time.sleep(LOOK_S)


def here() -> str:
    """The Ray node of this process, where the controller's address and files are known."""
    return str(ray.get_runtime_context().get_node_id())


def near(node: str) -> NodeAffinitySchedulingStrategy:
    """Placement on one Ray node."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def place(
    islands: Mapping[int, Island],
    runtime: str,
    placement: str,
    detached: bool,
    limit_s: float,
    nodes: Mapping[int, str] | None = None,
) -> dict[int, PlacementGroup]:
    """Reserves room for islands.

    Args:
        islands: by their numbers.
        placement: "pack" puts the hosts of an island on one node if they fit, "spread" on as many as there are.
        limit_s: for all of them, seconds.
        nodes: the Ray nodes for some islands, whose hosts are together there; elsewhere, where it has no room.

    Raises:
        Unschedulable: there is no room; what was reserved is free again.
    """
    deadline = time.monotonic() + limit_s
    groups: dict[int, PlacementGroup] = {}
    there = [node["Resources"] for node in alive_nodes()]
    try:
        for number, island in islands.items():
            if nodes is not None and number in nodes:
                groups[number] = _group(runtime, number, island, "STRICT_PACK", detached, nodes[number])
                continue
            packed = placement == "pack" and island.hosts > 1 and fits_one_node(there, island)
            strategy = "SPREAD" if placement == "spread" else "STRICT_PACK" if packed else "PACK"
            groups[number] = _group(runtime, number, island, strategy, detached)
            if packed and not groups[number].wait(PACK_LIMIT_S):
                remove_placement_group(groups.pop(number))
                groups[number] = _group(runtime, number, island, "PACK", detached)
        for number, group in groups.items():
            if not group.wait(max(0.0, deadline - time.monotonic())):
                free_now = resources_text([ray.available_resources()])
                raise Unschedulable(
                    f"Ray has no room for island {number}, {islands[number]}, within {limit_s:.0f} s; "
                    f"its nodes have {resources_text(there)}, of which {free_now} is free"
                )
        return groups
    except BaseException:
        free(groups.values())
        raise


def machines_of(group: PlacementGroup) -> set[str]:
    """The addresses of the Ray nodes on which a group has reserved room."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    found = placement_group_table(group)["bundles_to_node_id"].values()
    return {addresses[node] for node in found if node in addresses}


def free(groups: Iterable[PlacementGroup]) -> None:
    """Frees what groups have reserved, whatever state they are in."""
    for group in groups:
        with contextlib.suppress(Exception):
            remove_placement_group(group)


def _group(
    runtime: str, number: int, island: Island, strategy: str, detached: bool, node: str | None = None
) -> PlacementGroup:
    return placement_group(
        [island.bundle()] * island.hosts,
        strategy=strategy,
        name=names.group(runtime, number),
        lifetime="detached" if detached else None,
        _soft_target_node_id=node,
    )


def resources_text(nodes: list[dict[str, float]]) -> str:
    """The resources that matter here, node by node."""
    wanted = ("CPU", "GPU", "TPU")
    return "; ".join(
        ", ".join(f"{node[name]:g} {name}" for name in wanted if name in node) or "nothing" for node in nodes
    )
