"""Who sends which piece of an edge to whom: the shard-by-shard view that each host derives for itself.

Every piece that a host needs comes to it once, lands on one of its devices, and is copied from there to its other
devices that need it. The lists for one pair of hosts come out in the same order on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pathways_ray.ir.plan import Edge, PlacedSlice
from pathways_ray.ir.regions import Box, box_shape, pieces_for, relative, shard_boxes


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

    `assembly[k]` lists, for target device k, (sending host, number of the parcel in that list, box inside the shard).
    """

    source_boxes: list[Box]
    target_boxes: list[Box]
    parcels: dict[tuple[int, int], list[Parcel]] = field(default_factory=dict)
    assembly: dict[int, list[tuple[int, int, Box]]] = field(default_factory=dict)

    def bytes_between_hosts(self, item_bytes: int) -> int:
        total = 0
        for (sender, receiver), parcels in self.parcels.items():
            if sender != receiver:
                total += sum(_elements(parcel.shape) for parcel in parcels) * item_bytes
        return total


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def exchange(edge: Edge, source: PlacedSlice, target: PlacedSlice) -> Exchange:
    """All parcels of an edge. An array without elements has none: each target makes its own empty shard."""
    made = Exchange(
        shard_boxes(edge.type, edge.source.spec, source.mesh), shard_boxes(edge.type, edge.target.spec, target.mesh)
    )
    if _elements(edge.type.shape) == 0:
        return made
    numbers: dict[tuple[int, int, Box], int] = {}
    for k, (device, wanted) in enumerate(zip(target.devices, made.target_boxes, strict=True)):
        prefer = sorted(
            range(len(source.devices)),
            key=lambda s: (
                source.devices[s] != device,
                source.devices[s].host != device.host,
                (s - k) % len(source.devices),
            ),
        )
        parts = []
        for piece in pieces_for(wanted, made.source_boxes, prefer):
            origin = _holder(numbers, made, source, piece.source, piece.box, device.host)
            sender = source.devices[origin].host
            key = (device.host, origin, piece.box)
            if key not in numbers:
                parcels = made.parcels.setdefault((sender, device.host), [])
                numbers[key] = len(parcels)
                parcels.append(Parcel(origin, piece.box, k))
            parts.append((sender, numbers[key], relative(piece.box, wanted)))
        made.assembly[k] = parts
    return made


def _holder(
    numbers: dict[tuple[int, int, Box], int], made: Exchange, source: PlacedSlice, first: int, box: Box, receiver: int
) -> int:
    """The source that `box` comes from: one whose parcel already goes to the receiver, else the first choice.

    Pieces from the receiver's own host cost nothing, so those are left as they are.
    """
    if source.devices[first].host == receiver:
        return first
    for other, other_box in enumerate(made.source_boxes):
        if other_box == made.source_boxes[first] and (receiver, other, box) in numbers:
            return other
    return first
