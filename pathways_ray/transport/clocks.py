"""Comparison of the clocks of two machines: one asks the other for its time, many times, on a connection of its own.

The quickest answer counts (`observe.timeline.offset_of`): its time was read at most half the way there and back before
or after the middle. On a plain TCP connection that is some 20 us on one machine, and 30 to 60 us in one data centre,
where a call through Ray takes half a millisecond.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import socket
import struct
import time
from types import TracebackType

from pathways_ray.observe.timeline import Clock, offset_of

SAMPLES = 300
LIMIT_S = 5.0
"""Seconds after which a comparison is given up: the other machine cannot come here, or does not answer."""

NONCE_BYTES = 16
_TIME = struct.Struct("<d")


class ClockServer:
    """A port to which a process of another machine comes to have its clock compared, while the `with` block lasts.

    Args:
        address: of this machine, as others reach it.
        limit_s: seconds that one wait may take.
    """

    def __init__(self, address: str, limit_s: float = LIMIT_S) -> None:
        self.address = address
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.limit_s = limit_s
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family)
        self._server.settimeout(limit_s)
        self.port: int = self._server.getsockname()[1]

    def __enter__(self) -> ClockServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    def compare(self) -> Clock:
        """The clock of the process that comes next; it is running `answer`.

        Raises:
            OSError: nobody came in time, somebody else came, or it went away.
        """
        connection, _ = self._server.accept()
        with connection:
            connection.settimeout(self.limit_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_whole(connection, NONCE_BYTES), self.nonce):
                raise OSError("a stranger came to have its clock compared")
            samples = []
            for _ in range(SAMPLES):
                sent = time.monotonic()
                connection.sendall(b"?")
                (said,) = _TIME.unpack(_whole(connection, _TIME.size))
                samples.append((sent, said, time.monotonic()))
        return offset_of(samples)


def answer(address: str, port: int, nonce: bytes, ahead_s: float = 0.0) -> bool:
    """Goes to a `ClockServer` and tells it the time of this process, as often as it asks; False where it is not there.

    Args:
        ahead_s: what is added to the time, for tests.
    """
    with (
        contextlib.suppress(OSError),
        socket.create_connection((address, port), timeout=LIMIT_S) as connection,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(nonce)
        while connection.recv(1):
            connection.sendall(_TIME.pack(time.monotonic() + ahead_s))
        return True
    return False


def _whole(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise OSError("the process whose clock is compared went away")
        found += part
    return found
