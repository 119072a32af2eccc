"""Memory of another process of this user, read where the system allows it: an array is copied once, by its receiver.

No process is given a right that it did not have: Linux lets processes of one user read each other, unless something
(Yama's `ptrace_scope`, a filter of system calls, another namespace) forbids it, and then a pipe is the way.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import os
import platform
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

PART_BYTES = 32 << 20
"""Bytes after which a client that waits hears once more that something is read."""

SHARE_BYTES = 4 << 20
"""Bytes that each of two threads reads at a time."""

HELPED_BYTES = 2 * SHARE_BYTES
"""Bytes from which on two threads read: the system copies page by page, and one core takes longer for that than the
memory does."""

MAX_HELPERS = 4
"""Such second threads of a process: of several readings at a time some have none."""

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


Places = deque[tuple[int, int]]
"""Each an address and its bytes, of which there are some."""


class _Share(NamedTuple):
    """A part that one thread reads at a time: places here and there, as the system takes them, and their bytes; and
    whether a multiple of `PART_BYTES` lies in it, so that who waits hears of it."""

    here: bytes
    there: bytes
    nbytes: int
    is_said: bool


def _table(found: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """Places as the system takes them."""
    return np.array(found, np.uint64).reshape(-1, 2)


def _places(found: np.ndarray[Any, Any]) -> Places:
    return deque((address, size) for address, size in found.tolist() if size)


def _cut(here: Places, there: Places, most: int) -> deque[_Share]:
    """Shares of at most so many bytes each. Raises `OSError` where there are fewer bytes there than here."""
    shares, done = deque[_Share](), 0
    while here:
        count = min(_first(here, most), _first(there, most))
        if not count:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        shares.append(_Share(_taken(here, count), _taken(there, count), count, is_said=-done % PART_BYTES < count))
        done += count
    return shares


def _first(places: Places, most: int) -> int:
    """The bytes of the first places, no more than the system takes at a time."""
    return min(most, sum(size for _, size in itertools.islice(places, MAX_PLACES)))


def _taken(places: Places, count: int) -> bytes:
    """Takes the first bytes of places, and gives theirs."""
    taken: list[int] = []
    while count:
        address, size = places.popleft()
        if size > count:
            places.appendleft(((address + count) % (1 << 64), size - count))
            size = count
        taken += address, size
        count -= size
    return struct.pack(f"{len(taken)}Q", *taken)


@functools.cache
def _helpers() -> ThreadPoolExecutor | None:
    """Threads that read beside those that were asked to; None where there is one core."""
    cores = len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(min(cores - 1, MAX_HELPERS), "memory") if cores > 1 else None


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


def _do(promise: Future[None], work: Callable[[], None]) -> None:
    """Does work that may have been cancelled, and says what came of it."""
    if promise.set_running_or_notify_cancel():
        try:
            work()
        except BaseException as error:
            promise.set_exception(error.with_traceback(None))  # its frames have the promise, and all that is read
        else:
            promise.set_result(None)


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
            begins: called before the first share is read, and every 32 MiB. What it raises ends the reading.

        Raises:
            OSError: the system does not allow it, the process is gone, or there is nothing at that place.
        """
        here = buffers if isinstance(buffers, np.ndarray) else _table([(b.ctypes.data, b.nbytes) for b in buffers])
        # Who is read may have said anything, such as an address below 0.
        there = _table([(address % (1 << 64), size) for address, size in places])
        total = int(here[:, 1].sum())
        is_helped = total >= HELPED_BYTES
        if is_helped or max(len(here), len(there)) > MAX_PLACES:
            shares = _cut(_places(here), _places(there), SHARE_BYTES if is_helped else total)
        else:
            shares = deque([_Share(here.tobytes(), there.tobytes(), total, is_said=True)] if total else ())
        with self._helped(shares, begins) if is_helped else contextlib.nullcontext():
            self._read_shares(shares, begins)
        ended = select.poll()  # `select.select` takes no descriptor beyond 1,023
        for process in self._processes:
            ended.register(process, select.POLLIN)
        if ended.poll(0):  # its number may be that of another process by now
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))

    def _read_shares(self, shares: deque[_Share], begins: Callable[[], None]) -> None:
        """Reads shares until none is left. An error leaves none to the other thread either."""
        while True:
            try:
                share = shares.popleft()
            except IndexError:  # another thread has taken the last one
                return
            try:
                if share.is_said:
                    begins()
                here, there = share.here, share.there
                read = self._read(self._pid, here, len(here) // 16, there, len(there) // 16, 0)
                if read != share.nbytes:  # it reads up to a place where there is nothing
                    code = ctypes.get_errno() if read < 0 else errno.EFAULT
                    raise OSError(code, os.strerror(code))
            except BaseException:
                shares.clear()
                raise

    @contextlib.contextmanager
    def _helped(self, shares: deque[_Share], begins: Callable[[], None]) -> Iterator[None]:
        """Has another thread take shares as well, if one is free, and waits for the last that it has taken. What it
        cannot read is an error here."""
        helpers, helping = _helpers(), Future[None]()
        if helpers is not None:
            with contextlib.suppress(RuntimeError):  # no thread is left; it stays in the queue all the same
                helpers.submit(_do, helping, functools.partial(self._read_shares, shares, begins))
        try:
            yield
        finally:
            try:
                if not helping.cancel():
                    helping.result()
            finally:
                del helping  # its error has this frame, and would keep all that was read

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for process in getattr(self, "_processes", ()):
            close(process)
