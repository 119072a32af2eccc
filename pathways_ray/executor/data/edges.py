"""One host's part in an edge: cut its shards, serve the pieces, pull those it needs, assemble its shards.

All of it is prepared when the program is: at a launch the sender only offers futures under the transfer's id, and the
receiver only wraps futures into an array. Neither waits for data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pathways_ray.compat import copier
from pathways_ray.errors import Failure
from pathways_ray.executor.compile.compiler import Compiler, dtype_of
from pathways_ray.executor.data.device_transfer import DeviceTransfer
from pathways_ray.ir.exchange import Exchange, exchange
from pathways_ray.ir.plan import Edge, PlacedSlice, transfer_id
from pathways_ray.ir.regions import relative, shard_shape

Pieces = list[Any]

# Edges of a program are often alike: those of a pipeline, or of a chain that goes to and fro.
_exchange = functools.lru_cache(maxsize=32)(exchange)


def _is_copy(made: Exchange, source: PlacedSlice, target: PlacedSlice) -> bool:
    """Whether every device takes the whole shard of the one in its place in the source, which is another device of the
    same host: then the array is copied as one."""
    return (
        source.hosts == target.hosts
        and len(source.hosts) == 1
        and bool(made.parcels)
        and made.source_boxes == made.target_boxes
        and all(a != b for a, b in zip(source.devices, target.devices, strict=True))
    )


class Outgoing:
    """The sending side of an edge on this host."""

    def __init__(
        self, edge: Edge, number: int, source: PlacedSlice, target: PlacedSlice, host: int, compiler: Compiler
    ) -> None:
        made = _exchange(edge, source, target, host)
        self.number = number
        self.host = host
        self.dtype = edge.type.dtype
        self.devices = compiler.devices
        copied = _is_copy(made, source, target)
        self.copy = copier(compiler.sharding(target, edge.target.spec)) if copied else None
        local = [k for k, device in enumerate(source.devices) if device.host == host]
        self.place = {ordinal: at for at, ordinal in enumerate(local)}
        self.index = {k: source.devices[k].index for k in local}
        shape = shard_shape(edge.type, edge.source.spec, source.mesh)
        self.lists = {receiver: parcels for (sender, receiver), parcels in made.parcels.items() if sender == host}
        self.landings = {
            receiver: [target.devices[p.landing].index for p in parcels] for receiver, parcels in self.lists.items()
        }
        self.cuts = self._prepare_cuts(made, shape, compiler)
        self.lends = any(cut is None for cut, _ in self.cuts.values())

    def _prepare_cuts(
        self, made: Exchange, shape: tuple[int, ...], compiler: Compiler
    ) -> dict[int, tuple[Callable[..., Any] | None, dict[Any, int]]]:
        """The computation that cuts the shard of each local source device; None where the shard leaves whole."""
        wanted: dict[int, list[Any]] = {}
        for parcels in self.lists.values():
            for parcel in parcels:
                boxes = wanted.setdefault(parcel.source, [])
                if parcel.box not in boxes:
                    boxes.append(parcel.box)
        cuts: dict[int, tuple[Callable[..., Any] | None, dict[Any, int]]] = {}
        for ordinal, boxes in wanted.items():
            whole = made.source_boxes[ordinal]
            if boxes == [whole]:
                cuts[ordinal] = (None, {whole: 0})
                continue
            inside = [relative(box, whole) for box in boxes]
            cut = compiler.cut(shape, self.dtype, inside, self.index[ordinal])
            cuts[ordinal] = (cut, {box: k for k, box in enumerate(boxes)})
        return cuts

    def send(self, value: Any, launch: int, transfer: DeviceTransfer) -> Pieces | Failure:
        """Serves the pieces other hosts need; returns those that stay on this host, on their landing devices; of an
        edge that is a copy, the whole array."""
        if isinstance(value, Failure):
            self._send_failure(value, launch, transfer)
            return value
        if self.copy is not None:
            return [self.copy(value)]
        cut: dict[int, Sequence[Any]] = {}
        # Of a replicated array `addressable_data` gives the first device's copy, whichever one was asked for.
        replicas = value.addressable_shards if value.is_fully_replicated else None
        for ordinal, (compiled, _) in self.cuts.items():
            place = self.place[ordinal]
            shard = value.addressable_data(place) if replicas is None else replicas[place].data
            cut[ordinal] = (shard,) if compiled is None else compiled(shard)
        local: Pieces = []
        for receiver, parcels in self.lists.items():
            pieces = [cut[p.source][self.cuts[p.source][1][p.box]] for p in parcels]
            if receiver != self.host:
                if not transfer.reaches(receiver, launch):
                    continue  # what nobody pulls would stay in memory
                if self.lends:
                    transfer.lend(value)
                transfer.serve(transfer_id(launch, self.number, receiver), pieces)
                continue
            for parcel, piece, landing in zip(parcels, pieces, self.landings[receiver], strict=True):
                same = self.index[parcel.source] == landing
                if same and self.cuts[parcel.source][0] is None:
                    transfer.lend(value)  # the receiving gang, which may wait at its barrier, reads this very memory
                local.append(piece if same else jax.device_put(piece, self.devices[landing]))
        return local

    def _send_failure(self, failure: Failure, launch: int, transfer: DeviceTransfer) -> None:
        for receiver, parcels in self.lists.items():
            if receiver != self.host and transfer.reaches(receiver, launch):
                sharding = SingleDeviceSharding(self.devices[0])
                types = [jax.ShapeDtypeStruct(p.shape, dtype_of(self.dtype), sharding=sharding) for p in parcels]
                transfer.serve_failure(transfer_id(launch, self.number, receiver), types, failure)

    def take_back(self, launch: int, failure: Failure, transfer: DeviceTransfer) -> None:
        """Offers `failure` in place of the pieces of a launch. The transfer library then lets go of those: of two
        offers under one name it keeps the later one."""
        for receiver, parcels in self.lists.items():
            if receiver != self.host:
                tiny = jax.ShapeDtypeStruct((1,), np.uint8, sharding=SingleDeviceSharding(self.devices[0]))
                transfer.serve_failure(transfer_id(launch, self.number, receiver), [tiny] * len(parcels), failure)


class Incoming:
    """The receiving side of an edge on this host."""

    def __init__(
        self, edge: Edge, number: int, source: PlacedSlice, target: PlacedSlice, host: int, compiler: Compiler
    ) -> None:
        made = _exchange(edge, source, target, host)
        self.number = number
        self.host = host
        self.shape = edge.type.shape
        self.sharding = compiler.sharding(target, edge.target.spec)
        self.devices = compiler.devices
        self.is_copy = _is_copy(made, source, target)
        dtype = dtype_of(edge.type.dtype)
        self.wanted = {
            sender: [
                jax.ShapeDtypeStruct(
                    p.shape, dtype, sharding=SingleDeviceSharding(self.devices[target.devices[p.landing].index])
                )
                for p in parcels
            ]
            for (sender, receiver), parcels in made.parcels.items()
            if receiver == host and sender != host
        }
        shape = shard_shape(edge.type, edge.target.spec, target.mesh)
        self.empty = None if made.assembly else np.zeros(shape, dtype)
        self.shards = []
        for k, device in enumerate(target.devices):
            if device.host != host:
                continue
            parts = made.assembly.get(k, [])
            whole = (
                len(parts) == 1
                and all(a == 0 for a, _ in parts[0][2])
                and made.parcels[parts[0][0], host][parts[0][1]].shape == shape
            )
            join = None
            if not whole and made.assembly:
                join = compiler.join(shape, edge.type.dtype, [box for _, _, box in parts], device.index)
            landed = [made.parcels[s, host][n].landing for s, n, _ in parts]
            moves = [target.devices[landing] != device for landing in landed]
            self.shards.append((device.index, [(s, n) for s, n, _ in parts], moves, join))

    def post(self, launch: int, transfer: DeviceTransfer) -> dict[int, Pieces | Failure]:
        """Posts the pulls, before the producers need to have run."""
        if not self.wanted:
            return {}
        name = transfer_id(launch, self.number, self.host)
        return {sender: transfer.pull(sender, name, types) for sender, types in self.wanted.items()}

    def assemble(self, pulled: dict[int, Pieces | Failure], local: Pieces | Failure | None) -> Any:
        """The array in its new layout, or the failure that came in its place."""
        sources: dict[int, Any] = dict(pulled)
        if local is not None:
            sources[self.host] = local
        for pieces in sources.values():
            if isinstance(pieces, Failure):
                return pieces
        if self.is_copy and isinstance(local, list):
            return local[0]
        shards = []
        for index, parts, moves, join in self.shards:
            if self.empty is not None:
                shards.append(jax.device_put(self.empty, self.devices[index]))
                continue
            pieces = [
                jax.device_put(sources[s][n], self.devices[index]) if move else sources[s][n]
                for (s, n), move in zip(parts, moves, strict=True)
            ]
            shards.append((pieces if join is None else join(*pieces))[0])
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)
