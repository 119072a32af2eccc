"""Arrays in pieces, as they go from a client to hosts and come back: boxes, parts of boxes, files in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from pathways_ray import limits
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.regions import Box, box_shape, shard_boxes, shard_shape
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.jax_types import dtype_named
from pathways_ray.transport import messages as wire
from pathways_ray.transport.shared_memory import SharedFile, offsets


class Fetching:
    """Shards on their way to the client, from one host. `told` is called when they are there, or cannot come, by the
    thread that reads; without it a thread waits for them."""

    def __init__(self, devices: tuple[int, ...], told: Callable[[], None] | None = None) -> None:
        self.missing = set(devices)
        self.told = told
        self.parts: dict[int, bytearray] = {}
        self.failure: Failure | None = None
        self.in_file = False

    def add(self, part: wire.FetchPart) -> None:
        buffer = self.parts.get(part.device)
        if buffer is None:
            buffer = self.parts[part.device] = bytearray(part.total)
        memoryview(buffer)[part.offset : part.offset + len(part.data)] = part.data  # without a copy in between
        if part.offset + len(part.data) >= part.total:
            self.missing.discard(part.device)


class FetchPlan:
    """Shards that make up what is fetched, an array or one of its shards: their boxes, devices, and the requests to
    each host."""

    @classmethod
    def of_array(cls, kind: ArrayType, spec: Spec, placed: PlacedSlice) -> FetchPlan:
        """The fewest shards that cover an array."""
        ordinals: dict[Box, int] = {}
        for ordinal, box in enumerate(shard_boxes(kind, spec, placed.mesh)):
            ordinals.setdefault(box, ordinal)
        return cls(kind, [(box, placed.devices[ordinal]) for box, ordinal in ordinals.items()])

    @classmethod
    def of_shard(cls, kind: ArrayType, spec: Spec, placed: PlacedSlice, place: int) -> FetchPlan:
        """One shard, on device number `place`."""
        shape = shard_shape(kind, spec, placed.mesh)
        box = tuple((0, size) for size in shape)
        return cls(ArrayType(shape, kind.dtype), [(box, placed.devices[place])])

    def __init__(self, kind: ArrayType, shards: list[tuple[Box, Device]]) -> None:
        self.shape, self.dtype, self.shards = kind.shape, dtype_named(kind.dtype), shards
        by_host: dict[int, list[int]] = {}
        for _, device in self.shards:
            by_host.setdefault(device.host, []).append(device.index)
        self.by_host = {host: tuple(indices) for host, indices in by_host.items()}

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def assembled(self, received: dict[int, Fetching], file: SharedFile | None = None) -> np.ndarray[Any, Any]:
        """The array, from what each host sent; some may have written to a file that has room for all of it."""

        def shard(box: Box, device: Device) -> np.ndarray[Any, Any]:
            return np.frombuffer(received[device.host].parts[device.index], self.dtype).reshape(box_shape(box))

        if file is not None:
            whole = file.bytes(self.nbytes, writable=True).view(self.dtype).reshape(self.shape)
        elif len(self.shards) == 1:
            return shard(*self.shards[0])
        else:
            whole = np.empty(self.shape, self.dtype)
        for box, device in self.shards:
            if not received[device.host].in_file:
                whole[tuple(slice(a, b) for a, b in box)] = shard(box, device)
        return whole


class Copies:
    """Copies of the boxes of an array, so that the caller may change it. Each is made once, however many take it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self._copies: dict[Box, memoryview] = {}
        self._files: dict[tuple[Box, ...], SharedFile] = {}

    def size(self, boxes: tuple[Box, ...]) -> int:
        """Bytes of some boxes together."""
        return sum(math.prod(box_shape(box)) for box in boxes) * self._array.itemsize

    def file(self, boxes: tuple[Box, ...]) -> SharedFile | None:
        """A file in memory with these boxes; None where there is no memory for it."""
        if boxes not in self._files:
            pieces = [self._piece(box) for box in boxes]
            places, size = offsets([piece.nbytes for piece in pieces])
            try:
                file = SharedFile.create(size)
                for piece, place in zip(pieces, places, strict=True):
                    file.write(piece, place)
            except OSError:
                return None
            self._files[boxes] = file
        return self._files[boxes]

    def messages(self, opening: wire.PutOpen, boxes: tuple[Box, ...]) -> list[wire.Message]:
        """The messages that bring these boxes in parts."""
        messages: list[wire.Message] = [opening]
        for number, box in enumerate(boxes):
            if box not in self._copies:
                self._copies[box] = self._copy(box)
            data = self._copies[box]
            for offset in range(0, len(data), limits.PART_BYTES):
                # A view: a part is copied when it is encoded, right before it leaves.
                part = cast(bytes, data[offset : offset + limits.PART_BYTES])
                messages.append(wire.PutPart(opening.request, number, offset, part))
        return messages

    def _piece(self, box: Box) -> np.ndarray[Any, Any]:
        return self._array[tuple(slice(a, b) for a, b in box)]

    def _copy(self, box: Box) -> memoryview:
        """The bytes of a box, in C order, in memory of their own."""
        piece = np.array(self._piece(box), order="C")
        return memoryview(piece.reshape(-1).view(np.uint8).data) if piece.size else memoryview(b"")
