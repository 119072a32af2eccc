"""Arrays in pieces, as they go from a client to hosts and come back: boxes, parts of boxes, files in memory."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from pathways_ray import limits
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.regions import Box, box_shape, place_of, shard_boxes, shard_shape
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.jax_types import dtype_named
from pathways_ray.transport import messages as wire
from pathways_ray.transport.local_sockets import NotLocal
from pathways_ray.transport.pipes import Pipe
from pathways_ray.transport.shared_memory import SharedFile, aligned, bytes_of, offsets

if TYPE_CHECKING:
    from pathways_ray.client.argument_types import ArgumentType


SMALL_BYTES = 16 << 10
"""Shards up to this size that come in one part are joined once somebody looks at their array."""

THERE = MappingProxyType({-1: 0})
"""What is missing where a host is to say that it has an array."""


class Fetching:
    """Shards on their way to the client, from one host, with the `sizes` of those of each device. `told` is called when
    they are there, or cannot come, by the thread that reads; without it nobody waits for them. Where only their being
    there is asked for (`THERE`), there is no `array`."""

    failure: Failure | None = None
    in_file = False

    def __init__(
        self, array: FetchedArray | None, host: int, sizes: Mapping[int, int], told: Callable[[], None] | None = None
    ) -> None:
        self.array = array
        self.host = host
        self.missing = dict(sizes)
        self.told = told

    def add(self, part: wire.FetchPart) -> bool:
        """Takes a part; whether all has come. Raises `ValueError` for one that is no part of what was asked for."""
        array, device, data = self.array, part.device, part.data
        if array is not None:
            if len(data) == part.total == self.missing.get(device) and not part.offset and part.total <= SMALL_BYTES:
                array.shards[self.host, device] = bytearray(data)
                self.missing.pop(device, None)
            elif array.take(self.host, part):
                self.missing.pop(device, None)
        return not self.missing

    def add_all(self, shards: wire.FetchShards) -> bool:
        """Takes all shards: nothing is missing any more. Raises `ValueError` where they are not those asked for."""
        if self.array is not None:
            self.array.take_all(self.host, shards.data)
        self.missing.clear()
        return True

    def end(self) -> bool:
        """Notes that all has come to the file that the question took along, or comes by the pipe."""
        self.in_file = True
        self.missing.clear()
        return True


class Place(NamedTuple):
    """The place of a shard in its array, in bytes; `start` is -1 where it is not in one piece."""

    box: Box
    start: int
    size: int


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
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        by_host: dict[int, list[int]] = {}
        for _, device in self.shards:
            by_host.setdefault(device.host, []).append(device.index)
        self.by_host = {host: tuple(indices) for host, indices in by_host.items()}
        self.only_host = next(iter(by_host)) if len(by_host) == 1 else -1
        self.places = {(device.host, device.index): self._place_of(box) for box, device in shards}
        self.sizes = {host: {k: self.places[host, k].size for k in indices} for host, indices in by_host.items()}
        starts = itertools.accumulate((place.size for place in self.places.values()), initial=0)
        self.is_in_order = len(by_host) == 1 and all(
            place.start == start for place, start in zip(self.places.values(), starts, strict=False)
        )
        """Whether the shards, one behind the other as they are asked for, are the array."""

    def _place_of(self, box: Box) -> Place:
        start, run, _ = place_of(box, self.shape)
        size = math.prod(box_shape(box))
        return Place(box, start * self.dtype.itemsize if run == size else -1, size * self.dtype.itemsize)

    @property
    def goes_by_pipe(self) -> bool:
        """Whether each shard is in one piece in the array, and all are on one host: who reads from several in turn may
        wait for one that waits for others to be read."""
        return self.only_host >= 0 and all(place.start >= 0 for place in self.places.values())


def plan_of(kind: ArgumentType) -> FetchPlan:
    """The way in which arrays of a type are fetched."""
    if kind.cover is None:
        assert kind.slice is not None
        kind.cover = FetchPlan.of_array(kind.array, kind.spec, kind.slice.placed)
    found: FetchPlan = kind.cover
    return found


class FetchedArray:
    """An array that is fetched: its shards come from hosts, each to its place. Where that is not in one piece, a shard
    comes to memory of its own before.

    Args:
        told: see `Fetching`.
    """

    def __init__(self, plan: FetchPlan, told: Callable[[], None] | None = None) -> None:
        self.plan = plan
        self.by_host: dict[int, Fetching] = {}
        for host, sizes in plan.sizes.items():
            self.by_host[host] = Fetching(self, host, sizes, told)
        self.shards: dict[tuple[int, int], bytearray | memoryview] = {}
        """By host and device, small ones that have come whole."""
        # No locks: a thread that reads may be interrupted by a signal handler that waits for a value, reads for itself,
        # and comes to the same part. What is made first is everybody's.
        self._memory: dict[tuple[int, int], bytearray] = {}
        """By host and device, the memory of a shard that is not in one piece in the array; with `WHOLE` the array's."""

    @property
    def is_there(self) -> bool:
        """Whether all of its shards have come."""
        return not any(fetching.missing for fetching in self.by_host.values())

    def take(self, host: int, part: wire.FetchPart) -> bool:
        """Takes a part of a shard; returns whether it was the last one. For the thread that reads from that host.

        Raises:
            ValueError: it does not belong there.
        """
        name, plan, offset = (host, part.device), self.plan, part.offset
        box, start, size = plan.places[name]
        end = offset + len(part.data)
        if part.total != size or offset < 0 or end > size:
            raise ValueError(f"bytes {offset} to {end} of {part.total} came for a shard of {size}")
        if start >= 0:
            room = self._room(WHOLE, plan.nbytes)
            memoryview(room)[start + offset : start + end] = part.data  # without a copy in between
            return end == size
        room = self._room(name, size)
        memoryview(room)[offset:end] = part.data
        if end == size:
            whole = np.ndarray(plan.shape, plan.dtype, self._room(WHOLE, plan.nbytes))
            whole[_slices(box)] = np.ndarray(box_shape(box), plan.dtype, room)
            self._memory.pop(name, None)
        return end == size

    def take_all(self, host: int, data: bytes | memoryview) -> None:
        """Takes the small shards of a host, one behind the other, as they were asked for. Raises `ValueError` where
        they are of another size."""
        sizes, at, room = self.plan.sizes[host], 0, bytearray(data)
        if len(room) != sum(sizes.values()):
            raise ValueError(f"{len(room)} bytes came for shards of {sum(sizes.values())}")
        if self.plan.is_in_order:
            self._memory[WHOLE] = room
            return
        for device, size in sizes.items():
            self.shards[host, device] = memoryview(room)[at : at + size]
            at += size

    def read(self, pipe: Pipe) -> np.ndarray[Any, Any]:
        """The whole array, whose one host writes its shards to a pipe. Raises `EOFError` where that hangs up before."""
        whole = aligned(self.plan.nbytes)
        places = [self.plan.places[host, k] for host, devices in self.plan.by_host.items() for k in devices]
        pipe.read([whole[place.start : place.start + place.size] for place in places])
        return whole.view(self.plan.dtype).reshape(self.plan.shape)

    def value(self, file: SharedFile | None = None) -> np.ndarray[Any, Any]:
        """The whole array. Some hosts may have written to a file that has room for all of it."""
        if file is None:
            return self.array()
        plan = self.plan
        if missing := [box for box, device in plan.shards if not self.by_host[device.host].in_file]:
            whole = file.bytes(plan.nbytes, writable=True).view(plan.dtype).reshape(plan.shape)
            came = self.array()
            for box in missing:
                whole[_slices(box)] = came[_slices(box)]
        # The caller may change it, and a fork of this process may do so as well without changing that of the caller.
        return file.bytes(plan.nbytes, writable=True, shared=False).view(plan.dtype).reshape(plan.shape)

    def kept(self, file: SharedFile | None) -> np.ndarray[Any, Any] | ArrayFile:
        """The whole array for an upload to come: where hosts have written it to a file, that file."""
        if file is None or not all(fetching.in_file for fetching in self.by_host.values()):
            return self.value(file)
        return ArrayFile(file, self.plan.shape, self.plan.dtype)

    def _room(self, name: tuple[int, int], size: int) -> bytearray:
        return self._memory.get(name) or self._memory.setdefault(name, bytearray(size))

    def array(self) -> np.ndarray[Any, Any]:
        """The whole array, of what came in parts."""
        plan = self.plan
        if self.shards and len(plan.shards) == 1:
            (data,) = self.shards.values()
            return np.ndarray(plan.shape, plan.dtype, data)
        array = np.ndarray(plan.shape, plan.dtype, self._room(WHOLE, plan.nbytes))
        for name, data in self.shards.items():
            box = plan.places[name].box
            array[_slices(box)] = np.ndarray(box_shape(box), plan.dtype, data)
        return array


