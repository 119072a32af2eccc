"""Outboxes of an event loop over real links: order, gathering, an end that reads nothing, and one that goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from pathways_ray.transport import batcher, links, outboxes
from pathways_ray.transport.links import AsyncLink
from pathways_ray.transport.messages import TO_CLIENT, Completed, FetchPart, encode
from tests.unit.helpers import requests_in

LIMIT_S = 20.0
PATH = "/a.Test/Link"


def told(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), LIMIT_S))


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[AsyncLink, AsyncLink]]:
    """Both ends of a link."""
    came: asyncio.Queue[AsyncLink] = asyncio.Queue()
    over = asyncio.Event()

    async def handler(link: AsyncLink) -> None:
        came.put_nowait(link)
        await over.wait()

    server, address = await links.serve({PATH: handler}, "127.0.0.1")
    async with server:
        dialled = await links.dial(address, PATH, {})
        here = await came.get()
        try:
            yield here, dialled
        finally:
            over.set()
            for link in (here, dialled):
                assert link._transport is not None
                link._transport.abort()
                await link.wait_closed()


async def launches(link: AsyncLink, count: int) -> list[list[int]]:
    """The numbers in this many messages, batch by batch."""
    found: list[list[int]] = []
    while sum(map(len, found)) < count:
        data = await link.read()
        assert data is not None, found
        found.append([m.launches[0] for m in TO_CLIENT.decode_batch(data)])  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("depth", [0, batcher.GATHER_DEPTH + 1])
def test_what_is_sent_together_goes_together_and_in_order(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """
    1. Three messages at once, before the outbox has a link: one batch.
    2. With little under way a further one leaves at once; with much it waits for another, sent meanwhile.
    """

    monkeypatch.setattr(batcher, "GATHER_S", 1.0)

    async def story() -> None:
        async with connected() as (here, there):
            outbox = outboxes.AsyncOutbox(lambda: depth)
            for k in range(3):
                outbox.send(Completed((k,)))
            carried = asyncio.ensure_future(outbox.carry(here))
            assert await launches(there, 3) == [[0, 1, 2]]
            outbox.send(Completed((3,)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            outbox.send(Completed((4,)))
            assert await launches(there, 2) == ([[3, 4]] if depth else [[3], [4]])
            outbox.send(Completed((5,)))
            outbox.close()
            await carried
            assert await launches(there, 1) == [[5]]

    told(story)


def test_several_that_are_sent_at_once_are_one_batch_between_what_is_sent_before_and_behind() -> None:
    """With a link and before there is one; and the outbox closes behind them."""

    async def story() -> None:
        async with connected() as (here, there):
            outbox = outboxes.AsyncOutbox()
            outbox.send_all([Completed((0,)), Completed((1,))])
            carried = asyncio.ensure_future(outbox.carry(here))
            assert await launches(there, 2) == [[0, 1]]
            outbox.send_all([Completed((2,)), Completed((3,))])
            assert await launches(there, 2) == [[2, 3]]
            outbox.send(Completed((4,)))
            outbox.send_all([Completed((5,)), Completed((6,))])
            outbox.send(Completed((7,)))
            assert await launches(there, 4) == [[4, 5, 6, 7]]
            outbox.send_all([Completed((8,)), Completed((9,))])
            outbox.close()
            await carried
            assert await launches(there, 2) == [[8, 9]]

    told(story)


@pytest.mark.parametrize("kind", ["outbox", "fan"])
def test_nobody_wakes_where_nothing_has_gathered(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """
    1. With much under way, what follows a message waits for others, from when that has left.
    2. A message that comes later leaves at once.
    3. Between the two nothing was to be called.
    """
    monkeypatch.setattr(batcher, "GATHER_S", 0.2)
    monkeypatch.setattr(outboxes, "GATHER_S", 0.2)

    async def story() -> None:
        async with connected() as (here, there):
            loop = asyncio.get_running_loop()
            outbox = outboxes.AsyncOutbox(depth) if kind == "outbox" else outboxes.FanOut(depth)
            branch = outbox.open(0) if isinstance(outbox, outboxes.FanOut) else outbox
            carried = asyncio.ensure_future(branch.carry(here))
            await asyncio.sleep(0)
            sent = loop.time()
            outbox.send(Completed((1,)))
            assert await launches(there, 1) == [[1]]
            outbox.send(Completed((2,)))
            outbox.send(Completed((3,)))
            assert await launches(there, 2) == [[2, 3]]
            assert not outbox._scheduled
            assert loop.time() - sent > 0.1
            called: list[float] = []
            monkeypatch.setattr(outboxes, "call_from", lambda time, function: called.append(time) or function())
            await asyncio.sleep(0.4)
            outbox.send(Completed((4,)))
            assert called[0] < loop.time()
            assert await launches(there, 1) == [[4]]
            carried.cancel()

    def depth() -> int:
        return batcher.GATHER_DEPTH + 1

    told(story)


def test_who_reads_nothing_holds_up_its_sender_until_it_reads() -> None:
    """An end does not read: at some time there is no room for more. Then it reads, and all of it comes."""

    async def held_up(outbox: outboxes.AsyncOutbox) -> bool:
        try:
            await asyncio.wait_for(outbox.room(2), 0.05)
        except TimeoutError:
            return True
        return False

    async def story() -> None:
        async with connected() as (here, there):
            outbox = outboxes.AsyncOutbox()
            carried = asyncio.ensure_future(outbox.carry(here))
            part, sent = bytes(1 << 20), 0
            while not (await held_up(outbox) and here.full):  # a busy machine may be late without being held up
                outbox.send(FetchPart(sent, 0, 0, len(part), part))
                sent += 1
            found: list[int] = []
            while len(found) < sent:
                data = await there.read()
                assert data is not None
                found += requests_in(data)
            assert found == list(range(sent))
            await outbox.room(2)
            carried.cancel()

    told(story)


def test_an_end_that_goes_while_it_reads_nothing_leaves_nothing_waiting() -> None:
    async def story() -> None:
        async with connected() as (here, there):
            outbox = outboxes.AsyncOutbox()
            carried = asyncio.ensure_future(outbox.carry(here))
            part = bytes(1 << 20)
            while not here.full:
                outbox.send(FetchPart(0, 0, 0, len(part), part))
                await asyncio.sleep(0.001)
            assert there._transport is not None
            there._transport.abort()
            assert await here.read() is None
            outbox.send(Completed((1,)))
            outbox.close()
            await carried
            assert not here.full

    told(story)


def test_a_fan_carries_the_same_to_all_and_a_slow_end_holds_up_nobody() -> None:
    """
    1. Two links. One reads nothing while big batches come, and the other reads all of them.
    2. Then the slow one reads: everything, in order.
    """

    async def story() -> None:
        async with connected() as (quick, a), connected() as (slow, b):
            fan = outboxes.FanOut()
            tasks = [asyncio.ensure_future(fan.open(k).carry(end)) for k, end in enumerate((quick, slow))]
            await asyncio.sleep(0)
            part = bytes(1 << 20)
            for end, count in ((a, 24), (b, 0)):
                for k in range(count):
                    fan.send(FetchPart(k, 0, 0, len(part), part))
                    data = await end.read()
                    assert data is not None
                    assert requests_in(data) == [k]
            assert slow.full
            assert not quick.full
            found: list[int] = []
            while len(found) < 24:
                data = await b.read()
                assert data is not None
                found += requests_in(data)
            assert found == list(range(24))
            for task in tasks:
                task.cancel()

    told(story)


class Clogged:
    """A link that takes one batch at a time."""

    def __init__(self) -> None:
        self.full = False
        self.batches: list[bytes] = []
        self.waiting: list[Callable[[], None]] = []

    def put(self, batch: bytes) -> None:
        self.batches.append(batch)
        self.full = True

    def when_room(self, callback: Callable[[], None]) -> None:
        self.waiting.append(callback)

    def drain(self) -> None:
        self.full = False
        waiting, self.waiting = self.waiting, []
        for callback in waiting:
            callback()


def test_a_full_link_is_asked_before_each_batch_and_its_sender_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    1. Three messages, each a batch of its own: one goes, and the others are not even encoded.
    2. As the link takes them, the next one goes; when the last one has gone, it is blocked no more.
    """
    monkeypatch.setattr(batcher, "MAX_BATCH_BYTES", 1)
    encoded: list[Any] = []
    monkeypatch.setattr(batcher, "encode", lambda message: encoded.append(message) or encode(message))

    async def story() -> None:
        link, said = Clogged(), list[bool]()
        outbox = outboxes.AsyncOutbox(blocked=said.append)
        for k in range(3):
            outbox.send(Completed((k,)))
        carried = asyncio.ensure_future(outbox.carry(cast(AsyncLink, link)))
        for step in range(3):
            await asyncio.sleep(0.01)
            assert (len(link.batches), len(encoded)) == (step + 1, min(step + 2, 3))
            assert said == [True]
            link.drain()
        assert said == [True] * 1 + [False]
        outbox.close()
        await carried

    told(story)
