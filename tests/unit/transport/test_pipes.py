"""The bytes of arrays from one process to another by a pipe, and ends that come too early."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable

import numpy as np
import pytest

from pathways_ray.errors import WireError
from pathways_ray.transport import pipes
from pathways_ray.transport.pipes import HostPipe, Pipe, is_pipe
from pathways_ray.transport.shared_memory import SharedFile

LIMIT_S = 20.0
LARGE = np.arange(3 << 20, dtype=np.float32).reshape(3, 1024, 1024)


def ends() -> tuple[Pipe, HostPipe]:
    pipe = Pipe()
    assert pipe.other is not None
    return pipe, HostPipe(pipe.other)


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(LIMIT_S)
    return not thread.is_alive()


@pytest.mark.parametrize(
    "arrays",
    [
        [LARGE],
        [LARGE[0], LARGE[1:, ::2]],
        [LARGE.T, np.array([7], np.float32)],
        [np.asfortranarray(LARGE[:, 5]), LARGE[:0], LARGE[2]],
        [np.array(3.0)],
    ],
    ids=["whole", "strided", "transposed", "empty", "scalar"],
)
def test_arrays_arrive_in_c_order(arrays: list[np.ndarray]) -> None:
    client, host = ends()
    buffers = [np.empty(array.nbytes, np.uint8) for array in arrays]
    writer = beside(lambda: client.write(arrays))
    host.read(buffers)
    assert ended(writer)
    for array, buffer in zip(arrays, buffers, strict=True):
        assert buffer.tobytes() == array.tobytes()


def test_a_client_that_hangs_up_leaves_an_error_with_what_is_missing() -> None:
    client, host = ends()
    client.write([LARGE[0, 0]])
    with pytest.raises(WireError, match=r"hung up, .* and 4096 bytes of an array are missing"):
        host.read([np.empty(8192, np.uint8)])


def test_a_client_that_sends_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "_LIMIT", struct.pack("ll", 0, 1000))
    client, host = ends()
    with pytest.raises(WireError, match="sent nothing for 60 s, and 8192 bytes"):
        host.read([np.empty(8192, np.uint8)])
    client.end()


def test_a_host_that_hangs_up_ends_the_writing() -> None:
    client, host = ends()
    writer = beside(lambda: client.write([LARGE]))
    host.end()
    assert ended(writer)


def test_either_end_can_be_stopped_while_it_waits() -> None:
    client, host = ends()
    writer = beside(lambda: client.write([LARGE]))
    client.end()
    assert ended(writer)
    client, host = ends()
    failed: list[Exception] = []

    def read() -> None:
        try:
            host.read([np.empty(8, np.uint8)])
        except WireError as error:
            failed.append(error)

    reader = beside(read)
    host.end()
    assert ended(reader)
    assert failed
    client.end()


def test_a_file_is_no_pipe() -> None:
    client = Pipe()
    assert client.other is not None
    assert is_pipe(client.other)
    assert not is_pipe(SharedFile.create(8))
