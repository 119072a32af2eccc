"""The pieces of an edge with their senders and receivers, shard by shard, as each host derives them for itself.

Every piece that a host needs comes to it once, lands on one of its devices, and is copied from there to its other
devices that need it. The lists for one pair of hosts come out in the same order on both sides.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

from pathways_ray.ir.plan import Device, Edge, PlacedSlice
from pathways_ray.ir.regions import Box, Holders, box_shape, intersect, relative, shard_boxes


@dataclass(frozen=True)
class Parcel:
    """A box of the logical array on its way: from a source device (ordinal in the mesh) to where it lands."""

    source: int
    box: Box
    landing: int

    @property
    def shape(self) -> tuple[int, ...]:
        return box_shape(self.box)


@dataclass
class Exchange:
    """The parcels of one edge, by (sending host, receiving host), and how each target device is put together.

    `takers` has the target devices that need each parcel. `assembly[k]` lists, for target device k, (sending host,
    number of the parcel in that list, box inside the shard).
    """

    source_boxes: list[Box]
    target_boxes: list[Box]
    parcels: dict[tuple[int, int], list[Parcel]] = field(default_factory=dict)
    takers: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)
    assembly: dict[int, list[tuple[int, int, Box]]] = field(default_factory=dict)

    def is_copy(self, source: PlacedSlice, target: PlacedSlice) -> bool:
        """Whether every device takes the whole shard of the one in its place in the source, which is another device of
        the same host: then the array is copied as one."""
        return (
            source.hosts == target.hosts
            and len(source.hosts) == 1
            and bool(self.parcels)
            and self.source_boxes == self.target_boxes
            and all(a != b for a, b in zip(source.devices, target.devices, strict=True))
        )

    def bytes_between_hosts(self, item_bytes: int) -> int:
        between = (parcels for (sender, receiver), parcels in self.parcels.items() if sender != receiver)
        return item_bytes * sum(math.prod(parcel.shape) for parcels in between for parcel in parcels)


def exchange(edge: Edge, source: PlacedSlice, target: PlacedSlice, host: int | None = None) -> Exchange:
    """All parcels of an edge. An array without elements has none: each target makes its own empty shard.

    With `host`, only what that host sends or receives, and how its devices are put together; each list is the same as
    without. The time it takes grows with the devices of both slices and with the parcels that come out, not with pairs
    of devices.
    """
    made = Exchange(
        shard_boxes(edge.type, edge.source.spec, source.mesh), shard_boxes(edge.type, edge.target.spec, target.mesh)
    )
    if math.prod(edge.type.shape) == 0:
        return made
    nearest = _Nearest(Holders(made.source_boxes), source.devices)
    givers = _shards_given(made, source, host) if host is not None else {}
    # A piece that comes from another host comes once: no device of the receiver holds it, so all ask for that one.
    coming: dict[tuple[int, Box], int] = {}
    numbers: dict[tuple[int, int, Box], int] = {}
    for k, (device, wanted) in enumerate(zip(target.devices, made.target_boxes, strict=True)):
        whole = host is None or device.host == host
        parts = []
        for shard in nearest.holders.shards(wanted) if whole else givers.get(wanted, ()):
            box = intersect(wanted, shard)
            assert box is not None
            origin = coming.get((device.host, box), -1)
            if origin < 0:
                origin = nearest.to(k, device, shard)
            sender = source.devices[origin].host
            if sender != device.host:
                coming[device.host, box] = origin
            if not whole and sender != host:
                continue
            key = (device.host, origin, box)
            if key not in numbers:
                parcels = made.parcels.setdefault((sender, device.host), [])
                numbers[key] = len(parcels)
                parcels.append(Parcel(origin, box, k))
                made.takers.setdefault((sender, device.host), []).append([])
            made.takers[sender, device.host][numbers[key]].append(k)
            parts.append((sender, numbers[key], relative(box, wanted)))
        if whole:
            made.assembly[k] = parts
    return made


def _shards_given(made: Exchange, source: PlacedSlice, host: int) -> dict[Box, list[Box]]:
    """Shards of `host` that meet each box of the target, in row-major order."""
    mine = {box for box, device in zip(made.source_boxes, source.devices, strict=True) if device.host == host}
    takers = Holders(made.target_boxes)
    given: dict[Box, list[Box]] = {}
    for shard in sorted(mine):
        for wanted in takers.shards(shard):
            given.setdefault(wanted, []).append(shard)
    return given


class _Nearest:
    """Choice among replicas of a shard for a device: its own, one on its host, or, so that replicas share the work,
    the next one that counts on from the device's own place."""

    def __init__(self, holders: Holders, devices: tuple[Device, ...]) -> None:
        self.holders = holders
        self.count = len(devices)
        self.ordinals = {device: ordinal for ordinal, device in enumerate(devices)}
        self.on_host: dict[tuple[int, Box], list[int]] = {}
        for ordinal, device in enumerate(devices):
            self.on_host.setdefault((device.host, holders.boxes[ordinal]), []).append(ordinal)

    def to(self, place: int, device: Device, shard: Box) -> int:
        """The ordinal of the source that device number `place` of the target takes its part of `shard` from."""
        own = self.ordinals.get(device)
        if own is not None and self.holders.boxes[own] == shard:
            return own
        among = self.on_host.get((device.host, shard)) or self.holders.of[shard]
        return among[bisect_left(among, place % self.count) % len(among)]
