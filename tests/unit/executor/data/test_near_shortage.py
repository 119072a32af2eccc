"""Transfers between hosts of one machine where a process has no descriptors or threads left."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pathways_ray.errors import Failure
from pathways_ray.executor.data.arriving import Arriving
from pathways_ray.executor.data.near_transfer import NearTransfer
from pathways_ray.transport import neighbours
from tests.waiting import until

BIG = np.arange(1 << 20, dtype=np.float32)
SENDER, RECEIVER = (0, 1), (1, 1)


def came(arriving: Arriving) -> list[jax.Array] | Failure:
    until(arriving.is_ready, "nothing came")
    return arriving.arrays()


NUMBERS = itertools.count()
"""Of pairs: a host keeps its name while its process lives."""


class Pair:
    """A sender and a receiver of arrays like `BIG`."""

    def __init__(self) -> None:
        self.address = f"a host of test {os.getpid()} {next(NUMBERS)}"
        self.sender = NearTransfer(0, self.address, "secret", lambda: None)
        self.receiver = NearTransfer(1, f"{self.address}, the other", "secret", lambda: None)

    def pull(self, name: int, like: Any = BIG) -> Arriving:
        where = SingleDeviceSharding(jax.local_devices()[0])
        pulled = self.receiver.pulls.pull(
            SENDER, self.address, name, [jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=where)]
        )
        assert isinstance(pulled, list), pulled
        return pulled[0]

    def serve(self, name: int, value: Any = BIG) -> None:
        self.sender.offers.serve(name, RECEIVER, [jax.block_until_ready(jax.device_put(value))])


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two hosts that use pipes, as where no process may read another one's memory."""
    monkeypatch.setattr("pathways_ray.executor.data.near_offers.places_of", lambda arrays: None)
    made = Pair()
    yield made
    made.receiver.lose([SENDER])


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open no descriptor more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for one in taken:
            os.close(one)


@contextlib.contextmanager
def no_threads(monkeypatch: pytest.MonkeyPatch, named: str) -> Iterator[None]:
    """No thread of a name can be started, as where the system has no more of them."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(named):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        yield


def test_a_host_without_descriptors_takes_connections_once_it_has_some(pair: Pair) -> None:
    pair.serve(1)
    with contextlib.ExitStack() as strangers:
        others = [strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(3)]
        with no_descriptors():
            for other in others:  # the system has kept a descriptor for the first one
                other.connect(neighbours.name_of(pair.address, "secret"))
            time.sleep(0.2)
            assert len(pair.sender.offers._receivers) == 1
        assert isinstance(came(pair.pull(1)), list)


def test_a_connection_that_gets_no_thread_is_an_error_and_later_ones_are_taken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.serve(1)
    with no_threads(monkeypatch, "neighbour"):
        failure = pair.receiver.pulls.pull(SENDER, pair.address, 1, [])
        assert isinstance(failure, Failure)
        assert failure.kind == "HostLost"
        assert "thread" in failure.message
    assert isinstance(came(pair.pull(1)), list)


def test_only_the_transfer_that_gets_no_thread_fails(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    small = np.ones(3, np.float32)
    pair.serve(1, small)
    assert isinstance(came(pair.pull(1, small)), list)
    with no_threads(monkeypatch, "pipe"):
        arriving = pair.pull(2)
        pair.serve(2)
        failure = came(arriving)
        assert isinstance(failure, Failure)
        assert "start new thread" in failure.message
        pair.serve(3, small)
        assert isinstance(came(pair.pull(3, small)), list), "small ones need none"
    pair.serve(4)
    assert isinstance(came(pair.pull(4)), list)
    assert not pair.sender.offers._offers


def test_a_task_that_gets_no_thread_is_not_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    done: list[int] = []
    connection = neighbours.Connection(mine, lambda *came: None, lambda one: None)
    with theirs:
        with no_threads(monkeypatch, "pipe"), pytest.raises(RuntimeError, match="thread"):
            connection.work(lambda: done.append(1))
        connection.work(lambda: done.append(2))
        until(lambda: bool(done), "nothing is done")
    assert done == [2]


def test_a_pipe_that_finds_no_descriptor_fails_one_transfer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    small, receive = np.ones(3, np.float32), socket.recv_fds
    short = threading.Event()

    def cut(*given: Any) -> Any:
        message, descriptors, flags, address = receive(*given)
        if not descriptors or not short.is_set():
            return message, descriptors, flags, address
        os.close(*descriptors)
        return message, [], flags | socket.MSG_CTRUNC, address

    monkeypatch.setattr(socket, "recv_fds", cut)
    short.set()
    other, failed = pair.pull(1, small), pair.pull(2)
    pair.serve(2)
    failure = came(failed)
    assert isinstance(failure, Failure)
    assert failure.kind == "ExecutionError"
    assert "no descriptor" in failure.message
    pair.serve(1, small)
    assert isinstance(came(other), list)
    short.clear()
    pair.serve(3)
    assert isinstance(came(pair.pull(3)), list)


def test_a_message_that_cannot_be_sent_ends_its_connection() -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended = threading.Event()
    connection = neighbours.Connection(mine, lambda *came: None, lambda one: ended.set())
    with theirs:
        theirs.settimeout(10)
        connection.send(bytes(8 << 20))  # no socket takes so long a packet
        assert theirs.recv(1) == b""
    assert ended.wait(10)


def test_a_message_that_must_wait_and_finds_no_thread_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended = threading.Event()
    connection = neighbours.Connection(mine, lambda *came: None, lambda one: ended.set())
    with theirs, no_threads(monkeypatch, "pipe"):
        for _ in range(10_000):
            if ended.is_set():
                break
            connection.send(bytes(1000))
        assert ended.wait(10)


def test_a_pipe_that_nobody_takes_is_closed() -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = neighbours.Connection(mine, lambda *came: None, lambda one: None)
    one, other = socket.socketpair()
    with theirs, one:
        with other:
            socket.send_fds(theirs, [b"x"], [other.fileno()])
        one.settimeout(10)
        assert one.recv(1) == b"", "its sender would wait"
        connection.end()


def test_a_pipe_for_which_there_is_no_memory_is_closed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(size: int) -> Any:
        raise MemoryError(f"{size} bytes")

    pair.serve(1)
    with monkeypatch.context() as patched:
        patched.setattr("pathways_ray.executor.data.near_pulls.aligned", none)
        failure = came(pair.pull(1))
    assert isinstance(failure, Failure)
    assert "MemoryError" in failure.message
    until(lambda: not any(one._pipes for one in pair.sender.offers._receivers), "the sender waits")
    pair.serve(2)
    assert isinstance(came(pair.pull(2)), list)


def test_who_asked_and_is_not_known_any_more_gets_the_failure(pair: Pair) -> None:
    lost = Failure("HostLost", "host 2 was lost", host=2)
    arriving = pair.pull(1)
    until(lambda: bool(pair.sender.offers._asked), "nobody asks")
    assert not pair.sender.offers.refuse(2, lost)
    assert pair.sender.offers.refuse(1, lost)
    assert came(arriving) == lost
    assert not pair.sender.offers._asked
