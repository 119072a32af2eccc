"""Answers of a host that their client does not read: what it has made meanwhile is bounded."""

from __future__ import annotations

import pytest

from pathways_ray.transport.frames import framed
from pathways_ray.transport.messages import Fetch, FetchDone, FetchPart, Message, encode
from tests.unit.executor.data.test_server import LIMIT_S, SMALL, Host, Wire


@pytest.fixture
def host() -> Host:
    return Host()


def send_as_one(wire: Wire, *messages: Message) -> None:
    """Sends messages as one batch."""
    wire.outbox._write(b"".join(framed(encode(messages), True)), True)  # type: ignore[misc]


def test_nothing_comes_along_while_a_client_does_not_read(host: Host) -> None:
    """What was asked for comes all the same, and one who waits for several values still waits for all of them."""
    wire = Wire(host)
    wire.doors.get(timeout=LIMIT_S)
    for buffer in (1, 2):
        host.put(buffer, SMALL)
    wire.send(Fetch(3, 1, (0,), ((4, 2),)))
    assert [wire.next().request, wire.next().request] == [4, 3]
    (stream,) = host.server.streams
    stream.outbox.has_room = lambda most: False  # type: ignore[method-assign]
    send_as_one(wire, Fetch(5, 1, (0,), ((6, 2),)), Fetch(7, 1, (), ((0, 2), (0, 8))))
    assert wire.next() == FetchPart(5, 0, 0, SMALL.nbytes, SMALL.tobytes())
    host.put(8, SMALL)
    assert wire.next() == FetchDone(7)
    wire.link.close()
