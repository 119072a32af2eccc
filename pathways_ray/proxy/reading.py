"""Big and small values in the process of a proxy's client: by a local socket, where the proxy is on this machine; and
big arrays that are put (`putting`).

jaxlib's client gets values by gRPC alone, copies them four times, and has each pass several of its threads. So the
plugin has JAX ask here first for arrays from a size on, and for small ones. The array is the argument of a program that
only the proxy understands; the call's place among the requests says when the value is meant, as it does for any call.
By a local socket (`handover`) comes a file with the value, whose memory is the array's, or a small value itself. Where
anything of that is not possible, or goes wrong, JAX reads as ever, and says what is wrong; so it does while another
thread reads here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from typing import Any

import numpy as np

from pathways_ray.proxy.handover import NUMBER_BYTES, number_of
from pathways_ray.proxy.putting import PUT_BYTES, BigPuts
from pathways_ray.transport.local_sockets import Invitation, LocalSocket, NotLocal, received
from pathways_ray.transport.shared_memory import SharedFile

READ_BYTES = 1 << 20
"""Shards from this size on are read by a file; others gRPC brings as fast."""

SMALL_BYTES = 1 << 14
"""Values up to this size come in the answer of the local socket, which needs no other thread of the client."""

READING = b"pathways: hand over unasked"
"""The data of the program; a proxy that waits for questions at the socket knows another one."""

INVITATION = "pathways_values"
"""The attribute of a client with the invitation to the local socket."""


def written(invitation: Invitation) -> str:
    """An invitation as a client's attribute."""
    return f"{invitation.name} {invitation.tag.hex()} {invitation.answer.hex()}"


def read(text: str) -> Invitation:
    """An invitation as it is written. Raises `ValueError` for other text."""
    name, tag, answer = text.split(" ")
    return Invitation(name, bytes.fromhex(tag), bytes.fromhex(answer))


class BigValues:
    """Reads arrays of one client of JAX's.

    Args:
        invitation: to the proxy's local socket, for one connection.

    Raises:
        NotLocal: the proxy is on another machine.
    """

    def __init__(self, invitation: Invitation) -> None:
        self._socket = LocalSocket(invitation)
        self.puts = BigPuts(self._socket)
        self._program: Any = None
        self._numbers = itertools.count(1)
        self._over = False
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Lets go of the programs, which keep the client alive."""
        self._program = None
        self.puts.forget()

    def _reading(self, client: Any) -> Any:
        from jax.extend.ifrt_programs import ifrt_programs

        program = self._program
        if program is None:
            made, options = ifrt_programs.make_plugin_program(READING), ifrt_programs.make_plugin_compile_options()
            program = self._program = client.compile_ifrt_program(made, options)
        return program

    def _asked(self, program: Any, array: Any) -> int:
        """Asks for a file; its number. Where that is interrupted, or refused here (another thread may delete the array
        meanwhile), nobody knows whether the proxy has counted it: a later number would be that of another array, or of
        a file that never comes."""
        try:
            number = next(self._numbers)
            program.execute_sharded([array])
        except BaseException:
            self._over = True
            raise
        return number

    def _answer(self, number: int) -> tuple[bytes, SharedFile | None]:
        """The bytes and the file of an answer: both empty for one that does not come, or where the proxy has hung
        up."""
        with contextlib.suppress(ConnectionError):
            data, file = received(self._socket.connection)
            while data and number_of(data) < number:  # the answer to a question whose thread was interrupted
                data, file = received(self._socket.connection)
            if data:
                return data[NUMBER_BYTES:], file
        self._over = True
        return b"", None

    def value(self, client: Any, array: Any) -> np.ndarray[Any, Any] | None:
        """The value of an array that is whole on each of its devices; None where it does not come so."""
        alone = array if len(array.sharding.device_set) == 1 else array.addressable_data(0)
        program = self._reading(client)
        if not self._lock.acquire(blocking=False):
            return None  # another thread waits for a value that may take its time
        try:
            if self._over:
                return None
            data, file = self._answer(self._asked(program, alone))
        finally:
            self._lock.release()
        dtype = np.dtype(array.dtype)
        size = array.size * dtype.itemsize
        if file is None:
            return np.frombuffer(data, dtype).reshape(array.shape) if len(data) == size else None
        return file.bytes(size).view(dtype).reshape(array.shape) if file.size == size else None


class Readers:
    """The readers of this process: one of each client."""

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[Any, BigValues | None] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def takes(self, array: Any) -> bool:
        """Whether an array is read here."""
        if SMALL_BYTES < array.nbytes < READ_BYTES or not array.size:
            return False
        return self._of(_client(array)) is not None

    def value(self, array: Any) -> np.ndarray[Any, Any] | None:
        """The value of an array; None where JAX is to read it."""
        client = _client(array)
        reader = self._of(client)
        if reader is None or array.is_deleted():
            return None
        try:
            return reader.value(client, array)
        except Exception:  # JAX asks the same by itself, and says what is wrong
            return None

    def put(self, array: np.ndarray[Any, Any], device: Any) -> Any:
        """An array of JAX's with these values on a device; None where JAX is to put it."""
        client = device.client
        reader = self._of(client)
        try:
            return reader.puts.put(client, array, device) if reader is not None else None
        except Exception:  # JAX asks the same by itself, and says what is wrong
            return None

    def _of(self, client: Any) -> BigValues | None:
        with self._lock:
            if client not in self._found:
                reader = None
                if text := getattr(client, INVITATION, ""):
                    with contextlib.suppress(NotLocal, ValueError):
                        reader = BigValues(read(text))
                self._found[client] = reader
            return self._found[client]

    def cache_clear(self) -> None:
        """Lets go of what keeps clients alive: JAX clears its caches, and maybe its backends."""
        with self._lock:
            for reader in self._found.values():
                if reader is not None:
                    reader.forget()


def _client(array: Any) -> Any:
    return next(iter(array.sharding.device_set)).client


@functools.cache
def install() -> None:
    """Has JAX read and put big arrays of proxies here, and know nothing of the memory of their devices."""
    from jax.extend.backend import register_backend_cache

    from pathways_ray.jax_transfers import arrays_put_by, arrays_read_by, memory_of_others_unknown

    readers = Readers()
    register_backend_cache(readers, "the readers of pathways proxies")
    arrays_read_by(readers.takes, readers.value, READ_BYTES)
    arrays_put_by(readers.put, PUT_BYTES)
    memory_of_others_unknown()
