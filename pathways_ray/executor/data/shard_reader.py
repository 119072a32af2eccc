"""The shards of a host as bytes: read for those who fetch them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from pathways_ray import limits
from pathways_ray.errors import Failure, GraphError, from_failure
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.jax_arrays import shards_by_device, shards_of
from pathways_ray.transport import messages as wire
from pathways_ray.transport.shared_memory import SharedFile

SMALL_BYTES = 1 << 14
"""A fetch of no more than this is answered as soon as it is copied, by a thread that has it at hand or by a worker,
however much the client has yet to read. A put of no more than this goes to the devices within the event loop."""

NEAR_BYTES = 112 << 10
"""A fetch by a local socket of less than this is answered there in one message, where the client reads it: on CPUs to
copy it takes less than to wake another thread."""

MAX_PINNED_BYTES = 1 << 30
"""A shard on an accelerator of at most this size is copied to memory that the device writes by itself, and is read
there: 256 MiB take 6 ms of an H200 that way, and 85 by JAX's own, which goes through a small part of such memory. A
process keeps what it once had of it."""

Answer = wire.FetchPart | wire.FetchShards | wire.FetchDone


class ShardReader:
    """Reads the buffers of a host, from any thread.

    Args:
        host: its number.
        devices: its devices.
    """

    def __init__(self, host: int, devices: Sequence[jax.Device], store: BufferStore) -> None:
        self.host, self.devices, self.store = host, devices, store
        self._numbered = dict(enumerate(devices))
        self._is_apart = any(device.platform != "cpu" for device in devices)
        self.near_bytes = SMALL_BYTES if self._is_apart else NEAR_BYTES

    def value(self, session: int, buffer: int) -> Any:
        """The value of a buffer in the store (it may still be computed). Raises its failure."""
        value = self.store.get(session, buffer)
        if value is None:
            raise from_failure(Failure("BufferDeleted", f"buffer {buffer} was dropped", host=self.host))
        if isinstance(value, Failure):
            raise from_failure(value)
        return value

    def begin(self, session: int, message: wire.Fetch) -> None:
        """Has the small results that an answer will have come to the host's memory, all at once and as soon as they are
        computed, where devices have a memory of their own: read one after the other, each would wait for its copy."""
        if not (self._is_apart and message.devices):
            return
        found: list[Any] = [
            self.store.get(session, buffer) for buffer in (message.buffer, *(other for _, other in message.also))
        ]
        self.begin_copies([v for v in found if hasattr(v, "is_ready") and v.nbytes <= SMALL_BYTES])

    def begin_copies(self, values: Sequence[Any]) -> None:
        """The same for arrays that will all be read."""
        for value in values if self._is_apart else ():
            with contextlib.suppress(Exception):  # reading it tells what is wrong
                for shard in shards_of(value):
                    shard.copy_to_host_async()

    def parts(self, request: int, value: Any, devices: Sequence[int]) -> Sequence[Answer]:
        """The answer to a question for a small array, or, where it asks for no device, whether it is there. Waits for
        all that this host has of it; raises where some of that has failed."""
        value.block_until_ready()  # raises for one that failed; to read its memory would end the process
        if not devices:
            return [wire.FetchDone(request)]
        shards, numbered = shards_by_device(value), self._numbered
        try:
            held = [shards[numbered[device]] for device in devices]
        except KeyError:
            held = [self._on(shards, device) for device in devices]  # which says what is wrong
        if len(held) > 1 and len(held) * math.prod(held[0].shape) * value.dtype.itemsize <= SMALL_BYTES:
            return [wire.FetchShards(request, self._joined(held))]
        found = [self._joined([one]) for one in held]
        return [wire.FetchPart(request, k, 0, len(data), data) for k, data in zip(devices, found, strict=True)]

    def _joined(self, shards: Sequence[jax.Array]) -> bytes:
        """The elements of shards that are there, in C order, one shard behind the other."""
        if not self._is_apart and shards[0].dtype.isbuiltin == 1:
            with contextlib.suppress(BufferError, TypeError):  # in another order, say
                # At half the cost of arrays of NumPy's, which JAX keeps besides.
                return b"".join(cast("Any", shards))
        return b"".join([self._elements(one).tobytes() for one in shards])

    def siblings(self, session: int, message: wire.Fetch, room: int = limits.MAX_SIBLINGS_BYTES) -> Sequence[Answer]:
        """The small results that come along with the answer to a question, no more than a client of this project asks
        for, nor than there is room for. One for no devices waits for all of them."""
        parts: list[Answer] = []
        if not message.devices:
            for _, buffer in message.also:
                self.value(session, buffer).block_until_ready()
            return parts
        room = min(room, limits.MAX_SIBLINGS_BYTES)
        for request, buffer in message.also:
            value: Any = self.store.get(session, buffer)
            if hasattr(value, "is_ready") and value.nbytes <= SMALL_BYTES and is_computed(value):
                with contextlib.suppress(Exception):  # a question for it tells what is wrong
                    found = self.parts(request, value, message.devices)
                    room -= sum(len(part.data) for part in found if not isinstance(part, wire.FetchDone))
                    if room < 0:
                        break
                    parts += found
        return parts

    def write(self, value: Any, devices: Sequence[int], file: SharedFile) -> bool:
        """Writes shards to their places in a file that has room for the whole array, or a lone one to a file of its
        size; False where the system has no room."""
        shards = [self._shard(value, device) for device in devices]
        if len(shards) == 1 and file.size == shards[0][1].nbytes:
            shards = [((slice(None),) * value.ndim, shards[0][1])]
            shape = shards[0][1].shape
        else:
            shape = value.shape
        file.check(math.prod(shape) * value.dtype.itemsize)
        for index, data in shards:
            box = tuple(place.indices(size)[:2] for place, size in zip(index, shape, strict=True))
            try:
                file.write_box(data, box, shape)
            except OSError:
                return False
        return True

    def arrays(self, value: Any, devices: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        """Waits for the shards on devices of this host; their elements."""
        return [self._shard(value, device)[1] for device in devices]

    def bytes(self, value: Any, device: int) -> memoryview[int]:
        """Waits for the shard on a device of this host and copies it to host memory, in C order."""
        array = np.ascontiguousarray(self._elements(self._shard_on(value, device)))
        return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")

    def _shard(self, value: Any, device: int) -> tuple[tuple[slice, ...], np.ndarray[Any, Any]]:
        """Waits for the shard on a device of this host; its place in the array, and its elements."""
        data = self._shard_on(value, device)
        index = next(shard.index for shard in value.addressable_shards if shard.device == self.devices[device])
        return index, self._elements(data)

    def _shard_on(self, value: Any, device: int) -> jax.Array:
        """The shard on a device of this host."""
        return self._on(shards_by_device(value), device)

    def _on(self, shards: Mapping[jax.Device, jax.Array], device: int) -> jax.Array:
        """That of the shards here which is on a device."""
        found = shards.get(self._numbered.get(device))
        if found is not None:
            return found
        if device not in self._numbered:
            raise GraphError(f"host {self.host} has {len(self.devices)} devices, no number {device}")
        raise GraphError(f"the buffer has no shard on device {device} of host {self.host}")

    def _elements(self, data: jax.Array) -> np.ndarray[Any, Any]:
        data.block_until_ready()  # raises for one that failed; NumPy would end the process over it
        if self._is_apart and SMALL_BYTES < data.nbytes <= MAX_PINNED_BYTES:
            with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):  # not there, or full: the slow way is
                return np.asarray(jax.device_put(data, data.sharding.with_memory_kind("pinned_host")))
        return np.asarray(data)


def is_computed(value: Any) -> bool:
    """Whether nothing of a value has to be waited for. Its memory may be gone, to a launch: reading it says so."""
    try:
        return bool(value.is_ready())
    except (RuntimeError, ValueError):
        return True
