"""Connections between the hosts of one machine: small messages, and the bytes of big transfers.

A host listens at a name that only processes of its machine (to be exact: of its network namespace) can reach, made from
the address under which all hosts know it and the secret that only they have. Both ends make sure that the other one
belongs to the same user. A message is one packet. What is bigger is read by its receiver out of the sender's memory,
where the system lets processes of one user do that (`peer_memory`); else it has a pipe, two connected sockets of its
own, of which the sender hands one over: both processes copy at the same time. A slow transfer holds up no other.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from pathways_ray.transport.peer_memory import PeerMemory, peer_of
from pathways_ray.transport.shared_memory import contiguous_parts

MAX_PACKET_BYTES = 1 << 16
"""What is longer goes by a pipe."""

PIPES = 4
"""Big transfers at a time on each connection; each has a thread at both ends."""

PIPE_BYTES = 1 << 20
"""What a sender may be ahead of its receiver. The system grants what it allows."""


def machine() -> str:
    """The mark of all processes of this user that can reach each other's connections; "" where a system has none
    such."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        network, users = (os.stat(f"/proc/self/ns/{one}").st_ino for one in ("net", "user"))
        return f"{boot}/{network}/{users}/{os.geteuid()}"
    except OSError:
        return ""


def name_of(address: str, secret: str) -> str:
    """The name at which the host with an address listens."""
    key = hashlib.sha256(f"neighbours {secret}".encode()).digest()
    return f"\0pathways-host-{hashlib.blake2b(address.encode(), key=key, digest_size=16).hexdigest()}"


def check_user(connected: socket.socket) -> None:
    """Raises `OSError` unless the other end is a process of this user."""
    _, user = peer_of(connected)
    if user != os.geteuid():
        raise OSError(f"user {user} is at the other end of a connection between hosts of user {os.geteuid()}")


def _taken(tasks: list[Callable[[], None]]) -> list[Callable[[], None]]:
    """The one task, for the first that takes it."""
    try:
        return [tasks.pop()]
    except IndexError:
        return []


def listener(name: str) -> socket.socket:
    """A socket at which others connect. Raises `OSError` where there are no such names, or this one is taken."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.bind(name)
        made.listen(1024)
    except OSError:
        made.close()
        raise
    return made


class HeldSocket(socket.socket):
    """A socket that is closed with its last reference: so no thread uses its number once that is another one's."""

    def __del__(self) -> None:
        self.close()


