"""A client and the front door in one process: the lane beside the stream carries messages; one ends with the other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pathways_ray.client import session as session_module
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.array import Array
from pathways_ray.client.session import Session
from pathways_ray.controller import client_service
from pathways_ray.controller.client_service import ClientService
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.state import Command, HostState, SendClient
from pathways_ray.errors import Failure, HostLost, PathwaysError, SessionClosed, WireError
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport import grpc_streams, links, streams, thread_links
from pathways_ray.transport.capabilities import link_tags
from pathways_ray.transport.endpoints import ListenConfig, Tls
from pathways_ray.transport.messages import Completed
from pathways_ray.transport.tls import trust_of

_KIND = ArgumentType.of(ArrayType((2,), "float32"), False, None, ())
TOKEN = "the operator's"
LIMIT_S = 20.0


class Answer:
    """A method of an actor that answers at once."""

    def __init__(self, value: Any) -> None:
        self.value = value

    async def remote(self, *_: object) -> Any:
        return self.value


class Manager:
    """What the front door asks of the resource manager here."""

    platforms = Answer(("cpu",))
    release_session = Answer(None)


class Door:
    """The front door on a loop in a thread of its own, over launches without islands."""

    def __init__(self, tls: Tls | None) -> None:
        self.tls = tls
        self.launches = Launches(parallel=True, max_in_flight=100)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._started.wait(LIMIT_S)

    async def _main(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        listen = ListenConfig(tls=self.tls)
        self.front = ClientService(self.launches, self._do, listen, TOKEN, "data", True, 0, True)
        self.address = await self.front.serve(Manager())
        self._started.set()
        await self._stop.wait()
        self.front.links.close()
        await self.front.server.stop(0)

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, SendClient):
                self.front.send(command.session, command.message)

    def connect(self) -> Session:
        scheme, ca = ("grpc://", None) if self.tls is None else ("grpcs://", self.tls.ca)
        return Session(scheme + self.address, TOKEN, ca=ca)

    def call(self, work: Callable[[], Any]) -> Any:
        """Runs on the door's loop."""

        async def run() -> Any:
            found = work()
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(LIMIT_S)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


@pytest.fixture(params=["plain", "tls"])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(session_module, "_LINK_LIMIT_S", LIMIT_S)  # also on a busy machine
    made = Door(request.getfixturevalue("certificate") if request.param == "tls" else None)
    yield made
    made.stop()


def assert_answers(session: Session) -> None:
    """A launch of a program that nobody registered is refused, which goes there and back."""
    (array,) = session.launch(1, [], (_KIND,))
    with pytest.raises(WireError, match="names program 1, never registered"):
        array.block_until_ready(timeout=LIMIT_S)


def client_of(door: Door, session: Session) -> client_service.Client:
    """What the door knows of a session that has both its lane and its stream, which may come later than answers."""
    client = door.front.clients[session.id]
    eventually(lambda: client.reader is not None)
    return client


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline, "not within the limit"
        threading.Event().wait(0.01)


def test_messages_take_the_lane(door: Door) -> None:
    with door.connect() as session:
        assert_answers(session)
        client = client_of(door, session)
        assert client.by_link
        assert client.link is not None
    eventually(lambda: not door.front.clients)


