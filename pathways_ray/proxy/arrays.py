"""Arrays of a proxy's client: where the shards of each lie. Pure.

The client has names for arrays, and many operations of its protocol only give other names to the same shards: an array
is taken apart into its shards, put together from some, seen as its first copy. So an array here is a list of places,
one for each device, and a place is a shard of a *buffer*, which is an array of the runtime. Only where a computation
needs a buffer of its own are shards regrouped into one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pathways_ray.ir.tilings import axis_names, refined
from pathways_ray.ir.types import ArrayType, SliceType, Spec


class Status(NamedTuple):
    """An error as the protocol has it: a code of gRPC's, and a text."""

    code: int
    message: str


class Code:
    """Codes of gRPC that the proxy answers with."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Refused(Exception):
    """A request that cannot be answered; the client gets the status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.status = Status(code, message)


@dataclass(frozen=True)
class Sharding:
    """The devices of an array by their numbers in the client, a refined mesh of them, and the spec of the array there.

    `memory` is the kind of memory, "" for the default one. It is a label: all kinds of a device are one memory here. So
    is `sums`, XLA's own words for a sharding some of whose devices hold parts of a sum: they lie as copies would.

    With an `order` place k of the mesh is that of device number `order[k]` of them, not of device number k.
    """

    devices: tuple[int, ...]
    mesh: tuple[int, ...]
    spec: Spec = ()
    memory: str = ""
    sums: bytes = b""
    order: tuple[int, ...] = ()

    @classmethod
    def on(cls, device: int, memory: str = "") -> Sharding:
        """The sharding of an array on one device."""
        return cls((device,), (1,), (), memory)

    @classmethod
    def copies(cls, devices: Sequence[int], memory: str = "") -> Sharding:
        """The sharding of an array that each device has whole."""
        return cls(tuple(devices), refined((len(devices),)), (), memory)

    @functools.cached_property
    def slice_type(self) -> SliceType:
        """The mesh, as a slice without a number."""
        return SliceType(0, self.mesh, axis_names(self.mesh))

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The devices and their mesh: shardings of one place need one slice."""
        return self.devices, self.mesh

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one shard.

        Raises:
            Refused: the array does not divide evenly.
        """
        if len(self.spec) > len(shape):
            raise Refused(Code.INVALID_ARGUMENT, f"sharding {self} is for more dimensions than an array {shape} has")
        shard = list(shape)
        for dimension, axes in enumerate(self.spec):
            parts = math.prod(self.slice_type.axis_size(axis) for axis in axes)
            if shard[dimension] % parts:
                raise Refused(
                    Code.INVALID_ARGUMENT,
                    f"dimension {dimension} of an array {tuple(shape)} does not divide into {parts} shards",
                )
            shard[dimension] //= parts
        return tuple(shard)

    def is_same_but_memory(self, other: Sharding) -> bool:
        return self.place == other.place and self.spec == other.spec and self.order == other.order

    @property
    def straight(self) -> Sharding:
        """The same with the devices in the order of the mesh."""
        return replace(self, devices=tuple(self.devices[k] for k in self.order), order=()) if self.order else self


Place = tuple[int, int]
"""A buffer, and the number of a shard there."""


@dataclass(slots=True)
class Array:
    """An array of the client. `failure` is what went wrong with it; `deleted` ones have no shards any more. `buffer` is
    the number of the one that was made for it, 0 where none was."""

    type: ArrayType
    sharding: Sharding
    shards: tuple[Place, ...]
    failure: Status | None = None
    deleted: bool = False
    buffer: int = 0

    @property
    def shard_type(self) -> ArrayType:
        return ArrayType(self.sharding.shard_shape(self.type.shape), self.type.dtype)


@dataclass(slots=True)
class Buffer:
    """An array of the runtime. `uses` counts the places that arrays have in it; what is `shared` has memory that other
    buffers have too, and is never given away."""

    type: ArrayType
    sharding: Sharding
    uses: int = 0
    shared: bool = False
    failure: Status | None = None


