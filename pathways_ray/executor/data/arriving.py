"""Arrays on their way from another host of this machine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pathways_ray.errors import Failure
from pathways_ray.ir.regions import strides_of
from pathways_ray.jax_arrays import array_maker, shards_of
from pathways_ray.transport.shared_memory import ALIGNMENT

LANDED_BYTES = 4 << 20
"""Shards of up to this size are made of memory that was filled from outside. A computation that overwrites such an
array copies it, where it overwrites in place what XLA has joined: 43 ms and 3 for 64 MiB on four devices. At this size
the copy takes what not joining saves (9 ms and 8 on four devices)."""


class Landing:
    """Memory in which lies what a host of this machine sends: made once, for all launches of a program.

    `sizes` are the bytes of each array that is sent, `rooms` those of the memory of each that is made of them. `keeps`:
    whether all of these keep that memory, as the first ones have shown. Then others can be made before it is filled.

    Args:
        sent: the arrays that are sent.
        made: those that are made of them. Where none are given they are the same, and made once all is here, so that
            memory is taken late.
        pieces: how: what comes end to end consists of these pieces. Each has the numbers of the array and of the shard
            that it is in, the number of its first element there, and how many it has.
    """

    def __init__(
        self,
        sent: Sequence[jax.ShapeDtypeStruct],
        made: Sequence[jax.ShapeDtypeStruct] = (),
        pieces: Sequence[tuple[int, int, int, int]] = (),
    ) -> None:
        self.sizes = [math.prod(one.shape) * one.dtype.itemsize for one in sent]
        self.keeps: bool | None = None if made else False
        made, pieces = made or sent, pieces or [(k, 0, 0, math.prod(one.shape)) for k, one in enumerate(sent)]
        self.rooms: list[int] = []
        self._shards: list[tuple[Any, Any, Any]] = []
        self._makers: list[Callable[[Sequence[Any]], jax.Array]] = []
        for one in made:
            shape, devices = one.sharding.shard_shape(one.shape), one.sharding._addressable_device_assignment
            item = one.dtype.itemsize
            step = -(-math.prod(shape) * item // ALIGNMENT) * ALIGNMENT
            strides = step, *(item * stride for stride in strides_of(shape))
            self.rooms.append(step * len(devices))
            self._shards.append(((len(devices), *shape), one.dtype, strides))
            self._makers.append(array_maker(one.shape, one.dtype, one.sharding, devices))
        steps, items = [strides[0] for _, _, strides in self._shards], [one.dtype.itemsize for one in made]
        self._room = np.array([k for k, *_ in pieces], np.intp)
        self._starts = np.array([place * steps[k] + items[k] * first for k, place, first, _ in pieces], np.uint64)
        self._sizes = np.array([items[k] * count for k, _, _, count in pieces], np.uint64)

    def places(self, rooms: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """The address of each piece in these rooms, and its bytes."""
        addresses = np.array([room.ctypes.data for room in rooms], np.uint64)
        return np.stack((addresses[self._room] + self._starts, self._sizes), axis=1)

    def buffers(self, rooms: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """The memory of each piece."""
        pieces = zip(self._room.tolist(), self._starts.tolist(), self._sizes.tolist(), strict=True)
        return [rooms[k][start : start + size] for k, start, size in pieces]

    def arrays(self, rooms: Sequence[np.ndarray[Any, Any]]) -> list[jax.Array]:
        """Makes the arrays in their rooms, whose memory they keep where a device can use it."""
        made = [
            make(list(np.ndarray(shape, dtype, room, 0, strides)))
            for make, (shape, dtype, strides), room in zip(self._makers, self._shards, rooms, strict=True)
        ]
        if self.keeps is None:
            there = [shard.unsafe_buffer_pointer() for array in made for shard in shards_of(array)]
            self.keeps = there == [
                room.ctypes.data + place * strides[0]
                for (shape, _, strides), room in zip(self._shards, rooms, strict=True)
                for place in range(shape[0])
            ]
        return made


class Arriving:
    """Arrays that a host of this machine sends: ready once all are here, or a failure in their place. Whenever one has
    its end, `NearTransfer` says so. `rooms` is the memory in which they were made before, `filling` whether something
    fills it, and nothing else may."""

    __slots__ = ("_arrays", "_over", "failure", "filling", "landing", "rooms", "sender")
    looks_called = True

    def __init__(self, sender: int, landing: Landing) -> None:
        self.sender, self.landing = sender, landing
        self.failure: Failure | None = None
        self.filling = False
        self.rooms: list[np.ndarray[Any, Any]] = []
        self._arrays: list[jax.Array] = []
        self._over = threading.Event()

    def is_ready(self) -> bool:
        """Whether nothing more is waited for."""
        return self._over.is_set()

    def block_until_ready(self) -> Arriving:
        """Waits until it is."""
        self._over.wait()
        return self

    def arrays(self) -> list[jax.Array] | Failure:
        """The arrays, or the failure in their place; raises `RuntimeError` where there may be nothing in them yet."""
        if not self._over.is_set():
            raise RuntimeError("what another host sends is not here yet")
        return self._arrays if self.failure is None else self.failure

    def make(self, rooms: Sequence[np.ndarray[Any, Any]]) -> None:
        """Makes the arrays; in `rooms` of its own by the thread that takes them, before or while these are filled."""
        self._arrays = self.landing.arrays(rooms)

    def came(self, rooms: Sequence[np.ndarray[Any, Any]]) -> None:
        """All has come, and there are arrays of it."""
        if rooms is not self.rooms:
            self.make(rooms)
        self._over.set()

    def fail(self, failure: Failure) -> None:
        """Nothing comes."""
        self.failure = failure
        self._over.set()


def lost(sender: int) -> Failure:
    """The failure in place of what a host that has ended was to send."""
    return Failure("HostLost", f"host {sender}, which holds the data, was lost", host=sender)
