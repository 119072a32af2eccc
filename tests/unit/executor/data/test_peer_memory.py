"""Arrays that their receiver reads in the memory of the process that sends them."""

from __future__ import annotations

import collections
import errno
import gc
import itertools
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pathways_ray.errors import Failure
from pathways_ray.executor.data.arriving import Arriving
from pathways_ray.executor.data.near_messages import NAMED, TAKEN, UNREAD
from pathways_ray.executor.data.near_transfer import NearTransfer
from pathways_ray.transport import neighbours, peer_memory
from pathways_ray.transport.peer_memory import PeerMemory, places_of
from tests.waiting import until

BIG = np.arange(1 << 20, dtype=np.float32)
SENDER, RECEIVER = (0, 1), (1, 1)
NUMBERS = itertools.count()

OTHER = """
import socket, sys
import numpy as np
data = np.arange(int(sys.argv[1]), dtype=np.uint8)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(sys.argv[2].replace("@", chr(0)))
listener.listen(8)
print(data.ctypes.data, flush=True)
sys.stdin.read()
"""


class Other:
    """A process with an array in its memory."""

    def __init__(self, size: int) -> None:
        self.size, self.name = size, f"\0another process of test {os.getpid()} {next(NUMBERS)}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(size), self.name.replace("\0", "@")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = int(self.process.stdout.readline())
        self.connected = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)]
        for one in self.connected:
            one.connect(self.name)

    def memory(self) -> PeerMemory:
        return PeerMemory(*self.connected)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def other() -> Iterator[Other]:
    made = Other(100_000)
    yield made
    made.end()
    for one in made.connected:
        one.close()


def room(*sizes: int) -> list[np.ndarray[Any, Any]]:
    return [np.zeros(size, np.uint8) for size in sizes]


def test_places_of_another_process_are_read_in_parts(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "SHARE_BYTES", 30_000)
    monkeypatch.setattr(peer_memory, "HELPED_BYTES", 0)
    data, buffers = np.arange(other.size, dtype=np.uint8), room(other.size, 0, 7)
    places = [(other.address, other.size), (other.address, 0), (other.address + 1000, 7)]
    other.memory().read(places, buffers)
    np.testing.assert_array_equal(buffers[0], data)
    np.testing.assert_array_equal(buffers[2], data[1000:1007])


HELP = "in the pool", "none is free", "none can be started"


@pytest.fixture(params=HELP)
def helped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Reads small arrays in small shares by two threads, as big ones are; or by one, where there is no second."""
    monkeypatch.setattr(peer_memory, "SHARE_BYTES", 999)
    monkeypatch.setattr(peer_memory, "HELPED_BYTES", 2000)
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(peer_memory, "_helpers", lambda: pool)
        goes_on = threading.Event()
        if request.param == "none is free":
            pool.submit(goes_on.wait, 60)
        elif request.param == "none can be started":
            pool.shutdown()
        yield request.param
        goes_on.set()


def test_two_threads_read_each_byte_once(other: Other, helped: str) -> None:
    data = np.arange(other.size, dtype=np.uint8)
    for cuts in ([100_000], [1, 0, 998, 60_000, 39_001], [7] * 14_285 + [5]):
        ends = np.cumsum([0, *cuts])
        buffers, begun, both_read = room(*cuts), list[None](), threading.Event()
        places = [(other.address, 999), (other.address + 999, 0), (other.address + 999, 99_001)]
        memory, counts = other.memory(), collections.Counter[int]()
        system = memory._read

        def read(*what: Any, system: Any = system, counts: Any = counts, both_read: Any = both_read) -> int:
            count: int = system(*what)
            counts[threading.get_ident()] += count
            both_read.set()
            return count

        def begins(begun: list[None] = begun, both_read: threading.Event = both_read) -> None:
            begun.append(None)
            assert helped != "in the pool" or both_read.wait(20), "the other thread takes nothing"

        memory._read = read
        memory.read(places, buffers, begins)
        for buffer, start, end in zip(buffers, ends, ends[1:], strict=False):
            np.testing.assert_array_equal(buffer, data[start:end])
        assert len(begun) == 1
        assert sum(counts.values()) == other.size
        assert len(counts) == (2 if helped == "in the pool" else 1)


def test_who_helps_late_is_waited_for(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that can start no thread keeps what it was given, and the next thread that it can start does that."""
    monkeypatch.setattr(peer_memory, "SHARE_BYTES", 999)
    monkeypatch.setattr(peer_memory, "HELPED_BYTES", 2000)
    asked, has_begun, left = threading.get_ident(), threading.Event(), list[Callable[[], None]]()
    memory, buffers = other.memory(), room(other.size)
    system = memory._read

    class Full:
        def submit(self, *work: Any) -> None:
            do, *given = work
            left.append(lambda: do(*given))
            raise RuntimeError("can't start new thread")

    def read(*what: Any) -> int:
        if threading.get_ident() == asked and left:
            threading.Thread(target=left.pop(), daemon=True).start()
            assert has_begun.wait(20)
        elif threading.get_ident() != asked:
            has_begun.set()
            time.sleep(0.2)  # the other one is done meanwhile
        return int(system(*what))

    memory._read = read
    monkeypatch.setattr(peer_memory, "_helpers", Full)
    memory.read([(other.address, other.size)], buffers)
    np.testing.assert_array_equal(buffers[0], np.arange(other.size, dtype=np.uint8))


