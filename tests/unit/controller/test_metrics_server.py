"""The page for Prometheus: for who shows the token, and nobody waits for a client that does not ask."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial

import pytest

from pathways_ray.controller import metrics_server
from pathways_ray.controller.metrics_server import metrics_url, serve_once_free, serve_page
from pathways_ray.transport.endpoints import Tls
from tests.waiting import until


def get(url: str, token: str | None = "s3cret") -> tuple[int, bytes]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5.0) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def _has_loopback_of_6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def serve(page: Callable[[], bytes]) -> str:
    return serve_page("127.0.0.1", 0, None, "s3cret", "text/plain", page)


def test_the_page_is_for_who_shows_the_token() -> None:
    asked = []
    url = serve(lambda: asked.append(1) or b"up 1\n")
    assert get(url) == (200, b"up 1\n")
    for wrong in (None, "", "S3cret", "s3cret ", "s3crets"):
        assert get(url, wrong)[0] == 401
    assert get(url.removesuffix("metrics"))[0] == 404
    assert len(asked) == 1


@pytest.mark.skipif(not _has_loopback_of_6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_the_page_is_served_at_an_address_of_ipv6(address: str) -> None:
    url = serve_page(address, 0, None, "s3cret", "text/plain", lambda: b"up 1\n")
    assert url.startswith("http://[::1]:")
    assert get(url) == (200, b"up 1\n")


def test_no_status_is_no_page() -> None:
    def fail() -> bytes:
        raise TimeoutError("the controller is busy")

    assert get(serve(fail)) == (503, b"no status: TimeoutError: the controller is busy\n")


def test_clients_that_do_not_ask_hold_up_nobody() -> None:
    url = serve(lambda: b"up 1\n")
    port = int(url.split(":")[2].split("/")[0])
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    assert get(url) == (200, b"up 1\n")
    for connection in idle:
        connection.close()


def test_a_client_that_never_ends_its_question_is_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "READ_LIMIT_S", 0.1)
    url = serve(lambda: b"up 1\n")
    port = int(url.split(":")[2].split("/")[0])

    def ask(connection: socket.socket) -> None:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        while True:
            connection.sendall(b"y")
            time.sleep(0.01)

    with socket.create_connection(("127.0.0.1", port)) as slow, pytest.raises(ConnectionError):
        ask(slow)


def test_of_too_many_clients_that_do_not_ask_the_oldest_are_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "MAX_WAITING", 4)
    url = serve(lambda: b"up 1\n")
    port = int(url.split(":")[2].split("/")[0])
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5.0)) for _ in range(6)]
        assert [connection.recv(1) for connection in idle[:2]] == [b"", b""]
        assert get(url) == (200, b"up 1\n")  # which had another one hung up
        assert idle[2].recv(1) == b""
        idle[5].settimeout(0.05)
        with pytest.raises(TimeoutError):
            idle[5].recv(1)


def test_nothing_is_kept_of_a_client_that_leaves_without_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its place among those that may be hung up, nor a thread that waits to do so."""
    monkeypatch.setattr(metrics_server, "READ_LIMIT_S", 3600.0)
    server = metrics_server._Server(("127.0.0.1", 0), None, "s3cret", "text/plain", lambda: b"up 1\n")
    before = {*threading.enumerate()}
    with contextlib.closing(server.socket):
        client = socket.create_connection(("127.0.0.1", int(server.server_address[1])))
        server.handle_request()
        until(lambda: any(isinstance(thread, threading.Timer) for thread in {*threading.enumerate()} - before))
        assert len(server._waiting) == 1
        client.close()
        until(lambda: not {*threading.enumerate()} - before)
        assert not server._waiting


def test_connections_of_a_burst_wait_to_be_accepted() -> None:
    """The system would drop those beyond its queue, and their clients try again a second later."""
    server = metrics_server._Server(("127.0.0.1", 0), None, "s3cret", "text/plain", lambda: b"up 1\n")
    with contextlib.closing(server.socket), contextlib.ExitStack() as stack:
        port = int(server.server_address[1])
        dial = partial(socket.create_connection, ("127.0.0.1", port), timeout=5.0)
        made = [stack.enter_context(dial()) for _ in range(64)]  # nobody accepts them
        assert {connection.getpeername() for connection in made} == {("127.0.0.1", port)}


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
        serve_page("127.0.0.1", server.getsockname()[1], None, "t", "text/plain", lambda: b"")


def test_a_port_that_is_taken_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "PORT_PAUSE_S", 0.01)
    said: list[str] = []

    async def served() -> str:
        with socket.create_server(("127.0.0.1", 0)) as taker:
            port = taker.getsockname()[1]
            waiting = asyncio.ensure_future(
                serve_once_free(said.append, "127.0.0.1", port, None, "s3cret", "text/plain", lambda: b"up 1\n")
            )
            await asyncio.sleep(0.1)
            assert said == [f"nothing can listen at 127.0.0.1:{port}: [Errno 98] Address already in use"]
        return await waiting

    assert get(asyncio.run(served())) == (200, b"up 1\n")
    assert len(said) == 1


def test_there_is_tls_beyond_loopback() -> None:
    tls = Tls("cert", "key", "ca")
    assert metrics_url("127.0.0.1", 9100, tls) == "http://127.0.0.1:9100/metrics"
    assert metrics_url("10.0.0.1", 9100, tls) == "https://10.0.0.1:9100/metrics"
    assert metrics_url("::1", 9100, None) == "http://[::1]:9100/metrics"
