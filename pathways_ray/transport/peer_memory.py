"""Memory of another process of this user, read where the system allows it: an array is copied once, by its receiver.

No process is given a right that it did not have: Linux lets processes of one user read each other, unless something
(Yama's `ptrace_scope`, a filter of system calls, another namespace) forbids it, and then a pipe is the way.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import select
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

PART_BYTES = 32 << 20
"""Bytes that are read at a time."""

_C = ctypes.CDLL(None, use_errno=True)
_READ = getattr(_C, "process_vm_readv", None)
_CREDENTIALS = struct.Struct("3i")

_SO_PEERPIDFD = 77
"""A descriptor of the process at the other end (Linux 6.5), which Python has no name for. A number of a process is soon
that of another one, and the other end may be kept open by whom it was handed to."""

_SAYS_WHO = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


class _Part(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


if _READ is not None:
    _READ.restype = ctypes.c_ssize_t
    _ONE = (ctypes.POINTER(_Part), ctypes.c_ulong)
    _READ.argtypes = (ctypes.c_int, *_ONE, *_ONE, ctypes.c_ulong)


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """The process and the user that made the other end of a local connection, or a pair of connected sockets. The
    process is 0 where it is not known here."""
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


def places_of(arrays: Sequence[np.ndarray[Any, Any]]) -> list[tuple[int, int]] | None:
    """The address and the bytes of each array, for who reads this process; none where one is not in C order."""
    if _READ is None or not _SAYS_WHO or not all(one.flags.c_contiguous for one in arrays):
        return None
    return [(one.ctypes.data, one.nbytes) for one in arrays]


class PeerMemory:
    """The memory of the process that made the other ends of connections, while it lives. Any thread reads.

    Raises:
        OSError: the ends are of several processes, of another user or namespace, or that process has ended; or this
            system does not say whose they are in a way that lasts.
    """

    def __init__(self, *connected: socket.socket) -> None:
        if _READ is None or not _SAYS_WHO:
            raise OSError(errno.ENOSYS, "this system has no reading of another process's memory")
        self._read = _READ
        (self._pid, user), *others = {peer_of(one) for one in connected}
        if others or not self._pid or user != os.geteuid():
            raise PermissionError(f"process {self._pid} of user {user} is not read")
        self._processes: list[int] = []
        for one in connected:
            self._processes.append(one.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))

    def read(
        self,
        places: Sequence[tuple[int, int]],
        buffers: Sequence[np.ndarray[Any, Any]],
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        """Fills buffers of bytes from the places of the other process, each with as many.

        Args:
            begins: called before each part is read. What it raises ends the reading.

        Raises:
            OSError: the system does not allow it, the process is gone, or there is nothing at that place.
        """
        for (address, size), buffer in zip(places, buffers, strict=True):
            done = 0
            while done < size:
                count = min(size - done, PART_BYTES)
                begins()
                here, there = _Part(buffer.ctypes.data + done, count), _Part(address + done, count)
                if (read := self._read(self._pid, here, 1, there, 1, 0)) <= 0:
                    code = ctypes.get_errno() if read < 0 else errno.EFAULT
                    raise OSError(code, os.strerror(code))
                done += read
        ended = select.poll()  # `select.select` takes no descriptor beyond 1,023
        for process in self._processes:
            ended.register(process, select.POLLIN)
        if ended.poll(0):  # its number may be that of another process by now
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for process in getattr(self, "_processes", ()):
            close(process)