def test_without_a_lane_the_stream_carries_messages(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is closed; and a controller that names none."""

    def refused(self: thread_links.ThreadLink, timeout: float = 0.0, welcome: bytes = b"") -> None:
        raise links.LinkLost("nobody answers")

    monkeypatch.setattr(thread_links.ThreadLink, "dial", refused)
    for port in (door.front.link_port, 0):
        door.front.link_port = port
        with door.connect() as session:
            assert_answers(session)
            assert not door.front.clients[session.id].by_link
    eventually(lambda: not door.front.clients)


def test_news_of_hosts_that_went_to_a_lane_come_by_the_stream_that_takes_its_place(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane opens, a host comes up and another one goes, and only then does the client give the lane up."""
    dial = thread_links.ThreadLink.dial

    def given_up(self: thread_links.ThreadLink, timeout: float, welcome: bytes) -> None:
        dial(self, timeout, welcome)
        up = HostState(7, 0, 3, "transfer", "127.0.0.1:7", 1, 1)
        down = HostState(8, 0, 3, "transfer", "127.0.0.1:8", 1, 1, down_since=0.0)
        door.call(lambda: door.launches.hosts.update({7: up, 8: down}))
        self.close()
        next(iter(self))  # raises `LinkLost`, and closes the socket

    monkeypatch.setattr(thread_links.ThreadLink, "dial", given_up)
    with door.connect() as session:
        assert_answers(session)
        known = session._data._addresses
        assert (known[7].epoch, known[7].address) == (3, "127.0.0.1:7")
        assert (known[8].epoch, known[8].address) == (3, "")


def test_the_last_words_of_a_session_come_by_the_lane(door: Door) -> None:
    session = door.connect()
    assert_answers(session)
    client = client_of(door, session)
    door.call(lambda: door.front._end(client, "the tenant is gone"))
    eventually(lambda: bool(session.closed_because))
    assert session.closed_because == "the tenant is gone"
    with pytest.raises(SessionClosed):
        session.launch(1, [], (_KIND,))
    session.close()


def test_the_end_of_a_lane_is_the_end_of_its_session(door: Door) -> None:
    """
    1. The lane breaks from this side: the controller frees what the session held.
    2. It breaks from that side: the client knows, and what it waits for ends.
    """
    session = door.connect()
    assert_answers(session)
    assert session._link is not None
    session._link.close()
    eventually(lambda: not door.front.clients and not door.launches.sessions)
    eventually(lambda: bool(session.closed_because))
    session.close()
    other = door.connect()
    assert_answers(other)
    lane = client_of(door, other).link
    assert lane is not None
    door.call(lane.close)
    eventually(lambda: bool(other.closed_because))
    with pytest.raises(PathwaysError):
        other.launch(1, [], (_KIND,))
    other.close()


def test_the_end_of_the_stream_is_the_end_of_the_lane(door: Door) -> None:
    """As when gRPC's pings find that the client has stopped."""
    session = door.connect()
    assert_answers(session)
    reader = client_of(door, session).reader
    assert reader is not None
    door.call(reader.cancel)
    eventually(lambda: bool(session.closed_because) and not door.front.clients)
    assert session._end_kind == "ControllerLost"
    session.close()


def test_nobody_else_comes_in_by_the_lane(door: Door) -> None:
    """With another's number, a wrong secret, or a second time; garbage ends the session of who sent it."""
    session = door.connect()
    assert_answers(session)
    host, _ = links.endpoint(door.address)
    address = f"{host}:{door.front.link_port}"

    def said(batches: list[bytes], **shown: str) -> str:
        outbox = thread_links.Outbox()
        link = thread_links.ThreadLink(address, streams.CLIENT_STREAM, shown, outbox, trust_of(door.tls))
        with pytest.raises(links.LinkLost) as caught:
            for _ in link:
                pass
        return str(caught.value)

    unknown = "unknown session or wrong secret"
    assert said([], session=str(session.id), authorization="wrong") == unknown
    assert said([], session="99", authorization=session._secret) == unknown
    assert said([], authorization=session._secret) == unknown
    assert said([]) == unknown
    assert said([], session=str(session.id), authorization=session._secret) == unknown, "the secret is for the stream"
    proof, _ = link_tags(session._secret, session.id)
    second = said([], session=str(session.id), authorization=proof)
    assert second == "the session has its stream already"
    assert_answers(session)
    assert session._link is not None
    session._outbox.send(Completed((1,)))  # nothing that a client may say
    eventually(lambda: bool(session.closed_because))
    assert "refused" in session.closed_because
    session.close()


def test_a_lane_that_leads_elsewhere_is_not_taken(door: Door) -> None:
    """
    1. Where the client is, the port of the lane is somebody else's: one who knows no such thing, and one who takes any
       hello. Neither hears the secret, and the stream carries the messages.
    2. The hello reached the controller, but the client gave up before the answer came: the lane is dropped.
    """
    heard: list[str] = []

    async def takes_all(link: links.AsyncLink) -> None:
        heard.append(str(link.metadata))
        link.put(b"welcome")
        await link.read()

    async def other(handlers: dict[str, links.Handler]) -> tuple[asyncio.Server, str]:
        return await links.serve(handlers, "127.0.0.1", tls=door.tls)

    right = door.front.link_port
    for handlers in ({}, {streams.CLIENT_STREAM: takes_all}):
        server, address = door.call(lambda handlers=handlers: other(handlers))
        door.front.link_port = links.endpoint(address)[1]
        with door.connect() as session:
            assert_answers(session)
            assert not door.front.clients[session.id].by_link
            assert all(session._secret not in said for said in heard)
        door.call(server.close)
    assert heard
    door.front.link_port = right
    dial = thread_links.ThreadLink.dial

    def late(self: thread_links.ThreadLink, timeout: float = 0.0, welcome: bytes = b"") -> None:
        dial(self, LIMIT_S, welcome)
        assert self._connection is not None
        self._connection.close()
        raise links.LinkLost("too late")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread_links.ThreadLink, "dial", late)
        session = door.connect()
    assert_answers(session)
    client = door.front.clients[session.id]
    assert (client.by_link, client.link) == (False, None)
    assert_answers(session)
    session.close()


