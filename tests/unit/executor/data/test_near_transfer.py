"""Transfers between hosts of one machine, by local connections."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from pathways_ray.errors import Failure
from pathways_ray.executor.data import near_offers
from pathways_ray.executor.data.arriving import Arriving
from pathways_ray.executor.data.device_transfer import DeviceTransfer, is_near
from pathways_ray.executor.data.failure_texts import OF_A_PEER, error_text
from pathways_ray.ir.plan import transfer_id
from pathways_ray.transport import neighbours
from pathways_ray.transport.messages import Peer
from tests.waiting import until

MIB = 1 << 20
MACHINE = neighbours.machine()
SECRET = "the link secret"
LOST = Failure("HostLost", "host 2 was lost", host=2)


def kinds(*arrays: Any) -> list[jax.ShapeDtypeStruct]:
    where = SingleDeviceSharding(jax.local_devices()[0])
    return [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=where) for one in arrays]


class Pair:
    """A sender, host 0, and a receiver, host 1."""

    def __init__(self) -> None:
        client = jax.local_devices()[0].client
        made = [DeviceTransfer(host, client, "127.0.0.1", SECRET, MACHINE) for host in (0, 1)]
        self.sender, self.receiver = made
        self.peers = tuple(Peer(k, 1, one.address, machine=MACHINE) for k, one in enumerate(made))
        for one in made:
            one.set_peers(self.peers)
        self.arrivals = threading.Semaphore(0)
        self.receiver.on_arrival = self.arrivals.release
        self.launch = 0

    def name(self) -> int:
        self.launch += 1
        return transfer_id(self.launch, 0, 1)

    def pull(self, name: int, *arrays: Any) -> Arriving:
        pulled = self.receiver.pull(0, name, kinds(*arrays))
        assert isinstance(pulled, list)
        return pulled[0]

    def near(self) -> Any:
        near: Any = self.sender._near
        return near.offers

    def acquaint(self) -> None:
        """Has the receiver ask for something: from then on it is sent what is there unasked."""
        name = self.name()
        self.sender.serve(name, [jax.device_put(np.float32(1))])
        came(self.pull(name, np.float32(1)))

    def kept(self) -> list[int]:
        """The names of what the sender keeps for the receiver."""
        return [name for kept in self.near()._kept.values() for name in kept]

    def unasked(self) -> list[int]:
        """The names of what has come to the receiver, and was not asked for yet."""
        near: Any = self.receiver._near
        return [name for unasked in near.pulls._unasked.values() for name in unasked]


@pytest.fixture(params=["read", "piped"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How what is big goes: its receiver reads it in the sender's memory, or it comes by a pipe."""
    if request.param == "piped":
        monkeypatch.setattr(near_offers, "places_of", lambda arrays: None)
    return str(request.param)


@pytest.fixture
def pair(way: str) -> Iterator[Pair]:
    made = Pair()
    yield made
    for one in (made.sender, made.receiver):
        one.set_peers(())


def there(value: Any) -> jax.Array:
    """An array whose bytes are on its device: what is still to come is not sent in the thread that offers it."""
    return jax.block_until_ready(jax.device_put(value))


def came(arriving: Arriving) -> list[jax.Array] | Failure:
    until(arriving.is_ready, "nothing came")
    return arriving.arrays()


VALUES = {
    "a scalar": [np.float32(3.5)],
    "4 KiB": [np.arange(1024, dtype=np.int32)],
    "just in a packet": [np.arange(neighbours.MAX_PACKET_BYTES - 9, dtype=np.uint8)],
    "just not": [np.arange(neighbours.MAX_PACKET_BYTES - 8, dtype=np.uint8)],
    "big": [np.random.default_rng(0).standard_normal((1 << 20,)).astype(np.float32)],
    "four shards": [np.full((300_000,), k, np.float32) for k in range(4)],
    "nothing": [np.zeros((0, 7), np.float32)],
    "nothing between": [np.arange(5, dtype=np.int8), np.zeros((3, 0), np.int32), np.arange(70_000, dtype=np.int16)],
    "bfloat16": [np.arange(200_000).astype(jnp.bfloat16)],
    "others": [np.arange(7).astype(t) for t in (jnp.float8_e4m3fn, np.bool_, np.complex64, jnp.int4, np.uint16)],
}


