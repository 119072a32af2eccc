"""Transfers between hosts of one machine where a process has no descriptors or threads left."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pathways_ray.errors import Failure
from pathways_ray.executor.data.near_transfer import Arriving, NearTransfer
from pathways_ray.transport import neighbours

BIG = np.arange(1 << 20, dtype=np.float32)
SENDER, RECEIVER = (0, 1), (1, 1)


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def came(arriving: Arriving) -> list[jax.Array] | Failure:
    until(arriving.is_ready, "nothing came")
    return arriving.arrays()


class Pair:
    """A sender and a receiver of arrays like `BIG`."""

    def __init__(self) -> None:
        self.address = f"a host of test {os.getpid()} {id(self)}"
        self.sender = NearTransfer(0, self.address, "secret", lambda: None)
        self.receiver = NearTransfer(1, f"{self.address}, the other", "secret", lambda: None)

    def pull(self, name: int, like: Any = BIG) -> Arriving:
        where = SingleDeviceSharding(jax.local_devices()[0])
        pulled = self.receiver.pull(
            SENDER, self.address, name, [jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=where)]
        )
        assert isinstance(pulled, list), pulled
        return pulled[0]

    def serve(self, name: int, value: Any = BIG) -> None:
        self.sender.serve(name, RECEIVER, [jax.block_until_ready(jax.device_put(value))])


@pytest.fixture
def pair() -> Iterator[Pair]:
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
            assert len(pair.sender._receivers) == 1
        assert isinstance(came(pair.pull(1)), list)


def test_a_connection_that_gets_no_thread_is_an_error_and_later_ones_are_taken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.serve(1)
    with no_threads(monkeypatch, "neighbour"):
        failure = pair.receiver.pull(SENDER, pair.address, 1, [])
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
    assert not pair.sender._offers


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
