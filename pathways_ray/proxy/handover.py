"""Files in memory for clients of a proxy on its machine: big values by descriptor, of which nothing is copied; and the
ends of pipes by which their big arrays come.

jaxlib's client has no way for that, so what runs beside it in the client's process (`reading`) has opened a local
socket, to which it was invited when it attached. It counts what it asks for in the stream of requests; each answer
names its question by that number.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future

from pathways_ray.transport.local_sockets import Invitation, LocalServer
from pathways_ray.transport.shared_memory import SharedFile

_START_LIMIT_S = 10.0

NUMBER_BYTES = 8
"""A message begins with the number of what it answers."""

Value = SharedFile | bytes | None
"""A file, the bytes of a small value, or nothing where it does not come."""

Receive = Callable[[socket.socket], tuple[bytes, SharedFile | None]]

Send = Callable[[socket.socket, bytes, SharedFile | None], bool]


def number_of(message: bytes) -> int:
    """The number of what an answer is about; 0 for other messages."""
    return int.from_bytes(message[:NUMBER_BYTES], "little") if len(message) >= NUMBER_BYTES else 0


class Handover:
    """The files for one client. Safe to use from several threads.

    Attributes:
        invitation: brings the client to the socket.
        connection: the client's; None before it has come.

    Args:
        send: sends an answer, with a file where there is one; False where that cannot be.
        receive: the next message that has come; raises `OSError` where none has.
        end: hangs up on the client.
        count_pipe: notes an array that came by a pipe, whose end went on to a host (`passed_on`) or was read here.
    """

    def __init__(
        self, send: Send, receive: Receive, end: Callable[[Handover], None], count_pipe: Callable[[bool], None]
    ) -> None:
        self.invitation = Invitation("", b"", b"")
        self.connection: socket.socket | None = None
        self._send, self._receive, self._end = send, receive, end
        self.count_pipe = count_pipe
        self._taken = 0

    def give(self, number: int, value: Value) -> None:
        """Sends answer `number`. Who cannot be sent one, since it reads none, is hung up on: it waits for no more."""
        data, file = (value, None) if isinstance(value, bytes) else (b"", value)
        head = number.to_bytes(NUMBER_BYTES, "little")
        if self.connection is None or not self._send(self.connection, head + data, file):
            self._end(self)

    def taken(self) -> SharedFile | None:
        """The next file that the client has sent; None where it sent none of that number. It is here before the request
        that is about it, so nobody waits."""
        self._taken += 1
        with contextlib.suppress(OSError):
            if self.connection is not None:
                data, file = self._receive(self.connection)
                return file if number_of(data) == self._taken else None
        return None

    def close(self) -> None:
        """Hangs up on the client, who sees that no more come."""
        self._end(self)


class Handovers:
    """The local socket of a proxy, on an event loop in a thread of its own.

    Attributes:
        pipes: arrays that came by pipes which went on to hosts, and by those that were read here.
    """

    def __init__(self) -> None:
        self.pipes = {True: 0, False: 0}
        self._counting = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pathways-proxy-files", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_LIMIT_S):
            raise RuntimeError("the thread that hands files to clients did not start")

    def _run(self) -> None:
        async def serve() -> None:
            self._server: LocalServer[Handover] = LocalServer(lambda *said: None, self._came)
            self._stopped = asyncio.Event()
            self._started.set()
            await self._stopped.wait()
            self._server.close()

        try:
            self._loop.run_until_complete(serve())
        finally:
            self._started.set()
            self._loop.close()

    def open(self) -> Handover:
        """For a further client."""
        made = Handover(self._server.send, self._server.receive, self._dismiss, self._count_pipe)
        invited: Future[Invitation] = Future()
        self._loop.call_soon_threadsafe(lambda: invited.set_result(self._server.invite(made)))
        made.invitation = invited.result(_START_LIMIT_S)
        return made

    def _count_pipe(self, passed_on: bool) -> None:
        with self._counting:
            self.pipes[passed_on] += 1

    def _came(self, owner: Handover, connection: socket.socket) -> None:
        self._server.pause(connection)  # what it sends is taken when a request is about it
        owner.connection = connection

    def _dismiss(self, owner: Handover) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all connections
            self._loop.call_soon_threadsafe(self._server.dismiss, owner)

    def close(self) -> None:
        """Hangs up on all clients."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(_START_LIMIT_S)
