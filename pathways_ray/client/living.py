"""The bytes of a session's uploads that live on each host, as its client sees it: without those that it has freed.

A tenant with a quota says them with each upload. What has been freed is gone from the host a little later; an upload
that fits beside what lives waits there for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pathways_ray import limits
from pathways_ray.client.buffer import PENDING, READY, BufferRecord
from pathways_ray.ir.regions import Box, box_shape
from pathways_ray.ir.types import item_bytes
from pathways_ray.transport.capabilities import is_unlimited

UNSAID = -1
"""Said in place of the bytes where nothing is to wait."""


class LivingUploads:
    """The uploads of a session, by host. Any thread may call. `records` are the session's buffers, by number.

    Args:
        token: that of the session's data streams, which says whether there is a quota.
    """

    def __init__(self, token: str) -> None:
        self.records: Mapping[int, BufferRecord] = {}
        self.has_quota = not is_unlimited(token)
        self._sizes: dict[int, dict[int, int]] = {}

    def bytes_on(self, host: int) -> int:
        """The bytes on a host; `UNSAID` where there is no quota."""
        if not self.has_quota:
            return UNSAID
        living, sizes = 0, self._sizes.get(host, {})
        for number, size in list(sizes.items()):
            record = self.records.get(number)
            if record is None:
                sizes.pop(number, None)
            elif record.state is PENDING or record.state is READY:  # one that was donated may yet come back
                living += size
        return living

    def enter(self, host: int, buffer: int, boxes: Iterable[Box], dtype: str) -> None:
        """Takes an upload that begins, with the boxes of the devices of a host."""
        if self.has_quota:
            size = sum(math.prod(box_shape(box)) for box in boxes) * item_bytes(dtype)
            self._sizes.setdefault(host, {})[buffer] = max(size, limits.MIN_BUFFER_BYTES)  # as the host counts it
