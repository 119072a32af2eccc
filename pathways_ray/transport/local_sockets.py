"""Local sockets: how a client hands files in memory to a host of its machine, each with the message that is about it.

A host listens at a name that only processes of its machine (to be exact: of its network namespace) can reach. It tells
the name over a data link that is open already, with two random tags: the client shows the first, the host answers the
second. So each knows that the other is the end of that link, and nobody who finds the name learns or gets anything. A
client that cannot reach the name is on another machine, and its arrays go over the link.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from pathways_ray.transport.busy_poll import BusyPoll
from pathways_ray.transport.rooms import Room
from pathways_ray.transport.shared_memory import SharedFile

MAX_MESSAGE_BYTES = 205 << 10
"""A longer message goes over the link, and its array with it."""

MAX_ANSWER_BYTES = 120 << 10
"""A longer answer goes over the link: a client makes room for so much each time it reads, and for more than 128 KiB the
allocator asks the system each time."""

ANSWER_LIMIT_S = 2.0
"""A client waits this long for a host's tag, or for a host that takes no messages."""

MAX_STRANGERS = 64
"""Connections that have not shown a tag; a further one takes the place of the oldest."""

MAX_CAUGHT_UP = 1024
"""Messages that are read at once of what a connection has already: more than a kernel keeps of one."""

ACCEPT_PAUSE_S = 0.05
"""A host that has no descriptor left for a connection waits this long for one."""

_DESCRIPTOR_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)

_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)  # to join flags takes longer than to read a message

_UNAWAITED = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT

_room = Room(MAX_MESSAGE_BYTES)

Owner = TypeVar("Owner")


class NotLocal(OSError):
    """The other end is not on this machine, or is somebody else."""


class Invitation(NamedTuple):
    """The name and tags with which a client opens a local socket. Without a name no host listens."""

    name: str
    tag: bytes
    answer: bytes


def received(connection: socket.socket) -> tuple[bytes, SharedFile | None]:
    """The next message and the file that came with it, unless this process has no descriptor left for that; b"" at the
    end. Raises `OSError`."""
    space = _room.space  # that of all sockets of the thread
    size, others, flags, _ = connection.recvmsg_into((space,), _DESCRIPTOR_BYTES, socket.MSG_CMSG_CLOEXEC)
    message = bytes(space[:size])
    found: list[SharedFile] = []
    for level, kind, body in others:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(body[: len(body) - len(body) % numbers.itemsize])
            found += [SharedFile(number) for number in numbers]
    # Cut where nothing was found, it had a file. The message counts all the same: who has sent it waits for an answer.
    if (flags & _CUT and (found or flags & socket.MSG_TRUNC)) or len(found) > 1:
        raise OSError("a message that is too long, or more files than one, came")
    return message, found[0] if found else None


def _with(file: SharedFile | None) -> list[tuple[int, int, Any]]:
    """The ancillary data by which a message takes a file along."""
    if file is None:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.descriptor]))]


