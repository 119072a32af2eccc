"""Text of `VirtualSlice.explain`: how a mesh lies on the links of its island."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pathways_ray.ir.links import Dimension, axis_cost, pairs, text
from pathways_ray.ir.types import SliceType

MAX_DEVICES = 64
"""Devices that are listed; of more, the first."""


def lie_of(
    mesh: SliceType, name: str, island: int, devices: Sequence[str], islands: Sequence[Mapping[str, Any]]
) -> str:
    """A slice and its lie in words.

    Args:
        devices: in row-major order of the mesh.
        islands: as status has them.
    """
    found = next((one for one in islands if one["island"] == island), None)
    places = {d["device"]: tuple(d["place"]) for host in (found or {"hosts": ()})["hosts"] for d in host["devices"]}
    if found is None or not places.keys() >= set(devices):
        return f"{name} on island {island}, which is away: {' '.join(devices)}"
    links = tuple(Dimension(*one) for one in found["links"])
    held: dict[str, int] = {}
    for device in devices:
        held[device.partition(".")[0]] = held.get(device.partition(".")[0], 0) + 1
    whole = sum(len(host["devices"]) == held.get(str(host["host"])) for host in found["hosts"])
    at = [places[device] for device in devices]
    lines = [f"{name} on island {island}: {len(devices)} of its devices, {links_text(links)}"]
    lines.append(f"  hosts: {len(held)}, of which whole: {whole}")
    total = 0
    for axis, (label, size) in enumerate(zip(mesh.axes, mesh.shape, strict=True)):
        hops, most = axis_cost(links, mesh.shape, at, axis)
        total += hops
        count = pairs((size,)) * math.prod(mesh.shape) // size
        mean = f"{hops / count:.2f} hops between neighbours, at most {most}" if count else "no neighbours"
        lines.append(f"  axis {label} ({size}): {mean}")
    lines.append(f"  cost: {total} hops for {pairs(mesh.shape)} pairs of neighbours")
    lines += [f"  {_index(mesh, number)} {device} at {places[device]}" for number, device in _first(devices)]
    if len(devices) > MAX_DEVICES:
        lines.append(f"  and {len(devices) - MAX_DEVICES} more")
    return "\n".join(lines)


def links_text(links: Sequence[Dimension]) -> str:
    """The links of an island in words."""
    sizes = text([d.size for d in links])
    if links[0].kind == "switch":
        return f"hosts and their devices, {sizes}: hosts are {links[0].hops} hops apart, devices of one 1"
    return f"in a {sizes} {'torus' if any(d.kind == 'ring' for d in links) else 'grid'}"


def _first(devices: Sequence[str]) -> list[tuple[int, str]]:
    return list(enumerate(devices))[:MAX_DEVICES]


def _index(mesh: SliceType, number: int) -> str:
    """The position of a device in the mesh: `x=0, y=1`."""
    found = []
    for axis, size in zip(reversed(mesh.axes), reversed(mesh.shape), strict=True):
        number, at = divmod(number, size)
        found.append(f"{axis}={at}")
    return ", ".join(reversed(found))
