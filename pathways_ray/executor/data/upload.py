"""An array that a client uploads: its bytes as they come, and then the array on the devices of the host."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from weakref import WeakSet

import jax
import numpy as np

from pathways_ray.errors import GraphError, WireError
from pathways_ray.executor.compile.compiler import Compiler, dtype_of
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.regions import Box, box_shape
from pathways_ray.jax_arrays import array_of
from pathways_ray.transport import messages as wire
from pathways_ray.transport.pipes import HostPipe
from pathways_ray.transport.shared_memory import Mapping, SharedFile, aligned, offsets

DIGEST_BYTES = 16

MAX_MAPPED = 1024
"""Files of uploads of one tenant that are mapped; further ones are copied. A process may map some 65,530 things, among
them its heap and the stacks of its threads, and an array of one byte in a file of its own is one of them."""


class Upload:
    """An array on its way in: a byte buffer for each distinct box of this host, filled from its start to its end.

    Args:
        boxes: those of all devices of the slice.
    """

    def __init__(self, message: wire.PutOpen, boxes: Sequence[Box], host: int) -> None:
        self.message = message
        placed = list(zip(boxes, message.placed.devices, strict=True))
        self.local = [(box, device.index) for box, device in placed if device.host == host]
        self.boxes: list[Box] = list(dict.fromkeys(box for box, _ in self.local))
        elsewhere = {box for box, device in placed if device.host != host}
        self._positions = {box: boxes.index(box) for box in self.boxes if box in elsewhere}
        self.dtype = dtype_of(message.type.dtype)
        self.shape = box_shape(self.boxes[0])
        size = math.prod(self.shape) * self.dtype.itemsize
        self.size = self.missing = size * len(self.boxes)
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        """Makes room for boxes of this size."""
        self.buffers = [aligned(size) for _ in self.boxes]
        # The only record of what is filled: a part that came twice would leave another client's bytes in a gap.
        self.filled = [0] * len(self.boxes)

    def add(self, part: wire.PutPart) -> None:
        if not 0 <= part.box < len(self.buffers):
            raise WireError(f"part of box {part.box}; this host holds {len(self.buffers)}")
        buffer, filled = self.buffers[part.box], self.filled[part.box]
        end = filled + len(part.data)
        if part.offset != filled or end > len(buffer) or (not part.data and len(buffer)):
            raise WireError(
                f"part at {part.offset} of {len(part.data)} bytes does not go on at {filled} of the {len(buffer)} of "
                "its box"
            )
        buffer[filled:end] = np.frombuffer(part.data, np.uint8)
        self.filled[part.box] = end
        self.missing -= len(part.data)

    def digests(self, secret: str) -> dict[int, bytes]:
        """The digests of the boxes that other hosts hold as well, by the first position in the mesh that has the box.
        They are keyed, so that nobody can look for two arrays that have one digest."""
        key = hashlib.sha256(f"uploads {secret}".encode()).digest()
        return {
            self._positions[box]: hashlib.blake2b(data.data, digest_size=DIGEST_BYTES, key=key).digest()
            for box, data in zip(self.boxes, self.buffers, strict=True)
            if box in self._positions
        }

    def array(self, compiler: Compiler) -> jax.Array:
        """The array on the devices. Those of CPU hosts use the memory that its bytes came to."""
        arrays = {b: d.view(self.dtype).reshape(self.shape) for b, d in zip(self.boxes, self.buffers, strict=True)}
        sharding = compiler.sharding(self.message.placed, self.message.spec)
        shards, devices = [arrays[box] for box, _ in self.local], [compiler.devices[index] for _, index in self.local]
        return array_of(self.message.type.shape, sharding, shards, devices)


class SharedUpload(Upload):
    """An array that came whole, in a file in memory of which its client has the other end.

    Args:
        mapped: the files of its tenant that are mapped.
    """

    def __init__(
        self, message: wire.PutOpen, boxes: Sequence[Box], host: int, file: SharedFile, mapped: WeakSet[Mapping]
    ) -> None:
        self._file, self._mapped = file, mapped
        super().__init__(message, boxes, host)

    def _allocate(self, size: int) -> None:
        self._places, self._bytes = offsets([size] * len(self.boxes))
        self.missing = 0
        self._file.check(self._bytes)

    def array(self, compiler: Compiler) -> jax.Array:
        self._file.seal()
        if len(self._mapped) < MAX_MAPPED:
            mapping = Mapping(self._file.descriptor, self._bytes, writable=False)
            self._mapped.add(mapping)
            whole = np.asarray(mapping)
        else:
            whole = self._file.copy(self._bytes)
        size = self.size // len(self.boxes)
        self.buffers = [whole[place : place + size] for place in self._places]
        return super().array(compiler)


class PipedUpload(Upload):
    """An array whose bytes come by a pipe, when its array is asked for."""

    def __init__(self, message: wire.PutOpen, boxes: Sequence[Box], host: int, pipe: HostPipe) -> None:
        super().__init__(message, boxes, host)
        self.pipe, self.missing = pipe, 0

    def array(self, compiler: Compiler) -> jax.Array:
        self.pipe.read(self.buffers)
        return super().array(compiler)


def check_devices(placed: PlacedSlice, host: int, count: int) -> None:
    """Raises `GraphError` unless a slice has devices of a host of `count` devices, and only such as there are."""
    mine = [device for device in placed.devices if device.host == host]
    if not mine or len(placed.devices) != placed.mesh.size:
        raise GraphError(f"no device of {placed.mesh} is on host {host}")
    for device in mine:
        if not 0 <= device.index < count:
            raise GraphError(f"host {host} has {count} devices, no number {device.index}")
