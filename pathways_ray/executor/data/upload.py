"""An array that a client uploads: its bytes as they come, and then the array on the devices of the host."""

from __future__ import annotations

import hashlib
import socket
import threading
from typing import NoReturn
from weakref import WeakSet

import jax
import msgspec
import numpy as np

from pathways_ray import limits
from pathways_ray.errors import WireError
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.data.upload_plan import UploadPlan
from pathways_ray.transport import messages as wire
from pathways_ray.transport.pipes import HostPipe
from pathways_ray.transport.shared_memory import Mapping, SharedFile, aligned, offsets

DIGEST_BYTES = 16

MAX_MAPPED = 1024
"""Files of uploads of one tenant that are mapped; further ones are copied. A process may map some 65,530 things, among
them its heap and the stacks of its threads, and an array of one byte in a file of its own is one of them."""


class Upload:
    """An array on its way in: a byte buffer for each distinct box of this host, filled from its start to its end."""

    came_by: socket.socket | None = None
    """The local socket by which it came: who waits for it reads the answer there."""
    is_awaited = False
    """Whether somebody waits for it at once. Else the answer goes by the stream as well, which is always read."""

    def __init__(self, message: wire.PutOpen, plan: UploadPlan) -> None:
        self.message, self.plan = message, plan
        self.size = self.missing = plan.bytes
        self._allocate(plan.size)

    def _allocate(self, size: int) -> None:
        """Makes room for boxes of this size."""
        self.buffers = [aligned(size) for _ in self.plan.boxes]
        # The only record of what is filled: a part that came twice would leave another client's bytes in a gap.
        self.filled = [0] * len(self.plan.boxes)

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
        positions = self.plan.positions
        key = hashlib.sha256(f"uploads {secret}".encode()).digest()
        return {
            positions[box]: hashlib.blake2b(data.data, digest_size=DIGEST_BYTES, key=key).digest()
            for box, data in zip(self.plan.boxes, self.buffers, strict=True)
            if box in positions
        }

    def array(self, compiler: Compiler) -> jax.Array:
        """The array on the devices. Those of CPU hosts use the memory that its bytes came to."""
        return self.plan.array(self.buffers, compiler)


class WholeUpload(Upload):
    """A small array whose bytes came with its message: each box is copied, since the message has views of all that came
    in one batch. Devices copy it again where it is not aligned, which takes less time than to align it.

    Raises:
        WireError: the bytes do not fill the array, or it is not small.
    """

    def __init__(self, message: wire.PutOpen, plan: UploadPlan, local: socket.socket | None) -> None:
        whole = message.whole
        if plan.bytes > limits.MAX_WHOLE_BYTES:
            raise WireError(f"{plan.bytes} bytes came with their array; {limits.MAX_WHOLE_BYTES} may")
        if list(map(len, whole)) != plan.sizes:
            _refuse(message, plan)
        self.message = msgspec.structs.replace(message, whole=())
        self.plan, self.size, self.missing, self.came_by = plan, plan.bytes, 0, local
        self.is_awaited = local is not None
        self.buffers = [np.frombuffer(data, np.uint8).copy() for data in whole]


def _refuse(message: wire.PutOpen, plan: UploadPlan) -> NoReturn:
    """Says what is wrong with the first box that does not fit, as of an array in parts."""
    filled = Upload(message, plan)
    for number, data in enumerate(message.whole):
        filled.add(wire.PutPart(message.request, number, 0, data))
    raise WireError(f"{filled.missing} bytes are missing of an array that came whole")


class SharedUpload(Upload):
    """An array that came whole, in a file in memory of which its client has the other end.

    Args:
        mapped: the files of its tenant that are mapped.
    """

    def __init__(self, message: wire.PutOpen, plan: UploadPlan, file: SharedFile, mapped: WeakSet[Mapping]) -> None:
        self._file, self._mapped = file, mapped
        super().__init__(message, plan)

    def _allocate(self, size: int) -> None:
        self._places, self._bytes = offsets(self.plan.sizes)
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
        self.buffers = [whole[place : place + self.plan.size] for place in self._places]
        return super().array(compiler)


class PipedUpload(Upload):
    """An array whose bytes come by a pipe, when its array is asked for, or are read in the memory of its client.

    Args:
        client: the connection by which the pipe came.
        turn: held while the client's memory is read.
    """

    def __init__(
        self,
        message: wire.PutOpen,
        plan: UploadPlan,
        pipe: HostPipe,
        client: socket.socket,
        turn: threading.Semaphore,
    ) -> None:
        super().__init__(message, plan)
        self.pipe, self.missing, self._client, self._turn = pipe, 0, client, turn
        if message.places and len(message.places) != len(plan.boxes):
            raise WireError(f"{len(message.places)} places came for an array of {len(plan.boxes)} boxes here")

    def array(self, compiler: Compiler) -> jax.Array:
        places = [(address, self.plan.size) for address in self.message.places]
        if not places or not self.pipe.read_there(self._client, places, self.buffers, self._turn):
            self.pipe.read(self.buffers)
        return super().array(compiler)
