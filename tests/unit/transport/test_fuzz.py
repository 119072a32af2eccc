"""A hundred thousand broken messages of every kind: what comes out is a message or a `WireError`, soon, and small."""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pathways_ray.errors import WireError
from pathways_ray.transport.messages import Codec, Message, encode
from tests.unit.transport.test_messages import CODECS, KINDS, some

STRANGE: list[Any] = [None, True, -1, 2**64 - 1, -(2**63), 1.5, float("nan"), "", "x" * 999, b"", b"\xff" * 99, [], {}]
PICKLES = [pickle.dumps(value) for value in (Exception("x"), {"a": [1, 2]}, b"x" * 100)]
SLOWEST_S = 0.1
"""Of one message, on a machine that does other things too; the mean is a thousandth of it."""


def broken(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Something between `data` and nonsense; `other` is a message of another kind."""
    at = rng.randrange(len(data))
    match rng.randrange(8):
        case 0:
            changed = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            return bytes(changed)
        case 1:
            return data[:at]
        case 2:
            return data[:at] + other[rng.randrange(len(other)) :]
        case 3:
            return data[:at] + rng.randbytes(rng.randint(1, 9)) + data[at + 1 :]
        case 4:
            return data[:at] + rng.choice((b"\x91", b"\x81\x01", b"\x92\x04")) * rng.randint(1, 2000) + data[at:]
        case 5:
            return data[:at] + rng.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")) + rng.randbytes(4) + data[at:]
        case 6:
            return rng.choice(PICKLES) if rng.randrange(4) else data[:at] + rng.choice(PICKLES)
    return encode(retyped(msgspec.msgpack.decode(data, strict=False), rng))


def retyped(value: Any, rng: random.Random) -> Any:
    """The same structure with one of its values replaced by one of another type."""
    if not isinstance(value, list) or not value or not rng.randrange(4):
        return rng.choice(STRANGE)
    at = rng.randrange(len(value))
    return [*value[:at], retyped(value[at], rng), *value[at + 1 :]]


def samples(count: int, seed: int) -> Iterator[tuple[Codec[Any], bytes]]:
    rng = random.Random(seed)
    valid = [(CODECS[codec], encode(some(kind, 40))) for codec, kind in KINDS]
    for number in range(count):
        codec, data = valid[number % len(valid)]
        yield codec, broken(data, rng.choice(valid)[1], rng)


@contextlib.contextmanager
def nothing_else_to_collect() -> Iterator[None]:
    """The garbage collector looks at what the block makes, and not at all that other tests have left."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@nothing_else_to_collect()
def check(count: int, seed: int) -> None:
    accepted, slowest = 0, 0.0
    for codec, data in samples(count, seed):
        before = time.thread_time()
        try:
            found = codec.decode(data)
        except WireError:
            pass
        else:
            accepted += 1
            assert isinstance(found, Message)
            assert codec.decode(encode(found)) == found or "nan" in repr(found)
        try:
            batch = codec.decode_batch(b"\x92" + data + data)
        except WireError:
            pass
        else:
            assert all(isinstance(message, Message) for message in batch)
            encode(batch)
        slowest = max(slowest, time.thread_time() - before)
    assert count // 100 < accepted < count // 2, "the mutations are neither all harmless nor all fatal"
    assert slowest < SLOWEST_S


def test_a_hundred_thousand_broken_messages() -> None:
    check(100_000, 1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_five_million_broken_messages() -> None:
    check(5_000_000, 2)


def test_memory_is_bounded_by_the_message() -> None:
    """A number takes one byte in a message and a pointer in a tuple, and an empty list takes more; lengths that are not
    there take nothing."""
    tracemalloc.start()
    try:
        for codec, data in samples(2_000, 3):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with contextlib.suppress(WireError):
                codec.decode(data)
            assert tracemalloc.get_traced_memory()[1] - before < 100 * len(data) + 20_000
    finally:
        tracemalloc.stop()