class LocalServer(Generic[Owner]):
    """The host's end, on its event loop.

    Args:
        take: gets the owner of a connection, the connection, a message, and the file that came with it.
        opened: gets the owner of a connection that is open now, and the connection, before the other end knows.
        busy: has the loop look again and again for what comes next, where that comes soon.
    """

    def __init__(
        self,
        take: Callable[[Owner, socket.socket, bytes, SharedFile | None], None],
        opened: Callable[[Owner, socket.socket], None] = lambda owner, connection: None,
        busy: BusyPoll | None = None,
    ) -> None:
        self._busy, self._looks = busy, False
        self._take, self._opened = take, opened
        self._loop = asyncio.get_running_loop()
        self._invited: dict[bytes, tuple[Owner, bytes]] = {}
        self._strangers: list[socket.socket] = []
        self._open: dict[socket.socket, Owner] = {}
        self._sending = threading.Lock()
        self.name = ""
        with contextlib.suppress(OSError, AttributeError):  # this system has no such names
            name = f"pathways-{secrets.token_hex(16)}"
            self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._server.setblocking(False)
            self._server.bind(f"\0{name}")
            self._server.listen()
            self._loop.add_reader(self._server, self._accept)
            self.name = name

    def invite(self, owner: Owner) -> Invitation:
        """An invitation to `owner`, for one connection."""
        if not self.name:
            return Invitation("", b"", b"")
        tag, answer = secrets.token_bytes(32), secrets.token_bytes(32)
        self._invited[tag] = owner, answer
        return Invitation(self.name, tag, answer)

    def dismiss(self, owner: Owner) -> None:
        """Takes no more from `owner`."""
        for tag in [tag for tag, (other, _) in self._invited.items() if other is owner]:
            del self._invited[tag]
        for connection in [connection for connection, other in self._open.items() if other is owner]:
            self._end(connection)

    def send(self, connection: socket.socket, data: bytes, file: SharedFile | None = None) -> bool:
        """Sends a message, and a file, at once, from any thread; False where that cannot be."""
        with self._sending:  # lest the number of a connection that is closed meanwhile is another one's
            if connection not in self._open or len(data) > MAX_ANSWER_BYTES:
                return False
            try:
                connection.sendmsg([data], _with(file), socket.MSG_DONTWAIT)
            except OSError:
                return False
        return True

    def receive(self, connection: socket.socket) -> tuple[bytes, SharedFile | None]:
        """The next message that a paused connection has already, and the file with it, from any thread. Raises
        `OSError` where it has none, or is closed."""
        with self._sending:
            if connection not in self._open:
                raise OSError("the connection is closed")
            return received(connection)

    async def catch_up(self, owner: Owner, may: Callable[[], bool]) -> None:
        """Takes what `owner` has sent up to now, also by a paused connection, as long as it `may` send. Others are
        served between two messages: each may be of a call that is computed here."""
        for connection in [connection for connection, other in self._open.items() if other is owner]:
            for _ in range(MAX_CAUGHT_UP):
                if not (connection in self._open and may() and self._read(connection)):
                    break
                await asyncio.sleep(0)

    def pause(self, connection: socket.socket) -> None:
        """Reads nothing more of a connection, until `resume`."""
        self._loop.remove_reader(connection)

    def resume(self, connection: socket.socket) -> None:
        """Reads a connection again, if it is open yet."""
        if connection in self._open:
            self._loop.add_reader(connection, self._read, connection)

    def close(self) -> None:
        """Hangs up, and listens no more."""
        for connection in (*self._strangers, *self._open):
            self._end(connection)
        if self.name:
            self._loop.remove_reader(self._server)
            self._server.close()

    def _accept(self) -> None:
        try:
            self._take_stranger()
        except BlockingIOError:
            pass
        except OSError:  # who waits would be seen again at once, and without end: there is no descriptor for him
            self._loop.remove_reader(self._server)
            self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again)

    def _accept_again(self) -> None:
        if self._server.fileno() >= 0:
            self._loop.add_reader(self._server, self._accept)

    def _take_stranger(self) -> None:
        connection, _ = self._server.accept()
        connection.setblocking(False)
        if len(self._strangers) >= MAX_STRANGERS:
            self._end(self._strangers[0])
        self._strangers.append(connection)
        self._loop.add_reader(connection, self._read, connection)

    def _read(self, connection: socket.socket) -> bool:
        """Takes a message; False where nothing has come."""
        try:
            data, file = received(connection)
        except BlockingIOError:
            return False
        except OSError:
            data, file = b"", None
        if not data:
            self._end(connection)
        elif connection in self._open:
            if self._busy is not None:
                self._busy.came(time.perf_counter())
            self._take(self._open[connection], connection, data, file)
            if self._busy is not None and self._busy.begins(time.perf_counter()) and not self._looks:
                self._look()
        else:
            self._greet(connection, data)
        return bool(data)

    def _look(self) -> None:
        """Keeps the loop from sleeping while it pays."""
        assert self._busy is not None
        self._looks = self._busy.goes_on(time.perf_counter())
        if self._looks:
            os.sched_yield()
            self._loop.call_soon(self._look)

    def _greet(self, connection: socket.socket, tag: bytes) -> None:
        # A tag is looked up, and not compared: it is random, and is good once.
        owner, answer = self._invited.pop(tag, (None, b""))
        if owner is None:
            self._end(connection)
            return
        self._strangers.remove(connection)
        self._open[connection] = owner
        self._opened(owner, connection)
        try:
            connection.send(answer)
        except OSError:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._loop.remove_reader(connection)
        if connection in self._strangers:
            self._strangers.remove(connection)
        with self._sending:
            self._open.pop(connection, None)
            connection.close()


class LocalSocket:
    """The client's end: any thread sends, and none waits for another one. A lock would be kept by a thread whose signal
    handler waits for what the next one to send keeps from it.

    Raises:
        NotLocal: the name is not one of this machine, or somebody else answers there; or this process has no descriptor
            left.
    """

    _full = ended = False

    def __init__(self, invitation: Invitation) -> None:
        try:
            self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise NotLocal(str(error)) from None
        try:
            self.connection.settimeout(ANSWER_LIMIT_S)
            self.connection.connect(f"\0{invitation.name}")
            self.connection.send(invitation.tag, socket.MSG_NOSIGNAL)
            if not hmac.compare_digest(self.connection.recv(len(invitation.answer) + 1), invitation.answer):
                raise NotLocal("another process answers at the host's local socket")
            self.connection.settimeout(None)
            limit = struct.pack("ll", int(ANSWER_LIMIT_S), 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        except OSError as error:
            self.connection.close()
            raise error if isinstance(error, NotLocal) else NotLocal(str(error)) from None

    def send(self, message: bytes, file: SharedFile | None = None) -> bool:
        """Sends a message and a file; False where that cannot be, and the message has not been sent. Once the host has
        taken nothing for some time, nobody waits for it before it does again. `ended` is set where it never will."""
        if len(message) > MAX_MESSAGE_BYTES:
            return False
        try:
            flags = _UNAWAITED if self._full else socket.MSG_NOSIGNAL
            if file is None:
                self.connection.send(message, flags)
            else:
                self.connection.sendmsg([message], _with(file), flags)
            self._full = False
        except OSError as error:
            if isinstance(error, BlockingIOError):
                self._full = True
            elif isinstance(error, ConnectionError):
                self.ended = True
            return False
        return True

    def close(self) -> None:
        """Hangs up. The descriptor stays until nobody has this any more: what is just sent might go to whatever has it
        next."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        if hasattr(self, "connection"):
            self.connection.close()
