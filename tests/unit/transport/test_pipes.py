"""The bytes of arrays from one process to another by a pipe, and ends that come too early."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pathways_ray.errors import WireError
from pathways_ray.transport import pipes
from pathways_ray.transport.peer_memory import PeerMemory
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


@pytest.mark.parametrize("copied", [pipes.MAX_COPIED_BYTES, 0])
def test_a_host_that_takes_nothing_gets_the_rest_later(monkeypatch: pytest.MonkeyPatch, copied: int) -> None:
    """From a copy, whatever becomes of the array; or from the array, for which the caller waits."""
    monkeypatch.setattr(pipes, "PATIENCE_S", 0.05)
    monkeypatch.setattr(pipes, "MAX_COPIED_BYTES", copied)
    client, host = ends()
    array, over = LARGE.copy(), threading.Event()
    writer = beside(lambda: client.write([array[:2], array[2]], over.set))
    writer.join(LIMIT_S if copied else 0.3)
    assert writer.is_alive() == (not copied)
    if copied:
        array[:] = 0
    assert not over.is_set()
    buffer = np.empty(LARGE.nbytes, np.uint8)
    host.read([buffer])
    assert ended(writer)
    assert over.wait(LIMIT_S)
    assert buffer.tobytes() == LARGE.tobytes()


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


@pytest.mark.parametrize(
    "kind",
    [
        (socket.AF_UNIX, socket.SOCK_DGRAM),
        (socket.AF_UNIX, socket.SOCK_SEQPACKET),
        (socket.AF_INET, socket.SOCK_DGRAM),
        (socket.AF_INET, socket.SOCK_STREAM),
        (socket.AF_NETLINK, socket.SOCK_RAW),
    ],
    ids=str,
)
def test_a_socket_of_another_kind_is_refused(kind: tuple[int, int]) -> None:
    came = SharedFile(socket.socket(*kind).detach())
    with pytest.raises(WireError, match="no end of a pipe"):
        is_pipe(came)
    assert os.fstat(came.descriptor), "it is closed with its last reference, and not before"


def test_a_socket_that_was_opened_as_a_path_is_refused_and_leaves_no_descriptor(tmp_path: Path) -> None:
    """A client that hands over many of them would take all that its host has."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        came = SharedFile(os.open(tmp_path / "s", os.O_PATH))
        before = len(os.listdir("/proc/self/fd"))
        for make in (is_pipe, HostPipe):
            with pytest.raises(OSError, match="Bad file descriptor"):
                make(came)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_without_descriptors_an_end_says_no_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("too many open files")

    client = Pipe()
    assert client.other is not None
    monkeypatch.setattr(socket, "socketpair", full)
    monkeypatch.setattr(os, "dup", full)
    with pytest.raises(OSError, match="too many"):
        Pipe()
    with pytest.raises(OSError, match="too many"):
        HostPipe(client.other)


def test_a_program_with_a_time_limit_for_its_own_sockets_writes_and_reads_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`socket.setdefaulttimeout` holds for each socket that is made in the process."""
    socket.setdefaulttimeout(0.05)
    try:
        client, host = ends()
        other, writing = ends()
    finally:
        socket.setdefaulttimeout(None)
    monkeypatch.setattr(pipes, "MAX_COPIED_BYTES", 0)
    buffer, back = np.empty(LARGE.nbytes, np.uint8), np.empty(LARGE.nbytes, np.uint8)
    writer = beside(lambda: client.write([LARGE]))
    time.sleep(0.3)
    host.read([buffer])
    assert ended(writer)
    threading.Timer(0.3, lambda: writing.write([LARGE])).start()
    other.read([back])
    assert buffer.tobytes() == back.tobytes() == LARGE.tobytes()


PROGRAM = """
import signal, socket, sys
import numpy as np
from pathways_ray.transport.local_sockets import LocalSocket
from pathways_ray.transport.pipes import Pipe
from pathways_ray.transport.sockets import PlainSocket
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
pipe = Pipe()
pipe.other = None
pipe.write([np.zeros(1 << 20)])
mine, theirs = socket.socketpair()
theirs.close()
assert not PlainSocket(mine).write(b"hello", True)
local = LocalSocket.__new__(LocalSocket)
import threading
import time
local._sending = threading.Lock()
local.connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
other.close()
assert not local.send(b"hello")
print("lives")
"""


def test_a_program_that_has_set_sigpipe_back_does_not_end_with_the_other_end() -> None:
    """As programs of the command line do, which would end without a word."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "lives\n"), ran.stderr


class Reading:
    """A client's pipe and its host's end, both of this process, and the connection by which the pipe came."""

    def __init__(self) -> None:
        self.pipe, self.host = ends()
        self.mine, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.places = [(LARGE.ctypes.data, LARGE.nbytes)]
        self.buffers = [np.zeros(LARGE.nbytes, np.uint8)]
        self.turn = threading.Semaphore(1)

    def read_there(self) -> bool:
        with self.mine, self.theirs:
            return self.host.read_there(self.theirs, self.places, self.buffers, self.turn)

    def write(self) -> threading.Thread:
        return beside(lambda: self.pipe.write([LARGE], readable=True))

    def check(self) -> None:
        assert self.buffers[0].tobytes() == LARGE.tobytes()


def test_a_host_reads_in_the_clients_memory_and_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways_ray.transport.peer_memory.PART_BYTES", 1 << 20)
    monkeypatch.setattr(Pipe, "_sent", None)
    reading = Reading()
    writer = reading.write()
    assert reading.read_there()
    reading.check()
    assert ended(writer)