@pytest.mark.parametrize("asked_first", [True, False])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_arrays_come_bit_for_bit(pair: Pair, values: list[np.ndarray], asked_first: bool) -> None:
    arrays = [jax.device_put(value) for value in values]
    name = pair.name()
    if not asked_first:
        pair.sender.serve(name, arrays)
    arriving = pair.pull(name, *values)
    if asked_first:
        assert not arriving.is_ready()
        pair.sender.serve(name, arrays)
    found = came(arriving)
    assert isinstance(found, list)
    for one, value in zip(found, values, strict=True):
        assert (one.shape, one.dtype) == (value.shape, value.dtype)
        assert np.asarray(one).tobytes() == np.asarray(value).tobytes()
        assert one.committed
    assert pair.arrivals.acquire(timeout=10), "who waits is told"


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_they_come_unasked_where_the_receiver_is_known(pair: Pair, way: str, values: list[np.ndarray]) -> None:
    pair.acquaint()
    name, is_small = pair.name(), sum(value.nbytes for value in values) <= neighbours.MAX_PACKET_BYTES - 9
    pair.sender.serve(name, [jax.device_put(value) for value in values])
    if way == "read" or is_small:
        until(lambda: len(pair.unasked()) == 1, "nothing came unasked")
    found = came(pair.pull(name, *values))
    assert isinstance(found, list)
    for one, value in zip(found, values, strict=True):
        assert (one.shape, one.dtype) == (value.shape, value.dtype)
        assert np.asarray(one).tobytes() == np.asarray(value).tobytes()
    until(lambda: not pair.kept(), "the sender keeps what was taken")
    near = pair.near()
    assert (pair.unasked(), near._offers, near._asked) == ([], {}, {})


def test_what_is_computed_later_comes_unasked_too(pair: Pair) -> None:
    pair.acquaint()
    name, value = pair.name(), np.ones((1024, 1024), np.float32)
    pair.sender.serve(name, [jax.jit(lambda x: x @ x @ x @ x)(value)])
    (found,) = came(pair.pull(name, value))  # type: ignore[misc]
    np.testing.assert_array_equal(np.asarray(found), 2.0**30)
    until(lambda: not pair.kept(), "the sender keeps what was taken")


def test_few_are_sent_unasked_and_the_others_wait_until_they_are_asked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_offers, "MAX_UNASKED", 2)
    pair.acquaint()
    values = {pair.name(): np.full(3, k, np.float32) for k in range(5)}
    for name, value in values.items():
        pair.sender.serve(name, [there(value)])
    until(lambda: len(pair.unasked()) == 2, "nothing came unasked")
    assert len(pair.near()._offers) == 3
    for name, value in values.items():
        (found,) = came(pair.pull(name, value))  # type: ignore[misc]
        np.testing.assert_array_equal(np.asarray(found), value)
    until(lambda: not pair.kept(), "the sender keeps what was taken")


@pytest.mark.parametrize("can", [True, False])
@pytest.mark.parametrize("size", [3, MIB])
def test_who_asks_while_something_is_sent_unasked_gets_it_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, size: int, can: bool
) -> None:
    """Also where it could not be sent after all."""
    pair.acquaint()
    name, value = pair.name(), np.arange(size, dtype=np.float32)
    at_once, arriving = neighbours.Connection.send_at_once, list[Arriving]()

    def sends(connection: neighbours.Connection, message: bytes) -> bool:
        arriving.append(pair.pull(name, value))
        return can and at_once(connection, message)

    monkeypatch.setattr(neighbours.Connection, "send_at_once", sends)
    pair.sender.serve(name, [there(value)])
    if not arriving:
        arriving.append(pair.pull(name, value))  # what is big is not sent unasked by pipes
    (found,) = came(arriving[0])  # type: ignore[misc]
    np.testing.assert_array_equal(np.asarray(found), value)
    until(lambda: not (pair.kept() or pair.near()._asked), "the sender keeps what was taken")
    assert not pair.unasked()


