"""Arrays by pipes whose host takes no ends any more, after their program was compiled: the proxy reads them itself, and
waits for none."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pathways_ray.proxy import events as do
from pathways_ray.proxy import host_buffers, piped_puts
from pathways_ray.proxy.arrays import Code
from pathways_ray.proxy.handover import NUMBER_BYTES
from pathways_ray.proxy.programs import PLUGIN_PROGRAM
from pathways_ray.proxy.putting import PUTTING
from pathways_ray.transport.local_sockets import LocalSocket
from pathways_ray.transport.pipes import Pipe
from tests.unit.proxy.test_server import Door, Stream
from tests.waiting import until

VALUE = np.arange(8, dtype=np.uint8)
PROGRAM = 1
WITHIN_S = 20.0


class Client:
    """A client of a proxy, whose commands are carried out as those of its requests are."""

    def __init__(self, folder: Path) -> None:
        self.door = Door(folder)
        self.stream = Stream(self.door)
        self.stream.ask("init_request")
        (self.connection,) = self.door.server._attached.connections.values()
        self.carrier, self.session = self.connection.carrier, self.door.sessions[0]
        self._socket = LocalSocket(self.connection.handover.invitation)
        self._numbers = itertools.count(1)
        said = PUTTING + json.dumps({"shape": [8], "dtype": "uint8", "device": 0}).encode()
        self.carry(do.Compile(PROGRAM, SimpleNamespace(type_name=PLUGIN_PROGRAM, data=said), None))
        self.session.near = False

    def carry(self, command: do.Command) -> list[do.Event]:
        """Carries out a command, or fails where that takes long."""

        def carried() -> list[do.Event]:
            with self.connection._lock:
                return self.carrier.carry_out(command)

        with ThreadPoolExecutor(1) as threads:
            return threads.submit(carried).result(WITHIN_S)

    def put(self, buffer: int) -> tuple[Pipe, list[do.Event]]:
        """Puts an array; the pipe, to which nothing is written yet, and the events that follow at once."""
        pipe = Pipe()
        assert self._socket.send(next(self._numbers).to_bytes(NUMBER_BYTES, "little"), pipe.other)
        return pipe, self.carry(do.Execute(PROGRAM, (), (buffer,), ()))

    def value(self, buffer: int) -> Any:
        return self.session.fetch_shard(self.carrier.buffers[buffer][0], 0).tolist()

    def close(self) -> None:
        self.door.channel.close()
        self.door.server.stop()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    made = Client(tmp_path)
    yield made
    made.close()


def test_what_stands_behind_an_array_that_is_read_here_comes_after_it(client: Client) -> None:
    """1. Two arrays are put, to whose pipes nothing is written. Nobody waits, and the first counts. 2. It comes; the
    second one does then. 3. What was asked for behind both has happened."""
    first, events = client.put(1)
    second, later = client.put(2)
    assert events == later == client.carry(do.Free((1,))) == []
    assert client.connection.host_buffers._bytes == VALUE.nbytes
    assert client.carrier.buffers == {}
    first.write([VALUE])
    until(lambda: 1 in client.carrier.buffers)
    assert client.value(1) == VALUE.tolist()
    assert 2 not in client.carrier.buffers
    second.write([VALUE + 1])
    until(lambda: 2 in client.carrier.buffers and 1 not in client.carrier.buffers)
    assert client.value(2) == (VALUE + 1).tolist()
    assert client.connection.host_buffers._bytes == 0
    assert client.door.server.account == {"passed_on": 0, "read_here": 2}


def test_an_array_whose_writer_hangs_up_is_broken_and_what_is_behind_it_goes_on(client: Client) -> None:
    half, _ = client.put(1)
    whole, _ = client.put(2)
    half.write([VALUE[:4]])
    whole.write([VALUE])
    until(lambda: 2 in client.carrier.buffers)
    assert client.value(2) == VALUE.tolist()
    assert client.carrier.failed[1].code == Code.DATA_LOSS
    assert "4 bytes of an array are missing" in client.carrier.failed[1].message
    assert client.connection.host_buffers._bytes == 0


def test_an_array_that_there_is_no_room_for_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffers, "MAX_BYTES", VALUE.nbytes - 1)
    _, (broken,) = client.put(1)
    assert isinstance(broken, do.Broken)
    assert broken.failure.code == Code.RESOURCE_EXHAUSTED
    monkeypatch.undo()
    pipe, events = client.put(2)
    assert events == []
    pipe.write([VALUE])
    until(lambda: 2 in client.carrier.buffers)


def test_a_client_that_goes_in_the_midst_of_its_array_leaves_no_thread(client: Client) -> None:
    def reads() -> bool:
        return any(thread.name == "pathways-proxy-put" for thread in threading.enumerate())

    pipe, _ = client.put(1)
    assert reads()
    client.stream.call.cancel()
    until(lambda: not reads())
    assert client.carrier.buffers == {}
    del pipe


def test_a_host_on_this_machine_gets_the_end(client: Client) -> None:
    client.session.near = True
    pipe = Pipe()
    writer = threading.Thread(target=pipe.write, args=([VALUE],))
    assert client._socket.send((1).to_bytes(NUMBER_BYTES, "little"), pipe.other)
    writer.start()
    assert client.carry(do.Execute(PROGRAM, (), (1,), ())) == []
    writer.join(WITHIN_S)
    assert client.value(1) == VALUE.tolist()
    assert client.door.server.account == {"passed_on": 1, "read_here": 0}


def test_not_everything_may_stand_behind_an_array_that_does_not_come(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program counts with its module. Beyond the limit the array has failed, and what is behind it goes on."""
    monkeypatch.setattr(piped_puts, "MAX_BEHIND_BYTES", 1 << 20)
    pipe, _ = client.put(1)
    for buffer in range(100, 200):
        assert client.carry(do.Free((buffer,))) == []
    assert client.carrier.failed == {}
    client.carry(do.Compile(2, SimpleNamespace(type_name="none", data=bytes(1 << 20)), None))
    until(lambda: 1 in client.carrier.failed)
    assert client.carrier.failed[1].code == Code.RESOURCE_EXHAUSTED
    assert "comes too slowly" in client.carrier.failed[1].message
    until(lambda: client.connection.host_buffers._bytes == 0)
    whole, _ = client.put(2)
    whole.write([VALUE])
    until(lambda: 2 in client.carrier.buffers)
    assert client.carrier.pipes._behind_bytes == 0
    del pipe


def test_an_array_that_no_thread_can_read_is_refused(client: Client) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pipe = Pipe()
    assert client._socket.send((1).to_bytes(NUMBER_BYTES, "little"), pipe.other)
    with client.connection._lock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        (broken,) = client.carrier.carry_out(do.Execute(PROGRAM, (), (1,), ()))
    assert isinstance(broken, do.Broken)
    assert broken.failure.code == Code.RESOURCE_EXHAUSTED
    assert client.connection.host_buffers._bytes == 0
