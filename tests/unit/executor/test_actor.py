"""A host's process: how it comes to the successor of its scheduler."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from pathways_ray import limits
from pathways_ray.executor.actor import HostExecutor
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.run.journal import Said
from pathways_ray.transport.frames import LinkLost
from pathways_ray.transport.messages import Compiling, Holds, HostUp, Message, Ready, Recount, Stored, encode
from tests.unit.helpers import VECTOR

HOST = 2


class Outbox:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.put = self.sent.append

    def leave(self, count: int) -> None:
        assert 0 < count <= len(self.sent)

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
        executor.uploads.append(reports[number])  # as the data server notes it
        executor._say_stored([reports[number]])

    class Found(Outbox):
        def send(self, message: Message) -> None:
            super().send(message)
            if isinstance(message, HostUp):
                upload(2)
                upload(3)
                executor.store.drop(1, (3,))

    found = Found()
    executor.outbox, executor.found, executor.said = Outbox(), found, Said()
    executor.hello = HostUp(HOST, 1, "t", "d", 2, 1)
    upload(1)
    executor._rejoin(Holds(executor.store.held(), ()))
    hello, *rest = found.sent
    assert isinstance(hello, HostUp)
    assert hello.holds == Holds({1: (1,)}, (), (reports[1],))
    assert rest == [reports[2]]
    assert (executor.outbox, executor.found) == (found, None)


def test_a_host_says_to_each_scheduler_how_its_process_before_died() -> None:
    """The first one may have died before it passed that on, and the program that was the cause stayed unknown."""
    executor: Any = HostExecutor.__new__(HostExecutor)
    executor.store, executor.uploads, executor.said = BufferStore(), deque(), Said()
    executor.outbox, executor.found = Outbox(), Outbox()
    executor.hello = HostUp(HOST, 1, "t", "d", 2, 1, "Segmentation fault")
    found = executor.found
    executor._rejoin(Holds({}, ()))
    assert found.sent[0].crash == "Segmentation fault"


def test_a_host_says_to_the_new_scheduler_what_it_compiles() -> None:
    """It began before the old one died, or while there was none. What is ready is not said again."""
    executor: Any = HostExecutor.__new__(HostExecutor)
    executor.store, executor.uploads, executor.said = BufferStore(), deque(), Said()
    executor.outbox, executor.found = Outbox(), Outbox()
    executor.hello = HostUp(HOST, 1, "t", "d", 2, 1)
    for message in (Compiling(HOST, 1), Compiling(HOST, 2), Ready(HOST, 1, 0)):
        executor._send(message)
    found = executor.found
    executor._rejoin(Holds({}, (1, 2)))
    assert [type(message) for message in found.sent] == [HostUp, Compiling]
    assert found.sent[1] == Compiling(HOST, 2)


class Ended(BaseException):
    """The process has ended."""


class Stream:
    """A link that brings batches and ends, with a reason or without one."""

    def __init__(self, *batches: bytes, reason: str | None = None) -> None:
        self.batches, self.close_reason = batches, reason

    def __iter__(self) -> Iterator[bytes]:
        yield from self.batches
        raise LinkLost(self.close_reason or "it closed the connection")


def test_a_host_looks_for_a_scheduler_until_one_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    1. Its scheduler dies. The successor dies before it says a word, the next one after it.
    2. One turns the host away, and says so: the host ends.
    """

    def end(_: int) -> None:
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    said = encode([Recount()])
    following = [Stream(), Stream(said), Stream(reason="host 2 is not taken")]
    executor: Any = HostExecutor.__new__(HostExecutor)
    executor.host = HOST
    executor.dispatcher = SimpleNamespace(inbox=SimpleQueue())
    deadlines: list[float] = []

    def find(deadline: float) -> Stream:
        deadlines.append(deadline)
        return following.pop(0)

    executor._find_scheduler = find
    with pytest.raises(Ended):
        executor._read(Stream(said))
    assert not following
    assert sorted(set(deadlines)) == deadlines[::2]  # the second search is a part of the first one
