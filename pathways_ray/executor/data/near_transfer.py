"""Transfers between hosts of one machine: the bytes go from one memory to the other by a local connection.

As with the transfer library, a receiver asks by the secret name of a transfer, perhaps before the sender has it, and a
sender that has it waits until it is computed and asked for. What is small comes with the answer.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import math
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pathways_ray.errors import Failure
from pathways_ray.executor.data.failure_texts import OF_A_PEER, error_text, failure_in
from pathways_ray.executor.run.arrivals import Arrivals, is_there
from pathways_ray.executor.threads import ending_with_process
from pathways_ray.jax_arrays import array_of
from pathways_ray.transport import neighbours
from pathways_ray.transport.neighbours import MAX_PACKET_BYTES, Connection
from pathways_ray.transport.shared_memory import aligned

MAX_FAILURES = 1 << 12
"""Failures in place of what was taken back, which nobody has asked for. Hosts of such a launch that ask later hear
of it otherwise, too."""

ACCEPT_PAUSE_S = 0.05
"""A host that cannot take a connection, since it has no descriptor or thread left, waits this long for one."""

_NAMED = struct.Struct("<cQ")
_SIZE = struct.Struct("<Q")
_ASK, _HERE, _PIPED, _FAILED, _HAND = b"a", b"h", b"p", b"f", b"o"
_SEAL_BYTES = 16

PeerKey = tuple[int, int]
"""The number and the epoch of a host."""


class Arriving:
    """Arrays that a host of this machine sends: ready once all are here, or a failure in their place. Whenever one has
    its end, `NearTransfer` says so."""

    __slots__ = ("_arrays", "_over", "failure", "sender", "types")
    looks_called = True

    def __init__(self, sender: int, types: Sequence[jax.ShapeDtypeStruct]) -> None:
        self.sender, self.types = sender, types
        self.failure: Failure | None = None
        self._arrays: list[jax.Array] = []
        self._over = threading.Event()

    def is_ready(self) -> bool:
        """Whether nothing more is waited for."""
        return self._over.is_set()

    def block_until_ready(self) -> Arriving:
        """Waits until it is."""
        self._over.wait()
        return self

    def arrays(self) -> list[jax.Array] | Failure:
        """The arrays, or the failure in their place."""
        return self._arrays if self.failure is None else self.failure

    def came(self, parts: Sequence[np.ndarray[Any, Any]]) -> None:
        """Makes the arrays of their bytes, whose memory they keep where a device can use it."""
        self._arrays = [
            array_of(kind.shape, kind.sharding, [part.view(kind.dtype).reshape(kind.shape)], _devices(kind.sharding))
            for kind, part in zip(self.types, parts, strict=True)
        ]
        self._over.set()

    def fail(self, failure: Failure) -> None:
        """Nothing comes."""
        self.failure = failure
        self._over.set()


class _Offer(NamedTuple):
    """An offer of a host to another one: arrays, or the failure in their place. `ready`: all are computed."""

    receiver: PeerKey
    arrays: Sequence[jax.Array]
    failure: Failure | None = None
    ready: bool = False


class NearTransfer:
    """This host's transfers to and from others of its machine.

    Args:
        address: the one by which others know this host.
        arrived: is called by another thread whenever something has come.
    """

    def __init__(self, host: int, address: str, secret: str, arrived: Callable[[], None]) -> None:
        self.host = host
        self.on_handed: Callable[[bytes], None] = lambda data: None
        self._secret, self._arrived = secret, arrived
        self._key = hashlib.sha256(f"hand over {secret}".encode()).digest()
        self._changing = threading.Lock()
        self._offers: dict[int, _Offer] = {}
        self._failed: OrderedDict[int, _Offer] = OrderedDict()
        self._asked: dict[int, Connection] = {}
        self._receivers: dict[Connection, PeerKey | None] = {}
        self._senders: dict[PeerKey, Connection] = {}
        self._awaited: dict[Connection, dict[int, Arriving]] = {}
        self._computed = Arrivals(lambda name, _, values: self._is_computed(name))
        self._listener = neighbours.listener(neighbours.name_of(address, secret))
        for task in (self._accept, self._computed.run):
            threading.Thread(target=ending_with_process(task), name="near transfers", daemon=True).start()

    # --- as a sender --------------------------------------------------------------------------------------------------

    def serve(self, name: int, receiver: PeerKey, arrays: Sequence[jax.Array]) -> None:
        """Offers arrays, which may still be computed, to a host that asks for the name."""
        ready = all(map(is_there, arrays))
        with self._changing:
            self._offers[name] = _Offer(receiver, arrays, None, ready)
        if ready:
            self._answer(name)
        else:
            self._computed.add(name, 0, list(arrays))

    def serve_failure(self, name: int, receiver: PeerKey, failure: Failure) -> None:
        """Offers a failure, which may be all that the receiver ever hears of it."""
        with self._changing:
            self._offers[name] = _Offer(receiver, (), failure, True)
        self._answer(name)

    def take_back(self, name: int, receiver: PeerKey, failure: Failure) -> None:
        """Offers a failure in place of what was or may be offered under the name. The receiver hears of it otherwise,
        too."""
        with self._changing:
            self._offers.pop(name, None)
            self._failed[name] = _Offer(receiver, (), failure, True)
            if len(self._failed) > MAX_FAILURES:
                self._failed.popitem(last=False)
        self._computed.drop(name)
        self._answer(name)

    def refuse(self, name: int, failure: Failure) -> bool:
        """Answers a host that has asked for a name, and is not known any more; false where none has."""
        with self._changing:
            connection = self._asked.pop(name, None)
        if connection is not None:
            connection.send(_NAMED.pack(_FAILED, name) + error_text(failure).encode())
        return connection is not None

    def _is_computed(self, name: int) -> None:
        with self._changing:
            offer = self._offers.get(name)
            if offer is None:
                return
            self._offers[name] = offer._replace(ready=True)
        self._answer(name)

    def _answer(self, name: int) -> None:
        """Answers who has asked for a name, if it is there."""
        with self._changing:
            offer = self._failed.get(name) or self._offers.get(name)
            if offer is None or not offer.ready or name not in self._asked:
                return
            self._failed.pop(name, None)
            self._offers.pop(name, None)
            connection = self._asked.pop(name)
            if connection in self._receivers:
                self._receivers[connection] = offer.receiver
        if offer.failure is None and sum(one.nbytes for one in offer.arrays) + _NAMED.size > MAX_PACKET_BYTES:
            try:
                connection.work(functools.partial(self._send, connection, name, offer))
                return
            except RuntimeError as error:
                text = f"an array could not be sent: {error}"
                offer = _Offer(offer.receiver, (), Failure("ExecutionError", text, "transfer", "", self.host))
        self._send(connection, name, offer)

    def _send(self, connection: Connection, name: int, offer: _Offer) -> None:
        failure, parts = offer.failure, []
        try:
            for one in offer.arrays:
                one.block_until_ready()  # raises for one that failed; NumPy would end the process over it
                parts.append(np.asarray(one))
        except Exception as error:
            text = str(error) or type(error).__name__
            failure = failure_in(text) or Failure("ExecutionError", f"{OF_A_PEER}: {text}", host=self.host)
        try:
            if failure is not None:
                connection.send(_NAMED.pack(_FAILED, name) + error_text(failure).encode())
            elif (size := sum(part.nbytes for part in parts)) + _NAMED.size > MAX_PACKET_BYTES:
                connection.write(_NAMED.pack(_PIPED, name) + _SIZE.pack(size), parts)
            else:
                connection.send(_NAMED.pack(_HERE, name) + b"".join(part.tobytes() for part in parts))
        except (OSError, EOFError) as error:
            # Unless its peer is gone, it would wait for ever.
            text = f"{size} bytes could not be sent: {error}"
            lost = Failure("ExecutionError", text, "transfer", "", self.host)
            connection.send(_NAMED.pack(_FAILED, name) + error_text(lost).encode())

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
                with connected, self._changing:  # what the connection takes over is not closed
                    self._receivers[Connection(connected, self._take_request, self._receiver_ended)] = None
            except Exception:  # others may end, and then there is room for who waits
                time.sleep(ACCEPT_PAUSE_S)

    def _take_request(self, connection: Connection, message: bytes, pipe: socket.socket | None) -> None:
        if message[:1] == _HAND and pipe is None:
            seal, data = message[1 : 1 + _SEAL_BYTES], message[1 + _SEAL_BYTES :]
            if hmac.compare_digest(seal, self._sealed(data)):
                self.on_handed(data)
                return
        kind, name = _NAMED.unpack(message) if len(message) == _NAMED.size else (b"", 0)
        if kind != _ASK or pipe is not None:
            connection.end()  # it is no host of this runtime
            return
        with self._changing:
            self._asked[name] = connection
        self._answer(name)

    def _receiver_ended(self, connection: Connection) -> None:
        with self._changing:
            self._receivers.pop(connection, None)
            self._asked = {name: other for name, other in self._asked.items() if other is not connection}

    # --- as a receiver ------------------------------------------------------------------------------------------------

    def pull(
        self, sender: PeerKey, address: str, name: int, types: Sequence[jax.ShapeDtypeStruct]
    ) -> list[Any] | Failure:
        """The arrays that fill once the sender has served them, as one `Arriving`."""
        arriving = Arriving(sender[0], types)
        try:
            connection = self._connected(sender, address)
        except (OSError, RuntimeError) as error:  # the latter: there is no thread left
            return Failure("HostLost", f"host {sender[0]} could not be reached: {error}", host=sender[0])
        with self._changing:
            awaited = self._awaited.get(connection)
            if awaited is None:  # it has ended since
                arriving.fail(_lost(sender[0]))
                return [arriving]
            awaited[name] = arriving
        connection.send(_NAMED.pack(_ASK, name))
        return [arriving]

    def _connected(self, peer: PeerKey, address: str) -> Connection:
        with self._changing:  # before its end can be noted
            found = self._senders.get(peer)
            if found is None or found not in self._awaited:
                name = neighbours.name_of(address, self._secret)
                found = self._senders[peer] = Connection.to(name, self._take_answer, self._sender_ended)
                self._awaited[found] = {}
        return found

    def _take_answer(self, connection: Connection, message: bytes, pipe: socket.socket | None) -> None:
        kind, name = _NAMED.unpack_from(message) if len(message) >= _NAMED.size else (b"", 0)
        with self._changing:
            arriving = self._awaited.get(connection, {}).get(name)
        if arriving is None:
            return
        sizes = [math.prod(one.shape) * one.dtype.itemsize for one in arriving.types]
        size = len(message) - _NAMED.size
        if kind == _PIPED and pipe is not None and size == _SIZE.size:
            (size,) = _SIZE.unpack_from(message, _NAMED.size)
            if size == sum(sizes):
                try:
                    connection.work(functools.partial(self._read, connection, name, arriving, sizes, pipe))
                except RuntimeError as error:
                    text = f"{size} bytes could not be taken from host {arriving.sender}: {error}"
                    self._over(connection, name, Failure("ExecutionError", text, "transfer", "", self.host))
                return
        if kind == _PIPED and pipe is None:
            text = f"this process has no descriptor left for what host {arriving.sender} sends"
            self._over(connection, name, Failure("ExecutionError", text, "transfer", "", self.host))
        elif kind == _FAILED:
            text = message[_NAMED.size :].decode(errors="replace")
            self._over(connection, name, failure_in(text) or Failure("ExecutionError", text, host=arriving.sender))
        elif kind == _HERE and size == sum(sizes):
            parts, whole = [aligned(size) for size in sizes], np.frombuffer(message, np.uint8)
            start = _NAMED.size
            for part in parts:
                part[:] = whole[start : start + len(part)]
                start += len(part)
            self._over(connection, name, parts)
        else:
            text = f"{size} bytes came from host {arriving.sender} in place of arrays of {sum(sizes)}"
            self._over(connection, name, Failure("ExecutionError", text, "transfer", "", self.host))

    def _read(
        self, connection: Connection, name: int, arriving: Arriving, sizes: Sequence[int], pipe: socket.socket
    ) -> None:
        with pipe:  # closed in any case, since its sender waits at the other end, but not before it is said why
            try:
                buffers = [aligned(size) for size in sizes]
                connection.read(pipe, buffers)
            except (OSError, EOFError):
                self._over(connection, name, _lost(arriving.sender))
            except Exception as error:  # there is no memory
                text = f"{type(error).__name__}: {error}"
                self._over(connection, name, Failure("ExecutionError", text, "transfer", "", self.host))
            else:
                self._over(connection, name, buffers)

    def _over(self, connection: Connection, name: int, what: Failure | Sequence[np.ndarray[Any, Any]]) -> None:
        """The end of a transfer, in place of which nothing else comes."""
        with self._changing:
            arriving = self._awaited.get(connection, {}).pop(name, None)
        if arriving is None:
            return
        if isinstance(what, Failure):
            arriving.fail(what)
        else:
            try:
                arriving.came(what)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                arriving.fail(Failure("ExecutionError", text, "transfer", "", self.host))
        self._arrived()

    def _sender_ended(self, connection: Connection) -> None:
        with self._changing:
            awaited = self._awaited.pop(connection, {})
        for arriving in awaited.values():
            arriving.fail(_lost(arriving.sender))
        self._arrived()

    # --- launches -----------------------------------------------------------------------------------------------------

    def hand_over(self, peer: PeerKey, address: str, data: bytes) -> None:
        """Tells a host of a launch that it may begin. One that cannot be told, or not in one packet, hears of it
        otherwise. For any thread."""
        if len(_HAND) + _SEAL_BYTES + len(data) > MAX_PACKET_BYTES:  # who gets a longer one hangs up
            return
        with contextlib.suppress(OSError, RuntimeError):
            self._connected(peer, address).send(_HAND + self._sealed(data) + data)

    def _sealed(self, data: bytes) -> bytes:
        """The keyed hash of data, which only hosts of this runtime can make. Others of this user can connect here."""
        return hashlib.blake2b(data, key=self._key, digest_size=_SEAL_BYTES).digest()

    # --- peers --------------------------------------------------------------------------------------------------------

    def lose(self, gone: Iterable[PeerKey]) -> None:
        """Ends what goes to and comes from hosts that are not up any more, and lets go of what was for them."""
        lost = set(gone)
        with self._changing:
            ended = [one for key, one in self._senders.items() if key in lost]
            ended += [one for one, key in self._receivers.items() if key in lost]
            self._senders = {key: one for key, one in self._senders.items() if key not in lost}
            for offers in (self._offers, self._failed):
                for name in [name for name, offer in offers.items() if offer.receiver in lost]:
                    del offers[name]
                    self._computed.drop(name)
        for connection in ended:
            connection.end()


def _lost(sender: int) -> Failure:
    return Failure("HostLost", f"host {sender}, which holds the data, was lost", host=sender)


def _devices(sharding: Any) -> list[jax.Device]:
    return list(sharding.device_set)
