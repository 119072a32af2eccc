"""The topology of a runtime: its islands, and defaults for their number, platform and devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pathways_ray import limits
from pathways_ray.errors import Unschedulable, UsageError
from pathways_ray.ir import links

PLATFORMS = ("cpu", "gpu", "tpu")
ACCELERATORS = {"gpu": "GPU", "tpu": "TPU"}
"""Ray's resource for each platform but the CPU, whose devices are virtual."""

PLACEMENTS = ("pack", "spread")

CPUS_PER_HOST = 0.01
"""A host's logical CPUs in Ray: a trace, so that virtual devices may outnumber cores."""


@dataclass(frozen=True)
class Island:
    """An island: hosts of one platform.

        pw.init(islands=[pw.Island(hosts=2, devices=4), pw.Island(devices=8)])

    Args:
        platform: "cpu", "gpu" or "tpu"; "auto" is what the Ray cluster has.
        hosts: how many; several form one JAX group.
        devices: for each host. Devices of platform "cpu" are virtual.
        memory: bytes of each device for arrays; 0 is what it has. CPU devices then share the memory of their machine.
        topology: the sides of the grid of links between its devices, each host's being a block of it; () where nothing
            is known of links. TPU cores say themselves where they are.
        torus: whether the links of the grid are rings.
        generation: what its devices are called; "" is what JAX calls them.
    """

    platform: str = "auto"
    hosts: int = 1
    devices: int = 1
    memory: int = 0
    topology: tuple[int, ...] = ()
    torus: bool = False
    generation: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.memory, int) or isinstance(self.memory, bool) or not 0 <= self.memory < 1 << 63:
            raise UsageError(f"memory must be a whole number of bytes, or 0 for what devices have, not {self.memory!r}")
        _check_number("hosts", self.hosts)
        _check_number("devices", self.devices)
        if self.devices > limits.MAX_HOST_DEVICES:
            raise UsageError(f"a host has at most {limits.MAX_HOST_DEVICES} devices, not {self.devices}")
        if self.platform not in (*PLATFORMS, "auto"):
            raise UsageError(f"platform must be one of {', '.join(PLATFORMS)} or auto, not {self.platform!r}")
        if not isinstance(self.generation, str) or not isinstance(self.torus, bool):
            raise UsageError(f"generation is a text and torus True or False, not {self.generation!r}, {self.torus!r}")
        self._check_topology()

    def _check_topology(self) -> None:
        sides = self.topology
        if not isinstance(sides, tuple | list) or len(sides) > 3:
            raise UsageError(f"topology has the sides of a grid of one to three dimensions, not {sides!r}")
        for side in sides:
            _check_number("a side of topology", side)
        object.__setattr__(self, "topology", tuple(sides))
        if sides and math.prod(sides) != self.hosts * self.devices:
            raise UsageError(
                f"a grid of {links.text(sides)} has {math.prod(sides)} devices; "
                f"{self.hosts} host(s) with {self.devices} each have {self.hosts * self.devices}"
            )

    def hardware(self, host: int) -> links.Hardware:
        """The devices of its host number `host`, as far as they are declared."""
        places = links.declared_places(self.topology, host, self.devices) if self.topology else ()
        return links.Hardware(self.memory, self.generation, self.topology, self.torus, places)

    def bundle(self) -> dict[str, float]:
        """The Ray resources that one of its hosts takes."""
        taken: dict[str, float] = {"CPU": CPUS_PER_HOST}
        if self.platform in ACCELERATORS:
            taken[ACCELERATORS[self.platform]] = self.devices
        return taken


class IslandSpec(msgspec.Struct, frozen=True):
    """An island as it was started, which the resource manager keeps; `node` is the Ray node that it was to be on, ""
    where that was left open."""

    island: Island
    node: str = ""


