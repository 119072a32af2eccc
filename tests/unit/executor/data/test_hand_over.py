"""Launches that hosts of one machine tell each other to begin."""

from __future__ import annotations

import os
import queue
from typing import Any

import pytest

from pathways_ray.executor.data.near_transfer import NearTransfer
from pathways_ray.transport import neighbours

LIMIT_S = 30.0


class Pair:
    """Two hosts; the first one hears."""

    def __init__(self, name: str, secret: str = "secret") -> None:
        self.address = f"a host that hears, of test {os.getpid()} {name}"
        self.heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.hearing = NearTransfer(0, self.address, "secret", lambda: None)
        self.hearing.on_handed = self.heard.put
        self.telling = NearTransfer(1, f"{self.address}, the other", secret, lambda: None)


def test_a_host_hears_what_another_one_tells_it() -> None:
    pair = Pair("told")
    for data in (b"one", b"two"):
        pair.telling.hand_over((0, 1), pair.address, data)
        assert pair.heard.get(timeout=LIMIT_S) == data


def test_a_host_that_is_gone_is_told_nothing_and_nothing_is_raised() -> None:
    pair = Pair("gone")
    pair.telling.hand_over((5, 1), "nobody listens here", b"one")
    pair.telling.hand_over((0, 1), pair.address, b"two")
    assert pair.heard.get(timeout=LIMIT_S) == b"two"


def test_what_is_longer_than_a_packet_is_not_told_and_the_connection_stays() -> None:
    """Who gets a packet that is too long hangs up, and all that comes from the sender is lost with it."""
    pair = Pair("long")
    pair.telling.hand_over((0, 1), pair.address, b"one")
    for size in (neighbours.MAX_PACKET_BYTES - 17, neighbours.MAX_PACKET_BYTES - 16, 1 << 18):
        pair.telling.hand_over((0, 1), pair.address, bytes(size))
    pair.telling.hand_over((0, 1), pair.address, b"two")
    heard = [pair.heard.get(timeout=LIMIT_S) for _ in range(3)]
    assert heard == [b"one", bytes(neighbours.MAX_PACKET_BYTES - 17), b"two"]
    assert len(pair.telling.pulls._senders | pair.telling.offers._receivers) == 1


@pytest.mark.parametrize("message", [b"o", b"o" + bytes(16) + b"forged", b"o" + bytes(3)])
def test_who_does_not_know_the_secret_is_not_heard(message: bytes) -> None:
    """Other processes of the user can connect; such a connection ends."""
    pair, ended = Pair(f"forged {len(message)}"), queue.SimpleQueue[Any]()
    forger = neighbours.Connection.to(neighbours.name_of(pair.address, "secret"), lambda *came: None, ended.put)
    forger.send(message)
    assert ended.get(timeout=LIMIT_S) is forger
    assert pair.heard.empty()