def test_what_came_unasked_is_asked_for_again_where_only_the_connection_has_ended(pair: Pair) -> None:
    pair.acquaint()
    name, value = pair.name(), np.arange(3, dtype=np.float32)
    pair.sender.serve(name, [there(value)])
    until(lambda: len(pair.unasked()) == 1, "nothing came unasked")
    (connection,) = pair.near()._receivers
    connection.end()
    until(lambda: not (pair.unasked() or pair.kept()), "it stays")
    (found,) = came(pair.pull(name, value))  # type: ignore[misc]
    np.testing.assert_array_equal(np.asarray(found), value)


@pytest.mark.parametrize("size", [3, MIB])
@pytest.mark.parametrize("how", ["taken back", "its receiver is lost"])
def test_what_is_not_wanted_any_more_just_before_it_is_sent_unasked_is_not_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, size: int, how: str
) -> None:
    pair.acquaint()
    name, parts = pair.name(), near_offers._parts

    def ends(arrays: Any) -> Any:
        pair.sender.take_back(name, [], LOST) if how == "taken back" else pair.sender.set_peers(pair.peers[:1])
        return parts(arrays)

    monkeypatch.setattr(near_offers, "_parts", ends)
    pair.sender.serve(name, [there(np.ones(size, np.float32))])
    assert (pair.kept(), pair.near()._offers, pair.unasked()) == ([], {}, [])


def test_what_does_not_fit_what_was_sent_unasked_is_an_error_and_the_sender_keeps_nothing(pair: Pair) -> None:
    pair.acquaint()
    for size in (3, MIB):
        name = pair.name()
        pair.sender.serve(name, [there(np.ones(size, np.float32))])
        failure = came(pair.pull(name, np.ones(5, np.float32)))
        assert isinstance(failure, Failure)
        assert "in place of arrays of 20" in failure.message
        until(lambda: not pair.kept(), "the sender keeps what was taken")


def test_what_came_unasked_goes_with_its_sender(pair: Pair) -> None:
    pair.acquaint()
    name, value = pair.name(), np.ones(3, np.float32)
    pair.sender.serve(name, [there(value)])
    until(lambda: len(pair.unasked()) == 1, "nothing came unasked")
    assert len(pair.kept()) == 1
    pair.receiver.set_peers(pair.peers[1:])
    until(lambda: not (pair.unasked() or pair.kept()), "it stays")


def test_columns_in_memory_come_as_rows(pair: Pair) -> None:
    from jax.experimental.layout import Format, Layout

    value = np.arange(600 * 500, dtype=np.float32).reshape(600, 500)
    where = SingleDeviceSharding(jax.local_devices()[0])
    columns = jax.device_put(value, Format(Layout((1, 0)), where))
    name = pair.name()
    pair.sender.serve(name, [columns])
    found = came(pair.pull(name, value))
    assert isinstance(found, list)
    np.testing.assert_array_equal(np.asarray(found[0]), value)


def test_what_is_still_computed_is_waited_for(pair: Pair) -> None:
    start = jax.device_put(np.eye(1000, dtype=np.float32))
    computed = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda k, v: v @ x, x))(start)
    name = pair.name()
    arriving = pair.pull(name, start)
    pair.sender.serve(name, [computed])
    found = came(arriving)
    assert isinstance(found, list)
    np.testing.assert_array_equal(np.asarray(found[0]), np.eye(1000))


