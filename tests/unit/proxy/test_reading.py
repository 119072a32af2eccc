"""Big values read by a proxy's client: the count of what it asks for."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pathways_ray.proxy.handover import Handover, Handovers
from pathways_ray.proxy.reading import BigValues
from pathways_ray.transport.shared_memory import SharedFile

ARRAY: Any = SimpleNamespace(sharding=SimpleNamespace(device_set={0}), dtype=np.uint8, size=8, shape=(8,))


class Program:
    """In place of the program that hands arrays over: each call that comes is answered with a file of its number."""

    def __init__(self, files: Handover) -> None:
        self.files, self.handed, self.error = files, 0, ""

    def execute_sharded(self, arrays: Any) -> None:
        if self.error:
            raise RuntimeError(self.error)
        self.handed += 1
        file = SharedFile.create(8)
        file.write(np.full(8, self.handed, np.uint8), 0)
        self.files.give(self.handed, file)


def test_nothing_is_asked_for_once_the_count_may_differ_from_that_of_the_proxy() -> None:
    """1. Two values come. 2. A call fails before it has left, as where another thread deletes the array. 3. From then
    on values are left to JAX: a question would wait for a file that never comes."""
    server = Handovers()
    files = server.open()
    reader = BigValues(files.invitation)
    reader._socket.connection.settimeout(5.0)
    program = reader._program = Program(files)
    for number in (1, 2):
        value = reader.value(None, ARRAY)
        assert value is not None
        assert value.tolist() == [number] * 8
    program.error = "Array has been deleted"
    with pytest.raises(RuntimeError, match="deleted"):
        reader.value(None, ARRAY)
    program.error = ""
    assert reader.value(None, ARRAY) is None
    assert program.handed == 2
    reader._socket.close()
    server.close()


def test_nothing_is_asked_for_once_the_proxy_has_hung_up() -> None:
    """Each value would be fetched twice."""
    server = Handovers()
    files = server.open()
    reader = BigValues(files.invitation)
    reader._socket.connection.settimeout(5.0)
    program = reader._program = Program(files)
    files.close()
    assert reader._socket.connection.recv(1, socket.MSG_PEEK) == b""  # it has
    assert [reader.value(None, ARRAY) for _ in range(3)] == [None] * 3
    assert program.handed == 1
    reader._socket.close()
    server.close()
