"""Peers that are lost: what a host has offered is taken back, and what it pulls from one that says nothing fails."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pathways_ray.errors import Failure
from pathways_ray.executor.data.device_transfer import DeviceTransfer, return_free_memory
from pathways_ray.executor.data.failure_texts import failure_in
from pathways_ray.ir.plan import transfer_id
from pathways_ray.transport.messages import Peer
from tests.waiting import until

LOST = Failure("HostLost", "host 2 was lost", host=2)
OFFER_BYTES = 32 << 20


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def types(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    where = SingleDeviceSharding(jax.local_devices()[0])
    return [jax.ShapeDtypeStruct(shape, np.float32, sharding=where) for shape in shapes]


def tiny(count: int) -> list[jax.ShapeDtypeStruct]:
    where = SingleDeviceSharding(jax.local_devices()[0])
    return [jax.ShapeDtypeStruct((1,), np.uint8, sharding=where)] * count


@pytest.fixture(scope="module")
def pair() -> tuple[DeviceTransfer, DeviceTransfer]:
    client = jax.local_devices()[0].client
    sender, receiver = (DeviceTransfer(host, client, "127.0.0.1", "the link secret") for host in (0, 1))
    for transfer in (sender, receiver):
        transfer.set_peers((Peer(0, 1, sender.address), Peer(1, 1, receiver.address)))
    return sender, receiver


def failure_of(array: Any) -> Failure | None:
    until(array.is_ready, "nothing came", within_s=10.0)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        array.block_until_ready()
    return failure_in(str(raised.value))


def test_memory_of_what_is_taken_back_is_free(pair) -> None:
    sender, _ = pair
    add = jax.jit(lambda v, k: v + k)
    zeros = jax.device_put(np.zeros(OFFER_BYTES // 4, np.float32))
    add(zeros, 0.0).block_until_ready()
    gc.collect()
    return_free_memory()  # else the offers take what earlier tests have left, and seem to need none
    before = resident()
    names = [transfer_id(launch, 0, 1) for launch in range(1, 7)]
    for k, name in enumerate(names):
        sender.serve(name, [add(zeros, float(k)).block_until_ready()])
    gc.collect()
    assert resident() - before > 5 * OFFER_BYTES, "offers are kept until they are pulled"
    for name in names:
        sender.take_back(name, tiny(1), LOST)
    gc.collect()
    assert resident() - before < 2 * OFFER_BYTES


def test_memory_of_what_was_for_a_host_that_is_gone_is_free() -> None:
    """Nobody may be left who knows of the launch: its controller and its scheduler died too."""
    client = jax.local_devices()[0].client
    sender = DeviceTransfer(0, client, "127.0.0.1", "the link secret")
    there, other = Peer(1, 1, "127.0.0.1:1"), Peer(2, 1, "127.0.0.1:1")
    sender.set_peers((there, other))
    add = jax.jit(lambda v, k: v + k)
    zeros = jax.device_put(np.zeros(OFFER_BYTES // 4, np.float32))
    add(zeros, 0.0).block_until_ready()
    gc.collect()
    return_free_memory()
    before = resident()
    for k in range(6):
        sender.serve(transfer_id(k + 1, 0, 1), [add(zeros, float(k)).block_until_ready()])
    sender.set_peers((there,))
    gc.collect()
    assert resident() - before > 5 * OFFER_BYTES, "another one is gone"
    sender.set_peers((Peer(1, 2, "127.0.0.1:1", since=20),))
    gc.collect()
    assert resident() - before < 2 * OFFER_BYTES


def test_who_asked_before_gets_the_failure(pair) -> None:
    sender, receiver = pair
    name = transfer_id(11, 0, 1)
    pulled = receiver.pull(0, name, types((64, 64), (3,)))
    time.sleep(0.2)
    sender.take_back(name, tiny(2), LOST)
    assert [failure_of(array) for array in pulled] == [LOST, LOST]


def test_who_asks_afterwards_gets_the_failure(pair) -> None:
    sender, receiver = pair
    name = transfer_id(12, 0, 1)
    sender.serve(name, [jax.device_put(np.ones((64, 64), np.float32))])
    sender.take_back(name, tiny(1), LOST)
    (pulled,) = receiver.pull(0, name, types((64, 64)))
    assert failure_of(pulled) == LOST


def test_a_host_reaches_the_processes_that_got_the_launch(pair) -> None:
    sender, _ = pair
    sender.set_peers((Peer(1, 2, "of its successor", since=20),))
    assert sender.reaches(1, 21)
    assert not sender.reaches(1, 20), "the process that got this launch is gone"
    assert not sender.reaches(3, 21)


def test_what_is_pulled_from_a_peer_that_says_nothing_fails_once_it_is_lost() -> None:
    """The machine of the sender vanishes without a reset: here it never offers, and never ends the connection."""
    client = jax.local_devices()[0].client
    sender, receiver = (DeviceTransfer(host, client, "127.0.0.1", "the link secret") for host in (0, 1))
    receiver.set_peers((Peer(0, 1, sender.address),))
    arrays = receiver.pull(0, transfer_id(1, 0, 1), types((64, 64)))
    assert isinstance(arrays, list)
    (pulled,) = arrays
    time.sleep(0.3)
    assert not pulled.is_ready()
    receiver.set_peers(())
    assert failure_of(pulled) is None, "a failure of the connection, not of the peer"
    assert isinstance(receiver.pull(0, transfer_id(2, 0, 1), types((64, 64))), Failure)
