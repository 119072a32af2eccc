"""Batches: what a stream writes, a decoder reads."""

from __future__ import annotations

import pytest

from pathways_ray.errors import Failure
from pathways_ray.transport import capabilities, grpc_streams
from pathways_ray.transport.batcher import (
    GATHER_DEPTH,
    GATHER_S,
    LONG_GATHER_DEPTH,
    LONG_GATHER_S,
    MAX_BATCH_BYTES,
    MAX_HEADER_BYTES,
    Batcher,
    batches,
    joined_batches,
)
from pathways_ray.transport.messages import (
    FROM_HOST_DATA,
    TO_CLIENT,
    Completed,
    FetchPart,
    LaunchFailed,
    Message,
    PutDone,
    Stored,
    encode,
)
from tests.unit.helpers import VECTOR, requests_in


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 65_535, 65_536, 70_000])
def test_batches_are_what_the_decoder_reads(count: int) -> None:
    """The counts at which MessagePack writes the length in another way are among them."""
    messages = [Completed((k,)) for k in range(count)]
    made = list(batches(messages))
    assert len(made) == (1 if count else 0)
    assert [m for batch in made for m in TO_CLIENT.decode_batch(batch)] == messages
    if count:
        assert made[0] == encode(messages)


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 4096])
def test_small_messages_that_are_encoded_in_one_step_make_the_same_batch(count: int) -> None:
    """Also where they were composed, perhaps to none at all, and beside others."""
    small: list[Message] = [Stored(0, 1, number, 1, VECTOR, ()) for number in range(count)]
    beside: list[Message] = [*small, Completed((7,))]
    for given in (small, beside):
        for batcher in (Batcher(), Batcher(compose=lambda messages: messages)):
            batcher.put_all(given)
            assert batcher.take(5000) == list(batches(given))
    nothing = Batcher(compose=lambda messages: [])
    nothing.put_all(small)
    assert nothing.take(5000) == []


def test_very_many_small_messages_are_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways_ray.transport.batcher.MAX_BATCH_BYTES", 1000)
    batcher, sent = Batcher(), [PutDone(number) for number in range(1000)]
    batcher.put_all(sent)
    made = batcher.take()
    assert len(made) > 1
    assert max(map(len, made)) <= 1000 + MAX_HEADER_BYTES
    assert [one for batch in made for one in FROM_HOST_DATA.decode_batch(batch)] == sent


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
    assert all(len(batch) <= MAX_BATCH_BYTES + 16 for batch in made)
    numbers = [request for batch in made for request in requests_in(batch)]
    assert numbers == list(range(10))


def test_a_message_that_is_too_big_goes_alone() -> None:
    made = list(batches([part(10, 0), part(MAX_BATCH_BYTES + 1, 1), part(10, 2)]))
    assert [requests_in(batch) for batch in made] == [[0], [1], [2]]


def test_messages_that_just_fit_share_a_batch() -> None:
    overhead = len(encode([part(70_000)])) - 70_000 - 1
    half = MAX_BATCH_BYTES // 2 - overhead
    assert len(list(batches([part(half), part(half)]))) == 1
    assert len(list(batches([part(half), part(half + 1)]))) == 2


def test_a_thread_outbox_gives_all_that_is_there_and_then_ends() -> None:
    """
    1. Three messages are put, then it is closed.
    2. They come in one batch, in order; the iterator ends.
    """
    outbox = grpc_streams.GrpcOutbox()
    sent: list[Message] = [Completed((k,)) for k in range(3)]
    for message in sent:
        outbox.send(message)
    outbox.close()
    assert [TO_CLIENT.decode_batch(batch) for batch in outbox] == [sent]


@pytest.mark.parametrize("counts", [(1, 1), (15, 1), (16, 70_000), (65_535, 1, 3)])
def test_batches_are_joined_without_decoding_them(counts: tuple[int, ...]) -> None:
    """The counts at which MessagePack writes the length in another way are among them."""
    messages = [Completed((k,)) for k in range(sum(counts))]
    parts, rest = [], list(messages)
    for count in counts:
        parts.append(encode(rest[:count]))
        rest = rest[count:]
    assert list(joined_batches(parts)) == [encode(messages)]


def test_joined_batches_do_not_get_too_big() -> None:
    size = 3 << 20
    made = list(joined_batches([encode([part(size, k)]) for k in range(5)]))
    assert [requests_in(batch) for batch in made] == [[0, 1], [2, 3], [4]]


def test_messages_are_taken_in_order_some_at_a_time_and_composed_where_they_may_be() -> None:
    """Composing stands for what the coalescer does: here it keeps every second message."""
    waiting = Batcher(compose=lambda messages: messages[::2])
    for k in range(10):
        waiting.put(Completed((k,)))

    def taken(most: int, compose: bool) -> list[int]:
        found = (TO_CLIENT.decode_batch(batch) for batch in waiting.take(most, compose))
        return [message.launches[0] for batch in found for message in batch]  # type: ignore[union-attr]

    assert taken(3, False) == [0, 1, 2]
    assert taken(4, True) == [3, 5]
    assert len(waiting) == 3
    assert taken(100, True) == [7, 9]
    assert waiting.take() == []


@pytest.mark.parametrize(
    ("depth", "gather_s"),
    [
        (0, 0.0),
        (GATHER_DEPTH, 0.0),
        (GATHER_DEPTH + 1, GATHER_S),
        (LONG_GATHER_DEPTH, GATHER_S),
        (LONG_GATHER_DEPTH + 1, LONG_GATHER_S),
    ],
)
def test_messages_gather_for_as_long_as_launches_under_way_allow(depth: int, gather_s: float) -> None:
    assert Batcher(lambda: depth).gather_s() == gather_s
    assert Batcher(lambda: depth).lone == (gather_s == 0.0)
    assert Batcher(lambda: depth, long_gather_s=GATHER_S).gather_s() == min(gather_s, GATHER_S)


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
    assert capabilities.authorised(metadata, "secret") is allowed
