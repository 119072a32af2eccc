"""Pipes between a client and the hosts of its machine: the bytes of an array go from one memory to the other.

A pipe is two connected sockets of the machine; the host's end goes with a message over the local socket
(`local_sockets`). Both processes copy at the same time, into memory that the system gives in big pages; a file in
memory is written page by page, before its reader knows of it, and takes twice as long.

Where the message says where an upload is, and the system lets the host read it there (`peer_memory`), the bytes need no
pipe: the host only says by it that it has read them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathways_ray.errors import WireError
from pathways_ray.transport.peer_memory import PeerMemory
from pathways_ray.transport.shared_memory import SharedFile, contiguous_parts

SILENCE_S = 60
"""A host gives up a client that sends nothing for this long. A client waits while the link to its host is alive."""

PATIENCE_S = 1
"""A client that puts an array waits about this long for a host that takes nothing of it."""

AHEAD_BYTES = 1 << 20
"""What one end asks to be ahead of the other, which reads: Linux gives twice as much, where it is allowed."""

MIN_READ_BYTES = 4 << 20
"""What is smaller is written: most of it is in the pipe before a host has heard of it."""

READING_S = 0.5
"""A client that has said where its array is waits this long for a host that does not say that it reads there."""

_READING, _READ, _WRITE, _NOT_NOW = b"r", b"t", b"w", b"n"
"""What a host says of an upload in the client's memory: it reads a part; it has read all; it may not; it does not this
time. Without having read all it takes what is written."""

MAX_COPIED_BYTES = 64 << 20
"""It waits longer for one that has not taken more than this: it would have to copy that."""

# The kernel's limits, and not Python's: with those a socket never waits, and each part of it is a step of Python.
_LIMIT = struct.pack("ll", SILENCE_S, 0)


def is_pipe(came: SharedFile) -> bool:
    """Whether what came with a message is the end of a pipe, and no file.

    Raises:
        WireError: it is a socket of another kind, which might not end where a pipe does.
    """
    if not stat.S_ISSOCK(os.fstat(came.descriptor).st_mode):
        return False
    with _copy_of(came) as end:
        if (end.family, end.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
            raise WireError(f"a socket of family {end.family}, type {end.type} came for an array, and no end of a pipe")
    return True


def _copy_of(came: SharedFile) -> socket.socket:
    """A further descriptor of a socket. Raises `OSError` where the system does not say what kind of socket it is, as of
    one that was opened as a path."""
    number = os.dup(came.descriptor)
    try:
        return socket.socket(fileno=number)
    except BaseException:  # else it would stay open for as long as this process lives
        os.close(number)
        raise


class _End:
    """An end of a pipe, closed with its last reference."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def end(self) -> None:
        """Has a thread that reads or writes stop. Any thread may call this."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _fill(self, buffers: Sequence[np.ndarray[Any, Any]]) -> int:
        """Fills buffers of bytes; returns how many are missing where the other end hangs up, or is silent for long."""
        for buffer in buffers:
            view = memoryview(buffer.data)
            while view:
                try:  # all at once, without a step of Python between two parts
                    count = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
                except (BlockingIOError, ConnectionResetError):
                    count = 0
                if not count:
                    return len(view)
                view = view[count:]
        return 0

    def __del__(self) -> None:
        if hasattr(self, "_socket"):  # else there was no descriptor for it
            self._socket.close()


class Pipe(_End):
    """The client's end. `other` goes to the host with a message.

    Raises:
        OSError: this process has no descriptor left.
    """

    def __init__(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        super().__init__(mine)
        mine.settimeout(None)  # whatever the program has set for its own sockets
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, AHEAD_BYTES)
        patience = struct.pack("ll", *divmod(round(PATIENCE_S * 1_000_000), 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        self.other: SharedFile | None = SharedFile(theirs.detach())

    def write(
        self, arrays: Sequence[np.ndarray[Any, Any]], done: Callable[[], None] = lambda: None, readable: bool = False
    ) -> bool:
        """Writes the elements of arrays in C order, until the host has them, and hangs up. A host that hangs up first
        says elsewhere why. To one that takes nothing for a while another thread writes a copy of what is left, where
        that is not much: the caller, who may change the arrays then, need not wait.

        Args:
            done: called once nothing more is written.
            readable: whether the host knows where the arrays are. What it has read there is not written.

        Returns: whether the host may read what comes later in the same way.
        """
        self.other = None  # else nobody would hang up when the host is gone
        said = self._heard() if readable else b""
        if said == _READ:
            self._over(done)
            return True
        parts = (part for array in arrays for part in contiguous_parts(array))
        left = sum(array.nbytes for array in arrays)
        copies: list[bytes] = []
        try:
            for part in parts:
                rest, left = part, left - len(part)
                while (rest := self._sent(rest)) and left > MAX_COPIED_BYTES:
                    pass
                if rest:
                    copies = [bytes(rest), *map(bytes, parts)]
        except OSError:
            pass
        finally:
            if not copies:
                self._over(done)
        if copies:
            threading.Thread(target=self._finish, args=(copies, done), name="pathways-put", daemon=True).start()
        return said != _WRITE

    def read(self, buffers: Sequence[np.ndarray[Any, Any]]) -> None:
        """Fills buffers of bytes with what the host writes, and hangs up.

        Raises:
            EOFError: the host has hung up before.
        """
        self.other = None
        with self._socket:
            if missing := self._fill(buffers):
                raise EOFError(f"{missing} bytes of an array are missing")

    def _heard(self) -> bytes:
        """The host's word on arrays in this process's memory: that it has read them, or may not. One that says nothing
        for a while must not from then on: it cannot say that it has."""
        coming = select.poll()  # a limit of the socket would begin again with each signal that comes
        coming.register(self._socket, select.POLLIN)
        said = _READING
        while said == _READING:
            if not coming.poll(READING_S * 1000):
                # In one step: what was said before is there, and nothing more can be.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RD)
            try:
                said = self._socket.recv(1)
            except OSError:
                said = b""
        return said

    def _sent(self, part: memoryview[int]) -> memoryview[int]:
        """Writes a part, and returns the rest of it once the host has taken nothing for a while."""
        with contextlib.suppress(BlockingIOError):
            while part:
                part = part[self._socket.send(part, socket.MSG_NOSIGNAL) :]
        return part

    def _finish(self, copies: list[bytes], done: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            for copy in copies:
                rest = memoryview(copy)
                while rest:
                    rest = self._sent(rest)
        self._over(done)

    def _over(self, done: Callable[[], None]) -> None:
        self._socket.close()
        done()


class HostPipe(_End):
    """The host's end, of a descriptor for which `is_pipe` holds."""

    def __init__(self, end: SharedFile) -> None:
        super().__init__(_copy_of(end))
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, AHEAD_BYTES)
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, limit, _LIMIT)

    def read(self, buffers: Sequence[np.ndarray[Any, Any]]) -> None:
        """Fills buffers of bytes, and hangs up.

        Raises:
            WireError: the client has hung up before, or sends nothing.
        """
        with self._socket:
            if missing := self._fill(buffers):
                text = f"hung up, or sent nothing for {SILENCE_S} s"
                raise WireError(f"a client {text}, and {missing} bytes of an array are missing")

    def read_there(
        self,
        client: socket.socket,
        places: Sequence[tuple[int, int]],
        buffers: Sequence[np.ndarray[Any, Any]],
        turn: threading.Semaphore,
    ) -> bool:
        """Fills buffers of bytes from the client's memory, and hangs up; false where they come by this pipe.

        Only the process is read that has connected, and has made this pipe: not one that either was handed to, and
        none of another user.

        Args:
            client: the connection by which the pipe came.
            places: the address of each array, and its bytes.
            turn: held meanwhile; where it cannot be had at once, nothing is read.
        """
        said = _NOT_NOW
        if turn.acquire(blocking=False):
            try:
                PeerMemory(self._socket, client).read(places, buffers, lambda: self._say(_READING))
                said = _READ
            except OSError:
                said = _WRITE
            finally:
                turn.release()
        try:
            self._say(said)
        except OSError:  # the client waits no more, and may have changed what was read
            return False
        if said == _READ:
            self._socket.close()
        return said == _READ

    def _say(self, what: bytes) -> None:
        self._socket.send(what, socket.MSG_NOSIGNAL)

    def write(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Writes the elements of arrays in C order, and hangs up. A client that takes nothing for `SILENCE_S` gets no
        more, and neither does one that has hung up."""
        with self._socket, contextlib.suppress(OSError):
            for array in arrays:
                for part in contiguous_parts(array):
                    while part:
                        part = part[self._socket.send(part, socket.MSG_NOSIGNAL) :]
