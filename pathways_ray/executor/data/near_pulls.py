"""Pulls of this host from others of its machine."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from pathways_ray.errors import Failure
from pathways_ray.executor.data.arriving import Arriving, Landing, lost
from pathways_ray.executor.data.failure_texts import failure_in
from pathways_ray.executor.data.near_messages import (
    ASK,
    FAILED,
    FORGET,
    HERE,
    KEPT,
    NAMED,
    PIPED,
    PLACE,
    SIZE,
    TAKEN,
    UNASKED,
    UNREAD,
    PeerKey,
)
from pathways_ray.transport import neighbours
from pathways_ray.transport.neighbours import Connection
from pathways_ray.transport.shared_memory import aligned

READ_AT_ONCE_BYTES = 1 << 20
"""What has at most this size is read by the thread that hears of it: to wake another one takes as long."""


class NearPulls:
    """This host's connections to those that it takes arrays from.

    Args:
        arrived: is called by another thread whenever something has come.
    """

    def __init__(self, host: int, secret: str, arrived: Callable[[], None]) -> None:
        self.host, self._secret, self._arrived = host, secret, arrived
        self._changing = threading.Lock()
        self._senders: dict[PeerKey, Connection] = {}
        self._awaited: dict[Connection, dict[int, Arriving]] = {}
        self._unasked: dict[Connection, dict[int, bytes]] = {}
        """What came before it was asked for, and waits for that; senders bound it."""

    def pull(
        self,
        sender: PeerKey,
        address: str,
        name: int,
        types: Sequence[jax.ShapeDtypeStruct],
        landing: Landing | None = None,
    ) -> list[Any] | Failure:
        """The arrays that fill once the sender has served them, as one `Arriving`; those of `landing`, if any."""
        arriving = Arriving(sender[0], landing or Landing(types))
        try:
            connection = self.connected(sender, address)
        except (OSError, RuntimeError) as error:  # the latter: there is no thread left
            return Failure("HostLost", f"host {sender[0]} could not be reached: {error}", host=sender[0])
        if arriving.landing.keeps:  # before anything can come, which would make the arrays in memory of its own
            with contextlib.suppress(MemoryError):  # said when it comes, unless there is some by then
                arriving.rooms = _rooms(arriving)
        with self._changing:
            awaited = self._awaited.get(connection)
            if awaited is None:  # it has ended since
                arriving.fail(lost(sender[0]))
                return [arriving]
            awaited[name] = arriving
            came = self._unasked[connection].pop(name, None)
            if came is None:  # before what comes unasked meanwhile is taken
                connection.send(NAMED.pack(ASK, name))
        if came is not None:
            self._take(connection, came[:1], name, came, arriving, at_once=False)
        if arriving.rooms:  # this thread waits: it makes the arrays sooner than who reads
            try:
                arriving.make(arriving.rooms)
            except Exception as error:
                arriving.failure = self._failure(error)
                self._over(connection, name, arriving.failure)
        return [arriving]

    def connected(self, peer: PeerKey, address: str) -> Connection:
        """The connection to a host. Raises `OSError` or `RuntimeError` where it cannot be reached."""
        with self._changing:  # before its end can be noted
            found = self._senders.get(peer)
            if found is None or found not in self._awaited:
                name = neighbours.name_of(address, self._secret)
                found = self._senders[peer] = Connection.to(name, self._take_answer, self._sender_ended)
                self._awaited[found], self._unasked[found] = {}, {}
        return found

    def _take_answer(self, connection: Connection, message: bytes, pipe: socket.socket | None) -> None:
        kind, name = NAMED.unpack_from(message) if len(message) >= NAMED.size else (b"", 0)
        with self._changing:
            arriving, unasked = self._awaited.get(connection, {}).get(name), self._unasked.get(connection, {})
            if arriving is None and kind in UNASKED:
                unasked[name] = message
            forgets = kind == FORGET and unasked.pop(name, None) is not None
        if forgets or (arriving is None and kind == KEPT):  # nobody waits for it any more
            connection.send(NAMED.pack(TAKEN, name))
        if arriving is not None and kind != FORGET:
            self._take(connection, kind, name, message, arriving, pipe)

    def _take(
        self,
        connection: Connection,
        kind: bytes,
        name: int,
        message: bytes,
        arriving: Arriving,
        pipe: socket.socket | None = None,
        at_once: bool = True,
    ) -> None:
        """Takes what a sender says of arrays that are waited for.

        Args:
            at_once: whether this thread reads what is small.
        """
        if kind != FAILED:
            if arriving.filling:  # by no host of this runtime: arrays that are in use would change
                connection.end()
                return
            arriving.filling = True
        if UNASKED.get(kind) == HERE:
            connection.send(NAMED.pack(TAKEN, name))
        kind = UNASKED.get(kind, kind)
        landing = arriving.landing
        sizes, size = landing.sizes, len(message) - NAMED.size
        if kind == PIPED and pipe is not None and size == SIZE.size:
            (size,) = SIZE.unpack_from(message, NAMED.size)
            if size == sum(sizes):
                try:
                    connection.work(functools.partial(self._read, connection, name, arriving, pipe))
                except RuntimeError as error:
                    self._fail(
                        connection, name, f"{size} bytes could not be taken from host {arriving.sender}: {error}"
                    )
                return
        if kind == PIPED and pipe is None:
            self._fail(connection, name, f"this process has no descriptor left for what host {arriving.sender} sends")
        elif kind == KEPT and size % PLACE.size == 0:
            self._take_kept(connection, name, arriving, list(PLACE.iter_unpack(message[NAMED.size :])), at_once)
        elif kind == FAILED:
            text = message[NAMED.size :].decode(errors="replace")
            self._over(connection, name, failure_in(text) or Failure("ExecutionError", text, host=arriving.sender))
        elif kind == HERE and size == sum(sizes):
            try:
                rooms, whole = _rooms(arriving), np.frombuffer(message, np.uint8)
            except MemoryError as error:
                return self._fail(connection, name, f"{type(error).__name__}: {error}")
            start = NAMED.size
            for part in landing.buffers(rooms):
                part[:] = whole[start : start + len(part)]
                start += len(part)
            self._over(connection, name, rooms)
        else:
            self._fail(connection, name, _unequal(size, sizes, arriving.sender))

    def _read(self, connection: Connection, name: int, arriving: Arriving, pipe: socket.socket) -> None:
        with pipe:  # closed in any case, since its sender waits at the other end, but not before it is said why
            try:
                rooms = _rooms(arriving)
                connection.read(pipe, arriving.landing.buffers(rooms))
            except (OSError, EOFError):
                self._over(connection, name, lost(arriving.sender))
            except Exception as error:  # there is no memory
                self._fail(connection, name, f"{type(error).__name__}: {error}")
            else:
                self._over(connection, name, rooms)

    def _take_kept(
        self,
        connection: Connection,
        name: int,
        arriving: Arriving,
        places: Sequence[tuple[int, int]],
        at_once: bool,
    ) -> None:
        sizes = arriving.landing.sizes
        if (there := [size for _, size in places]) != sizes:
            connection.send(NAMED.pack(TAKEN, name))
            self._fail(connection, name, _unequal(sum(there), sizes, arriving.sender))
            return
        read = functools.partial(self._read_kept, connection, name, arriving, places)
        if at_once and sum(sizes) <= READ_AT_ONCE_BYTES:
            return read()
        try:
            connection.work(read)
        except RuntimeError:  # there is no thread left but this one
            read()

    def _read_kept(
        self, connection: Connection, name: int, arriving: Arriving, places: Sequence[tuple[int, int]]
    ) -> None:
        try:
            rooms = _rooms(arriving)
            connection.read_memory(places, arriving.landing.places(rooms))
        except OSError:
            arriving.filling = False
            connection.send(NAMED.pack(UNREAD, name))
            return
        except Exception as error:  # there is no memory
            connection.send(NAMED.pack(TAKEN, name))
            self._fail(connection, name, f"{type(error).__name__}: {error}")
        else:
            connection.send(NAMED.pack(TAKEN, name))  # first: what waits for the arrays may go on in this thread
            self._over(connection, name, rooms)

    def _fail(self, connection: Connection, name: int, text: str) -> None:
        self._over(connection, name, Failure("ExecutionError", text, "transfer", "", self.host))

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
                arriving.fail(self._failure(error))
        self._arrived()

    def _failure(self, error: Exception) -> Failure:
        return Failure("ExecutionError", f"{type(error).__name__}: {error}", "transfer", "", self.host)

    def _sender_ended(self, connection: Connection) -> None:
        with self._changing:
            awaited = self._awaited.pop(connection, {})
            self._unasked.pop(connection, None)
        for arriving in awaited.values():
            arriving.fail(lost(arriving.sender))
        self._arrived()

    def lose(self, gone: Collection[PeerKey]) -> list[Connection]:
        """Forgets the connections to hosts that are gone, and returns them."""
        with self._changing:
            ended = [one for key, one in self._senders.items() if key in gone]
            self._senders = {key: one for key, one in self._senders.items() if key not in gone}
        return ended


def _rooms(arriving: Arriving) -> list[np.ndarray[Any, Any]]:
    """The memory for what comes."""
    return arriving.rooms or list(map(aligned, arriving.landing.rooms))


def _unequal(size: int, sizes: Sequence[int], sender: int) -> str:
    return f"{size} bytes came from host {sender} in place of arrays of {sum(sizes)}"
