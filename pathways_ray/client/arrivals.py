"""Uploads of which the controller has yet to hear: it is told once they are sent to their hosts."""

from __future__ import annotations

from dataclasses import dataclass

from pathways_ray.client.buffer import BufferRecord
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.transport.messages import Put


@dataclass(eq=False)
class Arrival:
    """An upload that has begun, and whose `message` has yet to be `sent`. It is of no use once its slice is not where
    it was `placed` any more."""

    record: BufferRecord
    where: VirtualSlice
    placed: PlacedSlice
    sent: bool = False

    @property
    def message(self) -> Put:
        """The message that tells the controller about it."""
        record, upload = self.record, self.record.upload
        assert upload is not None
        return Put(record.id, self.where.id, record.kind.array, record.kind.spec, upload.epochs)
