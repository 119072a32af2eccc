"""The bytes of uploads that live on a host, as their client says them."""

from __future__ import annotations

from pathways_ray.client.buffer import BufferRecord
from pathways_ray.client.living import UNSAID, LivingUploads
from pathways_ray.errors import Failure
from pathways_ray.limits import MIN_BUFFER_BYTES
from pathways_ray.transport.capabilities import data_token

BOX = ((0, 4096),)
BYTES = 2 * 4096 * 4
"""Of an array on two devices that hold this box."""


def test_what_is_freed_failed_or_donated_does_not_live() -> None:
    records = {number: BufferRecord(number) for number in range(1, 6)}
    living = LivingUploads(data_token("secret", 7, 1000))
    living.records = records
    for number in records:
        living.enter(0, number, [BOX, BOX], "float32")
    assert (living.bytes_on(0), living.bytes_on(1)) == (5 * BYTES, 0)
    del records[1]
    records[2].fail(Failure("HostLost", "gone"))
    records[3].donate("given to f")
    assert living.bytes_on(0) == 2 * BYTES
    records[3].take_back()
    assert living.bytes_on(0) == 3 * BYTES


def test_a_small_array_counts_as_its_host_counts_it() -> None:
    """Else an upload would wait at the host for room that what lives there never leaves."""
    living = LivingUploads(data_token("secret", 7, 1000))
    living.records = {1: BufferRecord(1), 2: BufferRecord(2)}
    living.enter(0, 1, [((0, 1),)], "float32")
    living.enter(0, 2, [((0, 0),)], "float32")
    assert living.bytes_on(0) == 2 * MIN_BUFFER_BYTES


def test_without_a_quota_nothing_is_said() -> None:
    living = LivingUploads(data_token("secret", 7, None))
    living.enter(0, 1, [BOX], "float32")
    assert living.bytes_on(0) == UNSAID
