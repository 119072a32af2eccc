"""How much of a host's memory the uploads of a session may take: asked for before anything is allocated.

An upload counts from its first message until its buffer leaves the store; failed ones are given back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from pathways_ray import limits
from pathways_ray.errors import QuotaExceeded, TooLarge, WireError
from pathways_ray.ir.regions import Box, box_shape
from pathways_ray.ir.types import ArrayType, item_bytes


def check_type(kind: ArrayType) -> None:
    """Raises `TooLarge` for a shape that would trip what allocates it, `GraphError` for a dtype that is none."""
    item_bytes(kind.dtype)
    if len(kind.shape) > limits.MAX_DIMENSIONS:
        raise TooLarge(f"an array of {len(kind.shape)} dimensions; {limits.MAX_DIMENSIONS} are the limit")
    # Without the sizes of 0, which would hide the others.
    if math.prod(size for size in kind.shape if size) * item_bytes(kind.dtype) > limits.MAX_TENSOR_BYTES:
        raise TooLarge(f"{kind} is larger than the {limits.MAX_TENSOR_BYTES} bytes that a value may have")


def device_bytes(boxes: list[Box], dtype: str) -> int:
    """Bytes of the shards of these boxes, one for each device that holds one."""
    return sum(math.prod(box_shape(box)) for box in boxes) * item_bytes(dtype)


@dataclass
class Allowance:
    """The uploads of one session on one host. Sizes are bytes.

    Args:
        under_way: what it asked for, by buffer, and what is still coming of it.
        there: buffers that are in the store, as far as it was looked.
    """

    under_way: dict[int, int] = field(default_factory=dict)
    there: dict[int, int] = field(default_factory=dict)

    def take(self, buffer: int, asked: int, allowed: int | None, present: Callable[[int], bool]) -> None:
        """Notes an upload that starts.

        Args:
            allowed: for all uploads of the session; None is no limit but the runtime's.
            present: whether a buffer is still in the store.

        Raises:
            QuotaExceeded: more than is allowed, or more at a time than the runtime takes.
            WireError: the buffer is on its way already.
        """
        if buffer in self.under_way:
            raise WireError(f"buffer {buffer} is on its way already")
        coming = sum(self.under_way.values())
        if coming + asked > limits.MAX_UPLOAD_BYTES:
            raise QuotaExceeded(
                f"an upload asks for {asked} bytes on a host, and {coming} are on their way; {limits.MAX_UPLOAD_BYTES} "
                "are allowed at a time"
            )
        if allowed is not None and self._held() + asked > allowed:
            self.there = {number: size for number, size in self.there.items() if present(number)}
            if self._held() + asked > allowed:
                raise QuotaExceeded(
                    f"an upload asks for {asked} bytes on the devices of a host, where uploads of the session hold "
                    f"{self._held()}; {allowed} are allowed. Delete an array, or put a smaller one"
                )
        self.under_way[buffer] = asked

    def arrived(self, buffer: int) -> None:
        """The upload is in the store."""
        self.there[buffer] = self.there.get(buffer, 0) + self.under_way.pop(buffer, 0)

    def failed(self, buffer: int) -> None:
        """The upload will not be."""
        self.under_way.pop(buffer, None)

    def _held(self) -> int:
        return sum(self.under_way.values()) + sum(self.there.values())
