"""The socket of one client: a thread that reads it and hands on what has come, and the writing of any thread.

The reader writes answers once it has worked off what it has read, so a burst of requests costs two calls of the system.
Other threads write at once. Answers that nobody waits for leave some at a time, for each wakes three threads of the
client. Nobody waits for the client to read: what the kernel does not take the reader writes later.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from pathways_ray.proxy.http2 import Event, Http2
from pathways_ray.proxy.http2_frames import ProtocolError

PING_S = 3.0
"""A client that is silent is asked after so long whether it is there, and has as long to answer."""

READ_BYTES = 1 << 16
"""Read at a time: some hundred requests."""

EVENTS = 32
"""Worked off before their answers leave."""

MAX_UNWRITTEN = 1 << 12
"""Pieces that the client has not read; beyond them nothing more is read from it."""

SEND_BYTES = 1 << 22
"""The kernel keeps as much for the client to read, where it may: values of some megabytes go in few pieces."""

LATER_S, MAX_LATER = 0.002, 64
"""Answers that nobody waits for are kept for as long, and as many."""

_PIECES = 256
"""Written by one call of the system, which takes 1024 at most."""


class Wire:
    """One connection.

    Args:
        limits: see `Http2`.
        take: works off events, in the reader's thread.
        ended: called once or more when the connection is over, by threads that must not wait.
    """

    def __init__(
        self,
        connection: socket.socket,
        limits: Mapping[str, int],
        take: Callable[[Sequence[Event]], None],
        ended: Callable[[], None],
    ) -> None:
        self._socket = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self._http = Http2(limits)
        self._take, self._ended = take, ended
        self._lock = threading.Lock()
        self._unwritten: list[bytes | memoryview] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._over = self._closed = False
        self._reader = 0
        self._watched: dict[int, Callable[[], None]] = {}
        self._later: dict[int, list[bytes]] = {}
        self._later_count = 0
        self._later_until = 0.0

    # --- the reader ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Reads until the connection is over."""
        self._reader = threading.get_ident()
        try:
            self.flush()
            self._read()
        except ProtocolError as error:
            with self._lock:
                self._http.goodbye(error)
            self.flush()
        except OSError:
            pass
        finally:
            with self._lock:
                self._over = self._closed = True
                self._unwritten.clear()
                self._socket.close()
                os.close(self._wake)
            self._ended()

    def _read(self) -> None:
        asked, poll, watched = False, select.poll(), self._watched
        poll.register(self._wake, select.POLLIN)
        while not self._over:
            if watched is not self._watched:
                poll, watched = select.poll(), self._watched
                for number in (self._wake, *watched):
                    poll.register(number, select.POLLIN)
            wanted = select.POLLOUT if self._unwritten else 0
            if len(self._unwritten) <= MAX_UNWRITTEN:
                wanted |= select.POLLIN
            poll.register(self._socket, wanted)
            found = dict(poll.poll(1000 * (LATER_S if self._later else PING_S)))
            if not found and self._later:
                self._send_later()
            elif not found:
                if asked:
                    return
                asked = True
                with self._lock:
                    self._http.ping()
            if self._wake in found:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            for number, read in watched.items():
                if number in found:
                    read()
            if found.get(self._socket.fileno(), 0) & ~select.POLLOUT:
                asked = False
                data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
                if not data:
                    return
                self._work_off(data)
            if self._later and time.monotonic() > self._later_until:
                self._send_later()
            self.flush()

    def _work_off(self, data: bytes) -> None:
        with self._lock:
            events = self._http.receive(data)
        for at in range(0, len(events), EVENTS):
            self._take(events[at : at + EVENTS])
            if len(events) > at + EVENTS:
                self.flush()

    def watch(self, number: int, read: Callable[[], None]) -> None:
        """Has the reader call `read` whenever another file can be read, from now on."""
        self._watched = self._watched | {number: read}
        self._call()

    def unwatch(self, number: int) -> None:
        """Looks at a file no longer."""
        self._watched = {other: read for other, read in self._watched.items() if other != number}
        self._call()

    def lost(self) -> None:
        """Takes the news that the client has hung up, while the reader may wait for something else."""
        self._over = True
        self._call()
        self._ended()

    # --- any thread ---------------------------------------------------------------------------------------------------

    def send(self, stream: int, *parts: bytes | memoryview) -> None:
        """Sends a message of a call, which may be over."""
        with self._lock:
            self._http.send(stream, *parts)
        self._leave()

    def send_later(self, stream: int, data: bytes) -> None:
        """Sends a message that nobody waits for, with others like it."""
        with self._lock:
            self._later.setdefault(stream, []).append(data)
            self._later_count += 1
            if self._later_count == 1:
                self._later_until = time.monotonic() + LATER_S
        if self._later_count >= MAX_LATER:
            self._send_later()
        elif self._later_count == 1 and threading.get_ident() != self._reader:
            self._call()

    def _send_later(self) -> None:
        with self._lock:
            for stream, messages in self._later.items():
                self._http.send_all(stream, messages)
            self._later.clear()
            self._later_count = 0
        self._leave()

    def finish(self, stream: int, code: int = 0, text: str = "") -> None:
        """Ends a call, which may be over."""
        with self._lock:
            self._http.finish(stream, code, text)
        self._leave()

    def _leave(self) -> None:
        if threading.get_ident() != self._reader:
            self.flush()
            if self._unwritten:
                self._call()

    def _call(self) -> None:
        with self._lock:
            if not self._closed:  # else the number is that of another file by now
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Hangs up; any thread may call it."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def flush(self) -> None:
        """Writes what the kernel takes."""
        with self._lock:
            out = self._unwritten
            out += self._http.taken()
            if self._over:
                out.clear()
            while out:
                try:
                    sent = self._socket.sendmsg(out[:_PIECES], (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    return
                except OSError:  # it has hung up, which the reader sees
                    out.clear()
                    return
                done = 0
                while done < len(out) and sent >= len(out[done]):
                    sent -= len(out[done])
                    done += 1
                del out[:done]
                if sent:
                    out[0] = memoryview(out[0])[sent:]