@pytest.mark.parametrize("size", [3, MIB])
def test_an_error_of_what_was_computed_comes_instead(pair: Pair, size: int) -> None:
    value = np.ones(size, np.float32)
    failed, known = pair.name(), pair.name()
    (kind,) = kinds(value)
    pair.sender.serve(failed, [jax.device_put(value), transfer.make_error_array(kind, "it did not work")])
    failure = came(pair.pull(failed, value, value))
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.host) == ("ExecutionError", 0)
    assert "it did not work" in failure.message
    assert OF_A_PEER in failure.message, "else computations of the receiver are blamed"
    pair.sender.serve(known, [transfer.make_error_array(kind, error_text(LOST))])
    assert came(pair.pull(known, value)) == LOST


def test_a_failure_comes_in_place_of_arrays(pair: Pair) -> None:
    before, after, replaced = pair.name(), pair.name(), pair.name()
    value = np.ones((64, 64), np.float32)
    arriving = pair.pull(before, value)
    pair.sender.serve_failure(before, [], LOST)
    assert came(arriving) == LOST
    pair.sender.serve_failure(after, [], LOST)
    assert came(pair.pull(after, value)) == LOST
    pair.sender.serve(replaced, [jax.device_put(value)])
    pair.sender.take_back(replaced, [], LOST)
    until(lambda: not pair.unasked() and not pair.kept(), "what came unasked is not forgotten")
    assert came(pair.pull(replaced, value)) == LOST


def test_an_offer_is_gone_once_it_is_sent_or_taken_back_or_its_receiver_is_lost(pair: Pair) -> None:
    value = jax.device_put(np.ones(MIB, np.float32))
    names = [pair.name() for _ in range(3)]
    for name in names:
        pair.sender.serve(name, [value])
    assert len(pair.near()._offers) == 3
    assert isinstance(came(pair.pull(names[0], value)), list)
    pair.sender.take_back(names[1], [], LOST)
    assert len(pair.near()._offers) == 1
    pair.sender.serve_failure(pair.name(), [], LOST)
    pair.sender.set_peers(pair.peers[:1])
    assert not pair.near()._offers
    assert not pair.near()._failed


def test_failures_in_place_of_what_was_taken_back_are_bounded_and_others_wait_until_they_are_asked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pathways_ray.executor.data.near_offers.MAX_FAILURES", 3)
    failed = [pair.name() for _ in range(5)]
    for name in failed:
        pair.sender.serve_failure(name, [], LOST)
    for _ in range(10):
        pair.sender.take_back(pair.name(), [], LOST)
    assert len(pair.near()._failed) == 3
    assert [came(pair.pull(name, np.ones(3))) for name in failed] == [LOST] * 5
    assert not pair.near()._offers


def test_hosts_of_another_machine_or_another_secret_are_not_near(pair: Pair) -> None:
    peer = pair.peers[0]
    assert is_near(peer, MACHINE)
    assert not is_near(Peer(0, 1, peer.transfer_address), "")
    assert not is_near(peer, "elsewhere")
    assert not is_near(None, MACHINE)
    with pytest.raises(ConnectionRefusedError):
        neighbours.Connection.to(neighbours.name_of(peer.transfer_address, "another"), None, None)


def test_a_peer_that_cannot_be_reached_is_lost(pair: Pair) -> None:
    pair.receiver.set_peers((Peer(0, 2, "127.0.0.1:1", machine=MACHINE),))
    failure = pair.receiver.pull(0, pair.name(), kinds(np.ones(3)))
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.host) == ("HostLost", 0)


@pytest.mark.parametrize("sent", [b"x", b"a" + bytes(7), b"h" + bytes(8), b"a" + bytes(9), os.urandom(5000)])
def test_who_does_not_follow_the_protocol_is_hung_up_on(pair: Pair, sent: bytes) -> None:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(10)
    with stranger:
        stranger.connect(neighbours.name_of(pair.sender.address, SECRET))
        stranger.send(sent)
        assert stranger.recv(10) == b""
    name = pair.name()
    pair.sender.serve(name, [jnp.ones(3)])
    assert isinstance(came(pair.pull(name, np.ones(3, np.float32))), list), "others go on"


