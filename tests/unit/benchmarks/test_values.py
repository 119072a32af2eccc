"""What benchmarks hold values against, and connections whose other end is gone: they fail, and do not wait."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from benchmarks import bytes as arrays
from benchmarks import compiling, relays
from benchmarks.hotpath import Settings

ENDS = """
import socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
peer.recv(64)
peer.sendall(bytes(10))
"""

RELAY_ENDS = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
server.accept()[0].recv(4096)
"""


def test_a_sender_that_ends_within_an_array_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "PEER", ENDS)
    with contextlib.closing(arrays.Raw(100)) as raw, pytest.raises(ConnectionError, match="that sends has ended"):
        raw.receive(100)


def test_a_relay_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "RELAY", RELAY_ENDS)
    with contextlib.closing(relays.Relays(1)) as one, pytest.raises(ConnectionError, match="a relay has ended"):
        one.round_trip()


def test_first_calls_must_have_the_bits_of_functions_jitted_each_by_itself() -> None:
    right = np.array([1.0, 3.0], np.float32)
    almost = np.nextafter(right, np.float32(9))
    compiling.check("nodes", right, 100, right)
    with pytest.raises(AssertionError):
        compiling.check("another client", almost, 100, right)
    few, many = (compiling.operations(count)(compiling.START) for count in (compiling.FEW, 100))
    compiling.check("operations", np.nextafter(many, np.float32(9)), 100, right)
    compiling.check("other slices", few, 100, right)
    with pytest.raises(AssertionError):
        compiling.check("other slices", many, 100, right)


@pytest.mark.parametrize("round_trips, launches", [(1, 3), (2, 2)])
def test_too_few_launches_for_their_statistics_are_refused(round_trips: int, launches: int) -> None:
    with pytest.raises(ValueError, match="2 round trips and 3 launches"):
        Settings(round_trips=round_trips, launches=launches)
