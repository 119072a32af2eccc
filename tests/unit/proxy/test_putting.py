"""Big arrays that a proxy's client puts by pipes: the count of calls and ends, and programs that are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pathways_ray.ir.types import ArrayType
from pathways_ray.proxy.arrays import Code, Refused
from pathways_ray.proxy.codec import Reader
from pathways_ray.proxy.descriptors import messages
from pathways_ray.proxy.handover import NUMBER_BYTES, Handover, Handovers
from pathways_ray.proxy.programs import PLUGIN_PROGRAM, putting
from pathways_ray.proxy.putting import MAX_PROGRAMS, MAX_UNFINISHED, PUTTING, BigPuts
from pathways_ray.proxy.reading import READING
from pathways_ray.transport import pipes
from pathways_ray.transport.local_sockets import LocalSocket
from pathways_ray.transport.pipes import HostPipe, Pipe
from pathways_ray.transport.shared_memory import SharedFile
from tests.waiting import until

DEVICE: Any = SimpleNamespace(id=0)
M = messages()
VALUE = np.arange(8, dtype=np.uint8)


@pytest.fixture
def files() -> Iterator[Handover]:
    server = Handovers()
    yield server.open()
    server.close()


class Proxy:
    """In place of the client of a proxy that reads each array at once, while its program writes; it may refuse."""

    def __init__(self, files: Handover) -> None:
        self.files, self.error = files, ""
        self.compiled, self.found = 0, np.zeros(8, np.uint8)

    def compile_ifrt_program(self, program: Any, options: Any) -> Any:
        self.compiled += 1
        if self.error:
            raise RuntimeError(self.error)
        return self

    def execute_sharded(self, arrays: Any) -> Any:
        if self.error:
            raise RuntimeError(self.error)
        end = self.files.taken()
        assert end is not None
        self.pipe = HostPipe(end)
        return self

    def disassemble_into_single_device_arrays(self) -> Any:
        self.pipe.read([self.found])
        return [[self.found.copy()]]


def test_each_array_comes_by_its_own_pipe_until_the_count_may_differ(files: Handover) -> None:
    """1. Two arrays of one type, which has one program. 2. A call that fails before it has left. 3. From then on JAX
    puts arrays: an end would be taken for another call's."""
    proxy = Proxy(files)
    puts = BigPuts(LocalSocket(files.invitation))
    for k in range(2):
        assert puts.put(proxy, VALUE + k, DEVICE).tolist() == (VALUE + k).tolist()
    assert proxy.compiled == 1
    proxy.error = "the session is over"
    with pytest.raises(RuntimeError, match="over"):
        puts.put(proxy, VALUE, DEVICE)
    proxy.error = ""
    assert puts.put(proxy, VALUE, DEVICE) is None


def test_a_type_that_the_proxy_refuses_is_asked_for_once(files: Handover) -> None:
    """Others go on, as many as there are; the programs of some are kept."""
    proxy = Proxy(files)
    puts = BigPuts(LocalSocket(files.invitation))
    proxy.error = "no such program"
    with pytest.raises(RuntimeError, match="no such"):
        puts.put(proxy, VALUE, DEVICE)
    proxy.error = ""
    assert puts.put(proxy, VALUE, DEVICE) is None
    assert proxy.compiled == 1
    for k in range(1, 2 + MAX_PROGRAMS):
        assert puts.put(proxy, VALUE, SimpleNamespace(id=k)).tolist() == VALUE.tolist()
    assert len(puts._programs) == MAX_PROGRAMS


def test_a_host_that_is_away_is_asked_again(files: Handover) -> None:
    proxy = Proxy(files)
    puts = BigPuts(LocalSocket(files.invitation))
    proxy.error = "UNAVAILABLE: HostLost: host 0 is down"
    with pytest.raises(RuntimeError, match="is down"):
        puts.put(proxy, VALUE, DEVICE)
    proxy.error = ""
    assert puts.put(proxy, VALUE, DEVICE).tolist() == VALUE.tolist()


class Interrupting(Proxy):
    """A proxy's client in whose calls another array is put, as by a signal handler."""

    def __init__(self, files: Handover) -> None:
        super().__init__(files)
        self.puts = BigPuts(LocalSocket(files.invitation))
        self.nested: list[Any] = []

    def execute_sharded(self, arrays: Any) -> Any:
        self.nested.append(self.puts.put(self, VALUE, DEVICE))
        return super().execute_sharded(arrays)