def test_a_guessed_name_gets_nothing(pair: Pair) -> None:
    name = pair.name()
    pair.sender.serve(name, [jnp.ones(3)])
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with stranger:
        stranger.connect(neighbours.name_of(pair.sender.address, SECRET))
        stranger.send(b"a" + name.to_bytes(8, "little"))
        stranger.settimeout(0.3)
        with pytest.raises(TimeoutError):
            stranger.recv(10)


def test_arrays_of_other_sizes_than_expected_are_an_error(pair: Pair) -> None:
    """Both ends derive the types from one plan, so that this never happens; bytes at wrong places would be worse."""
    small, big = pair.name(), pair.name()
    pair.sender.serve(small, [jnp.ones(3)])
    pair.sender.serve(big, [jnp.ones(MIB)])
    failure = came(pair.pull(small, np.ones(4, np.float32)))
    assert isinstance(failure, Failure)
    assert "in place of arrays of 16" in failure.message
    failure = came(pair.pull(big, np.ones(MIB + 1, np.float32)))
    assert isinstance(failure, Failure)
    assert f"{4 * MIB} bytes came" in failure.message
    until(lambda: not is_on_its_way(pair.sender), "the sender waits for one who takes nothing")


def test_a_write_after_the_end_leaves_no_pipe_open() -> None:
    """A socket that only its last reference closes warns, which is an error in tests."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        connection = neighbours.Connection(mine, lambda *_: None, lambda _: None)
        connection.end()
        with pytest.raises(EOFError):
            connection.write(b"late", [np.ones(3)])


def test_nothing_stays_open(pair: Pair) -> None:
    value = jax.device_put(np.ones(MIB, np.float32))

    def once() -> None:
        name = pair.name()
        pair.sender.serve(name, [value])
        assert isinstance(came(pair.pull(name, value)), list)

    once()
    process = psutil.Process()
    before = process.num_fds()
    for _ in range(20):
        once()
    until(lambda: process.num_fds() <= before, "descriptors are left")
    pair.receiver.set_peers(())
    until(lambda: process.num_fds() <= before - 2, "a connection to who is gone is left")


PEER = """
    import sys, time, threading
    import jax, numpy as np
    from jax.sharding import SingleDeviceSharding
    from pathways_ray.executor.data import near_offers
    from pathways_ray.executor.data.device_transfer import DeviceTransfer
    from pathways_ray.ir.plan import transfer_id
    from pathways_ray.transport import neighbours
    from pathways_ray.transport.messages import Peer
    if sys.argv[1:] == ["piped"]:
        near_offers.places_of = lambda arrays: None
    machine = neighbours.machine()
    made = DeviceTransfer(0, jax.local_devices()[0].client, "127.0.0.1", "the link secret", machine)
    print(made.address, flush=True)
    other = sys.stdin.readline().strip()
    made.set_peers((Peer(1, 1, other, machine=machine),))
    for line in sys.stdin:
        what, launch, count = line.split()
        name = transfer_id(int(launch), 0, int(what == "serve"))
        if what == "serve":
            made.serve(name, [jax.device_put(np.arange(int(count), dtype=np.float32))])
        else:
            kind = jax.ShapeDtypeStruct((int(count),), np.float32, sharding=SingleDeviceSharding(jax.devices()[0]))
            made.pull(1, name, [kind])
        print("done", flush=True)
