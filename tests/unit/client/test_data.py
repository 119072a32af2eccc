"""A client's data streams: the memory and the time that arrays take on their way, and messages that make no sense."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from pathways_ray import limits
from pathways_ray.client import data as data_module
from pathways_ray.client.array_pieces import Fetching, FetchPlan
from pathways_ray.client.data import DataLinks
from pathways_ray.errors import Failure, HostLost
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, SliceType
from pathways_ray.transport import frames
from pathways_ray.transport.messages import FetchPart, HostAddress, encode

MIB = 1 << 20
LIMIT_S = 20.0


def test_a_part_of_a_fetch_takes_no_further_copy_of_the_array() -> None:
    """Not a whole array cleared for each part: of 64 parts each was 8 times as dear then as of 8."""
    part, size = bytes(limits.PART_BYTES), 16 * limits.PART_BYTES
    fetching = Fetching((0,))
    fetching.add(FetchPart(1, 0, 0, size, part))
    tracemalloc.start()
    try:
        for offset in range(limits.PART_BYTES, size, limits.PART_BYTES):
            fetching.add(FetchPart(1, 0, offset, size, part))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not fetching.missing
    assert peak < limits.PART_BYTES


class Hosts:
    """Hosts that read what comes, keep none of it, and answer each piece with what they are told to say."""

    def __init__(self, count: int, says: bytes = b"") -> None:
        self.read = [0] * count
        self.says = says
        self.go = threading.Event()
        self._servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        for k in range(count):
            threading.Thread(target=self._serve, args=(k,), daemon=True).start()

    def _serve(self, k: int) -> None:
        peer, _ = self._servers[k].accept()
        room = bytearray(1 << 16)
        with peer:
            self.go.wait(LIMIT_S)
            while size := peer.recv_into(room):
                self.read[k] += size
                peer.sendall(self.says)

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def addresses(self) -> tuple[HostAddress, ...]:
        names = [server.getsockname() for server in self._servers]
        return tuple(HostAddress(k, 1, f"{host}:{port}") for k, (host, port) in enumerate(names))


@contextmanager
def links_to(hosts: Hosts) -> Iterator[DataLinks]:
    made = DataLinks(7, "token", hosts.addresses())
    try:
        yield made
    finally:
        made.close(Failure("SessionClosed", "over"))
        hosts.close()


def on_hosts(count: int) -> PlacedSlice:
    return PlacedSlice.on(SliceType(1, (count,), ("x",)), 0, tuple(Device(k, 0) for k in range(count)))


@pytest.mark.parametrize("spec", [((), ()), (("x",), ()), ((), ("x",))], ids=["replicated", "rows", "columns"])
def test_an_upload_takes_once_the_memory_of_its_array(spec: Any) -> None:
    """It is copied once, so that the caller may change it; on four hosts as on one. Parts are made as they leave."""
    array = np.ones((8192, 8192), np.float32)
    hosts = Hosts(4)
    with links_to(hosts) as data:
        tracemalloc.start()
        try:
            kind = ArrayType(array.shape, "float32")
            data.upload(1, array, kind, spec, on_hosts(4), "tag", lambda *_: None)
            hosts.go.set()
            each = array.nbytes if spec == ((), ()) else array.nbytes // 4
            deadline = time.monotonic() + LIMIT_S
            while min(hosts.read) < each and time.monotonic() < deadline:
                time.sleep(0.01)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert min(hosts.read) >= each
    under_way = 24 * MIB  # of each host: batches as they are encoded and sent, however big the array is
    assert peak < array.nbytes + 4 * under_way, f"{peak / array.nbytes:.2f} times the array"


def test_a_message_that_makes_no_sense_ends_what_waits() -> None:
    """A part that is longer than its array is no error of the protocol's own; the reader ends by it all the same."""
    sense = frames.frame(b"\x91" + encode(FetchPart(1, 0, 0, -5, b"x")))
    hosts = Hosts(1, says=sense)
    hosts.go.set()
    cover = FetchPlan.of_array(ArrayType((4,), "float32"), ((),), on_hosts(1))
    with links_to(hosts) as data, pytest.raises(HostLost, match="its messages cannot be read"):
        data.fetch(1, cover, lambda: None)


def test_a_put_to_a_host_that_does_not_come_back_is_a_typed_error_in_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    1. The stream to a host breaks, and nothing is heard of the host: a put waits for news.
    2. Half the limit later the host is known to be down; it is waited for no longer than what is left of the limit.
    """
    monkeypatch.setattr(data_module, "RECONNECT_LIMIT_S", 1.0)
    hosts = Hosts(1)
    hosts.go.set()
    array, kind = np.ones(4, np.float32), ArrayType((4,), "float32")
    with links_to(hosts) as data:
        data.upload(1, array, kind, ((),), on_hosts(1), "tag", lambda *_: None)
        data._links[0].end("its connection broke")
        threading.Timer(0.5, data.host_changed, (HostAddress(0, 1, ""),)).start()
        begun = time.monotonic()
        with pytest.raises(HostLost, match="host 0 is down, and was not back in 1 s"):
            data.upload(2, array, kind, ((),), on_hosts(1), "tag", lambda *_: None)
        assert time.monotonic() - begun >= 0.9