class Connection:
    """One end of a connection. Any thread sends, and none waits for that; one thread of its own reads.

    Args:
        take: gets each message, and the end of a pipe that came with it; none where this process has no descriptor left
            for it.
        ended: is called once, when nothing more comes.
    """

    def __init__(
        self,
        connected: socket.socket,
        take: Callable[[Connection, bytes, socket.socket | None], None],
        ended: Callable[[Connection], None],
    ) -> None:
        check_user(connected)
        self._memory: PeerMemory | None = None
        self._socket = HeldSocket(fileno=connected.detach())
        self._take, self._ended = take, ended
        self._workers = ThreadPoolExecutor(PIPES, "pipe")
        self._changing = threading.Lock()
        self._pipes: set[socket.socket] = set()
        self._open = True
        threading.Thread(target=self._read, name="neighbour", daemon=True).start()

    @classmethod
    def to(cls, name: str, take: Any, ended: Any) -> Connection:
        """A connection to who listens at a name. Raises `OSError`."""
        connected = HeldSocket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connected.setblocking(False)  # who takes no connection, and has many waiting, must not hold up this thread
        connected.connect(name)
        connected.setblocking(True)
        return cls(connected, take, ended)

    def send(self, message: bytes, pipe: socket.socket | None = None) -> None:
        """Sends a message, later where the other end has many to take. A connection on which it cannot be sent ends,
        since the other end would wait for it; `ended` says so."""
        try:
            self._send(message, pipe, socket.MSG_DONTWAIT)
        except BlockingIOError:
            try:
                self.work(lambda: self._send_later(message, pipe))
            except RuntimeError:  # there is no thread left
                self.end()
        except OSError:
            self.end()

    def send_at_once(self, message: bytes) -> bool:
        """Sends a message, unless the other end has many to take or is gone; whether it did."""
        try:
            self._send(message, None, socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def _send_later(self, message: bytes, pipe: socket.socket | None) -> None:
        try:
            self._send(message, pipe, 0)
        except OSError:
            self.end()

    def _send(self, message: bytes, pipe: socket.socket | None, flags: int) -> None:
        taken = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pipe.fileno()]))] if pipe else []
        self._socket.sendmsg([message], taken, flags)

    def work(self, task: Callable[[], None]) -> None:
        """Has a thread of this connection do something that may wait, unless the connection has ended.

        Raises:
            RuntimeError: no thread can be started, and the task is not done.
        """
        left = [task]

        def run() -> None:
            for one in _taken(left):
                one()

        with self._changing:
            if not self._open:
                return
            try:
                self._workers.submit(run)
            except RuntimeError:  # it stays in the queue all the same
                if _taken(left):  # else a thread that was there before does it
                    raise

    def write(self, message: bytes, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Sends a message with a pipe, and the elements of arrays in C order by that. Waits for the other end.

        Raises:
            OSError: it has hung up, or this process has no descriptor left.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIPE_BYTES)
        with theirs, self._using(mine):
            self._send(message, theirs, 0)
            theirs.close()  # so that the receiver's end is the only one
            for one in arrays:
                for part in contiguous_parts(one):
                    mine.sendall(part)

    def read(self, pipe: socket.socket, buffers: Sequence[np.ndarray[Any, Any]]) -> None:
        """Fills buffers of bytes from a pipe. Raises `EOFError` where the other end hangs up before."""
        with self._using(pipe):
            for buffer in buffers:
                view = memoryview(buffer.data)
                while view:
                    count = pipe.recv_into(view, len(view), socket.MSG_WAITALL)
                    if not count:
                        raise EOFError(f"{len(view)} bytes of an array are missing")
                    view = view[count:]

    def read_memory(self, places: Sequence[tuple[int, int]], here: np.ndarray[Any, Any]) -> None:
        """Fills places here from others, each an address and its bytes, in the memory of who listened. Any one thread
        does so.

        Raises:
            OSError: the system does not allow it, that process has ended, or has hung up, and keeps nothing any more.
        """
        if self._memory is None:
            self._memory = PeerMemory(self._socket)
        self._memory.read(places, here)
        ended = select.poll()
        ended.register(self._socket, select.POLLRDHUP)
        if ended.poll(0):
            raise ConnectionResetError("the other end has hung up")

    @contextlib.contextmanager
    def _using(self, pipe: socket.socket) -> Any:
        with pipe:
            with self._changing:
                if not self._open:
                    raise EOFError("the connection has ended")
                self._pipes.add(pipe)
            try:
                yield
            finally:
                with self._changing:
                    self._pipes.discard(pipe)

    def end(self) -> None:
        """Hangs up, and ends what is on its way. Any thread may call this."""
        with self._changing:
            self._open = False
            for one in (self._socket, *self._pipes):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while True:
                message, descriptors, flags, _ = socket.recv_fds(
                    self._socket, MAX_PACKET_BYTES + 64, 1, socket.MSG_CMSG_CLOEXEC
                )
                pipe = HeldSocket(fileno=descriptors[0]) if descriptors else None
                if not message or flags & socket.MSG_TRUNC:
                    return
                self._take(self, message, pipe)
                del message, pipe  # else a pipe that was not taken would keep its sender waiting until more comes
        except OSError:
            pass  # as at the end
        finally:
            self.end()
            self._workers.shutdown(wait=False)
            self._ended(self)
