"""The resource manager's part of `pathways status`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pathways_ray.ir.plan import Device
from pathways_ray.resource_manager.allocation import Inventory, SliceRecord
from pathways_ray.resource_manager.choosing import HostRecord, links_of, places_of


def status(inventory: Inventory, shared: Collection[int] = ()) -> dict[str, Any]:
    """Islands with their hosts and devices, the slices on each device, and all slices. Of the islands that all share,
    `shared`, those are there too whose hosts have never joined together."""
    holders: dict[Device, list[str]] = {}
    for record in inventory.slices.values():
        for device in record.placed.devices:
            holders.setdefault(device, []).append(_label(record))
    joined = inventory.islands()
    return {
        "islands": [
            *(_island(inventory, island, hosts, holders) for island, hosts in joined.items()),
            *(_unformed(inventory, island) for island in sorted(set(shared) - joined.keys())),
        ],
        "slices": [_slice(record) for record in inventory.slices.values()],
    }


def _island(
    inventory: Inventory, island: int, hosts: Sequence[HostRecord], holders: Mapping[Device, list[str]]
) -> dict[str, Any]:
    """`links` has size, kind and hops of each dimension of the island's links (`ir.links.Dimension`), `place` of each
    device its coordinates there, and `busy` the part of its time for which it computed lately. `started` is when a
    host's process began (`HostInfo`). `drain_left_s` are the seconds that a drain has left; null without a drain, or
    where its deadline is not known."""
    links = links_of(hosts)
    places = places_of(hosts, links)
    return {
        "island": island,
        "platform": hosts[0].platform,
        "tenant": hosts[0].tenant,
        "shares": hosts[0].base if hosts[0].tenant else None,
        **_state(inventory, island),
        "generation": hosts[0].hardware.generation,
        "memory": min(host.hardware.memory for host in hosts),
        "links": [(link.size, link.kind, link.hops) for link in links],
        "hosts": [
            {
                "host": host.host,
                "node": host.node,
                "pid": host.pid,
                "started": host.started,
                "epoch": host.epoch,
                "up": host.up,
                "devices": [
                    {
                        "device": str(device),
                        "slices": holders.get(device, []),
                        "place": places[device],
                        "busy": inventory.busy.get(device, 0.0),
                    }
                    for device in (Device(host.host, k) for k in range(host.devices))
                ],
            }
            for host in hosts
        ],
    }


def _unformed(inventory: Inventory, island: int) -> dict[str, Any]:
    """An island that lacked a host from its start on: nothing is known of its devices."""
    return {
        "island": island,
        "platform": "",
        "tenant": "",
        "shares": None,
        **_state(inventory, island),
        "generation": "",
        "memory": 0,
        "links": [],
        "hosts": [
            {"host": host, "node": "", "pid": 0, "started": 0, "epoch": 0, "up": False, "devices": []}
            for host in sorted(inventory.members[island])
        ],
    }


def _state(inventory: Inventory, island: int) -> dict[str, Any]:
    left_s = inventory.draining.get(island, math.inf) - inventory.now
    return {
        "state": inventory.state_of(island),
        "reason": inventory.drained_for.get(island, ""),
        "drain_left_s": left_s if math.isfinite(left_s) else None,
    }


def _slice(record: SliceRecord) -> dict[str, Any]:
    mesh = record.placed.mesh
    return {
        "session": record.session,
        "slice": mesh.id,
        "name": record.name,
        "mesh": dict(zip(mesh.axes, mesh.shape, strict=True)),
        "island": record.placed.island,
        "devices": [str(device) for device in record.placed.devices],
    }


def _label(record: SliceRecord) -> str:
    return f"session {record.session}: {record.name or f'slice {record.placed.mesh.id}'}"
