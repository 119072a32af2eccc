"""The parcels of a bundle packed: small ones of several edges that go the same way travel end to end, as one array.

Each array that travels costs its sender, its receiver and the network about the same, however few bytes it has; so does
each computation that cuts or joins shards. Large parcels go alone: for them a copy costs more than an array does. Both
hosts derive the same lists, as they do for `exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pathways_ray.ir.exchange import Exchange
from pathways_ray.ir.plan import Edge, PlacedSlice
from pathways_ray.ir.regions import Box, box_shape, place_of
from pathways_ray.ir.types import ArrayType, item_bytes

PACKED_BYTES = 256 << 10
"""Parcels of up to this size are packed."""

AS_IT_IS = -1
"""The place in a pack of a parcel that travels alone, in its own shape."""


@dataclass(frozen=True)
class Pack:
    """Parcels that travel as one array from a source device to a landing device (ordinals in their meshes), each given
    by the place of its edge in the bundle and its box. Several lie end to end: those of one row shape as rows, others
    flat."""

    source: int
    landing: int
    dtype: str
    parcels: tuple[tuple[int, Box], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first, *others = shapes = [box_shape(box) for _, box in self.parcels]
        if not others:
            return first
        if all(len(one) > 0 and one[1:] == first[1:] for one in shapes):
            return (sum(one[0] for one in shapes), *first[1:])
        return (sum(map(math.prod, shapes)),)


class Piece(NamedTuple):
    """A piece of a shard: in pack number `pack` from host `sender`, from element `start` on, or `AS_IT_IS`; `box` is
    its place inside the shard."""

    sender: int
    pack: int
    start: int
    box: Box


@dataclass
class Packing:
    """The packs of a bundle, by (sending host, receiving host), and how each target device is put together.

    `assembly[k]` has, for target device k, the pieces of its shard of each edge.
    """

    packs: dict[tuple[int, int], list[Pack]] = field(default_factory=dict)
    assembly: dict[int, list[list[Piece]]] = field(default_factory=dict)


def pack(edges: Sequence[Edge], exchanges: Sequence[Exchange], source: PlacedSlice, target: PlacedSlice) -> Packing:
    """The packs of edges between two slices, from the exchange of each edge.

    Parcels of one pack have their source device, their landing device, all devices that need them, and their dtype in
    common. What stays on its device is not packed.
    """
    made = Packing()
    places: dict[tuple[int, tuple[int, int], int], tuple[int, int]] = {}
    for pair in sorted({pair for one in exchanges for pair in one.parcels}):
        groups: dict[tuple[int, int, str, tuple[int, ...]], list[tuple[int, int]]] = {}
        lone: list[tuple[int, int]] = []
        for edge, one in enumerate(exchanges):
            dtype = edges[edge].type.dtype
            for number, parcel in enumerate(one.parcels.get(pair, ())):
                stays = source.devices[parcel.source] == target.devices[parcel.landing]
                if stays or math.prod(parcel.shape) * item_bytes(dtype) > PACKED_BYTES:
                    lone.append((edge, number))
                else:
                    takers = tuple(one.takers[pair][number])
                    groups.setdefault((parcel.source, parcel.landing, dtype, takers), []).append((edge, number))
        packs = made.packs[pair] = []
        for members in [*groups.values(), *([member] for member in lone)]:
            parcels = [(edge, exchanges[edge].parcels[pair][number]) for edge, number in members]
            start = 0
            for member, (_, parcel) in zip(members, parcels, strict=True):
                places[member[0], pair, member[1]] = len(packs), start if len(members) > 1 else AS_IT_IS
                start += math.prod(parcel.shape)
            first = parcels[0][1]
            kinds = tuple((edge, parcel.box) for edge, parcel in parcels)
            packs.append(Pack(first.source, first.landing, edges[parcels[0][0]].type.dtype, kinds))
    for k, device in enumerate(target.devices):
        if any(k in one.assembly for one in exchanges):
            made.assembly[k] = [
                [
                    Piece(sender, *places[edge, (sender, device.host), number], box)
                    for sender, number, box in one.assembly.get(k, ())
                ]
                for edge, one in enumerate(exchanges)
            ]
    return made


def pieces_in_place(
    packs: Sequence[Pack], shards: Mapping[int, ArrayType], assembly: Sequence[Sequence[Sequence[Piece]]]
) -> list[tuple[int, int, int, int]] | None:
    """The places in shards of the elements of packs, end to end: for each piece the edge, the place of the device, the
    number of its first element in the shard, and how many it has.

    Args:
        packs: those of one sender.
        shards: the type of the shard of each edge.
        assembly: for each device the pieces of its shard of each edge.

    None unless each element is in one shard, each shard is of nothing else, and each piece is in one piece there.
    """
    found = []
    for place, edges in enumerate(assembly):
        for edge, kind in shards.items():
            for piece in edges[edge] if edges else ():
                first, count, interrupted = place_of(piece.box, kind.shape)
                if interrupted:
                    return None
                found.append((piece.pack, piece.start, edge, place, first, count))
    room = len(assembly) * sum(math.prod(kind.shape) for kind in shards.values())
    if not sum(count for *_, count in found) == sum(math.prod(one.shape) for one in packs) == room:
        return None
    return [(edge, place, first, count) for _, _, edge, place, first, count in sorted(found)]