WHOLE = (-1, -1)

Pieces = tuple[np.ndarray[Any, Any], ...]
"""Boxes of an array."""


class ArrayFile(NamedTuple):
    """An array in C order that is a file in memory, to which nobody writes any more."""

    file: SharedFile
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def array(self) -> np.ndarray[Any, Any]:
        """The array, to be read only."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return self.file.bytes(size).view(self.dtype).reshape(self.shape)


class ArrayPipe(NamedTuple):
    """An array in C order whose bytes somebody else writes to a pipe, of which this is the host's end. It is not read
    here, where it might be waited for: its uploader does that, if no host takes it."""

    end: SharedFile
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


Kept = np.ndarray[Any, Any] | ArrayFile
"""An array that was fetched to be uploaded again."""

Given = Kept | ArrayPipe
"""What is uploaded."""


class Copies:
    """Copies of the boxes of an array, so that the caller may change it. Each is made once, however many take it. An
    array that is a file in memory changes no more: where its boxes lie in it as an upload has them, it goes itself. Of
    one that comes by a pipe the host gets the end; all else that is asked of it raises `NotLocal`."""

    def __init__(self, array: Given) -> None:
        self._source = array
        self._copies: dict[Box, memoryview] = {}
        self._files: dict[tuple[Box, ...], SharedFile] = {}

    def size(self, boxes: tuple[Box, ...]) -> int:
        """Bytes of some boxes together."""
        return sum(math.prod(box_shape(box)) for box in boxes) * self._source.dtype.itemsize

    @functools.cached_property
    def _array(self) -> np.ndarray[Any, Any]:
        if isinstance(self._source, ArrayPipe):
            raise NotLocal("an array comes by a pipe, which its host does not take")
        return self._source if isinstance(self._source, np.ndarray) else self._source.array()

    def file(self, boxes: tuple[Box, ...]) -> SharedFile | None:
        """A file in memory with these boxes; None where there is no memory for it."""
        if isinstance(self._source, ArrayFile) and self._is_all(boxes):
            return self._source.file
        if isinstance(self._source, ArrayPipe) and [box_shape(box) for box in boxes] == [self._source.shape]:
            return self._source.end
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

    def pieces(self, boxes: tuple[Box, ...]) -> Pieces | None:
        """The boxes in the caller's array, which may change it later; None of one that is no array yet."""
        return tuple(map(self._piece, boxes)) if isinstance(self._source, np.ndarray) else None

    def _is_all(self, boxes: tuple[Box, ...]) -> bool:
        """Whether these boxes, one behind the other as an upload has them, are the array in C order."""
        item, shape = self._source.dtype.itemsize, self._source.shape
        found = [place_of(box, shape) for box in boxes]
        if any(run != math.prod(box_shape(box)) for box, (_, run, _) in zip(boxes, found, strict=True)):
            return False
        places, size = offsets([run * item for _, run, _ in found])
        return places == [start * item for start, _, _ in found] and size == math.prod(shape) * item

    def whole(self, boxes: tuple[Box, ...]) -> tuple[memoryview, ...]:
        """The bytes of these boxes."""
        return tuple(map(self._copy, boxes))

    def messages(self, opening: wire.PutOpen, boxes: tuple[Box, ...]) -> list[wire.Message]:
        """The messages that bring these boxes: one, where they are small, or else parts. Within a quota it is parts,
        which do not come before there is room."""
        if opening.living < 0 and self.size(boxes) <= limits.MAX_WHOLE_BYTES:
            return [msgspec.structs.replace(opening, whole=self.whole(boxes))]
        messages: list[wire.Message] = [opening]
        for number, box in enumerate(boxes):
            if box not in self._copies:
                self._copies[box] = self._copy(box)
            data = self._copies[box]
            for offset in range(0, len(data), limits.PART_BYTES):
                # A view: a part is copied when it is encoded, right before it leaves.
                part = data[offset : offset + limits.PART_BYTES]
                messages.append(wire.PutPart(opening.request, number, offset, part))
        return messages

    def _piece(self, box: Box) -> np.ndarray[Any, Any]:
        return self._array[_slices(box)]

    def _copy(self, box: Box) -> memoryview:
        """The bytes of a box, in C order, in memory of their own."""
        return bytes_of(np.array(self._piece(box), order="C"))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)
