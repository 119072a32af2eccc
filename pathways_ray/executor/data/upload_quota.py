"""The quota of a tenant's uploads on a host, in bytes: reserved before anything is allocated.

An upload counts from its first message until its buffer leaves the store, which says so (`BufferStore.add`); a failed
one is released. The uploads that are there are never gone through: it is the loop of all tenants that would do it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, field
from weakref import WeakSet

from pathways_ray import limits
from pathways_ray.errors import QuotaExceeded, TooLarge, WireError
from pathways_ray.executor.data.awaited_frees import FreesAwaited
from pathways_ray.executor.data.buffer_store import Gone
from pathways_ray.ir.regions import Box, box_shape
from pathways_ray.ir.types import ArrayType, item_bytes
from pathways_ray.transport.shared_memory import Mapping


def check_type(kind: ArrayType) -> None:
    """Raises `TooLarge` for a shape that would trip what allocates it, `GraphError` for an unknown dtype."""
    item_bytes(kind.dtype)
    if len(kind.shape) > limits.MAX_DIMENSIONS:
        raise TooLarge(f"an array of {len(kind.shape)} dimensions; {limits.MAX_DIMENSIONS} are the limit")
    # Without the sizes of 0, which would hide the others.
    if math.prod(size for size in kind.shape if size) * item_bytes(kind.dtype) > limits.MAX_TENSOR_BYTES:
        raise TooLarge(f"{kind} is larger than the {limits.MAX_TENSOR_BYTES} bytes that a value may have")


def device_bytes(boxes: list[Box], dtype: str) -> int:
    """Bytes of the shards of these boxes, one for each device that holds one."""
    return sum(math.prod(box_shape(box)) for box in boxes) * item_bytes(dtype)


MAX_READING = 8
"""Uploads of one tenant that are read in their client's memory at a time; further ones come by their pipe. Memory may
be such that its owner has to fill it first, and nothing ends a thread that waits for that but the owner's end."""

Name = tuple[int, int]
"""A session and its number of a buffer."""


@dataclass
class UploadQuota:
    """The uploads of one tenant on one host, in bytes, by session and buffer.

    Args:
        reserved: uploads on their way.
        gone: what has left the store, and counts until it is read here. Any thread appends.
        mapped: the files of uploads that are mapped.
        reading: held by each upload that is read in its client's memory, which may never give it.
    """

    reserved: dict[Name, int] = field(default_factory=dict)
    gone: Gone = field(default_factory=deque)
    mapped: WeakSet[Mapping] = field(default_factory=WeakSet)
    reading: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MAX_READING))
    _coming: int = 0
    _held: dict[int, int] = field(default_factory=dict)  # reserved or stored, by session
    _total: int = 0  # of these

    def check(self, buffer: Name, asked: int) -> None:
        """Looks whether an upload may start, whatever its tenant is allowed.

        Raises:
            QuotaExceeded: more would be on its way at a time than the runtime takes.
            WireError: the buffer is on its way already.
        """
        if buffer in self.reserved:
            raise WireError(f"buffer {buffer[1]} is on its way already")
        if self._coming + asked > limits.MAX_UPLOAD_BYTES:
            raise QuotaExceeded(
                f"an upload asks for {asked} bytes on a host, and {self._coming} are on their way; "
                f"{limits.MAX_UPLOAD_BYTES} are allowed at a time"
            )

    def reserve(
        self,
        buffer: Name,
        asked: int,
        allowed: int | None,
        living: int = -1,
        behind: bool = False,
    ) -> None:
        """Reserves room for an upload that starts.

        Args:
            allowed: for all uploads of the tenant; with None, only the runtime's limit holds.
            living: bytes of its session's uploads that the client has not freed; below 0, it does not wait for others.
            behind: whether it has to wait for its turn.

        Raises:
            FreesAwaited: more than is allowed, but not beside what lives.
            QuotaExceeded: more than is allowed, or what `check` raises.
            WireError: what `check` raises.
        """
        self.check(buffer, asked)
        if allowed is not None and (behind or self._used() + asked > allowed):
            if 0 <= living <= allowed - asked - self._of_others(buffer[0]):
                raise FreesAwaited(self._refusal(asked, allowed))
            raise self._refusal(asked, allowed)  # in no variable: it would keep itself, and the pipe of the upload
        self.reserved[buffer] = asked
        self._coming += asked
        self._count(buffer[0], asked)

    def _refusal(self, asked: int, allowed: int) -> QuotaExceeded:
        return QuotaExceeded(
            f"an upload asks for {asked} bytes on the devices of a host, where uploads of the tenant hold "
            f"{self._used()}; {allowed} are allowed. Delete an array, or put a smaller one"
        )

    def _of_others(self, session: int) -> int:
        """The bytes of other sessions' uploads."""
        return self._used() - self._held.get(session, 0)

    @property
    def is_empty(self) -> bool:
        return not self.reserved and not self._used()

    def keep(self, buffer: Name) -> None:
        """The upload is in the store, with its bytes and `gone`."""
        self._coming -= self.reserved.pop(buffer, 0)

    def release(self, buffer: Name) -> None:
        """The upload has failed, or counts no more."""
        size = self.reserved.pop(buffer, 0)
        self._coming -= size
        self._count(buffer[0], -size)

    def _count(self, session: int, size: int) -> None:
        self._total += size
        held = self._held.get(session, 0) + size
        if held:
            self._held[session] = held
        else:
            self._held.pop(session, None)

    def _used(self) -> int:
        while self.gone:
            session, size = self.gone.popleft()
            self._count(session, -size)
        return self._total
