"""A host that has no descriptors or threads left for what a client on its machine asks: the client hears of it."""

from __future__ import annotations

import pytest

from pathways_ray.transport.messages import FROM_HOST_DATA, DataFailed, Fetch, FetchPart, PutDone, encode
from pathways_ray.transport.pipes import Pipe
from tests.unit.executor.data.test_near_shortage import no_descriptors, no_threads
from tests.unit.executor.data.test_server import BIG, LARGE, SMALL, Host, Wire, in_file, local, opening

__all__ = ["host", "wire"]

from tests.unit.executor.data.test_server import host, wire
from tests.waiting import until


def test_what_comes_with_a_descriptor_that_a_host_cannot_take_is_answered(host: Host, wire: Wire) -> None:
    """
    1. The host has no descriptor for a pipe: an upload by one fails, and a fetch comes in parts.
    2. The local socket goes on: a question by it is answered, and later an upload.
    """
    host.put(1, LARGE)
    host.put(2, SMALL)
    door, pipes = local(wire), [Pipe(), Pipe()]
    (stream,) = host.server.streams
    stream.workers._max_workers = 1
    wire.send(Fetch(9, 1, (0,)))  # a thread that asks JAX for the first time needs descriptors
    assert wire.next().request == 9
    until(lambda: len(host.server.local._open) == 1)
    with no_descriptors():
        assert door.send(encode(opening(3)), pipes[0].other)
        failed = wire.next()
        assert isinstance(failed, DataFailed)
        assert "no descriptor" in failed.failure.message
        assert door.send(encode(Fetch(4, 1, (0,))), pipes[1].other)
        part = wire.next()
        assert (type(part), part.request, part.total) == (FetchPart, 4, LARGE.nbytes)
        assert door.send(encode(Fetch(5, 2, (0,))))
        (answer,) = FROM_HOST_DATA.decode_batch(door.connection.recv(1 << 16))
        assert isinstance(answer, FetchPart | DataFailed)
        assert answer.request == 5
    assert door.send(encode(opening(6)), in_file(LARGE))
    assert wire.next() == PutDone(6)


def test_a_question_for_which_a_host_has_no_thread_fails(
    host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.put(1, BIG)
    with no_threads(monkeypatch, "fetch"):
        wire.send(Fetch(1, 1, (0,)))
        failed = wire.next()
        assert isinstance(failed, DataFailed)
        assert "thread" in failed.failure.message
    wire.send(Fetch(2, 1, (0,)))
    assert wire.next().request == 2
