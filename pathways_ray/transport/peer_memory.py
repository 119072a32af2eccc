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

MAX_PLACES = 1024
"""Places that the system takes at a time (`IOV_MAX`)."""

_C = ctypes.CDLL(None, use_errno=True)
_READ = getattr(_C, "process_vm_readv", None)
_CREDENTIALS = struct.Struct("3i")

_SO_PEERPIDFD = 77
"""A descriptor of the process at the other end (Linux 6.5), which Python has no name for. A number of a process is soon
that of another one, and the other end may be kept open by whom it was handed to."""

_SAYS_WHO = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


if _READ is not None:
    _READ.restype = ctypes.c_ssize_t
    _PLACES = ctypes.c_void_p, ctypes.c_ulong
    _READ.argtypes = (ctypes.c_int, *_PLACES, *_PLACES, ctypes.c_ulong)


class _Left:
    """Places, each an address and its bytes, of which the first ones are done."""

    def __init__(self, places: np.ndarray[Any, Any]) -> None:
        self.places = places[places[:, 1] > 0]

    def part(self) -> np.ndarray[Any, Any]:
        """The first of those that are left: as many as are read at a time, and of a long one its beginning."""
        first = self.places[:MAX_PLACES]
        if first[:, 1].sum() > PART_BYTES:
            first = first[: max(1, int(np.searchsorted(np.cumsum(first[:, 1]), PART_BYTES, "right")))].copy()
            first[0, 1] = min(first[0, 1], PART_BYTES)
        return first

    def skip(self, count: int) -> None:
        """Takes off as many bytes, which are done."""
        ends = np.cumsum(self.places[:, 1])
        done = int(np.searchsorted(ends, count, "right"))
        self.places = self.places[done:]
        if len(self.places):
            over = count - (int(ends[done - 1]) if done else 0)
            self.places[0] += np.array([over, -over]).astype(np.uint64)


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
        buffers: Sequence[np.ndarray[Any, Any]] | np.ndarray[Any, Any],
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        """Fills buffers of bytes, one after the other, from the places of the other process.

        Args:
            buffers: with as many bytes in all; or one array of their addresses and their bytes.
            begins: called before each part is read. What it raises ends the reading.

        Raises:
            OSError: the system does not allow it, the process is gone, or there is nothing at that place.
        """
        if not isinstance(buffers, np.ndarray):
            buffers = np.array([(one.ctypes.data, one.nbytes) for one in buffers], np.uint64).reshape(-1, 2)
        # Who is read may have said anything, such as an address below 0.
        places = [(address % (1 << 64), size) for address, size in places]
        here, there = _Left(buffers), _Left(np.array(places, np.uint64).reshape(-1, 2))
        while len(here.places):
            begins()
            mine, theirs = here.part(), there.part()
            read = self._read(self._pid, mine.ctypes.data, len(mine), theirs.ctypes.data, len(theirs), 0)
            if read <= 0:
                code = ctypes.get_errno() if read < 0 else errno.EFAULT
                raise OSError(code, os.strerror(code))
            here.skip(read)
            there.skip(read)
        ended = select.poll()  # `select.select` takes no descriptor beyond 1,023
        for process in self._processes:
            ended.register(process, select.POLLIN)
        if ended.poll(0):  # its number may be that of another process by now
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for process in getattr(self, "_processes", ()):
            close(process)
