"""Batches: what a stream writes, a decoder reads."""

from __future__ import annotations

import asyncio

import pytest

from pathways_ray.errors import Failure
from pathways_ray.transport import fan_out, links, streams
from pathways_ray.transport.messages import (
    FROM_HOST_DATA,
    TO_CLIENT,
    Completed,
    FetchPart,
    Free,
    LaunchFailed,
    Message,
    encode_batch,
)
from pathways_ray.transport.streams import BATCH_BYTES, batches


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 65_535, 65_536, 70_000])
def test_batches_are_what_the_decoder_reads(count: int) -> None:
    """The counts at which MessagePack writes the length in another way are among them."""
    messages = [Completed((k,)) for k in range(count)]
    made = list(batches(messages))
    assert len(made) == (1 if count else 0)
    assert [m for batch in made for m in TO_CLIENT.decode_batch(batch)] == messages
    if count:
        assert made[0] == encode_batch(messages)


def part(size: int, number: int = 1) -> FetchPart:
    return FetchPart(number, 0, 0, size, bytes(size))


def test_a_batch_is_closed_before_it_gets_too_big() -> None:
    """
    1. Ten arrays of 3 MiB against a limit of 8 MiB: two fit into one batch.
    2. Every batch is below the limit, none could take the next message, and the order is kept.
    """
    size = 3 << 20
    made = list(batches(part(size, k) for k in range(10)))
    assert [len(batch) // size for batch in made] == [2] * 5
    assert all(len(batch) <= BATCH_BYTES + 16 for batch in made)
    numbers = [message.request for batch in made for message in FROM_HOST_DATA.decode_batch(batch)]
    assert numbers == list(range(10))


def test_a_message_that_is_too_big_goes_alone() -> None:
    made = list(batches([part(10, 0), part(BATCH_BYTES + 1, 1), part(10, 2)]))
    assert [[m.request for m in FROM_HOST_DATA.decode_batch(batch)] for batch in made] == [[0], [1], [2]]


def test_messages_that_just_fit_share_a_batch() -> None:
    overhead = len(encode_batch([part(70_000)])) - 70_000 - 1
    half = BATCH_BYTES // 2 - overhead
    assert len(list(batches([part(half), part(half)]))) == 1
    assert len(list(batches([part(half), part(half + 1)]))) == 2


def test_a_thread_outbox_gives_all_that_is_there_and_then_ends() -> None:
    """
    1. Three messages are put, then it is closed.
    2. They come in one batch, in order; the iterator ends.
    """
    outbox = streams.ThreadOutbox()
    sent: list[Message] = [Completed((k,)) for k in range(3)]
    for message in sent:
        outbox.send(message)
    outbox.close()
    assert [TO_CLIENT.decode_batch(batch) for batch in outbox] == [sent]


# --- many streams that carry the same ---------------------------------------------------------------------------------


class Far:
    """The far end of a stream; it takes a batch only when it `may`."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.may, self.came = asyncio.Event(), asyncio.Event()
        self.may.set()

    async def write(self, batch: bytes) -> None:
        await self.may.wait()
        self.batches.append(batch)
        self.came.set()

    @property
    def launches(self) -> list[list[int]]:
        return [[m.launches[0] for m in TO_CLIENT.decode_batch(batch)] for batch in self.batches]


async def soon() -> None:
    """All that is ready to run has run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_streams_of_a_fan_share_their_batches() -> None:
    """
    1. Three messages are sent at once, then a fourth.
    2. Both streams get the three as one batch, and that batch is one and the same object.
    """

    async def story() -> list[Far]:
        fan, far = fan_out.FanOut(), [Far(), Far()]
        pumps = [asyncio.ensure_future(fan.open(k).pump(end.write)) for k, end in enumerate(far)]
        for k in range(3):
            fan.send(Completed((k,)))
        await soon()
        fan.send(Completed((3,)))
        await soon()
        for pump in pumps:
            pump.cancel()
        return far

    one, other = asyncio.run(story())
    assert one.launches == other.launches == [[0, 1, 2], [3]]
    assert one.batches[0] is other.batches[0]


def test_a_slow_stream_of_a_fan_gets_what_gathered_as_one_batch_and_holds_up_nobody() -> None:
    async def story() -> tuple[Far, Far]:
        fan, slow, quick = fan_out.FanOut(), Far(), Far()
        slow.may.clear()
        pumps = [asyncio.ensure_future(fan.open(k).pump(end.write)) for k, end in enumerate((slow, quick))]
        for k in range(4):
            fan.send(Completed((k,)))
            await soon()
        assert quick.launches == [[0], [1], [2], [3]]
        slow.may.set()
        await soon()
        for pump in pumps:
            pump.cancel()
        return slow, quick

    slow, _ = asyncio.run(story())
    assert slow.launches == [[0], [1, 2, 3]]


def test_a_stream_of_a_fan_gets_what_is_sent_after_it_opened() -> None:
    """
    1. A message is sent, a second stream opens before it has left, another message is sent.
    2. The first stream is opened anew under its name: the old one gets nothing any more.
    3. All are forgotten, with what has not left.
    """

    async def story() -> dict[str, list[list[int]]]:
        fan, far = fan_out.FanOut(), {name: Far() for name in ("first", "second", "again")}
        pumps = [asyncio.ensure_future(fan.open(1).pump(far["first"].write))]
        fan.send(Completed((1,)))
        pumps.append(asyncio.ensure_future(fan.open(2).pump(far["second"].write)))
        fan.send(Completed((2,)))
        await soon()
        pumps.append(asyncio.ensure_future(fan.open(1).pump(far["again"].write)))
        fan.send(Completed((3,)))
        await soon()
        fan.send(Completed((4,)))
        fan.clear()
        await soon()
        for pump in pumps:
            pump.cancel()
        return {name: end.launches for name, end in far.items()}

    assert asyncio.run(story()) == {"first": [[1], [2]], "second": [[2], [3]], "again": [[3]]}


def test_a_stream_carries_what_a_link_that_has_ended_did_not_take() -> None:
    async def run() -> None:
        outbox, written = streams.AsyncOutbox(), asyncio.Queue[bytes]()
        carrying = asyncio.ensure_future(outbox.carry(links.AsyncLink()))
        await soon()
        pump = asyncio.ensure_future(outbox.pump(written.put))
        carrying.cancel()
        outbox.send(Free((1,)))
        async with asyncio.timeout(10):
            assert await written.get() == encode_batch([Free((1,))])
        pump.cancel()

    asyncio.run(run())


def test_a_fan_gathers_while_much_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    1. Many launches are under way beyond it: the first message leaves at once, the next two wait for each other.
    2. With few, each leaves at once.
    """
    monkeypatch.setattr(streams, "PAUSE_S", 0.5)  # longer than a busy machine takes between two messages

    async def story(depth: int) -> list[list[int]]:
        fan, far = fan_out.FanOut(lambda: depth), Far()
        pump = asyncio.ensure_future(fan.open(1).pump(far.write))
        for k in range(3):
            fan.send(Completed((k,)))
            await soon()
        while sum(map(len, far.launches)) < 3:
            far.came.clear()
            await far.came.wait()
        pump.cancel()
        return far.launches

    assert asyncio.run(story(streams.DEEP + 1)) == [[0], [1, 2]]
    assert asyncio.run(story(streams.DEEP)) == [[0], [1], [2]]


def test_batches_of_a_fan_are_closed_before_they_get_too_big() -> None:
    size = 3 << 20

    async def story() -> list[bytes]:
        fan, far = fan_out.FanOut(), Far()
        pump = asyncio.ensure_future(fan.open(1).pump(far.write))
        for k in range(5):
            fan.send(part(size, k))
        await soon()
        pump.cancel()
        return far.batches

    made = asyncio.run(story())
    assert [[m.request for m in FROM_HOST_DATA.decode_batch(batch)] for batch in made] == [[0, 1], [2, 3], [4]]


def test_a_failure_travels_whole() -> None:
    failed = LaunchFailed(3, Failure("CompileError", "much too big", "f", "user.py:3", 7))
    assert TO_CLIENT.decode_batch(next(batches([failed]))) == [failed]


@pytest.mark.parametrize(
    ("metadata", "allowed"),
    [
        ({"authorization": "secret"}, True),
        ({"authorization": "Secret"}, False),
        ({"authorization": ""}, False),
        ({}, False),
    ],
)
def test_a_call_without_the_secret_is_not_authorised(metadata: dict[str, str], allowed: bool) -> None:
    assert streams.authorised(metadata, "secret") is allowed