@dataclass(frozen=True)
class Topology:
    """All islands of a runtime. Hosts are numbered through, island after island. `nodes` has the Ray node for each
    island; () is wherever there is room."""

    islands: tuple[Island, ...]
    nodes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.islands:
            raise UsageError("a runtime needs at least one island")
        _check_hosts(self.hosts)
        most = max(island.hosts for island in self.islands)
        if most > limits.MAX_ISLAND_HOSTS:
            raise UsageError(f"an island has 1 to {limits.MAX_ISLAND_HOSTS} hosts, not {most}; have several islands")

    @property
    def hosts(self) -> int:
        return sum(island.hosts for island in self.islands)

    @property
    def devices(self) -> int:
        return sum(island.hosts * island.devices for island in self.islands)

    def specs(self) -> dict[int, bytes]:
        """Each island as the resource manager keeps it, an encoded `IslandSpec`."""
        nodes = self.nodes or [""] * len(self.islands)
        specs = map(IslandSpec, self.islands, nodes)
        return {number: msgspec.msgpack.encode(spec) for number, spec in enumerate(specs)}

    def members(self) -> dict[int, list[int]]:
        """The numbers of the hosts of each island."""
        found, start = {}, 0
        for number, island in enumerate(self.islands):
            found[number] = list(range(start, start + island.hosts))
            start += island.hosts
        return found


Resources = Sequence[Mapping[str, float]]
"""The resources of each Ray node that is alive."""


@dataclass(frozen=True)
class Auto:
    """An island for each Ray node that has what one takes: a host with all devices of the node.

    Args:
        platform: of the nodes that count; "auto" is the best that each has.
        devices: of each island; None is what its node has.
    """

    platform: str = "auto"
    devices: int | None = None

    def __post_init__(self) -> None:
        Island(self.platform, 1, self.devices if self.devices is not None else 1)

    def island_of(self, node: Mapping[str, float]) -> Island | None:
        """The island of a node with these resources; None where it gets none."""
        found = _devices_of(node)
        if found is None or self.platform not in ("auto", found[0]):
            return None
        return Island(found[0], 1, self.devices or found[1])

    def topology(self, nodes: Mapping[str, Mapping[str, float]]) -> Topology:
        """The islands of these nodes.

        Raises:
            Unschedulable: none of them has what an island takes.
        """
        found = {node: island for node, has in nodes.items() if (island := self.island_of(has)) is not None}
        if not found:
            raise Unschedulable("no Ray node has what an island takes; islands follow nodes, and one has to be there")
        return Topology(tuple(found.values()), tuple(found))


def topology_on(
    nodes: Resources,
    islands: int | Sequence[Island],
    hosts_per_island: int = 1,
    devices_per_host: int | None = 1,
    platform: str = "auto",
) -> Topology:
    """The shape that a caller asked for, with platforms (and devices, where left out) taken from the Ray nodes.

    Args:
        nodes: see `Resources`.
        islands: how many like each other, or each of them.
        devices_per_host: None is what the nodes have, split between the hosts that a node gets.
        platform: of islands given by number, and of those that leave theirs to "auto".

    Raises:
        UsageError: a value no runtime can have.
    """
    if platform not in (*PLATFORMS, "auto"):
        raise UsageError(f"platform must be one of {', '.join(PLATFORMS)} or auto, not {platform!r}")
    named = platform if platform != "auto" else platform_of(nodes)
    if isinstance(islands, list | tuple):
        given = tuple(islands)
        if not all(isinstance(island, Island) for island in given):
            raise UsageError(f"islands must be a whole number or a list of pw.Island, not {islands!r}")
        return Topology(tuple(replace(i, platform=named) if i.platform == "auto" else i for i in given))
    _check_number("islands", islands)
    assert isinstance(islands, int)
    _check_number("hosts_per_island", hosts_per_island)
    if devices_per_host is None:
        devices_per_host = _share(nodes, named, islands * hosts_per_island)
    _check_number("devices_per_host", devices_per_host)
    _check_hosts(islands * hosts_per_island)
    return Topology((Island(named, hosts_per_island, devices_per_host),) * islands)


def have_devices(nodes: Resources, topology: Topology) -> bool:
    """Whether the nodes together have as many accelerators as the islands of a topology."""
    return not lacking(nodes, topology)


