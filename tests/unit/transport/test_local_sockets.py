"""Local sockets: files come with their messages, from whom they are expected."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pathways_ray.transport import local_sockets
from pathways_ray.transport.busy_poll import BusyPoll
from pathways_ray.transport.local_sockets import Invitation, LocalServer, LocalSocket, NotLocal
from pathways_ray.transport.shared_memory import SharedFile

LIMIT_S = 20.0


class Server:
    """A local server on a loop in a thread, which notes what it takes."""

    def __init__(self, busy: BusyPoll | None = None) -> None:
        self._busy = busy
        self.took: list[tuple[str, bytes, SharedFile | None]] = []
        self.came = threading.Semaphore(0)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server: LocalServer[str] = self.run(self._made)

    def _made(self) -> LocalServer[str]:
        return LocalServer(self._take, busy=self._busy)

    def _take(self, owner: str, connection: socket.socket, data: bytes, file: SharedFile | None) -> None:
        self.took.append((owner, data, file))
        self.last = connection
        self.came.release()

    def run(self, work: Any, *arguments: Any) -> Any:
        async def call() -> Any:
            found = work(*arguments)
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(LIMIT_S)

    def invite(self, owner: str) -> Invitation:
        found: Invitation = self.run(self.server.invite, owner)
        return found

    def end(self) -> None:
        self.run(self.server.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LIMIT_S)
        self.loop.close()

    def next(self) -> tuple[str, bytes, SharedFile | None]:
        assert self.came.acquire(timeout=LIMIT_S)
        return self.took.pop(0)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.end()


class Looks(BusyPoll):
    """Looks so many times behind each message."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.left, self.looked = times, 0, 0
        self.over = threading.Event()

    def begins(self, now: float) -> bool:
        self.left = self.times
        self.over.clear()
        return True

    def goes_on(self, now: float) -> bool:
        self.left -= 1
        self.looked += 1
        if self.left < 0:
            self.over.set()
        return self.left >= 0


def test_a_server_looks_for_what_comes_next_and_serves_all_meanwhile() -> None:
    looks = Looks(2000)
    server = Server(looks)
    ours, theirs = (LocalSocket(server.invite(owner)) for owner in ("ours", "theirs"))
    for number in range(20):
        for name, end in (("ours", ours), ("theirs", theirs)):
            assert end.send(b"%d" % number)
            assert server.next()[:2] == (name, b"%d" % number)
            assert server.run(lambda: 7) == 7, "the loop does what else there is"
    assert looks.over.wait(LIMIT_S), "it sleeps once it does not pay"
    assert 2000 < looks.looked <= 41 * 2001
    ours.close()
    theirs.close()
    server.end()


def test_a_file_comes_with_its_message(server: Server) -> None:
    ours, theirs = (LocalSocket(server.invite(owner)) for owner in ("ours", "theirs"))
    file = SharedFile.create(8)
    file.write(np.arange(8, dtype=np.uint8), 0)
    assert ours.send(b"a", file)
    assert server.next()[:2] == ("ours", b"a")
    assert theirs.send(b"b")
    assert server.next() == ("theirs", b"b", None)
    assert ours.send(b"c", file)
    del file
    _, _, came = server.next()
    assert came is not None
    assert came.bytes(8).tolist() == list(range(8))


def test_a_tag_is_good_once_and_for_its_owner(server: Server) -> None:
    invitation = server.invite("ours")
    first = LocalSocket(invitation)
    with pytest.raises(NotLocal):
        LocalSocket(invitation)
    with pytest.raises(NotLocal):
        LocalSocket(invitation._replace(tag=bytes(32)))
    assert first.send(b"a")
    assert server.next() == ("ours", b"a", None)
    other = server.invite("gone")
    server.run(server.server.dismiss, "gone")
    with pytest.raises(NotLocal):
        LocalSocket(other)


def test_a_client_gives_nothing_to_somebody_else_at_the_name(server: Server) -> None:
    with pytest.raises(NotLocal, match="another process answers"):
        LocalSocket(server.invite("ours")._replace(answer=b"x" * 32))
    with pytest.raises(NotLocal):
        LocalSocket(Invitation("pathways-nobody-listens-here", b"t", b"a"))


def test_a_client_without_a_descriptor_left_goes_without_a_local_socket(server: Server) -> None:
    invitation = server.invite("ours")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_one = os.dup(0)
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, before[1]))
    try:
        with pytest.raises(NotLocal, match="Too many open files"):
            LocalSocket(invitation)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert LocalSocket(invitation).send(b"a")


def test_who_is_dismissed_is_not_heard_any_more(server: Server) -> None:
    ours, theirs = LocalSocket(server.invite("ours")), LocalSocket(server.invite("theirs"))
    server.run(server.server.dismiss, "ours")
    assert not ours.send(b"a")
    assert theirs.send(b"b")
    assert server.next()[0] == "theirs"


def test_strangers_make_room_for_others_and_leave_no_descriptors(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sockets, "MAX_STRANGERS", 3)
    name = server.invite("ours").name
    strangers = []
    for _ in range(10):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(LIMIT_S)
        connection.connect(f"\0{name}")
        strangers.append(connection)
    assert strangers[0].recv(1) == b""
    assert LocalSocket(server.invite("ours")).send(b"a")
    assert server.next()[0] == "ours"
    assert server.run(lambda: len(server.server._strangers)) <= 3
    for connection in strangers:
        connection.close()


