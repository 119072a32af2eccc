"""Files in memory that a client and the hosts of its machine share: an array is copied once on its way.

A file has no name in any file system: it is its descriptor, which the client hands to a host over a local socket
(`local_sockets`). So nobody else can open it, it needs no room in `/dev/shm`, and it is gone with the last process that
has it, however that ends. Its size is sealed when it is made, so that reading it can never fail; before a host reads an
upload it seals the bytes as well, and what it uses as memory of its devices changes no more.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pathways_ray.errors import WireError
from pathways_ray.ir.regions import Box, box_shape, place_of, strides_of

ALIGNMENT = 64
"""Boxes begin at multiples of this: then XLA uses the memory as it is."""

WRITE_BYTES = 4 << 20
"""Bytes that are written at a time. What is not contiguous is made so in pieces of this size."""

SHORTEST_RUN_BYTES = 1 << 14
"""Longer runs of a box are written each by a call; shorter ones through a mapping, which costs more for each byte."""

_FIXED_SIZE = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK if hasattr(fcntl, "F_SEAL_GROW") else 0
_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_C.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Mapping:
    """The bytes of a file as memory, until the last array on it is gone.

    Unlike `mmap.mmap` it keeps no descriptor, of which a process has a thousand.
    """

    def __init__(self, descriptor: int, size: int, writable: bool, shared: bool = True) -> None:
        self._size = size
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        # What is only read is mapped privately: it is the same memory, and before Linux 6.7 that is the only way to map
        # a file that is sealed against writing.
        sharing = mmap.MAP_SHARED if writable and shared else mmap.MAP_PRIVATE
        self._address = _C.mmap(None, size, protection, sharing, descriptor, 0)
        if self._address in (None, ctypes.c_void_p(-1).value):
            self._size, code = 0, ctypes.get_errno()
            raise OSError(code, f"{size} bytes of shared memory cannot be mapped: {os.strerror(code)}")
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (self._address, not writable),
        }

    def __del__(self, unmap: Callable[..., Any] = _C.munmap) -> None:
        if self._size:  # a default: at the end of the interpreter the names of this module may be gone
            unmap(self._address, self._size)


class SharedFile:
    """A file in memory of at least one byte; closed with its last reference.

    Args:
        descriptor: is this object's from now on.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def create(cls, size: int) -> SharedFile:
        """A file of `size` bytes, which takes memory as it is written. Raises `OSError` where there is no room."""
        if not hasattr(os, "memfd_create") or not _FIXED_SIZE:
            raise OSError("this system has no files in memory that can be sealed")
        made = cls(os.memfd_create("pathways", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(made.descriptor, size)
        fcntl.fcntl(made.descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)
        return made

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)

    @property
    def size(self) -> int:
        """Its bytes."""
        return os.fstat(self.descriptor).st_size

    def check(self, size: int) -> None:
        """Raises `WireError` unless this is a file in memory whose size is `size`, and stays so."""
        status = os.fstat(self.descriptor)
        seals = 0
        with contextlib.suppress(OSError):  # it is another kind of file
            seals = fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS)
        if not stat.S_ISREG(status.st_mode) or seals & _FIXED_SIZE != _FIXED_SIZE:
            raise WireError("what came with a message is no file in memory of sealed size")
        if status.st_size != size:
            raise WireError(f"a file in memory of {status.st_size} bytes came for an array of {size}")

    def seal(self) -> None:
        """Makes sure that nobody writes to it any more. Raises `WireError` where somebody still may."""
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            if fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
                return  # another host has done so, perhaps just now
            raise WireError(f"the shared memory of an upload cannot be sealed: {error}") from None

    def bytes(self, size: int, writable: bool = False, shared: bool = True) -> np.ndarray[Any, Any]:
        """Its bytes as an array, which keeps them when the file is closed.

        Args:
            shared: whether what is written there is written to the file, for all who have it: a fork of this process
                has all that it has mapped.
        """
        return np.asarray(Mapping(self.descriptor, size, writable, shared))

    def copy(self, size: int) -> np.ndarray[Any, Any]:
        """A copy of its first bytes, in memory that is not mapped."""
        found = aligned(size)
        rest = memoryview(found.data)
        while rest and (count := os.preadv(self.descriptor, [rest], size - len(rest))):
            rest = rest[count:]
        return found

    def write(self, array: np.ndarray[Any, Any], offset: int) -> None:
        """Writes the elements of an array in C order, from `offset` on."""
        for rest in contiguous_parts(array):
            while rest:
                written = os.pwrite(self.descriptor, rest, offset)
                rest, offset = rest[written:], offset + written

    def write_box(self, data: np.ndarray[Any, Any], box: Box, shape: tuple[int, ...]) -> None:
        """Writes the elements of a box to their places in an array of this shape, which is the whole file."""
        if data.size == 0:
            return
        start, run, leading = place_of(box, shape)
        if run * data.itemsize < SHORTEST_RUN_BYTES and run != data.size:
            whole = self.bytes(math.prod(shape) * data.itemsize, writable=True).view(data.dtype).reshape(shape)
            whole[tuple(slice(a, b) for a, b in box)] = data
            return
        strides = strides_of(shape)
        for place in np.ndindex(*box_shape(box)[:leading]):
            at = start + sum(k * stride for k, stride in zip(place, strides, strict=False))
            self.write(data[place], at * data.itemsize)


def contiguous_parts(array: np.ndarray[Any, Any]) -> Iterator[memoryview[int]]:
    """The bytes of an array in C order, in parts, of which only one is copied at a time where they are not so."""
    if not array.flags.c_contiguous and array.ndim and len(array) > 1:
        rows = max(1, WRITE_BYTES // max(1, array.nbytes // len(array)))
        for first in range(0, len(array), rows):
            yield from contiguous_parts(np.ascontiguousarray(array[first : first + rows]))
        return
    data = bytes_of(array)
    for first in range(0, len(data), WRITE_BYTES):
        yield data[first : first + WRITE_BYTES]


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview[int]:
    """The bytes of an array in C order, copied only where they are not so."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) if array.size else memoryview(b"")


def aligned(size: int) -> np.ndarray[Any, Any]:
    """Bytes that begin where XLA takes them as they are, instead of copying them."""
    room = np.empty(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size]


def offsets(sizes: list[int]) -> tuple[list[int], int]:
    """The places of pieces of these sizes in a file, and its size."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places, max(1, end)
