"""Big arrays that a proxy's client puts on one device, by pipes, where the proxy is on its machine.

jaxlib's client writes each to a file, whose memory the system clears before, and that nobody reads until it is whole.
So what runs beside that client (`reading`) makes them by a program that only the proxy understands: a call of it gives
an array whose bytes come by a pipe (`transport.pipes`). The host's end of that has come by the local socket
(`handover`) before the call, so calls and ends are counted, and the proxy waits for none. It passes
the end on to the host: program and host copy at the same time, and nobody else does. What cannot go so is put as ever.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Annotated, Any

import msgspec
import numpy as np

from pathways_ray.ir.types import MAX_ARRAY_DIMENSIONS
from pathways_ray.proxy.handover import NUMBER_BYTES
from pathways_ray.transport.local_sockets import LocalSocket
from pathways_ray.transport.pipes import Pipe

PUT_BYTES = 8 << 20
"""Arrays from this size on go by pipes; for smaller ones the program, of which each type has its own, costs as much."""

MAX_PROGRAMS = 64
"""Types whose programs are kept; the oldest goes for a further one."""

MAX_UNFINISHED = 16
"""Pipes to which something is yet to be written: each that nobody reads has a thread and a copy."""

PUTTING = b"pathways: an array by a pipe "
UNAVAILABLE = "UNAVAILABLE:"
"""The beginning of the data of such a program; a `Piped` follows."""


class Piped(msgspec.Struct, frozen=True):
    """The array that a call of such a program gives."""

    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_ARRAY_DIMENSIONS)]
    dtype: str
    device: int


class BigPuts:
    """Puts arrays of one client of JAX's.

    Args:
        socket: the client's end of the local socket.
    """

    def __init__(self, socket: LocalSocket) -> None:
        self._socket = socket
        self._programs: dict[Piped, Any] = {}
        self._numbers = itertools.count(1)
        self._over = False
        self._unfinished: weakref.WeakSet[Pipe] = weakref.WeakSet()
        self._lock = threading.RLock()  # a signal handler may put an array in the midst of a put

    def forget(self) -> None:
        """Lets go of the programs, which keep the client alive."""
        self._programs = {}

    def _program(self, kind: Piped, client: Any) -> Any:
        from jax.extend.ifrt_programs import ifrt_programs

        programs = self._programs
        if kind not in programs:
            made = ifrt_programs.make_plugin_program(PUTTING + msgspec.json.encode(kind))
            if len(programs) >= MAX_PROGRAMS:
                programs.pop(next(iter(programs)), None)
            programs[kind] = None  # for good, where the proxy refuses it; not where a host is away
            try:
                programs[kind] = client.compile_ifrt_program(made, ifrt_programs.make_plugin_compile_options())
            except Exception as error:
                if str(error).startswith(UNAVAILABLE):
                    programs.pop(kind, None)
                raise
        return programs.get(kind)

    def put(self, client: Any, array: np.ndarray[Any, Any], device: Any) -> Any:
        """An array with these values on a device of the client; None where it cannot be had so. The values are read, or
        copied, before this returns."""
        with self._lock:
            if self._over or len(self._unfinished) >= MAX_UNFINISHED:
                return None
            program = self._program(Piped(array.shape, array.dtype.name, device.id), client)
            if program is None or self._over:
                return None
            pipe = Pipe()
            self._over = True  # unless all of this comes to its end, the proxy may count otherwise
            if not self._socket.send(next(self._numbers).to_bytes(NUMBER_BYTES, "little"), pipe.other):
                return None
            made = program.execute_sharded([])
            self._over = False
            self._unfinished.add(pipe)  # until its thread lets go of it, where it has one
        pipe.write([array])
        return made.disassemble_into_single_device_arrays()[0][0]
