"""Transfers between hosts: their names on the network, and failures in place of arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import jax
import numpy as np
import psutil
import pytest
from jax.sharding import SingleDeviceSharding

from pathways_ray.errors import Failure
from pathways_ray.executor.data.device_transfer import (
    DeviceTransfer,
    hang_up,
    return_free_memory,
)
from pathways_ray.executor.data.failure_texts import error_text, failure_in
from pathways_ray.ir.plan import transfer_id
from pathways_ray.transport import neighbours
from pathways_ray.transport.messages import Peer
from tests.waiting import until

NAME = transfer_id(5, 1, 0)


def transfer(secret: str) -> DeviceTransfer:
    made = DeviceTransfer(0, jax.local_devices()[0].client, "127.0.0.1", secret)
    made.set_peers([Peer(0, 1, made.address, 0)])
    return made


def test_names_on_the_network_are_known_to_hosts_of_the_runtime_only() -> None:
    ours, again, others = transfer("secret"), transfer("secret"), transfer("another secret")
    names = {ours._secret_name(transfer_id(launch, edge, 1)) for launch in range(1, 100) for edge in range(10)}
    assert len(names) == 990
    assert max(names).bit_length() > 60
    assert ours._secret_name(NAME) == again._secret_name(NAME) != others._secret_name(NAME)
    assert ours._secret_name(NAME) != NAME
    kind = jax.ShapeDtypeStruct((4,), np.float32, sharding=SingleDeviceSharding(jax.local_devices()[0]))
    ours.serve(NAME, [jax.numpy.arange(4, dtype=np.float32)])
    pulled = ours.pull(0, NAME, [kind])
    assert isinstance(pulled, list)
    assert np.asarray(pulled[0]).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [10, 1_900, 2_048, 3_000, 100_000])
@pytest.mark.parametrize("letter", ["x", "ü", "\x01", '"'])
def test_a_failure_keeps_what_went_wrong_however_long_its_text(size: int, letter: str) -> None:
    """The root cause stands first in some texts, last in others."""
    made = transfer("secret")
    failure = Failure("ExecutionError", f"first {letter * size} last", "node" * size, "main.py:3", 2, ("told",) * size)
    kind = jax.ShapeDtypeStruct((4,), np.float32, sharding=SingleDeviceSharding(jax.local_devices()[0]))
    made.serve_failure(NAME, [kind], failure)
    pulled = made.pull(0, NAME, [kind])
    assert isinstance(pulled, list)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        pulled[0].block_until_ready()
    found = failure_in(str(raised.value))
    assert found is not None
    assert (found.kind, found.where, found.host) == ("ExecutionError", "main.py:3", 2)
    assert found.message.startswith("first")
    assert found.message.endswith("last")


def test_a_short_failure_travels_whole() -> None:
    failure = Failure("HostLost", "it went", "node", "main.py:3", 2, ("1 s before: up",))
    assert failure_in(error_text(failure)) == failure


@pytest.fixture
def free_memory() -> Iterator[None]:
    """120 MiB that are free, in blocks of 8 MiB, as edges are. glibc keeps them in its heap once a bigger one has come
    and gone."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("this C library is not glibc")
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    libc.free(libc.malloc(24 << 20))
    blocks = [libc.malloc(8 << 20) for _ in range(16)]
    for block in blocks:
        ctypes.memset(block, 1, 8 << 20)
    for block in blocks[:-1]:  # the last one stays, above the others
        libc.free(block)
    yield
    libc.free(blocks[-1])


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.usefixtures("free_memory")
def test_what_is_free_goes_back_to_the_system() -> None:
    there = resident()
    return_free_memory()
    assert there - resident() > 100 << 20


@pytest.mark.usefixtures("free_memory")
@pytest.mark.parametrize("machine", ["", neighbours.machine()], ids=["library", "local connections"])
def test_it_does_so_once_a_host_is_lost(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """By whichever way the arrays went, also where they only left."""
    monkeypatch.setattr("pathways_ray.executor.data.device_transfer.TRIM_AFTER_S", 0.1)
    made = DeviceTransfer(0, jax.local_devices()[0].client, "127.0.0.1", "secret", machine)
    peers = [Peer(host, 1, made.address, machine=machine) for host in (0, 1)]
    made.set_peers(peers)
    there = resident()
    made.set_peers(peers[:1])
    until(lambda: there - resident() >= 100 << 20, "it is kept")


def test_hanging_up_opens_no_file() -> None:
    """Copies of files that are no sockets stayed open, and were copied the next time: twice as many each time, until
    the process had all that it may have, and ended."""
    before = psutil.Process().num_fds()
    for _ in range(3):
        hang_up("127.0.0.1:9")
    assert psutil.Process().num_fds() == before
