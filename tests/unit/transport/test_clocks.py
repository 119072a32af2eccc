"""Comparison of clocks: the bound holds, and strangers and silence are no clocks."""

from __future__ import annotations

import socket
import threading

import pytest

from pathways_ray.transport.clocks import NONCE_BYTES, ClockServer, answer


@pytest.mark.parametrize("ahead_s", [0.0, -500.0])
def test_the_offset_is_no_further_off_than_said(ahead_s: float) -> None:
    with ClockServer("127.0.0.1") as server:
        coming = threading.Thread(
            target=answer, args=(server.address, server.port, server.nonce), kwargs={"ahead_s": ahead_s}
        )
        coming.start()
        found = server.compare()
        coming.join()
    assert abs(found.offset_s - ahead_s) <= found.within_s


def test_a_stranger_is_hung_up_on() -> None:
    with ClockServer("127.0.0.1") as server, socket.create_connection((server.address, server.port)) as stranger:
        stranger.sendall(bytes(NONCE_BYTES))
        with pytest.raises(OSError, match="a stranger"):
            server.compare()
        assert stranger.recv(1) == b""


def test_nobody_comes_or_goes_away() -> None:
    with ClockServer("127.0.0.1", limit_s=0.05) as server:
        with pytest.raises(TimeoutError):
            server.compare()
        with socket.create_connection((server.address, server.port)) as gone:
            gone.sendall(server.nonce)
            gone.shutdown(socket.SHUT_WR)
            with pytest.raises(OSError, match="went away"):
                server.compare()
    assert not answer(server.address, server.port, server.nonce)
