"""What many streams carry alike: all hosts of an island get the same batches, so each is encoded once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from pathways_ray.transport import streams
from pathways_ray.transport.links import AsyncLink
from pathways_ray.transport.messages import Message, encode


class FanOut:
    """Outgoing messages that go to all streams that are open, in one order. Each batch is encoded once.

    A stream that is slow to take its batches gets those that gathered meanwhile as one; the others do not wait for it.

    Args:
        depth: how many launches are under way beyond the streams.
    """

    def __init__(self, depth: Callable[[], int] = lambda: 0) -> None:
        self._depth = depth
        self._messages: list[Message] = []
        self._branches: dict[int, Branch] = {}
        self._scheduled = False

    def send(self, message: Message) -> None:
        self._messages.append(message)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def open(self, name: int) -> Branch:
        """A further stream, or another one under the same name. It carries what is sent from now on."""
        self._hand_out()
        branch = self._branches[name] = Branch()
        return branch

    def clear(self) -> None:
        """Forgets all streams, and what has not been handed to them."""
        self._branches.clear()
        self._messages.clear()

    def _flush(self) -> None:
        self._scheduled = bool(self._messages) and self._depth() > streams.DEEP
        self._hand_out()
        if self._scheduled:
            asyncio.get_running_loop().call_later(streams.PAUSE_S, self._flush)

    def _hand_out(self) -> None:
        messages, self._messages = self._messages, []
        for count, bodies in streams.grouped((1, encode(message)) for message in messages):
            batch = Batch(count, bodies, streams.header(count) + bodies)
            for branch in self._branches.values():
                branch.put(batch)


class Batch(NamedTuple):
    """Messages as they travel: how many, their bodies, and both together."""

    messages: int
    bodies: bytes
    whole: bytes


class Branch:
    """One stream of a `FanOut`."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self._wake = asyncio.Event()
        self._link: AsyncLink | None = None
        self._waits = False

    def put(self, batch: Batch) -> None:
        if self._link is not None and not self._waits and not self._link.full:
            self._link.put(batch.whole)
            return
        self._batches.append(batch)
        if self._link is None:
            self._wake.set()
        elif not self._waits:
            self._waits = True
            self._link.when_room(self._flush)

    async def carry(self, link: AsyncLink) -> None:
        """The same as `pump` for a link, which takes a batch without a task to wait for it."""
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
            for count, bodies in streams.grouped((batch.messages, batch.bodies) for batch in batches):
                self._link.put(streams.header(count) + bodies)

    async def pump(self, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Writes until it is cancelled. Run it as a task beside the reader of the same stream."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batches, self._batches = self._batches, []
            if len(batches) == 1:
                await write(batches[0].whole)
                continue
            for count, bodies in streams.grouped((batch.messages, batch.bodies) for batch in batches):
                await write(streams.header(count) + bodies)