@dataclass
class Arrays:
    """All arrays of one client, and the buffers that they lie in."""

    arrays: dict[int, Array] = field(default_factory=dict)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    unused: list[int] = field(default_factory=list)
    """Buffers in which no array lies any more; to be freed."""
    made: int = 0
    borrowed: int = 0
    """The last of the names that were borrowed; they are below zero, where the client has none."""

    # --- arrays -------------------------------------------------------------------------------------------------------

    def find(self, handle: int) -> Array:
        """Raises `Refused` for a name that the client has not given, or has taken back."""
        found = self.arrays.get(handle)
        if found is None:
            raise Refused(Code.NOT_FOUND, f"there is no array with handle {handle}")
        return found

    def usable(self, handle: int) -> Array:
        """Raises `Refused` for an array that is unknown or deleted, or failed: with how it failed."""
        found = self.find(handle)
        if found.deleted:
            raise Refused(Code.INVALID_ARGUMENT, f"array {handle} has been deleted or donated")
        failure = self.failure_of(found)
        if failure is not None:
            raise Refused(*failure)
        return found

    def failure_of(self, array: Array) -> Status | None:
        if array.failure is not None or (array.buffer and self.buffers[array.buffer].failure is None):
            return array.failure
        return next((failure for b, _ in array.shards if (failure := self.buffers[b].failure) is not None), None)

    def name(self, handle: int, array: Array) -> None:
        """Gives an array its name; one that had the name before is gone."""
        self.forget(handle)
        for buffer, _ in array.shards:
            self.buffers[buffer].uses += 1
        self.arrays[handle] = array

    def poison(self, handles: Iterable[int], status: Status) -> None:
        """Makes arrays of which only the failure is known."""
        for handle in handles:
            self.name(handle, Array(ArrayType((), "float32"), Sharding.on(0), (), status))

    def delete(self, array: Array) -> None:
        self._let_go(array.shards)
        array.shards, array.deleted, array.buffer = (), True, 0

    def forget(self, handle: int) -> None:
        found = self.arrays.pop(handle, None)
        if found is not None:
            self._let_go(found.shards)

    def move(self, array: Array, buffer: int) -> None:
        """Has an array lie in a buffer of its own, shard by shard."""
        before = array.shards
        array.shards, array.buffer = self.whole(buffer), buffer
        self.buffers[buffer].uses += len(array.shards)
        self._let_go(before)

    def _let_go(self, places: Iterable[Place]) -> None:
        for buffer, _ in places:
            found = self.buffers[buffer]
            found.uses -= 1
            if not found.uses:
                del self.buffers[buffer]
                self.unused.append(buffer)

    # --- buffers ------------------------------------------------------------------------------------------------------

    def new(self, kind: ArrayType, sharding: Sharding, shared: bool = False) -> int:
        """The number of a further buffer."""
        self.made += 1
        self.buffers[self.made] = Buffer(kind, sharding, shared=shared)
        return self.made

    def alone(self, buffer: int) -> Array:
        """An array that is just a buffer."""
        found = self.buffers[buffer]
        return Array(found.type, found.sharding, self.whole(buffer), buffer=buffer)

    def listed(self, buffer: int, sharding: Sharding) -> Array:
        """An array of this sharding that is just a buffer, which has the devices in the order of the mesh."""
        if not sharding.order:
            return self.alone(buffer)
        shards = dict(zip(sharding.order, self.whole(buffer), strict=True))
        return Array(self.buffers[buffer].type, sharding, tuple(shards[k] for k in range(len(shards))))

    def borrow(self, array: Array) -> Array:
        """Names an array until the request is over."""
        self.borrowed -= 1
        self.name(self.borrowed, array)
        return array

    def give_back(self) -> None:
        """Forgets what was borrowed."""
        while self.borrowed:
            self.forget(self.borrowed)
            self.borrowed += 1

    def whole(self, buffer: int) -> tuple[Place, ...]:
        """All places of a buffer, in the order of its devices."""
        count = len(self.buffers[buffer].sharding.devices)
        return ((buffer, 0),) if count == 1 else tuple((buffer, place) for place in range(count))

    def buffer_of(self, array: Array) -> int:
        """The buffer that is just this array; 0 where no buffer is."""
        if array.buffer or not array.shards:
            return array.buffer
        number = array.shards[0][0]
        found = self.buffers[number]
        same = found.sharding is array.sharding or found.sharding.is_same_but_memory(array.sharding)
        if same and found.type == array.type and array.shards == self.whole(number):
            return number
        return 0

    def is_alone_in(self, array: Array, buffer: int) -> bool:
        """Whether nothing but this array has the memory of a buffer."""
        found = self.buffers[buffer]
        return not found.shared and found.uses == len(array.shards)