def test_a_stream_that_comes_after_its_lane_has_ended_ends_the_session(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane may carry messages, and break, before the stream beside it has arrived."""
    opened = threading.Event()
    call = grpc_streams.stream_call

    def slow(*arguments: Any) -> Any:
        assert opened.wait(LIMIT_S)
        return call(*arguments)

    def broken() -> None:
        eventually(lambda: any(client.link is not None for client in door.front.clients.values()))
        (client,) = door.front.clients.values()
        assert client.link is not None
        door.call(client.link.close)
        eventually(lambda: client.link is None)
        opened.set()

    monkeypatch.setattr(grpc_streams, "stream_call", slow)
    threading.Thread(target=broken).start()
    session = door.connect()
    eventually(lambda: not door.front.clients and not door.launches.sessions)
    eventually(lambda: bool(session.closed_because))
    session.close()


class OnItsWay:
    """An upload."""

    done = False
    failure: Failure | None = None


class Watched(deque[Any]):
    """A queue that notes how far `array` is whenever something leaves."""

    def __init__(self, array: Callable[[], Array]) -> None:
        super().__init__()
        self.array = array
        self.seen: list[Failure | None] = []

    def popleft(self) -> Any:
        self.seen.append(self.array()._buffer.failure)
        return super().popleft()


def test_a_launch_that_fails_in_the_queue_has_failed_when_the_queue_is_empty(door: Door) -> None:
    """
    1. A launch waits for the upload of an array, which fails.
    2. Before the queue lets the next launch pass by, the result is known to have failed: who consumes it hears why.
    """
    with door.connect() as session:
        session._queue = queue = Watched(lambda: result)
        upload = OnItsWay()
        argument = session._new_buffer()
        argument.upload = upload  # type: ignore[assignment]
        (result,) = session.launch(1, [argument], (_KIND,))
        assert result._buffer.failure is None
        upload.failure, upload.done = Failure("HostLost", "it went"), True
        session._uploads_changed()
        assert queue.seen == [upload.failure]
        (further,) = session.launch(1, [result._buffer], (_KIND,))
        with pytest.raises(HostLost, match="it went"):
            further.block_until_ready(timeout=LIMIT_S)


class Silent:
    """A stream that never reaches the controller."""

    def __init__(self, *_: object) -> None:
        self.over = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self.over.wait(LIMIT_S)
        yield from ()

    def cancel(self) -> None:
        self.over.set()


@pytest.mark.parametrize("missing", ["stream", "lane"])
def test_a_session_needs_its_stream_and_its_lane(door: Door, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """One of them never comes: when the time for it is over, the session ends."""
    if missing == "stream":
        monkeypatch.setattr(grpc_streams, "stream_call", Silent)
    session = door.connect()
    assert_answers(session)
    client = door.front.clients[session.id]
    door.call(lambda: door.front.tick(client.opened + client_service.STREAM_LIMIT_S - 1))
    assert session.id in door.front.clients
    if missing == "lane":
        client.link = None
    door.call(lambda: door.front.tick(client.opened + client_service.STREAM_LIMIT_S + 1))
    assert session.id not in door.front.clients
    if missing == "stream":
        eventually(lambda: bool(session.closed_because))
        assert "did not come" in session.closed_because
    session.close()
