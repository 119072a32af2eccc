"""The quota of a tenant's uploads on a host, in bytes: reserved before anything is allocated.

An upload counts from its first message until its buffer leaves the store; a failed one is released.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from pathways_ray import limits
from pathways_ray.errors import QuotaExceeded, TooLarge, WireError
from pathways_ray.executor.data.awaited_frees import FreesAwaited
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


LOOK_AT = 1024
"""Uploads that came into the store, from which on one looks whether they are there yet."""

Name = tuple[int, int]
"""A session and its number of a buffer."""


@dataclass
class UploadQuota:
    """The uploads of one tenant on one host, in bytes, by session and buffer.

    Args:
        reserved: uploads on their way.
        stored: uploads that came into the store; those that have left it since are removed when room is needed, and
            when most of them may have.
        mapped: the files of uploads that are mapped.
    """

    reserved: dict[Name, int] = field(default_factory=dict)
    stored: dict[Name, int] = field(default_factory=dict)
    mapped: WeakSet[Mapping] = field(default_factory=WeakSet)
    _stored_bytes: int = 0
    _look_at: int = LOOK_AT

    def reserve(
        self,
        buffer: Name,
        asked: int,
        allowed: int | None,
        present: Callable[[Name], bool],
        living: int = -1,
        behind: bool = False,
    ) -> None:
        """Reserves room for an upload that starts.

        Args:
            allowed: for all uploads of the tenant; with None, only the runtime's limit holds.
            present: whether a buffer is still in the store.
            living: bytes of its session's uploads that the client has not freed; below 0, it does not wait for others.
            behind: whether it has to wait for its turn.

        Raises:
            FreesAwaited: more than is allowed, but not beside what lives.
            QuotaExceeded: more than is allowed, or more at a time than the runtime takes.
            WireError: the buffer is on its way already.
        """
        if buffer in self.reserved:
            raise WireError(f"buffer {buffer[1]} is on its way already")
        if len(self.stored) >= self._look_at:  # who puts small arrays again and again would never need room
            self.forget(present)
            self._look_at = max(LOOK_AT, 2 * len(self.stored))
        coming = sum(self.reserved.values())
        if coming + asked > limits.MAX_UPLOAD_BYTES:
            raise QuotaExceeded(
                f"an upload asks for {asked} bytes on a host, and {coming} are on their way; {limits.MAX_UPLOAD_BYTES} "
                "are allowed at a time"
            )
        if allowed is not None and (behind or self._used() + asked > allowed):
            self.forget(present)
            if behind or self._used() + asked > allowed:
                if 0 <= living <= allowed - asked - self._of_others(buffer[0]):
                    raise FreesAwaited(self._refusal(asked, allowed))
                raise self._refusal(asked, allowed)  # in no variable: it would keep itself, and the pipe of the upload
        self.reserved[buffer] = asked

    def _refusal(self, asked: int, allowed: int) -> QuotaExceeded:
        return QuotaExceeded(
            f"an upload asks for {asked} bytes on the devices of a host, where uploads of the tenant hold "
            f"{self._used()}; {allowed} are allowed. Delete an array, or put a smaller one"
        )

    def _of_others(self, session: int) -> int:
        """The bytes of other sessions' uploads."""
        return sum(size for (other, _), size in (*self.reserved.items(), *self.stored.items()) if other != session)

    def forget(self, present: Callable[[Name], bool]) -> None:
        """Forgets uploads that have left the store."""
        self.stored = {name: size for name, size in self.stored.items() if present(name)}
        self._stored_bytes = sum(self.stored.values())

    @property
    def is_empty(self) -> bool:
        return not self.reserved and not self.stored

    def keep(self, buffer: Name) -> None:
        """The upload is in the store."""
        size = self.reserved.pop(buffer, 0)
        self.stored[buffer] = self.stored.get(buffer, 0) + size
        self._stored_bytes += size

    def release(self, buffer: Name) -> None:
        """The upload has failed."""
        self.reserved.pop(buffer, None)

    def _used(self) -> int:
        return sum(self.reserved.values()) + self._stored_bytes