@pytest.mark.parametrize("refused", [PermissionError(1, "not permitted"), OSError(38, "not implemented")], ids=str)
def test_a_host_that_may_not_read_has_it_written(monkeypatch: pytest.MonkeyPatch, refused: OSError) -> None:
    def refuse(*_: object) -> None:
        raise refused

    monkeypatch.setattr(pipes, "PeerMemory", refuse)
    reading = Reading()
    writer = reading.write()
    assert not reading.read_there()
    reading.host.read(reading.buffers)
    reading.check()
    assert ended(writer)


def test_a_host_that_may_not_read_is_told_of_no_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    may: list[bool] = []
    for refused in (False, True):
        with monkeypatch.context() as patched:
            if refused:
                patched.setattr(PeerMemory, "read", lambda *_: os.close(-1))
            reading = Reading()
            write = partial(reading.pipe.write, [LARGE], readable=True)
            writer = beside(lambda write=write: may.append(write()))  # type: ignore[misc]
            if not reading.read_there():
                reading.host.read(reading.buffers)
            assert ended(writer)
            reading.check()
    assert may == [True, False]


def test_without_a_turn_it_is_written_this_time() -> None:
    reading, may = Reading(), list[bool]()
    writer = beside(lambda: may.append(reading.pipe.write([LARGE], readable=True)))
    with reading.turn:
        assert not reading.read_there()
    reading.host.read(reading.buffers)
    assert ended(writer)
    assert may == [True]
    reading.check()


def test_signals_make_the_wait_for_a_silent_host_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would begin a limit of the socket anew."""
    import signal

    monkeypatch.setattr(pipes, "READING_S", 0.3)
    monkeypatch.setattr(pipes, "PATIENCE_S", 0.05)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        reading = Reading()
        giving_up = threading.Timer(LIMIT_S, reading.host.end)
        giving_up.start()
        reading.pipe.write([LARGE[0, :8]], readable=True)
        assert giving_up.is_alive(), "it has waited for the end of the host"
        giving_up.cancel()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    reading.mine.close()
    reading.theirs.close()


def test_a_wrong_address_has_it_written() -> None:
    reading = Reading()
    reading.places = [(4096, LARGE.nbytes)]
    writer = reading.write()
    assert not reading.read_there()
    reading.host.read(reading.buffers)
    reading.check()
    assert ended(writer)


GIVER = """
import socket, sys
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
with socket.socket(fileno=int(sys.argv[1])) as other:
    socket.send_fds(other, [b"x"], [pair[0].fileno()])
    other.recv(1)
"""


@pytest.mark.parametrize("which", ["pipe", "connection"])
def test_no_process_is_read_but_the_one_that_made_both_ends(which: str) -> None:
    """The other one is of this user as well, so that the system would let it be read; but it waits for nothing."""
    reading = Reading()
    mine, theirs = socket.socketpair()
    with mine, theirs:
        giver = subprocess.Popen([sys.executable, "-c", GIVER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        _, descriptors, _, _ = socket.recv_fds(mine, 1, 1)
        if which == "pipe":
            reading.host = HostPipe(SharedFile(os.dup(descriptors[0])))
        else:
            reading.theirs.close()
            reading.theirs = socket.socket(fileno=os.dup(descriptors[0]))
        os.close(descriptors[0])
        assert not reading.read_there()
        assert not reading.buffers[0].any()
        mine.send(b"x")
        assert giver.wait(LIMIT_S) == 0


def test_who_has_waited_for_long_is_not_read_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may change the array as soon as it is written, so that what is read then is not taken."""
    monkeypatch.setattr(pipes, "READING_S", 0.05)
    may_say, read = threading.Event(), PeerMemory.read

    def slowly(self: PeerMemory, *what: object) -> None:
        assert may_say.wait(LIMIT_S)
        read(self, what[0], what[1])  # type: ignore[arg-type]

    monkeypatch.setattr(PeerMemory, "read", slowly)
    reading = Reading()
    said: list[bool] = []
    host = beside(lambda: said.append(reading.read_there()))
    ahead = reading.pipe._socket
    monkeypatch.setattr(Pipe, "_sent", lambda self, part: may_say.set() or part[self._socket.send(part) :])
    writer = reading.write()
    assert ended(host)
    assert said == [False]
    reading.buffers[0][:] = 0
    reading.host.read(reading.buffers)
    reading.check()
    assert ended(writer)
    assert ahead.fileno() == -1


def test_a_host_that_reads_for_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "READING_S", 0.2)
    for name in ("PART_BYTES", "SHARE_BYTES"):
        monkeypatch.setattr(f"pathways_ray.transport.peer_memory.{name}", 1 << 20)
    reading = Reading()
    say = HostPipe._say

    def slowly(self: HostPipe, what: bytes) -> None:
        time.sleep(0.08)
        say(self, what)

    monkeypatch.setattr(HostPipe, "_say", slowly)
    writer = reading.write()
    assert reading.read_there()
    assert ended(writer)


@pytest.mark.parametrize("who", ["host", "client"])
def test_an_end_that_goes_while_the_other_waits_for_it(who: str) -> None:
    reading = Reading()
    if who == "host":
        writer = reading.write()
        reading.host.end()
        assert ended(writer)
    else:
        reading.pipe.end()
        assert not reading.read_there()
        with pytest.raises(WireError, match="hung up"):
            reading.host.read(reading.buffers)
    reading.mine.close()
    reading.theirs.close()