def lacking(nodes: Resources, topology: Topology) -> str:
    """Of which accelerators the nodes together have fewer than the islands take, as a text; "" where of none."""
    wanted: Counter[str] = Counter()
    for island in topology.islands:
        wanted[ACCELERATORS.get(island.platform, "")] += island.hosts * island.devices
    for name, count in wanted.items():
        if name and (there := sum(node.get(name, 0.0) for node in nodes)) < count:
            return f"{there:g} {name}s, and its islands take {count}"
    return ""


def shape_of_nodes(nodes: Resources, platform: str = "auto", devices: int | None = None) -> Topology:
    """One host on each node that has accelerators or CPUs to give; alike nodes form an island.

    Where no node has what was asked for, one host, for which Ray may still get one.

    Args:
        nodes: see `Resources`.
        platform: of all hosts; "auto" is the best that each node has.
        devices: of each host; None is what its node has.

    Raises:
        UsageError: no such platform, or number of devices.
        Unschedulable: there is no such node.
    """
    Island(platform, 1, 1 if devices is None else devices)
    found = [one for node in nodes if (one := _devices_of(node, platform)) is not None]
    alike = Counter((named, devices or count) for named, count in found)
    if not alike and platform == "auto" and devices is None:
        raise Unschedulable("no Ray node has CPUs, GPUs or TPUs to give")
    alike = alike or Counter([(platform_of(nodes) if platform == "auto" else platform, devices or 1)])
    return Topology(tuple(Island(platform, hosts, devices) for (platform, devices), hosts in sorted(alike.items())))


def platform_of(nodes: Resources) -> str:
    """The best platform that a node has: "tpu", "gpu", else "cpu"."""
    for platform in ("tpu", "gpu"):
        if any(node.get(ACCELERATORS[platform], 0) >= 1 for node in nodes):
            return platform
    return "cpu"


def fits_one_node(nodes: Resources, island: Island) -> bool:
    """Whether a node has all that the hosts of an island take, when it is idle."""
    taken = {name: island.hosts * amount for name, amount in island.bundle().items()}
    return any(all(node.get(name, 0.0) >= amount for name, amount in taken.items()) for node in nodes)


def parse_island(text: str) -> Island:
    """An island from `platform:hosts=2,devices=8,topology=4x4,torus,generation=v4`; parts may be left out.

    Raises:
        UsageError: the text is not of this form.
    """
    platform, _, rest = text.partition(":")
    found: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        made = _setting(key, value)
        if made is None or key in found:
            raise UsageError(f"an island is written like cpu:hosts=2,devices=4,topology=2x4,torus, not {text!r}")
        found[key] = made
    return Island(platform or "auto", **found)


def _setting(key: str, value: str) -> int | str | bool | tuple[int, ...] | None:
    """The value of a part of an island's text; None where it has none."""
    if key in ("hosts", "devices", "memory"):
        return int(value) if value.isdecimal() else None
    if key == "topology":
        sides = value.split("x")
        return tuple(map(int, sides)) if all(side.isdecimal() for side in sides) else None
    if key == "generation":
        return value or None
    return True if key == "torus" and not value else None


def _devices_of(node: Mapping[str, float], platform: str = "auto") -> tuple[str, int] | None:
    """The platform and the devices of a host that has a whole node for itself."""
    platform = platform_of([node]) if platform == "auto" else platform
    count = int(node.get(ACCELERATORS.get(platform, "CPU"), 0))
    return (platform, count) if count >= 1 and node.get("CPU", 0) >= CPUS_PER_HOST else None


def _share(nodes: Resources, platform: str, hosts: int) -> int:
    """Devices for each of `hosts` hosts, spread evenly over the nodes that have the platform."""
    counts = [int(node.get(ACCELERATORS.get(platform, "CPU"), 0)) for node in nodes]
    counts = [count for count in counts if count >= 1]
    if not counts:
        return 1
    on_each = -(-hosts // len(counts))
    return max(1, min(counts) // on_each)


def _check_hosts(count: int) -> None:
    if count > limits.MAX_HOSTS:
        raise UsageError(f"{count} hosts are more than the {limits.MAX_HOSTS} that a runtime can have")


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
