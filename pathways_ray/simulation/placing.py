"""The links of simulated islands, and faults of slices that do not lie along them."""

from __future__ import annotations

from collections.abc import Sequence

from pathways_ray.ir.links import Hardware, declared_places
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.simulation.settings import Settings


def ring(hosts: Sequence[int], host: int, devices: int) -> Hardware:
    """The devices of a host of an island whose devices are all linked to a ring."""
    size = len(hosts) * devices
    return Hardware(grid=(size,), torus=True, places=declared_places((size,), list(hosts).index(host), devices))


def misplaced(placed: PlacedSlice, hosts: Sequence[int], settings: Settings) -> str:
    """The fault of a slice that does not lie as it should; "" for none."""
    devices = settings.devices
    numbers = sorted({list(hosts).index(d.host) * devices + d.index for d in placed.devices if d.host in hosts})
    if len(numbers) != placed.mesh.size:
        return f"{placed.mesh} has devices {placed.devices}, which are not as many of island {placed.island}"
    after = [*numbers[1:], numbers[0] + len(hosts) * devices]
    gaps = sum(other - one > 1 for one, other in zip(numbers, after, strict=True))
    return (
        f"{placed.mesh} has devices {placed.devices}, which are no part of a ring"
        if settings.rings and gaps > 1
        else ""
    )
