"""One host's part in a bundle of edges: cut its shards, serve the packs, pull those it needs, assemble its shards.

All of it is prepared when the program is: at a launch the sender only offers futures under the transfer's id, and the
receiver only wraps futures into arrays. Neither waits for data. Each device has one computation that cuts and packs,
and one that joins, for all edges of the bundle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from pathways_ray.errors import Failure
from pathways_ray.executor.compile.compiler import Compiler, dtype_of
from pathways_ray.executor.compile.pieces import Placed
from pathways_ray.executor.data.arriving import LANDED_BYTES, Arriving, Landing
from pathways_ray.executor.data.device_transfer import DeviceTransfer
from pathways_ray.executor.data.shared_shards import PEERS, OnTheWay, joined, share
from pathways_ray.executor.run.numbered import taker
from pathways_ray.executor.run.parts import first_failure
from pathways_ray.ir.exchange import Exchange, exchange
from pathways_ray.ir.packing import AS_IT_IS, Pack, Packing, Piece, pack, pieces_in_place
from pathways_ray.ir.plan import Bundle, Edge, PlacedSlice, transfer_id
from pathways_ray.ir.regions import Box, relative, shard_shape
from pathways_ray.ir.types import ArrayType
from pathways_ray.jax_arrays import copier, joiner, shards_of

Pieces = list[Any]

_exchange = functools.lru_cache(maxsize=32)(exchange)
"""Edges of a program are often alike: those of a pipeline, or of a chain that goes to and fro."""


class _Shares(NamedTuple):
    """A host's share of a bundle: the boxes of each edge's shards on the devices of the source, the edges that
    are copied as a whole, and the packs of the others."""

    boxes: list[list[Box]]
    copied: frozenset[int]
    packing: Packing


@functools.lru_cache(maxsize=32)
def _shares(edges: tuple[Edge, ...], source: PlacedSlice, target: PlacedSlice, host: int) -> _Shares:
    made = [_exchange(edge, source, target, host) for edge in edges]
    copied = frozenset(k for k, one in enumerate(made) if one.is_copy(source, target))
    moved = [Exchange(one.source_boxes, one.target_boxes) if k in copied else one for k, one in enumerate(made)]
    return _Shares([one.source_boxes for one in made], copied, pack(edges, moved, source, target))


def copied_to(
    bundle: Bundle, source: PlacedSlice, target: PlacedSlice, host: int, compiler: Compiler
) -> list[NamedSharding] | None:
    """The shardings to which the arrays of a bundle are copied as a whole on this host; None where not all are."""
    if len(_shares(bundle.edges, source, target, host).copied) < len(bundle.edges):
        return None
    return [compiler.sharding(target, edge.target.spec) for edge in bundle.edges]


class _Offer(NamedTuple):
    """A piece that leaves a source device, which is number `place` on this host.

    It is the whole shard of edge `edge`, or, where that is -1, output `output` of what the device computes. `device` is
    where it is copied to, if it is.
    """

    place: int
    edge: int
    output: int
    device: Any = None


class Outgoing:
    """The sending side of a bundle on this host."""

    def __init__(
        self, bundle: Bundle, number: int, source: PlacedSlice, target: PlacedSlice, host: int, compiler: Compiler
    ) -> None:
        self.shares = _shares(bundle.edges, source, target, host)
        self.number = number
        self.host = host
        self.device = compiler.devices[0]
        self.copied = sorted(self.shares.copied)
        self.copy = copier([compiler.sharding(target, bundle.edges[k].target.spec) for k in self.copied])
        self.packs = {to: packs for (sender, to), packs in self.shares.packing.packs.items() if sender == host}
        local = [k for k, device in enumerate(source.devices) if device.host == host]
        shards = [
            ArrayType(shard_shape(edge.type, edge.source.spec, source.mesh), edge.type.dtype) for edge in bundle.edges
        ]
        self.cuts: list[tuple[int, Callable[[Sequence[Any]], Sequence[Any]], Callable[..., Any]]] = []
        outputs: dict[tuple[int, tuple[tuple[int, Box], ...]], int] = {}
        for place, ordinal in enumerate(local):
            made = self._cut_here(ordinal)
            if made:
                outputs.update({(ordinal, parcels): k for k, parcels in enumerate(made)})
                edges = sorted({edge for parcels in made for edge, _ in parcels})
                boxes = [
                    [(edges.index(edge), relative(box, self.shares.boxes[edge][ordinal])) for edge, box in parcels]
                    for parcels in made
                ]
                cut = compiler.pack([shards[edge] for edge in edges], boxes, source.devices[ordinal].index)
                self.cuts.append((place, taker(edges), cut))
        self.offers: dict[int, list[_Offer]] = {}
        for receiver, packs in self.packs.items():
            offers = self.offers[receiver] = []
            for packed in packs:
                edge = packed.parcels[0][0] if self._is_whole(packed) else -1
                output = outputs[packed.source, packed.parcels] if edge < 0 else -1
                stays = receiver != host or source.devices[packed.source] == target.devices[packed.landing]
                device = None if stays else compiler.devices[target.devices[packed.landing].index]
                offers.append(_Offer(local.index(packed.source), edge, output, device))

    def _is_whole(self, packed: Pack) -> bool:
        """Whether a pack is a shard that leaves as it is."""
        edge, box = packed.parcels[0]
        return len(packed.parcels) == 1 and box == self.shares.boxes[edge][packed.source]

    def _cut_here(self, ordinal: int) -> list[tuple[tuple[int, Box], ...]]:
        """The parcels of each pack that a source device has to make, each once for all receivers."""
        packs = [p for packs in self.packs.values() for p in packs if p.source == ordinal and not self._is_whole(p)]
        return list(dict.fromkeys(packed.parcels for packed in packs))

    def send(self, values: Sequence[Any] | Failure, launch: int, transfer: DeviceTransfer) -> Pieces | Failure:
        """Serves the packs that other hosts need; returns those that stay on this host, on their landing devices,
        behind the arrays that are copied as a whole."""
        if isinstance(values, Failure) or any(isinstance(value, Failure) for value in values):
            return self._send_failure(first_failure(values), launch, transfer)
        local = OnTheWay(self.copy(*[values[k] for k in self.copied]) if self.copied else ())
        # What nobody pulls would stay in memory.
        reached = [to for to in self.offers if to == self.host or transfer.reaches(to, launch)]
        if not reached:
            return local
        shards = [shards_of(value) for value in values]
        here = list(zip(*shards, strict=True))  # by device
        made = {place: cut(*edges(here[place])) for place, edges, cut in self.cuts}
        for receiver in reached:
            pieces: Pieces = []
            for place, edge, output, device in self.offers[receiver]:
                piece = shards[edge][place] if edge >= 0 else made[place][output]
                if edge >= 0 and device is None:
                    share(piece, values[edge], local if receiver == self.host else PEERS)
                pieces.append(piece if device is None else jax.device_put(piece, device))
            if receiver == self.host:
                local += pieces
            else:
                transfer.serve(transfer_id(launch, self.number, receiver), pieces)
        return local

    def _send_failure(self, failure: Failure, launch: int, transfer: DeviceTransfer) -> Failure:
        for receiver, packs in self.packs.items():
            if receiver != self.host and transfer.reaches(receiver, launch):
                sharding = SingleDeviceSharding(self.device)
                types = [jax.ShapeDtypeStruct(p.shape, dtype_of(p.dtype), sharding=sharding) for p in packs]
                transfer.serve_failure(transfer_id(launch, self.number, receiver), types, failure)
        return failure

    def take_back(self, launch: int, failure: Failure, transfer: DeviceTransfer) -> None:
        """Offers `failure` in place of the packs of a launch."""
        for receiver, packs in self.packs.items():
            if receiver != self.host:
                tiny = jax.ShapeDtypeStruct((1,), np.uint8, sharding=SingleDeviceSharding(self.device))
                transfer.take_back(transfer_id(launch, self.number, receiver), [tiny] * len(packs), failure)


class Incoming:
    """The receiving side of a bundle on this host."""

    def __init__(
        self, bundle: Bundle, number: int, source: PlacedSlice, target: PlacedSlice, host: int, compiler: Compiler
    ) -> None:
        shares = _shares(bundle.edges, source, target, host)
        self.number = number
        self.host = host
        self.joined = [
            joiner(edge.type.shape, dtype_of(edge.type.dtype), compiler.sharding(target, edge.target.spec))
            for edge in bundle.edges
        ]
        self.copied = sorted(shares.copied)
        self.moved = [k for k in range(len(bundle.edges)) if k not in shares.copied]
        packs = {
            (sender, number): packed
            for (sender, receiver), packs in shares.packing.packs.items()
            if receiver == host
            for number, packed in enumerate(packs)
        }
        landing = {key: target.devices[packed.landing].index for key, packed in packs.items()}
        self.wanted: dict[int, list[jax.ShapeDtypeStruct]] = {}
        for key, packed in packs.items():
            if key[0] != host:
                sharding = SingleDeviceSharding(compiler.devices[landing[key]])
                kind = jax.ShapeDtypeStruct(packed.shape, dtype_of(packed.dtype), sharding=sharding)
                self.wanted.setdefault(key[0], []).append(kind)
        shards = {
            k: ArrayType(shard_shape(edge.type, edge.target.spec, target.mesh), edge.type.dtype)
            for k, edge in enumerate(bundle.edges)
            if k not in shares.copied
        }
        here = [(k, device.index) for k, device in enumerate(target.devices) if device.host == host and shards]
        assembly = [shares.packing.assembly.get(k, ()) for k, _ in here]
        self.joins = [
            _Join(shards, mine, packs, landing, device, compiler)
            for mine, (_, device) in zip(assembly, here, strict=True)
        ]
        self.handed_on = {k for join in self.joins for k in join.whole}
        self.landings = {sender: Landing(types) for sender, types in self.wanted.items()}
        pieces = None
        alone = len(self.wanted) == 1 and not self.copied and self.wanted.keys() == {sender for sender, _ in packs}
        if alone and self._joins_small(shards):
            pieces = pieces_in_place(list(packs.values()), shards, assembly)
        self.lands_joined = pieces is not None
        """Whether what a host of this machine sends lands in the arrays as a whole, and nothing else is in them."""
        if pieces is not None:
            ((sender, types),) = self.wanted.items()
            made = [
                jax.ShapeDtypeStruct(
                    edge.type.shape, dtype_of(edge.type.dtype), sharding=compiler.sharding(target, edge.target.spec)
                )
                for edge in bundle.edges
            ]
            self.landings = {sender: Landing(types, made, pieces)}

    def _joins_small(self, shards: Mapping[int, ArrayType]) -> bool:
        """Whether something is joined here, and only arrays of which little is on a device."""
        are_small = all(kind.nbytes <= LANDED_BYTES for kind in shards.values())
        return are_small and any(join.join for join in self.joins)

    def post(self, launch: int, transfer: DeviceTransfer) -> dict[int, Pieces | Failure]:
        """Posts the pulls, before the producers need to have run."""
        if not self.wanted:
            return {}
        name = transfer_id(launch, self.number, self.host)
        return {
            sender: transfer.pull(sender, name, types, self.landings[sender]) for sender, types in self.wanted.items()
        }

    def assemble(self, pulled: dict[int, Pieces | Failure], local: Pieces | Failure | None) -> Sequence[Any] | Failure:
        """The arrays in their new layouts, or the failure that came in their place."""
        sources: dict[int, Pieces] = {}
        for sender, pieces in (*pulled.items(), (self.host, local)):
            if isinstance(pieces, Failure):
                return pieces
            if pieces is not None:
                near = bool(pieces) and isinstance(pieces[0], Arriving)
                came = pieces[0].arrays() if near else pieces
                if isinstance(came, Failure) or (near and self.lands_joined):
                    return came
                sources[sender] = came
        made: dict[int, Any] = {}
        if self.copied:
            mine = sources[self.host]
            made.update(zip(self.copied, mine, strict=False))
            sources[self.host] = mine[len(self.copied) :]
        for k, *shards in zip(self.moved, *(join.run(sources) for join in self.joins), strict=True):
            made[k] = self.joined[k](shards)
            if k in self.handed_on:
                joined(made[k], shards)
        return [made[k] for k in range(len(made))]


class _Join:
    """The shards of one target device, put together from what arrived on this host.

    Args:
        shards: the type of the shard of each edge that is not copied.
        assembly: the pieces of each edge.
        packs, landing: what comes to this host, by sender and number, and the devices where it lands.
    """

    def __init__(
        self,
        shards: Mapping[int, ArrayType],
        assembly: Sequence[Sequence[Piece]],
        packs: Mapping[tuple[int, int], Pack],
        landing: Mapping[tuple[int, int], int],
        device: int,
        compiler: Compiler,
    ) -> None:
        self.device = compiler.devices[device]
        self.empty: dict[int, Any] = {}
        self.whole: dict[int, tuple[int, int]] = {}
        taken: dict[tuple[int, int], int] = {}
        made: dict[int, list[Placed]] = {}
        for k, kind in shards.items():
            pieces = assembly[k] if assembly else ()
            if not pieces:  # it has no elements
                self.empty[k] = np.zeros(kind.shape, dtype_of(kind.dtype))
                continue
            first = pieces[0]
            if len(pieces) == 1 and first.start == AS_IT_IS and packs[first[:2]].shape == kind.shape:
                self.whole[k] = first[:2]
                continue
            made[k] = [(taken.setdefault(p[:2], len(taken)), p.start, p.box) for p in pieces]
        self.made = list(made)
        self.taken = list(taken)
        self.moves = {key for key, index in landing.items() if index != device}
        self.join: Callable[..., Any] | None = None
        if made:
            arrived = [ArrayType(packs[key].shape, packs[key].dtype) for key in taken]
            self.join = compiler.unpack(arrived, [(shards[k], parts) for k, parts in made.items()], device)

    def run(self, sources: Mapping[int, Pieces]) -> Sequence[Any]:
        """The shards, in the order of their edges."""
        if self.join is not None and not self.empty and not self.whole:
            made: Sequence[Any] = self.join(*(self._piece(sources, key) for key in self.taken))
            return made
        found = {k: jax.device_put(value, self.device) for k, value in self.empty.items()}
        found.update((k, self._piece(sources, key)) for k, key in self.whole.items())
        if self.join is not None:
            found.update(zip(self.made, self.join(*(self._piece(sources, key) for key in self.taken)), strict=True))
        return [found[k] for k in sorted(found)]

    def _piece(self, sources: Mapping[int, Pieces], key: tuple[int, int]) -> Any:
        piece = sources[key[0]][key[1]]
        return jax.device_put(piece, self.device) if key in self.moves else piece
