"""Files in memory for clients of a proxy on its machine: big values by descriptor, of which nothing is copied.

jaxlib's client has no way for that, so what runs beside it in the client's process (`reading`) asks at a local socket,
to which it was invited when it attached. It counts what it asks for in the stream of requests, and names each by its
number here: so file and question find each other, whichever is first.
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

MAX_KEPT = 64
"""Files that a client has not asked for yet; beyond them it does not get the oldest."""

_START_LIMIT_S = 10.0

NUMBER_BYTES = 8
"""A message begins with the number of what it is about."""

Value = SharedFile | bytes | None
"""A file, the bytes of a small value, or nothing where it does not come."""

Send = Callable[[socket.socket, bytes, SharedFile | None], bool]


def question(number: int) -> bytes:
    """The message that asks for a file."""
    return number.to_bytes(NUMBER_BYTES, "little")


def number_of(message: bytes) -> int:
    """The file that a question or an answer is about; 0 for a message that is neither."""
    return int.from_bytes(message[:NUMBER_BYTES], "little") if len(message) >= NUMBER_BYTES else 0


class Handover:
    """The files for one client, by their numbers. Safe to use from several threads.

    Args:
        invitation: brings the client to the socket.
        send: sends an answer, with a file where there is one; False where that cannot be.
        end: hangs up on the client.
    """

    def __init__(self, send: Send, end: Callable[[Handover], None]) -> None:
        self.invitation = Invitation("", b"", b"")
        self._send, self._end = send, end
        self._lock = threading.Lock()
        self._kept: dict[int, Value] = {}
        self._asked: dict[int, socket.socket] = {}
        self._past = 0
        """No file up to this number is kept but those that are."""

    def give(self, number: int, file: Value) -> None:
        """Takes file `number`, or what stands for it."""
        with self._lock:
            asked = self._asked.pop(number, None)
            if asked is None:
                self._kept[number] = file
                if len(self._kept) > MAX_KEPT:
                    oldest = min(self._kept)
                    del self._kept[oldest]
                    self._past = max(self._past, oldest)
                return
        self._answer(asked, number, file)

    def ask(self, connection: socket.socket, number: int) -> None:
        """Sends file `number` as soon as it is there."""
        with self._lock:
            if number not in self._kept and number > self._past and len(self._asked) < MAX_KEPT:
                self._asked[number] = connection
                return
            file = self._kept.pop(number, None)
        self._answer(connection, number, file)

    def _answer(self, connection: socket.socket, number: int, found: Value) -> None:
        """Sends an answer. A client that cannot be sent one waits for it: it sees the end."""
        data, file = (found, None) if isinstance(found, bytes) else (b"", found)
        if not self._send(connection, question(number) + data, file):
            self._end(self)

    def close(self) -> None:
        """Lets go of all files, and hangs up on the client, who sees that no more come."""
        with self._lock:
            self._kept.clear()
            self._asked.clear()
        self._end(self)


class Handovers:
    """The local socket of a proxy, on an event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pathways-proxy-files", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_LIMIT_S):
            raise RuntimeError("the thread that hands files to clients did not start")

    def _run(self) -> None:
        async def serve() -> None:
            self._server: LocalServer[Handover] = LocalServer(self._take)
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
        made = Handover(self._server.send, self._dismiss)
        invited: Future[Invitation] = Future()
        self._loop.call_soon_threadsafe(lambda: invited.set_result(self._server.invite(made)))
        made.invitation = invited.result(_START_LIMIT_S)
        return made

    def _take(self, owner: Handover, connection: socket.socket, data: bytes, file: SharedFile | None) -> None:
        owner.ask(connection, number_of(data))

    def _dismiss(self, owner: Handover) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all connections
            self._loop.call_soon_threadsafe(self._server.dismiss, owner)

    def close(self) -> None:
        """Hangs up on all clients."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(_START_LIMIT_S)
