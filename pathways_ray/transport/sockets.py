"""Connections of links for threads: one thread reads, one at a time writes; plain, or encrypted."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterator

from pathways_ray.machine_load import slowness
from pathways_ray.transport.tls import Trust, client_context

READ_BYTES = 1 << 18
"""The most that is read at a time, into memory that stays (see `rooms`)."""

_AWAITED, _AT_ONCE = int(socket.MSG_NOSIGNAL), int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
"""Flags of a write. No signal: a program that has set SIGPIPE back would end with its connection. To join flags takes
longer than to write a message."""

RECORD_BYTES = 1 << 14
"""The most that one record of TLS carries, and one call of OpenSSL gives."""


def keep_alive(connection: socket.socket) -> None:
    """No waiting for more to send; and the kernel notices that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class PlainSocket:
    """A connection that is not encrypted."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._silence = 0.0
        self._connection = connection
        self._unsent: tuple[memoryview, list[int]] = memoryview(b""), []
        self._room = memoryview(bytearray(READ_BYTES))

    def limit(self, silence: float) -> None:
        """Sets the seconds that a read or a write may wait. The kernel counts them, at no call beside each."""
        self._silence = silence
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            seconds = struct.pack("ll", int(silence), int(silence % 1 * 1e6))
            self._connection.setsockopt(socket.SOL_SOCKET, option, seconds)

    def read(self) -> memoryview:
        """The bytes that have come, until the next read; none at the end. Raises `OSError` after too long a silence."""
        for _ in silences():
            with contextlib.suppress(BlockingIOError):
                return self._room[: self._connection.recv_into(self._room)]
        raise OSError(f"it was silent for {self._silence:.0f} s")

    def write(self, data: bytes, wait: bool) -> bool:
        """Sends `data` behind the rest from before. Returns False, and keeps the data, where that would take waiting.

        Ctrl-C may end this at any step, in the thread of a user who sends. What is left is known nevertheless: `extend`
        calls `send` and notes how much it took without a step in between.
        """
        whole, sent = self._unsent
        if not data and not whole:
            return True
        if before := whole[sum(sent) :]:
            data = bytes(before) + data
        self._unsent = whole, sent = memoryview(data), []
        flags = _AWAITED if wait else _AT_ONCE
        while rest := whole[sum(sent) :]:
            try:
                sent.extend(map(self._connection.send, (rest,), (flags,)))
            except BlockingIOError:
                if wait:  # the other end took nothing for as long
                    hang_up(self._connection)
                return False
            except OSError:
                self._unsent = memoryview(b""), []
                hang_up(self._connection)
                return False
        self._unsent = memoryview(b""), []
        return True


def silences() -> Iterator[int]:
    """Counts the silences that are waited for: one, and on a machine that is slow as many as it is slow by."""
    waited = 0
    while waited == 0 or waited < slowness():  # to look takes longer than a small message
        yield waited
        waited += 1


class EncryptedSocket:
    """A connection with TLS. OpenSSL is not for two threads at a time, so bytes go through memory, under a lock."""

    def __init__(self, connection: socket.socket, trust: Trust, name: str, timeout: float) -> None:
        self._silence = timeout
        self._connection = connection
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = client_context(trust).wrap_bio(self._coming, self._going, server_hostname=name)
        self._lock = threading.Lock()
        connection.settimeout(timeout)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                if not (data := connection.recv(READ_BYTES)):
                    raise OSError("it hung up while encryption was agreed on") from None
                self._coming.write(data)
        self._flush()

    def limit(self, silence: float) -> None:
        self._silence = silence
        self._connection.settimeout(silence)

    def _flush(self) -> None:
        if self._going.pending:
            self._connection.sendall(self._going.read(), socket.MSG_NOSIGNAL)

    def read(self) -> bytes:
        while True:
            with self._lock:
                found = self._decrypted()
            if found:
                return found
            received = self._received()
            if not received:
                return b""
            with self._lock:
                self._coming.write(received)

    def _decrypted(self) -> bytes:
        """The bytes of whole records that have come, up to about `READ_BYTES`."""
        pieces: list[bytes] = []
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            while len(pieces) < READ_BYTES // RECORD_BYTES and (data := self._tls.read(RECORD_BYTES)):
                pieces.append(data)
        return b"".join(pieces)

    def _received(self) -> bytes:
        for _ in silences():
            with contextlib.suppress(TimeoutError):
                return self._connection.recv(READ_BYTES)
        raise OSError(f"it was silent for {self._silence:.0f} s")

    def write(self, data: bytes, wait: bool) -> bool:
        """Always waits: only the link's own thread writes."""
        whole = memoryview(data)
        try:
            for first in range(0, len(whole), READ_BYTES):  # in pieces: the other end decrypts one meanwhile
                with self._lock:
                    self._tls.write(whole[first : first + READ_BYTES])
                    encrypted = self._going.read()
                rest = memoryview(encrypted)
                while rest:  # `sendall` would have to be through within the time that one step may take
                    rest = rest[self._connection.send(rest, socket.MSG_NOSIGNAL) :]
        except OSError:
            hang_up(self._connection)
            return False
        return True


def hang_up(connection: socket.socket) -> None:
    """Ends a connection that cannot be written to any more, so that its reader learns of it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