"""


class Other:
    """A host in a process of its own: number 0, and this process is number 1."""

    def __init__(self, way: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PEER), way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[4])},
        )
        self.transfer = DeviceTransfer(1, jax.local_devices()[0].client, "127.0.0.1", SECRET, MACHINE)
        self.transfer.set_peers((Peer(0, 1, self.say(self.transfer.address), machine=MACHINE),))

    def say(self, *words: object) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def pull(self, launch: int, count: int) -> Arriving:
        pulled = self.transfer.pull(0, transfer_id(launch, 0, 1), kinds(np.zeros(count, np.float32)))
        assert isinstance(pulled, list)
        return pulled[0]


@pytest.fixture
def other(way: str) -> Iterator[Other]:
    made = Other(way)
    yield made
    made.transfer.set_peers(())
    made.process.kill()
    made.process.communicate()


def is_on_its_way(transfer: DeviceTransfer) -> bool:
    """Whether something big is on its way to or from a host."""
    near: Any = transfer._near
    connections = (*near.pulls._awaited, *near.offers._receivers)
    return any(one._pipes for one in connections) or any(near.offers._kept.values())


def offers_of(other: Other) -> Any:
    near: Any = other.transfer._near
    return near.offers


COUNT = 64 * MIB // 4


def test_arrays_cross_processes_both_ways(other: Other) -> None:
    assert other.say("serve", 1, COUNT) == "done"
    found = came(other.pull(1, COUNT))
    assert isinstance(found, list)
    np.testing.assert_array_equal(np.asarray(found[0]), np.arange(COUNT, dtype=np.float32))
    other.say("pull", 2, COUNT)
    other.transfer.serve(transfer_id(2, 0, 0), [found[0]])
    near = offers_of(other)
    until(lambda: not near._offers, "it is not asked for")


@pytest.mark.parametrize("launches", [1, 6], ids=["one", "more than pipes"])
def test_a_sender_killed_in_the_middle_is_a_lost_host(other: Other, launches: int) -> None:
    pulls = [other.pull(launch, COUNT) for launch in range(1, launches + 1)]
    waiting = other.pull(99, 5)
    process = psutil.Process(other.process.pid)
    for launch in range(1, launches + 1):
        other.say("serve", launch, COUNT)
    until(lambda: is_on_its_way(other.transfer) or pulls[0].is_ready(), "nothing is on its way")
    process.suspend()
    assert not waiting.is_ready()
    process.send_signal(signal.SIGKILL)
    for one in (*pulls, waiting):
        found = came(one)
        if isinstance(found, Failure):  # else it was here before
            assert (found.kind, found.host) == ("HostLost", 0)
    assert waiting.failure is not None
    assert not is_on_its_way(other.transfer)


def test_what_a_suspended_sender_sends_fails_once_it_is_lost_and_goes_on_if_it_is_not(other: Other) -> None:
    process = psutil.Process(other.process.pid)
    process.suspend()
    kept, lost = other.pull(1, COUNT), other.pull(2, COUNT)
    time.sleep(0.2)
    assert not kept.is_ready()
    process.resume()
    other.say("serve", 1, COUNT)
    assert isinstance(came(kept), list)
    process.suspend()
    other.transfer.set_peers(())
    found = came(lost)
    assert isinstance(found, Failure)
    assert (found.kind, found.host) == ("HostLost", 0)


@pytest.mark.parametrize("end", ["killed", "lost"])
def test_a_receiver_that_ends_in_the_middle_frees_its_sender(other: Other, end: str) -> None:
    near = offers_of(other)
    value = jax.device_put(np.ones(COUNT, np.float32))
    other.say("pull", 1, COUNT)
    until(lambda: bool(near._asked), "nobody asks")
    process = psutil.Process(other.process.pid)
    process.suspend()
    other.transfer.serve(transfer_id(1, 0, 0), [value])
    until(lambda: is_on_its_way(other.transfer), "nothing is on its way")
    small = transfer_id(2, 0, 0)
    other.transfer.serve(small, [jnp.ones(3)])
    if end == "killed":
        process.kill()
        until(lambda: not near._receivers, "its connection is there")
    other.transfer.set_peers(())
    until(lambda: not near._receivers, "its connection is there")
    assert not near._offers
    import gc

    def freed() -> bool:
        gc.collect()
        return sys.getrefcount(value) <= 2

    until(freed, "the array is kept")