@pytest.mark.parametrize("by", ["the thread that was asked", "the other one"])
def test_nothing_is_read_or_kept_behind_an_error(other: Other, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Not even until the next search for cycles: it may be the bytes of a big array, and a client's pipe."""
    monkeypatch.setattr(peer_memory, "SHARE_BYTES", 999)
    monkeypatch.setattr(peer_memory, "HELPED_BYTES", 2000)
    asked, failed, goes_on = threading.get_ident(), threading.Event(), list[None]()
    memory = other.memory()
    system = memory._read

    def read(*what: Any) -> int:
        if (threading.get_ident() == asked) == (by == "the thread that was asked"):
            failed.set()
            return 0
        assert failed.wait(20)
        goes_on.append(None)
        time.sleep(0.05)  # the other one has time to say that it has failed
        return int(system(*what))

    memory._read = read
    buffers = room(other.size)
    kept = weakref.ref(buffers[0]), weakref.ref(memory)
    gc.disable()
    try:
        with ThreadPoolExecutor(1) as pool:
            monkeypatch.setattr(peer_memory, "_helpers", lambda: pool)
            with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
                memory.read([(other.address, other.size)], buffers)
        del buffers, memory
        assert [one() for one in kept] == [None, None]
        assert len(goes_on) < 50, "of 101 shares: it reads on"
    finally:
        gc.enable()


@pytest.mark.parametrize("at", [0, 50_000, 99_999])
def test_what_one_of_two_threads_cannot_read_is_an_error(other: Other, helped: str, at: int) -> None:
    """Wherever the place lies at which there is nothing."""
    places = [(other.address, at), (4096, 1), (other.address, 100_000 - at - 1)]
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        other.memory().read(places, room(100_000))


def test_less_memory_than_room_is_an_error(other: Other, helped: str) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        other.memory().read([(other.address, 50_000)], room(50_001))


def test_who_is_told_of_each_part_ends_both_threads(other: Other, helped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "PART_BYTES", 10_000)
    begun: list[int] = []

    def begins() -> None:
        begun.append(threading.get_ident())
        if len(begun) >= 4:
            raise BrokenPipeError("who waited for it has gone")

    buffers = room(other.size)
    with pytest.raises(BrokenPipeError):
        other.memory().read([(other.address, other.size)], buffers, begins)
    assert len(begun) <= 5, "each thread hears of it once at the most"
    assert not buffers[0][60_000:].any(), "somebody reads on"


@pytest.mark.parametrize("address", [0, 4096, (1 << 47) - 4096, (1 << 64) - 4096, -4096])
def test_where_there_is_nothing_nothing_is_read(other: Other, address: int) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        other.memory().read([(address, 10)], room(10))


def test_a_process_that_has_ended_is_not_read(other: Other) -> None:
    memory = other.memory()
    other.end()
    with pytest.raises(ProcessLookupError):
        memory.read([(other.address, 10)], room(10))
    with pytest.raises(ProcessLookupError):  # as when its number is another one's by now
        memory.read([], [])


def test_a_process_with_many_descriptors_reads(other: Other) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    taken = [os.dup(0) for _ in range(1100)]
    try:
        buffers = room(other.size)
        other.memory().read([(other.address, other.size)], buffers)
        np.testing.assert_array_equal(buffers[0], np.arange(other.size, dtype=np.uint8))
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_has_ended_is_not_read_later(other: Other) -> None:
    """Its number may be another one's, while somebody to whom it was handed keeps its end of a connection open."""
    other.end()
    with pytest.raises(OSError, match=r".+"):
        other.memory().read([], [])


def test_ends_of_two_processes_are_not_read(other: Other) -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs, pytest.raises(PermissionError):
        PeerMemory(other.connected[0], mine)


def test_where_the_process_or_the_user_is_another_namespaces_nothing_is_read(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    for who in ((0, os.geteuid()), (other.process.pid, os.geteuid() + 1)):
        monkeypatch.setattr(peer_memory, "peer_of", lambda _, who=who: who)
        with pytest.raises(PermissionError):
            other.memory()


@pytest.mark.parametrize("without", ["_READ", "_SAYS_WHO", "_SO_PEERPIDFD"])
def test_an_older_system_reads_nothing(other: Other, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    monkeypatch.setattr(peer_memory, without, 12345 if without == "_SO_PEERPIDFD" else None)
    with pytest.raises(OSError, match=r".+"):
        other.memory()


def test_what_is_not_in_one_piece_has_no_place() -> None:
    assert places_of([BIG]) == [(BIG.ctypes.data, BIG.nbytes)]
    assert places_of([BIG, BIG.reshape(1024, -1).T]) is None


class Pair:
    """A sender and a receiver, and which arrays the receiver waits for."""

    def __init__(self) -> None:
        self.address = f"a host whose memory is read, of test {os.getpid()} {next(NUMBERS)}"
        self.sender = NearTransfer(0, self.address, "secret", lambda: None)
        self.receiver = NearTransfer(1, f"{self.address}, the other", "secret", lambda: None)

    def serve(self, name: int, value: Any = BIG) -> None:
        self.sender.offers.serve(name, RECEIVER, [jax.block_until_ready(jax.device_put(value))])

    def pull(self, name: int, like: Any = BIG) -> Arriving:
        where = SingleDeviceSharding(jax.local_devices()[0])
        kind = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=where)
        pulled = self.receiver.pulls.pull(SENDER, self.address, name, [kind])
        assert isinstance(pulled, list), pulled
        return pulled[0]

    def kept(self) -> int:
        return sum(map(len, self.sender.offers._kept.values()))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.receiver.lose([SENDER])


def came(arriving: Arriving) -> Any:
    until(arriving.is_ready, "nothing came")
    found = arriving.arrays()
    return found if isinstance(found, Failure) else np.asarray(found[0])


def test_a_sender_keeps_an_array_until_it_is_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read, read = threading.Event(), PeerMemory.read

    def later(self: PeerMemory, *what: Any) -> None:
        assert may_read.wait(30)
        read(self, *what)

    monkeypatch.setattr(PeerMemory, "read", later)
    pair.serve(1)
    arriving = pair.pull(1)
    until(lambda: pair.kept() == 1, "it is not kept")
    assert not arriving.is_ready()
    may_read.set()
    np.testing.assert_array_equal(came(arriving), BIG)
    until(lambda: pair.kept() == 0, "it is kept for ever")


def test_who_may_not_read_gets_a_pipe_and_is_offered_no_memory_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refused(self: PeerMemory, *what: Any) -> None:
        tried.append(what)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(PeerMemory, "read", refused)
    for name in (1, 2, 3):
        pair.serve(name, BIG + name)
        np.testing.assert_array_equal(came(pair.pull(name)), BIG + name)
    assert len(tried) == 1
    assert pair.kept() == 0


def test_what_is_read_while_its_sender_hangs_up_is_not_taken(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the memory no longer than the connection stands."""
    read, may_read = PeerMemory.read, threading.Event()

    def later(self: PeerMemory, *what: Any) -> None:
        assert may_read.wait(30)
        read(self, *what)

    monkeypatch.setattr(PeerMemory, "read", later)
    monkeypatch.setattr(pair.receiver.pulls, "_sender_ended", lambda connection: None)
    pair.serve(1)
    arriving = pair.pull(1)
    until(lambda: pair.kept() == 1, "it is not kept")
    pair.sender.lose([RECEIVER])
    until(lambda: pair.kept() == 0, "it is kept for ever")
    may_read.set()
    (connection,) = pair.receiver.pulls._awaited
    connection._workers.shutdown(wait=True)
    assert not arriving.is_ready()


def test_a_lost_receiver_frees_what_is_kept_for_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours.Connection, "work", lambda self, task: None)  # it never reads
    pair.serve(1)
    pair.pull(1)
    until(lambda: pair.kept() == 1, "it is not kept")
    pair.sender.lose([RECEIVER])
    until(lambda: pair.kept() == 0, "it is kept for ever")


def test_a_receiver_that_is_out_of_memory_says_so_and_frees_the_sender(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(size: int) -> Any:
        raise MemoryError(f"no room for {size} bytes")

    with monkeypatch.context() as patched:
        patched.setattr("pathways_ray.executor.data.near_pulls.aligned", none)
        pair.serve(1)
        failure = came(pair.pull(1))
    assert isinstance(failure, Failure)
    assert f"no room for {BIG.nbytes} bytes" in failure.message
    until(lambda: pair.kept() == 0, "it is kept for ever")
    pair.serve(2)
    np.testing.assert_array_equal(came(pair.pull(2)), BIG)


def test_a_receiver_without_threads_reads_all_the_same(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Any, task: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(neighbours.Connection, "work", none)
    pair.serve(1)
    np.testing.assert_array_equal(came(pair.pull(1)), BIG)


def test_other_sizes_than_expected_are_an_error_and_free_the_sender(pair: Pair) -> None:
    pair.serve(1)
    failure = came(pair.pull(1, BIG[1:]))
    assert isinstance(failure, Failure)
    assert f"{BIG.nbytes} bytes came from host 0 in place of arrays of {BIG.nbytes - 4}" in failure.message
    until(lambda: pair.kept() == 0, "it is kept for ever")


@pytest.mark.parametrize("kind", [TAKEN, UNREAD])
def test_who_answers_what_nobody_sent_is_hung_up_on(pair: Pair, kind: bytes) -> None:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(10)
    with stranger:
        stranger.connect(neighbours.name_of(pair.address, "secret"))
        stranger.send(NAMED.pack(kind, 7))
        assert stranger.recv(10) == b""
    until(lambda: not pair.sender.offers._by_pipe, "it is remembered")
