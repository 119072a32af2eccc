"""A small HTTP server for Prometheus: one page, for requests with the token."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pathways_ray.transport.endpoints import Tls, is_loopback, joined

READ_LIMIT_S = 10.0
"""A connection that does not ask within this time is closed."""

PORT_PAUSE_S = 2.0
"""Time between two attempts to have a port that somebody else has."""

MAX_WAITING = 64
"""Connections that have not asked yet. Of more, the oldest is closed: each has a thread in the controller's process."""


def metrics_url(address: str, port: int, tls: Tls | None) -> str:
    """The URL of the page for Prometheus; on loopback it has no TLS."""
    scheme = "http" if tls is None or is_loopback(address) else "https"
    return f"{scheme}://{joined(address, port)}/metrics"


class _Server(ThreadingHTTPServer):
    """Answers each connection in a thread of its own.

    Args:
        page: makes the answer; what it raises makes a 503.
    """

    daemon_threads = True
    request_queue_size = 512  # with the library's five, most of a burst would wait a second for the next try to connect

    def __init__(
        self,
        place: tuple[str, int],
        context: ssl.SSLContext | None,
        token: str,
        content_type: str,
        page: Callable[[], bytes],
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        super().__init__(place, _Page)
        self.context, self.token, self.content_type, self.page = context, token, content_type, page
        self._waiting: dict[socket.socket, None] = {}
        self._changing = threading.Lock()

    def get_request(self) -> tuple[socket.socket, object]:
        connection, peer = super().get_request()
        connection.settimeout(READ_LIMIT_S)
        if self.context is not None:
            # The handshake comes with the first read, in the connection's own thread: a slow one delays no other.
            connection = self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        self._begin(connection)
        return connection, peer

    def shutdown_request(self, request: Any) -> None:
        self.end(request)
        super().shutdown_request(request)

    def _begin(self, connection: socket.socket) -> None:
        """Waits for a question, and no longer for the oldest of too many others.

        In the thread that accepts: the connections' own threads start in any order.
        """
        with self._changing:
            self._waiting[connection] = None
            oldest = next(iter(self._waiting)) if len(self._waiting) > MAX_WAITING else None
            if oldest is not None:
                del self._waiting[oldest]
        if oldest is not None:
            _hang_up(oldest)

    def end(self, connection: socket.socket) -> None:
        """Has a question, or the end of its connection."""
        with self._changing:
            self._waiting.pop(connection, None)

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that breaks, or speaks no TLS, is its own affair."""


class _Page(BaseHTTPRequestHandler):
    server: _Server
    timeout = READ_LIMIT_S
    server_version, sys_version = "pathways", ""

    def setup(self) -> None:
        super().setup()
        # All of the question together: a connection that sends a little now and then is slow in none of its parts.
        self.late = threading.Timer(READ_LIMIT_S, _hang_up, (self.connection,))
        self.late.daemon = True
        self.late.start()

    def finish(self) -> None:
        self._asked()
        super().finish()

    def _asked(self) -> None:
        self.late.cancel()
        self.server.end(self.connection)

    def do_GET(self) -> None:
        self._asked()
        shown = self.headers.get("Authorization", "").encode("utf-8", "surrogatepass")
        if not hmac.compare_digest(shown, f"Bearer {self.server.token}".encode()):
            return self._answer(401, b"show the operator's token: Authorization: Bearer <token>\n")
        if self.path.partition("?")[0] != "/metrics":
            return self._answer(404, b"there is /metrics\n")
        try:
            found = self.server.page()
        except Exception as error:
            return self._answer(503, f"no status: {type(error).__name__}: {error}\n".encode())
        return self._answer(200, found, self.server.content_type)

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: Prometheus asks every few seconds."""


def _hang_up(connection: socket.socket) -> None:
    """Ends the connection, which its own thread finds. For any thread."""
    with contextlib.suppress(OSError):
        # Past TLS, whose own shutdown is for the thread that reads.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def serve_page(
    address: str, port: int, tls: Tls | None, token: str, content_type: str, page: Callable[[], bytes]
) -> str:
    """Serves `/metrics` in a thread of its own, until the process ends; returns its URL.

    On loopback without TLS.

    Args:
        token: has to be shown as `Authorization: Bearer <token>`.
        page: makes the answer; what it raises makes a 503.

    Raises:
        OSError: the port is not free, or the address is not of this machine.
    """
    context = None
    if tls is not None and not is_loopback(address):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key)
    server = _Server((address.strip("[]"), port), context, token, content_type, page)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return metrics_url(address, int(server.server_address[1]), tls)


async def serve_once_free(taken: Callable[[str], None], address: str, port: int, *rest: Any) -> str:
    """Serves the page as `serve_page` does, once nobody else has its port.

    Args:
        taken: hears why it is not served yet, once.
    """
    told = False
    while True:
        try:
            return serve_page(address, port, *rest)
        except OSError as error:
            if not told:
                taken(f"nothing can listen at {joined(address, port)}: {error}")
                told = True
        await asyncio.sleep(PORT_PAUSE_S)
