"""Batches: what a stream writes, a decoder reads."""

from __future__ import annotations

import pytest

from pathways_ray.errors import Failure
from pathways_ray.transport import streams
from pathways_ray.transport.messages import (
    FROM_HOST_DATA,
    TO_CLIENT,
    Completed,
    FetchPart,
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
