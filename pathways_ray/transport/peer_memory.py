"""Memory of another process of this user, read where the system allows it: an array is copied once, by its receiver.

No process is given a right that it did not have: Linux lets processes of one user read each other, unless something
(Yama's `ptrace_scope`, a filter of system calls, another namespace) forbids it, and then a pipe is the way.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Sequence
from typing import Any

import numpy as np

PART_BYTES = 256 << 20
"""Bytes that are read at a time: the system reads less than 2 GiB at once."""

_C = ctypes.CDLL(None, use_errno=True)
_READ = getattr(_C, "process_vm_readv", None)


class _Part(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


if _READ is not None:
    _READ.restype = ctypes.c_ssize_t
    _ONE = (ctypes.POINTER(_Part), ctypes.c_ulong)
    _READ.argtypes = (ctypes.c_int, *_ONE, *_ONE, ctypes.c_ulong)


def places_of(arrays: Sequence[np.ndarray[Any, Any]]) -> list[tuple[int, int]] | None:
    """The address and the bytes of each array, for who reads this process; none where one is not in C order."""
    if _READ is None or not all(one.flags.c_contiguous for one in arrays):
        return None
    return [(one.ctypes.data, one.nbytes) for one in arrays]


class PeerMemory:
    """The memory of a process of this user. Any thread reads.

    Args:
        pid: its number, while it is at the other end of a connection.

    Raises:
        OSError: the number is 0, the process is gone, or this system has no such reading.
    """

    def __init__(self, pid: int) -> None:
        if pid <= 0 or _READ is None:  # it is in another namespace; or this is no Linux
            raise OSError(errno.ENOSYS, "the memory of this process cannot be read")
        self._pid, self._read = pid, _READ
        self._process = os.pidfd_open(pid)

    def read(self, places: Sequence[tuple[int, int]], buffers: Sequence[np.ndarray[Any, Any]]) -> None:
        """Fills buffers of bytes from the places of the other process, each with as many.

        Raises:
            OSError: the system does not allow it, the process is gone, or there is nothing at that place.
        """
        for (address, size), buffer in zip(places, buffers, strict=True):
            done = 0
            while done < size:
                count = min(size - done, PART_BYTES)
                here, there = _Part(buffer.ctypes.data + done, count), _Part(address + done, count)
                if (read := self._read(self._pid, here, 1, there, 1, 0)) <= 0:
                    code = ctypes.get_errno() if read < 0 else errno.EFAULT
                    raise OSError(code, os.strerror(code))
                done += read
        # Its number may be that of another process by now, if it has ended.
        if select.select([self._process], [], [], 0)[0]:
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            os.close(self._process)
