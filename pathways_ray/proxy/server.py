"""The door of a proxy: the protocol's calls, on a socket that only its owner reaches.

A client opens one stream of requests and answers, and brings and fetches bytes by calls beside it, all on one
connection, which one thread reads (`wire`). Each stream has a session of the runtime, with slices of its own; when the
stream ends, whatever ends it, the session does, and all is free.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from pathways_ray.errors import UsageError
from pathways_ray.proxy.calls import Attached, Calls, Standing
from pathways_ray.proxy.connection import Opened
from pathways_ray.proxy.readers import Readers

BACKLOG = 64

MAX_CONNECTIONS = 256
"""Connections at a time. A further one takes the place of one on which nobody has attached, or is hung up on: so
strangers keep no client out."""

LOOK_S = 5.0
"""After so long it looks for clients whose bytes do not come."""

ACCEPT_PAUSE_S = 0.05
"""A proxy that has no descriptor left for a connection waits this long for one."""

_STOP_LIMIT_S = 5.0


class ProxyServer:
    """Serves clients of one tenant.

    Args:
        open_session: a session of the tenant with the slices that a client gets.
        target: where to listen: `unix:path`, or `address:port`.
        token: what clients have to show on a port; sockets in a folder of the owner's need none.
        devices: as many as a client has; 0 where nobody knows.

    Raises:
        UsageError: nobody can listen there.
    """

    def __init__(self, open_session: Callable[[], Opened], target: str, token: str = "", devices: int = 0) -> None:
        self._listener, self.port = _listening(target)
        self._readers = Readers(devices)
        self._attached = Attached(open_session, self._readers, token)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: dict[int, Calls] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._accept, name="pathways-proxy-accept", daemon=True)

    def start(self) -> None:
        self._readers.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends all connections, and their sessions."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join(_STOP_LIMIT_S)
        self._listener.close()
        self._attached.close()
        self._readers.close()
        for calls in list(self._calls.values()):
            calls.wire.close()

    @property
    def clients(self) -> int:
        """Clients that are attached."""
        return len(self._attached.connections)

    @property
    def account(self) -> dict[str, int]:
        """Big arrays that clients have put by pipes: those whose ends the proxy has passed on to hosts, and those that
        it has read itself."""
        pipes = self._attached.handovers.pipes
        return {"passed_on": pipes[True], "read_here": pipes[False]}

    def _accept(self) -> None:
        """Takes connections, and looks out for those that hang up: their readers may wait for something else."""
        listener = self._listener.fileno()
        with select.epoll() as poll:
            poll.register(listener, select.EPOLLIN)
            poll.register(self._wake, select.EPOLLIN)
            while not self._stopping:
                for client in list(self._attached.connections.values()):
                    client.give_up_late(time.monotonic())
                found = {number for number, _ in poll.poll(LOOK_S)}
                for number in found - {listener, self._wake}:
                    with contextlib.suppress(OSError):
                        poll.unregister(number)
                    if (calls := self._calls.get(number)) is not None:
                        calls.wire.lost()
                # Last, since a reader closes its socket by itself: a connection that is taken before may get the number
                # of one that has hung up, and would be hung up on in its place.
                if listener in found:
                    try:
                        connection, _ = self._listener.accept()
                        self._serve(connection, poll)
                    except BlockingIOError:
                        pass
                    except OSError:  # who waits would be seen again at once, and without end: no descriptor is left
                        time.sleep(ACCEPT_PAUSE_S)

    def _serve(self, connection: socket.socket, poll: select.epoll) -> None:
        if len(self._calls) >= MAX_CONNECTIONS:
            # The oldest of those that have said least: who has asked something may be about to attach.
            number, calls = min(list(self._calls.items()), key=lambda one: one[1].standing)
            if calls.standing is Standing.USED:
                connection.close()
                return
            self._calls.pop(number, calls).wire.close()
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = connection.fileno()

        def ended() -> None:
            if self._calls.get(number) is calls:  # and not one that has its number by now
                del self._calls[number]

        calls = self._calls[number] = Calls(self._attached, connection, ended)
        poll.register(number, select.EPOLLRDHUP)
        try:
            threading.Thread(target=calls.run, name="pathways-proxy-client", daemon=True).start()
        except RuntimeError:  # no thread is left
            calls.wire.lost()
            calls.run()


def _listening(target: str) -> tuple[socket.socket, int]:
    """A socket that listens, and its port; 0 where it has none."""
    kind, _, path = target.partition(":")
    try:
        if kind == "unix":
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
        else:
            address, _, port = target.rpartition(":")
            listener = socket.create_server((address, int(port)), backlog=BACKLOG)
        listener.listen(BACKLOG)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot listen at {target}: {error}") from None
    listener.setblocking(False)
    return listener, 0 if kind == "unix" else listener.getsockname()[1]