def test_several_files_or_too_long_a_message_end_the_connection_and_nothing_stays_open(server: Server) -> None:
    file = SharedFile.create(8)
    for odd in ("files", "long"):
        ours = LocalSocket(server.invite("ours"))
        before = len(os.listdir("/proc/self/fd"))
        numbers = array.array("i", [file.descriptor] * (9 if odd == "files" else 1))
        data = b"a" if odd == "files" else bytes(local_sockets.MAX_MESSAGE_BYTES + 1)
        ours.connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
        assert ours.connection.recv(1) == b""
        assert len(os.listdir("/proc/self/fd")) <= before
    assert not server.took


def test_an_answer_that_is_longer_than_its_reader_has_room_for_is_not_sent(server: Server) -> None:
    ours = LocalSocket(server.invite("ours"))
    assert ours.send(b"a")
    assert server.next()[1] == b"a"
    assert not server.run(lambda: server.server.send(server.last, bytes(local_sockets.MAX_ANSWER_BYTES + 1)))
    assert server.run(lambda: server.server.send(server.last, bytes(local_sockets.MAX_ANSWER_BYTES)))
    assert len(ours.connection.recv(local_sockets.MAX_MESSAGE_BYTES)) == local_sockets.MAX_ANSWER_BYTES


def test_other_threads_send_while_a_signal_handler_has_interrupted_one_that_does(server: Server) -> None:
    """Else a handler that waits for such a thread, as for one that has the turn to launch, would do so without end."""
    ours = LocalSocket(server.invite("ours"))
    connection, sent = ours.connection, []

    class Interrupted:
        def send(self, message: bytes, flags: int) -> int:
            ours.connection = connection
            signal.raise_signal(signal.SIGUSR1)
            return connection.send(message, flags)

    def handler(*_: object) -> None:
        other = threading.Thread(target=lambda: sent.append(ours.send(b"b")), daemon=True)
        other.start()
        other.join(LIMIT_S)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        ours.connection = Interrupted()  # type: ignore[assignment]
        assert ours.send(b"a")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sent == [True]
    assert [server.next()[1], server.next()[1]] == [b"b", b"a"]


def test_a_message_that_is_too_long_is_not_sent(server: Server) -> None:
    ours = LocalSocket(server.invite("ours"))
    assert not ours.send(bytes(local_sockets.MAX_MESSAGE_BYTES + 1))
    assert ours.send(b"a")
    assert server.next()[1] == b"a"


def test_the_host_answers_from_any_thread_until_the_connection_is_gone(server: Server) -> None:
    ours = LocalSocket(server.invite("ours"))
    assert ours.send(b"a")
    server.next()
    assert server.server.send(server.last, b"b")
    assert ours.connection.recv(10) == b"b"
    sent = 0
    while server.server.send(server.last, bytes(1000)):  # a client that reads nothing holds up nobody
        sent += 1
        assert sent < 10_000
    server.run(server.server.dismiss, "ours")
    assert not server.server.send(server.last, b"c")


def test_a_host_without_descriptors_waits_for_some(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    1. Somebody connects whom it cannot take. It does not look for him all the time: its loop serves all clients.
    2. Once it has a descriptor, it takes him.
    """
    invitation, tries = server.invite("a"), 0
    accept = server.server._take_stranger

    def counted() -> None:
        nonlocal tries
        tries += 1
        accept()

    monkeypatch.setattr(server.server, "_take_stranger", counted)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(LIMIT_S)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.dup(0) for _ in range(64)]  # so that no number is free below
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened), limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.dup(0))
        connection.connect(f"\0{invitation.name}")
        time.sleep(0.5)
        seen = tries
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for number in opened:
            os.close(number)
    assert 1 <= seen <= 50
    connection.send(invitation.tag)
    assert connection.recv(100) == invitation.answer
    connection.close()


def test_others_are_served_while_what_has_come_is_taken(server: Server) -> None:
    one, two = (LocalSocket(server.invite(owner)) for owner in ("one", "two"))
    assert one.send(b"first")
    server.next()
    server.run(server.server.pause, server.last)
    for _ in range(20):
        assert one.send(b"call")

    async def catch_up() -> None:
        assert two.send(b"call")
        await server.server.catch_up("one", lambda: True)

    server.run(catch_up)
    owners = [owner for owner, *_ in server.took]
    assert owners.count("one") == 20
    assert 0 < owners.index("two") < 20
    one.close()
    two.close()


def test_what_has_come_is_taken_as_long_as_its_owner_may_send(server: Server) -> None:
    """Of one that is paused as well; the rest stays until it is read again."""
    client = LocalSocket(server.invite("one"))
    assert client.send(b"first")
    server.next()
    connection = server.last
    server.run(server.server.pause, connection)
    for k in range(5):
        assert client.send(b"%d" % k)
    for may, there in ((lambda: False, 0), (lambda: len(server.took) < 2, 2), (lambda: True, 5)):
        server.run(server.server.catch_up, "one", may)
        assert [data for _, data, _ in server.took] == [b"%d" % k for k in range(there)]
    server.run(server.server.catch_up, "another", lambda: True)
    server.run(server.server.resume, connection)
    assert client.send(b"last")
    for _ in range(6):
        taken = server.next()
    assert taken[:2] == ("one", b"last")
    client.close()
