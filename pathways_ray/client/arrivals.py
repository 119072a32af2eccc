"""Uploads of which the controller has yet to hear: it is told once they are sent to their hosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pathways_ray.client.buffer import READY, BufferRecord
from pathways_ray.client.core import ClientCore
from pathways_ray.client.events import Placed
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


class Arrivals:
    """The part of a session's driver that has its `arrivals`."""

    core: ClientCore
    arrivals: list[Arrival]

    def handle(self, event: Any) -> None:
        raise NotImplementedError

    def tell_of(self, several: Iterable[Arrival]) -> None:
        """Tells the controller of uploads, but for those of which somebody has. The caller has `sending`."""
        messages = []
        for one in several:
            stays = self.take_arrival(one) and one.placed is one.where.placed
            if stays and self.core.buffers.get(one.record.id) is one.record:
                one.sent = True
                messages.append(one.message)
        self.handle(Placed(tuple(messages)))

    def take_arrival(self, one: Arrival) -> bool:
        """Takes an upload out of those that the controller has yet to hear of; whether it was one of them."""
        try:
            self.arrivals.remove(one)
        except ValueError:
            return False
        return True

    def send_arrivals(self) -> None:
        """Tells of the uploads that are there for threads that wait for `sending` with that. The caller has it."""
        for one in tuple(self.arrivals):
            if one.record.state is READY and one.record.upload is not None and one.record.upload.done:
                self.tell_of((one,))
