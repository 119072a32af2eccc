"""Carriers of messages for processes whose decisions run on an event loop.

`AsyncOutbox` serves one stream, `FanOut` several that get the same: all hosts of an island get the same batches, so
each is encoded once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

from pathways_ray.transport.batcher import GATHER_S, Batcher, joined_batches
from pathways_ray.transport.links import AsyncLink
from pathways_ray.transport.messages import Message

FEWEST = 3
"""Messages that are looked at for what can be said in fewer."""


def gathers_until(batcher: Batcher) -> float:
    """The time, by the clock of the running loop, until which the messages behind a batch that leaves now gather."""
    pause = batcher.gather_s()
    return asyncio.get_running_loop().time() + pause if pause else 0.0


def call_from(time: float, function: Callable[[], None]) -> None:
    """Has the running loop call a function soon, but not before a time."""
    loop = asyncio.get_running_loop()
    if time and time > loop.time():
        loop.call_at(time, function)
    else:
        loop.call_soon(function)


class AsyncOutbox:
    """Outgoing messages of one stream, carried by a link, or by gRPC for a client that has no link.

    Args:
        depth: the number of launches under way beyond the stream.
        blocked: called with True when messages wait since the link is full, with False once it takes them again.
        compose: says the same in fewer messages, where `FEWEST` or more have gathered.
    """

    def __init__(
        self,
        depth: Callable[[], int] = lambda: 0,
        blocked: Callable[[bool], None] = lambda full: None,
        compose: Callable[[list[Message]], list[Message]] | None = None,
    ) -> None:
        self._batcher = Batcher(depth, compose, fewest=FEWEST)
        self._waiting = self._batcher.waiting
        self._blocked = blocked
        self._is_blocked = False
        self._taking: Iterator[bytes] = iter(())
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._closed = False
        self._link: AsyncLink | None = None
        self._scheduled = False
        self._gathers_until = 0.0

    def send(self, message: Message) -> None:
        self._batcher.put(message)
        if not self._scheduled or self._link is None:
            self._call()

    def send_all(self, messages: Iterable[Message]) -> None:
        """The same for each of several that came together."""
        self._batcher.put_all(messages)
        self._call()

    def _call(self) -> None:
        if self._link is None:
            self._wake.set()
        elif not self._scheduled:
            self._scheduled = True
            call_from(self._gathers_until, self._flush)

    def has_room(self, most: int) -> bool:
        """Whether no more than `most` messages wait for those before them to be taken by the other end."""
        return len(self._waiting) <= most

    async def room(self, most: int) -> None:
        """Waits while more than `most` messages wait for those before them to be taken by the other end."""
        while not self.has_room(most):
            self._taken.clear()
            await self._taken.wait()

    def close(self) -> None:
        """Ends the carrier once the messages sent before have gone out."""
        self._closed = True
        self._call()

    async def carry(self, link: AsyncLink) -> None:
        """Sends over a link until closed. No task wakes for a batch: the link takes it, or says when it has room."""
        self._link = link
        self._call()
        try:
            self._wake.clear()
            await self._wake.wait()
        finally:
            self._link = None

    def _flush(self) -> None:
        link = self._link
        if link is None:
            self._scheduled = False
            self._wake.set()  # a stream may carry them instead
            return
        sent = False
        # One by one: a batch may be a program of many megabytes, and is encoded only when the link takes it.
        while not link.full and (batch := self._next()) is not None:
            link.put(batch)
            sent = True
        if link.full is not self._is_blocked:
            self._is_blocked = link.full
            self._blocked(link.full)
        if link.full:
            link.when_room(self._flush)
            return
        self._scheduled = False
        if self._closed:
            self._wake.set()
        elif sent:
            self._gathers_until = gathers_until(self._batcher)

    def _next(self) -> bytes | None:
        """The next batch of the messages that wait."""
        batch = next(self._taking, None)
        if batch is None and self._waiting:
            self._taking = self._batcher.taken()
            self._taken.set()
            batch = next(self._taking, None)
        return batch

    async def pump(self, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Sends by a gRPC stream's `write` until closed. Run it as a task beside the reader of the same stream."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (batch := self._next()) is not None:
                await write(batch)
            if self._closed:
                return
            if pause := self._batcher.gather_s():
                await asyncio.sleep(pause)


class FanOut:
    """Outgoing messages that go to all links that are open, in one order. Each batch is encoded once.

    A link that is slow to take its batches gets those that gathered meanwhile as one; the others do not wait for it.

    Args:
        depth: the number of launches under way beyond the links.
    """

    def __init__(self, depth: Callable[[], int] = lambda: 0) -> None:
        self._batcher = Batcher(depth, long_gather_s=GATHER_S)
        self._branches: dict[int, Branch] = {}
        self._scheduled = False
        self._gathers_until = 0.0

    def send(self, message: Message) -> None:
        self._batcher.put(message)
        if not self._scheduled:
            self._scheduled = True
            call_from(self._gathers_until, self._flush)

    def open(self, name: int) -> Branch:
        """A further link, or another one under the same name. It carries the messages sent from now on."""
        self._hand_out()
        branch = self._branches[name] = Branch()
        return branch

    def clear(self) -> None:
        """Forgets all links, and the messages that have not been handed to them."""
        self._branches.clear()
        self._batcher.clear()

    def _flush(self) -> None:
        self._scheduled = False
        self._gathers_until = gathers_until(self._batcher)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._batcher.waiting:
            for batch in self._batcher.taken():
                for branch in self._branches.values():
                    branch.put(batch)


class Branch:
    """One link of a `FanOut`."""

    def __init__(self) -> None:
        self._batches: list[bytes] = []
        self._link: AsyncLink | None = None
        self._waits = False

    def put(self, batch: bytes) -> None:
        if self._link is not None and not self._waits and not self._link.full:
            self._link.put(batch)
            return
        self._batches.append(batch)
        if self._link is not None and not self._waits:
            self._waits = True
            self._link.when_room(self._flush)

    async def carry(self, link: AsyncLink) -> None:
        """Sends over a link until it is cancelled."""
        self._link = link
        self._flush()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._link = None

    def _flush(self) -> None:
        self._waits = False
        if self._link is not None:
            batches, self._batches = self._batches, []
            for batch in joined_batches(batches):
                self._link.put(batch)
