"""The devices of one island that a slice gets, and how its mesh lies on them.

The first of these that tells two choices apart decides:

1. its busiest device, in `Inventory.load`: a slice is as fast as the slowest of its devices;
2. the hosts of which it has some devices only, and, of these, those that nobody used before: whole hosts before parts;
3. hops between neighbours of the mesh (`ir.links.cost`): neighbours before strangers;
4. the load of all its devices, and lower numbers.

Where the places of devices are known, a slice is a sub-grid of the island's links, perhaps across the edge of a torus;
if no sub-grid has its size, or one of its devices is missing, it gets what it would get without places. There, hosts
are strangers to each other, and all devices of a host are neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pathways_ray.ir.links import Hardware, Links, Place, cost, factors, grid_of, hosts_of, text
from pathways_ray.ir.plan import Device
from pathways_ray.resource_manager.laying import lay
from pathways_ray.transport.messages import HostInfo

MAX_LOOKS = 100_000
"""Devices that are looked at for one slice. On islands on which all sub-grids have more, those are tried that begin at
multiples of their sides, which leaves room for as large ones."""


@dataclass
class HostRecord:
    """A host and its devices; `up` is False between its loss and its successor.

    Where a tenant has the island for itself, `tenant` is its name, and `base` the island whose devices it shares.
    """

    host: int
    island: int
    platform: str
    devices: int
    node: str
    pid: int
    epoch: int = 1
    up: bool = True
    tenant: str = ""
    base: int = -1
    started: int = 0
    hardware: Hardware = field(default_factory=Hardware)

    @classmethod
    def of(cls, info: HostInfo, epoch: int = 1) -> HostRecord:
        """A host that is up, by its own report."""
        place = (info.host, info.island, info.platform, info.devices, info.node, info.pid)
        return cls(*place, epoch, True, info.tenant, info.base, info.started, info.hardware)

    def has(self, memory: int, generation: str) -> bool:
        """Whether its devices are known to have as many bytes, and to be of a generation; 0 and "" are any."""
        return self.hardware.memory >= memory and generation in ("", self.hardware.generation)

    def at(self) -> Iterator[tuple[Device, Place]]:
        """Its devices whose places are known."""
        for index, place in enumerate(self.hardware.places[: self.devices]):
            yield Device(self.host, index), place


class Choice(NamedTuple):
    """Devices in row-major order of a mesh; see the head of this file for what comes first."""

    busiest: int
    parts: int
    broken: int
    cost: int
    load: int
    devices: tuple[Device, ...]


def links_of(hosts: Sequence[HostRecord]) -> Links:
    """The links of an island, as far as they are known."""
    known = [host.hardware for host in hosts if host.hardware.places and len(host.hardware.places) >= host.devices]
    places = [place for hardware in known for place in hardware.places]
    if len(known) < len(hosts) or len(set(places)) < len(places):
        return hosts_of(len(hosts), max((host.devices for host in hosts), default=1))
    bounds = [1 + max(along) for along in zip(*places, strict=True)]
    return grid_of(known[0].grid or bounds, known[0].torus)


def is_grid(links: Links) -> bool:
    """Whether the places of devices are known."""
    return links[0].kind != "switch"


def places_of(hosts: Sequence[HostRecord], links: Links) -> dict[Device, Place]:
    """The place of each device; without a grid, the position of its host among all, and its own number."""
    if is_grid(links):
        return {device: place for host in hosts for device, place in host.at()}
    return {Device(host.host, k): (at, k) for at, host in enumerate(hosts) for k in range(host.devices)}


def choose(
    hosts: Sequence[HostRecord], load: Mapping[Device, int], shape: tuple[int, ...], topology: tuple[int, ...] = ()
) -> Choice | None:
    """The best devices for a mesh, of those of some hosts of an island; None where there are too few.

    Args:
        hosts: in the order of their numbers.
        topology: the sides of the sub-grid that it is to be, in any order; () leaves that open.
    """
    if not 0 < math.prod(shape) <= sum(host.devices for host in hosts):
        return None
    links = links_of(hosts)
    found: Choice | None = None
    if is_grid(links):
        found = min(_sub_grids(hosts, load, shape, topology, links), default=None)
    if found is None and not topology:
        found = _packed(hosts, load, shape, links)
    return found


class _Rating:
    """Rates devices of an island for a slice, many choices at once: this may be asked of thousands of devices.

    `number` counts the devices in their order; `loads` and `owner`, the position of its host, are by that number.
    """

    def __init__(self, hosts: Sequence[HostRecord], load: Mapping[Device, int]) -> None:
        self.devices = [Device(host.host, k) for host in hosts for k in range(host.devices)]
        self.number = {device: at for at, device in enumerate(self.devices)}
        self.sizes = np.array([host.devices for host in hosts])
        self.loads = np.array([load[device] for device in self.devices])
        self.owner = np.repeat(np.arange(len(hosts)), self.sizes)
        self.unused = np.bincount(self.owner, self.loads, len(hosts)) == 0

    def best(self, rows: np.ndarray, hops: int) -> Choice:
        """The best one of some choices of as many devices and the same cost, whose first devices differ.

        Args:
            rows: the numbers of the devices of each.
        """
        loads, owners = self.loads[rows], np.sort(self.owner[rows])
        is_first = np.diff(owners, axis=1, prepend=-1) > 0  # of the devices of its host
        at = np.flatnonzero(is_first)
        host, row = owners.flat[at], at // rows.shape[1]
        split = np.diff(at, append=rows.size) < self.sizes[host]
        parts = np.bincount(row[split], minlength=len(rows))
        broken = np.bincount(row[split & self.unused[host]], minlength=len(rows))
        busiest, total = loads.max(1), loads.sum(1)
        best = np.lexsort((rows[:, 0], total, broken, parts, busiest))[0]
        devices = tuple(self.devices[k] for k in rows[best].tolist())
        return Choice(int(busiest[best]), int(parts[best]), int(broken[best]), hops, int(total[best]), devices)


# --- on a grid --------------------------------------------------------------------------------------------------------


def _sub_grids(
    hosts: Sequence[HostRecord],
    load: Mapping[Device, int],
    shape: tuple[int, ...],
    topology: tuple[int, ...],
    links: Links,
) -> Iterator[Choice]:
    """The best place for each kind of sub-grid of a mesh's size, or of these sides, with the mesh laid into it as well
    as can be."""
    size, sides = math.prod(shape), [d.size for d in links]
    rated = _Rating(hosts, load)
    number_at = {place: rated.number[device] for host in hosts for device, place in host.at()}
    numbers = np.array([number_at.get(place, -1) for place in itertools.product(*map(range, sides))]).reshape(sides)
    sub_grids = [one for one in factors(size, len(sides)) if all(n <= most for n, most in zip(one, sides, strict=True))]
    if topology:
        wanted = sorted(side for side in topology if side > 1)
        sub_grids = [one for one in sub_grids if sorted(side for side in one if side > 1) == wanted]
    aligned = len(sub_grids) * math.prod(sides) * size > MAX_LOOKS
    for sub_grid in sub_grids:
        laying = lay(shape, sub_grid, links)
        corners = [_corners(d.size, side, d.kind == "ring", aligned) for d, side in zip(links, sub_grid, strict=True)]
        places = np.array(list(itertools.product(*corners)))[:, None] + np.array(laying.places)
        rows = numbers[tuple(np.moveaxis(places % sides, -1, 0))]
        whole = rows[(rows >= 0).all(1)]
        if len(whole):
            yield rated.best(whole, laying.cost)


def _corners(size: int, side: int, ring: bool, aligned: bool) -> range:
    if aligned:
        return range(0, size - side + 1, side)
    return range(size if ring and side < size else size - side + 1)


# --- on hosts ---------------------------------------------------------------------------------------------------------


def _packed(
    hosts: Sequence[HostRecord], load: Mapping[Device, int], shape: tuple[int, ...], links: Links
) -> Choice | None:
    """Devices that carry as little as can be, on as few hosts as these allow, whole ones first."""
    size = math.prod(shape)
    loads = sorted(load[Device(host.host, k)] for host in hosts for k in range(host.devices))
    if not 0 < size <= len(loads):
        return None
    busiest = loads[size - 1]
    free = {host.host: _free(host, load, busiest) for host in hosts}
    whole = {host.host for host in hosts if len(free[host.host]) == host.devices}
    chosen: dict[int, list[Device]] = {}
    while (left := size - sum(map(len, chosen.values()))) > 0:
        host = _next({number: devices for number, devices in free.items() if number not in chosen}, whole, load, left)
        chosen[host] = sorted(free[host][:left])
    counts = {len(devices) for devices in chosen.values()}
    rows = [chosen[host] for host in sorted(chosen)]
    place = places_of(hosts, links)
    if len(counts) == 1:
        laying = lay(shape, (len(rows), counts.pop()), hosts_of(len(rows), len(rows[0])))
        devices = tuple(rows[row][column] for row, column in laying.places)
    else:
        devices = tuple(device for row in rows for device in row)
    rated = _Rating(hosts, load)
    row = np.array([[rated.number[device] for device in devices]])
    return rated.best(row, cost(links, shape, [place[device] for device in devices]))


def _free(host: HostRecord, load: Mapping[Device, int], busiest: int) -> list[Device]:
    """The devices of a host that carry no more, those with the least load first."""
    devices = [Device(host.host, k) for k in range(host.devices)]
    return sorted((d for d in devices if load[d] <= busiest), key=lambda d: (load[d], d))


def _next(free: Mapping[int, Sequence[Device]], whole: set[int], load: Mapping[Device, int], left: int) -> int:
    """The host to take devices of: the largest whole one of which all are needed; or the one with the fewest that are
    enough, of which others have some already if there is one; or the one with the most."""

    def carries(host: int) -> int:
        return sum(load[device] for device in free[host])

    fitting = [host for host in free if host in whole and 0 < len(free[host]) <= left]
    if fitting:
        return min(fitting, key=lambda host: (-len(free[host]), carries(host), host))
    enough = [host for host in free if len(free[host]) >= left]
    if enough:
        return min(enough, key=lambda host: (sum(load[d] for d in free[host][:left]), len(free[host]), host))
    return max(free, key=lambda host: (len(free[host]), -host))


def hardware_text(hosts: Sequence[HostRecord]) -> str:
    """The hardware of an island, as far as it is known, in words."""
    links, parts = links_of(hosts), []
    if is_grid(links):
        shape = "torus" if any(d.kind == "ring" for d in links) else "grid"
        parts.append(f"a {text([d.size for d in links])} {shape}")
    generations = sorted({host.hardware.generation for host in hosts} - {""})
    least = min((host.hardware.memory for host in hosts), default=0)
    parts += [*generations, *([f"{least} bytes each"] if least else [])]
    return f" ({', '.join(parts)})" if parts else ""