def test_a_put_in_the_midst_of_a_put_goes_as_ever(files: Handover) -> None:
    proxy = Interrupting(files)
    for _ in range(2):
        assert proxy.puts.put(proxy, VALUE, DEVICE).tolist() == VALUE.tolist()
    assert proxy.nested == [None, None]


class Stalled(Proxy):
    """A proxy that keeps the ends of pipes, and reads none."""

    def __init__(self, files: Handover) -> None:
        super().__init__(files)
        self.ends: list[Any] = []

    def execute_sharded(self, arrays: Any) -> Any:
        self.ends.append(self.files.taken())
        return self

    def disassemble_into_single_device_arrays(self) -> Any:
        return [["an array"]]


def test_behind_a_proxy_that_reads_nothing_arrays_go_as_ever(files: Handover, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. As many as may be unfinished wait. 2. A further one goes as ever. 3. The ends go, and with them the rest."""
    monkeypatch.setattr(pipes, "PATIENCE_S", 0.01)
    proxy, value = Stalled(files), np.zeros(4 << 20, np.uint8)
    puts = BigPuts(LocalSocket(files.invitation))
    found = [puts.put(proxy, value, DEVICE) for _ in range(MAX_UNFINISHED + 1)]
    assert found == ["an array"] * MAX_UNFINISHED + [None]
    proxy.ends.clear()
    gone = "pipes whose other ends are gone are still counted"
    until(lambda: puts.put(proxy, VALUE, DEVICE) is not None, gone)


def test_an_array_of_too_many_dimensions_is_refused() -> None:
    shape = M.IfrtRequest().make_array_from_host_buffer_request.shape
    shape.dims.extend([1 << 62] * 65)
    with pytest.raises(Refused, match="an array has 65 dimensions; 64 are the limit"):
        Reader(M).array_type(SimpleNamespace(kind=2), shape)


def test_an_end_is_taken_by_its_number(files: Handover) -> None:
    """None has come; another one has; a message without one has."""
    client = LocalSocket(files.invitation)
    assert files.taken() is None
    for number in (1, 3):
        assert client.send(number.to_bytes(NUMBER_BYTES, "little"), Pipe().other)
    assert files.taken() is None
    assert isinstance(files.taken(), SharedFile)
    assert client.send((4).to_bytes(NUMBER_BYTES, "little"))
    assert files.taken() is None
    files.close()
    assert files.taken() is None


def program(said: Any, kind: str = PLUGIN_PROGRAM) -> Any:
    data = PUTTING + (said if isinstance(said, bytes) else json.dumps(said).encode())
    return SimpleNamespace(type_name=kind, data=b"head" + data)


def test_a_program_says_what_comes() -> None:
    found = putting(program({"shape": [2, 3], "dtype": "bfloat16", "device": 1}), 2)
    assert found is not None
    assert found.by_pipe
    assert (found.signature.outputs, found.signature.devices) == ((ArrayType((2, 3), "bfloat16"),), (1,))
    assert putting(SimpleNamespace(type_name=PLUGIN_PROGRAM, data=READING), 2) is None
    assert putting(program({"shape": [2], "dtype": "int8", "device": 0}, "xla::ifrt::XlaProgram"), 2) is None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "cannot be read"),
        (b"\xff\x00", "cannot be read"),
        ({"shape": [2], "dtype": "int8"}, "missing required field `device`"),
        ({"shape": [2.5], "dtype": "int8", "device": 0}, "Expected `int`, got `float`"),
        ({"shape": [3, -1], "dtype": "int8", "device": 0}, "a dimension of -1"),
        ({"shape": [1 << 62] * 65, "dtype": "int8", "device": 0}, "length <= 64"),
        ({"shape": [2], "dtype": "no such", "device": 0}, "no such"),
        ({"shape": [2], "dtype": "object", "device": 0}, "no dtype 'object'"),
        ({"shape": [2], "dtype": "int8", "device": 2}, "device 2 is to come by a pipe; there are 0 to 1"),
        ({"shape": [2], "dtype": "int8", "device": -1}, "device -1"),
    ],
)
def test_a_program_that_cannot_be_read_is_refused(said: Any, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        putting(program(said), 2)
    assert refused.value.status.code == Code.INVALID_ARGUMENT
