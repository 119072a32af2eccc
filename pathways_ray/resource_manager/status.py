"""The resource manager's part of `pathways status`."""

from __future__ import annotations

from typing import Any

from pathways_ray.resource_manager.allocation import HostRecord, Inventory, SliceRecord


def status(inventory: Inventory) -> dict[str, Any]:
    """Islands with their hosts and devices, the slices on each device, and all slices."""
    holders: dict[tuple[int, int], list[str]] = {}
    for record in inventory.slices.values():
        for device in record.placed.devices:
            holders.setdefault((device.host, device.index), []).append(_label(record))
    return {
        "islands": [
            {
                "island": island,
                "platform": hosts[0].platform,
                "tenant": hosts[0].tenant,
                "shares": hosts[0].base if hosts[0].tenant else None,
                "state": inventory.state_of(island),
                "hosts": [_host(host, holders) for host in hosts],
            }
            for island, hosts in inventory.islands().items()
        ],
        "slices": [_slice(record) for record in inventory.slices.values()],
    }


def _host(host: HostRecord, holders: dict[tuple[int, int], list[str]]) -> dict[str, Any]:
    return {
        "host": host.host,
        "node": host.node,
        "pid": host.pid,
        "epoch": host.epoch,
        "up": host.up,
        "devices": [
            {"device": f"{host.host}.{k}", "slices": holders.get((host.host, k), [])} for k in range(host.devices)
        ],
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
