"""A host's process: what it says to the successor of its scheduler."""

from __future__ import annotations

from collections import deque
from typing import Any

from pathways_ray import limits
from pathways_ray.executor.actor import HostExecutor
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.transport.messages import Holds, HostUp, Message, Stored
from tests.unit.helpers import VECTOR

HOST = 2


class Outbox:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


def test_an_upload_that_is_stored_while_a_host_rejoins_is_reported_to_the_new_scheduler() -> None:
    """
    1. Upload 1 was reported before, and is among what the host holds.
    2. Uploads 2 and 3 are stored once that list is made, and before the outbox is the new one. Upload 3 is dropped.
    """
    executor: Any = HostExecutor.__new__(HostExecutor)
    executor.store, executor.uploads = BufferStore(), deque(maxlen=limits.MAX_REMEMBERED_UPLOADS)
    reports = {number: Stored(HOST, 1, number, 2, VECTOR, ()) for number in (1, 2, 3)}

    def upload(number: int) -> None:
        executor.store.add(1, number, f"array {number}")
        executor._say_stored(reports[number])

    class Found(Outbox):
        def send(self, message: Message) -> None:
            super().send(message)
            if isinstance(message, HostUp):
                upload(2)
                upload(3)
                executor.store.drop(1, (3,))

    found = Found()
    executor.outbox, executor.found = Outbox(), found
    executor.hello = HostUp(HOST, 1, "t", "d", 2, 1)
    upload(1)
    executor._rejoin(Holds(executor.store.held(), ()))
    hello, *rest = found.sent
    assert isinstance(hello, HostUp)
    assert hello.holds == Holds({1: (1,)}, (), (reports[1],))
    assert rest == [reports[2]]
    assert (executor.outbox, executor.found) == (found, None)
