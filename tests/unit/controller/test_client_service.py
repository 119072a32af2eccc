"""The client service over real sockets, without Ray: a scripted client, its stream, its direct link, the upgrade."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from pathways_ray import limits
from pathways_ray.controller import client_service
from pathways_ray.controller.channel import ChannelState
from pathways_ray.controller.client_service import ClientService
from pathways_ray.controller.clients import Client, Clients
from pathways_ray.controller.core import ControllerCore
from pathways_ray.controller.events import (
    AnswerCall,
    CallManager,
    CloseChannel,
    Event,
    ManagerAnswered,
    OpenChannel,
    PauseReading,
    ResumeReading,
    SwitchToLink,
    TakeTurn,
    Turn,
)
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.requests import MAX_CALL_BYTES
from pathways_ray.controller.state import SendClient
from pathways_ray.controller.takeover import MAX_RESUME_BYTES
from pathways_ray.errors import TooLarge, from_failure
from pathways_ray.transport import frames, grpc_streams, links, streams, thread_links
from pathways_ray.transport.capabilities import link_tags
from pathways_ray.transport.endpoints import ListenConfig, Tls
from pathways_ray.transport.messages import (
    REPLY,
    TO_CLIENT,
    VERSION,
    CloseSession,
    Completed,
    Explain,
    KeptBuffers,
    Launch,
    LaunchFailed,
    ListHeld,
    OpenSession,
    Refused,
    ResumeSession,
    SessionEnded,
    SessionOpened,
    ToClient,
    Upgrade,
    Upgraded,
    encode,
)
from pathways_ray.transport.tls import trust_of
from tests.unit.helpers import VECTOR
from tests.waiting import until

TOKEN = "the token of the operator"
LIMIT_S = 20.0
UNKNOWN = "unknown session or wrong secret"


class Service:
    """The client service on a loop in a thread of its own, over a core without islands."""

    def __init__(self, tls: Tls | None) -> None:
        self.tls = tls
        launches = Launches(parallel=True, max_in_flight=100)
        self.core = ControllerCore(launches, Clients(launches, fusion=True), TOKEN, "data secret")
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._started.wait(LIMIT_S)

    async def _main(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.service = ClientService(self.core, self.handle, ListenConfig(tls=self.tls), strict=True)
        self.address = await self.service.serve()
        self._started.set()
        await self._stop.wait()
        self.service.links.close()
        await self.service.server.stop(0)

    def handle(self, event: Event) -> None:
        """The part of the actor that concerns clients; the resource manager answers at once."""
        for command in self.core.handle(event, time.monotonic()):
            match command:
                case SendClient(session, message):
                    self.service.send(session, message)
                case OpenChannel(session):
                    self.service.open(session)
                case SwitchToLink(session):
                    self.service.switch(session)
                case CloseChannel():
                    self.service.close(command)
                case AnswerCall():
                    self.service.answer(command)
                case TakeTurn():
                    self.loop.call_soon(self.handle, Turn())
                case PauseReading(session):
                    self.service.pause(session)
                case ResumeReading(session):
                    self.service.resume(session)
                case CallManager(method, _, call) if call:
                    assert method == "platforms"
                    self.loop.call_soon(self.handle, ManagerAnswered(call, ("cpu",)))

    def call(self, work: Callable[[], Any]) -> Any:
        """Runs on the loop of the service."""

        async def run() -> Any:
            found = work()
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(LIMIT_S)

    def state(self, session: int) -> ChannelState:
        client = self.core.clients.known.get(session)
        return client.channel.state if client is not None else ChannelState.CLOSED

    def stop(self) -> None:
        """Stops once all links are gone, as they have to be by now."""
        until(lambda: self.service.links._active_count == 0)  # type: ignore[attr-defined]
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


class Peer:
    """A scripted client: every step of the protocol is a call. `by_stream` and `by_link` are what it has received."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.trust = trust_of(service.tls)
        self.channel = grpc_streams.channel(service.address, self.trust)
        opened = self.request(OpenSession(VERSION, "scripted"), {"authorization": TOKEN})
        assert isinstance(opened, SessionOpened)
        self.session, self.secret, self.port = opened.session, opened.secret, opened.link_port
        self.shown = {"session": str(self.session), "authorization": self.secret}
        self.outbox = grpc_streams.GrpcOutbox()
        self.link: thread_links.ThreadLink | None = None
        self.reads_link = False
        self.by_stream: queue.Queue[ToClient | str] = queue.Queue()
        self.by_link: queue.Queue[ToClient | str] = queue.Queue()

    def request(self, request: Any, metadata: dict[str, str]) -> Any:
        unary = self.channel.unary_unary(streams.CALL)
        return REPLY.decode(unary(encode(request), timeout=LIMIT_S, metadata=tuple(metadata.items())))

    def open_stream(self) -> None:
        self.stream: Any = grpc_streams.stream_call(self.channel, streams.CLIENT_STREAM, self.outbox, self.shown)
        _reading(self.stream, self.by_stream)

    def link_to_service(self, **shown: str) -> thread_links.ThreadLink:
        host, _ = links.endpoint(self.service.address)
        self.link_outbox = thread_links.Outbox()
        return thread_links.ThreadLink(
            f"{host}:{self.port}", streams.CLIENT_STREAM, shown, self.link_outbox, self.trust
        )

    def open_link(self) -> None:
        tag, answer = link_tags(self.secret, self.session)
        link = self.link_to_service(session=str(self.session), authorization=tag)
        link.dial(LIMIT_S, answer.encode())
        self.link = link

    def read_link(self) -> None:
        self.reads_link = True
        _reading(self.link, self.by_link)

    def hang_up_link(self) -> None:
        assert self.link is not None
        self.link.close()
        if not self.reads_link:
            _drain(self.link)  # closes the socket
        self.link = None

    def upgrade(self) -> None:
        self.open_stream()
        self.open_link()
        self.outbox.send(Upgrade())
        assert self.by_stream.get(timeout=LIMIT_S) == Upgraded()
        self.read_link()

    def assert_answers(self, outbox: Any, inbox: queue.Queue[ToClient | str]) -> None:
        """A launch of a program that was never registered is refused, which goes there and back."""
        outbox.send(Launch(1, 1, (), 1))
        failed = inbox.get(timeout=LIMIT_S)
        assert isinstance(failed, LaunchFailed)
        assert "names program 1, never registered" in failed.failure.message

    def close(self) -> None:
        self.outbox.close()
        if self.link is not None:
            self.hang_up_link()
        self.channel.close()


def _reading(source: Any, inbox: queue.Queue[ToClient | str]) -> None:
    """Puts what comes into an inbox, and at the end the reason, in a thread of its own."""

    def read() -> None:
        reason = "the end"
        try:
            for data in source:
                for message in TO_CLIENT.decode_batch(data):
                    inbox.put(message)
        except (grpc.RpcError, frames.LinkLost) as error:
            reason = str(error)
        inbox.put(reason)

    threading.Thread(target=read, daemon=True).start()


@pytest.fixture(params=["plain", "tls"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    for module in (links, thread_links):  # an end that nobody reads from learns from its pings that the other one went
        monkeypatch.setattr(module, "PING_S", 0.1)
    made = Service(request.getfixturevalue("certificate") if request.param == "tls" else None)
    yield made
    made.stop()


@pytest.fixture
def peer(service: Service) -> Iterator[Peer]:
    made = Peer(service)
    yield made
    made.close()
    until(lambda: not service.core.clients.known)


def test_messages_take_the_stream(peer: Peer) -> None:
    peer.open_stream()
    peer.assert_answers(peer.outbox, peer.by_stream)


def test_messages_take_the_link_after_the_upgrade(peer: Peer) -> None:
    """What was sent by the stream before comes before `Upgraded`, and what comes by the link before it is not read."""
    peer.open_stream()
    peer.open_link()
    peer.link_outbox.send(Launch(2, 1, (), 1))
    peer.outbox.send(Launch(1, 1, (), 1))
    peer.outbox.send(Upgrade())
    first = peer.by_stream.get(timeout=LIMIT_S)
    assert isinstance(first, LaunchFailed)
    assert first.launch == 1
    assert peer.by_stream.get(timeout=LIMIT_S) == Upgraded()
    peer.read_link()
    second = peer.by_link.get(timeout=LIMIT_S)
    assert isinstance(second, LaunchFailed)
    assert second.launch == 2
    assert peer.service.state(peer.session) is ChannelState.ON_LINK
    assert peer.by_stream.empty()


def test_a_link_that_comes_before_the_stream_waits_for_it(peer: Peer) -> None:
    dialled = threading.Thread(target=peer.open_link, daemon=True)
    dialled.start()
    link = peer.service.core.clients.known[peer.session]
    assert link.channel.state is ChannelState.OPENED
    peer.open_stream()
    dialled.join(LIMIT_S)
    until(lambda: peer.service.state(peer.session) is ChannelState.LINK_OPEN)
    peer.outbox.send(Upgrade())
    assert peer.by_stream.get(timeout=LIMIT_S) == Upgraded()
    peer.read_link()


def test_a_link_that_ends_before_the_upgrade_is_ignored(peer: Peer) -> None:
    """And another one may be dialled."""
    peer.open_stream()
    for _ in range(2):
        peer.open_link()
        until(lambda: peer.service.state(peer.session) is ChannelState.LINK_OPEN)
        peer.hang_up_link()
        until(lambda: peer.service.state(peer.session) is ChannelState.ON_STREAM)
    peer.assert_answers(peer.outbox, peer.by_stream)


def _drain(link: thread_links.ThreadLink) -> None:
    with pytest.raises(frames.LinkLost):
        next(iter(link))


@pytest.mark.parametrize("end", ["link", "stream"])
def test_after_the_upgrade_the_end_of_either_ends_the_session(peer: Peer, end: str) -> None:
    peer.upgrade()
    peer.assert_answers(peer.link_outbox, peer.by_link)
    if end == "link":
        peer.hang_up_link()
    else:
        peer.stream.cancel()
    until(lambda: not peer.service.core.clients.known and not peer.service.core.launches.sessions)
    for inbox in (peer.by_stream, peer.by_link):
        assert isinstance(inbox.get(timeout=LIMIT_S), str), "both connections end"


@pytest.mark.parametrize("upgraded", [False, True])
def test_the_reason_comes_before_the_end(peer: Peer, upgraded: bool) -> None:
    peer.upgrade() if upgraded else peer.open_stream()
    peer.assert_answers(*_carrier(peer, upgraded))

    def end() -> None:
        client = peer.service.core.clients.known[peer.session]
        for command in peer.service.core.clients.end(client, "the tenant is gone"):
            if isinstance(command, SendClient):
                peer.service.service.send(command.session, command.message)
            elif isinstance(command, CloseChannel):
                peer.service.service.close(command)

    peer.service.call(end)
    _, inbox = _carrier(peer, upgraded)
    assert inbox.get(timeout=LIMIT_S) == SessionEnded("the tenant is gone")
    for ended in (peer.by_stream, inbox) if upgraded else (inbox,):
        assert isinstance(ended.get(timeout=LIMIT_S), str)


def _carrier(peer: Peer, upgraded: bool) -> tuple[Any, queue.Queue[ToClient | str]]:
    return (peer.link_outbox, peer.by_link) if upgraded else (peer.outbox, peer.by_stream)


def test_a_stream_that_carries_no_more_messages_ends(peer: Peer, capfd: pytest.CaptureFixture[str]) -> None:
    """What was to be said is lost, and the client would wait for it for ever."""
    peer.open_stream()
    peer.assert_answers(peer.outbox, peer.by_stream)
    service = peer.service.service
    peer.service.call(lambda: service.send(peer.session, Completed((1 << 64,))))
    assert isinstance(peer.by_stream.get(timeout=LIMIT_S), str)
    until(lambda: not peer.service.core.launches.sessions)
    assert "OverflowError" in capfd.readouterr().err


@pytest.mark.parametrize("upgraded", [False, True])
def test_what_is_not_of_the_protocol_ends_the_session_with_the_reason(peer: Peer, upgraded: bool) -> None:
    peer.upgrade() if upgraded else peer.open_stream()
    outbox, inbox = _carrier(peer, upgraded)
    outbox.send(Completed((1,)))  # nothing that a client may say
    ended = inbox.get(timeout=LIMIT_S)
    assert isinstance(ended, SessionEnded)
    assert "refused" in ended.reason
    until(lambda: not peer.service.core.launches.sessions)


def test_an_upgrade_without_a_link_ends_the_session(peer: Peer) -> None:
    peer.open_stream()
    peer.outbox.send(Upgrade())
    ended = peer.by_stream.get(timeout=LIMIT_S)
    assert isinstance(ended, SessionEnded)
    assert "it asks for the upgrade" in ended.reason


def test_messages_by_the_stream_after_the_upgrade_end_the_session(peer: Peer) -> None:
    peer.upgrade()
    peer.outbox.send(Launch(1, 1, (), 1))
    ended = peer.by_link.get(timeout=LIMIT_S)
    assert isinstance(ended, SessionEnded)
    assert "messages by the stream of a session that is on its direct link" in ended.reason


def test_a_link_needs_the_tag_of_its_session(peer: Peer) -> None:
    """With another's number, a wrong tag, the secret itself, or a second time."""
    peer.upgrade()

    def said(**shown: str) -> str:
        outbox = peer.link_outbox
        with pytest.raises(frames.LinkLost) as caught:
            for _ in peer.link_to_service(**shown):
                pass
        peer.link_outbox = outbox
        return str(caught.value)

    tag, _ = link_tags(peer.secret, peer.session)
    assert said(session=str(peer.session), authorization="wrong") == UNKNOWN
    assert said(session="99", authorization=tag) == UNKNOWN
    assert said(authorization=tag) == UNKNOWN
    assert said() == UNKNOWN
    assert said(session=str(peer.session), authorization=peer.secret) == UNKNOWN, "the secret is for the stream"
    assert said(session=str(peer.session), authorization=tag) == client_service.SECOND_CONNECTION
    peer.assert_answers(peer.link_outbox, peer.by_link)


def test_a_stream_needs_the_secret_of_its_session(peer: Peer) -> None:
    peer.open_stream()
    peer.assert_answers(peer.outbox, peer.by_stream)
    tag, _ = link_tags(peer.secret, peer.session)

    def said(**shown: str) -> str:
        call: Any = grpc_streams.stream_call(peer.channel, streams.CLIENT_STREAM, grpc_streams.GrpcOutbox(), shown)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        return str(caught.value.details())

    assert said(session=str(peer.session), authorization=tag) == UNKNOWN, "the tag is for the link"
    assert said(session="99", authorization=peer.secret) == UNKNOWN
    assert said(**peer.shown) == client_service.SECOND_CONNECTION
    peer.assert_answers(peer.outbox, peer.by_stream)


def test_a_client_that_closes_its_session_has_time_to_hang_up(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And if it does not, the service does."""
    monkeypatch.setattr(client_service, "HANG_UP_LIMIT_S", 0.1)
    peer.open_stream()
    peer.assert_answers(peer.outbox, peer.by_stream)
    peer.request(CloseSession(peer.session), peer.shown)
    assert isinstance(peer.by_stream.get(timeout=LIMIT_S), str)
    refused = peer.request(CloseSession(peer.session), peer.shown)
    assert isinstance(refused, Refused)
    assert "is not open" in str(from_failure(refused.failure))


def test_a_long_call_is_refused_before_it_is_decoded(peer: Peer) -> None:
    """
    1. What is no message at all is none at any length; of one that is longer than a call may be that is said as well.
    2. Questions about graphs, and requests to resume, have limits of their own: what they begin with says which
       they are.
    """
    peer.open_stream()
    peer.assert_answers(peer.outbox, peer.by_stream)
    unary = peer.channel.unary_unary(streams.CALL)
    for size, said in ((MAX_CALL_BYTES, ""), (MAX_CALL_BYTES + 1, f"the limit is {MAX_CALL_BYTES}. It begins as no")):
        reply = REPLY.decode(unary(bytes(size), timeout=LIMIT_S, metadata=tuple(peer.shown.items())))
        assert isinstance(reply, Refused)
        assert reply.failure.kind == "WireError"
        assert said in reply.failure.message
    long = encode(ListHeld(1, (0,) * MAX_CALL_BYTES))
    reply = REPLY.decode(unary(long, timeout=LIMIT_S, metadata=tuple(peer.shown.items())))
    assert isinstance(reply, Refused)
    assert reply.failure.kind == "TooLarge"
    explain = encode(Explain(1, -1, bytes(limits.MAX_GRAPH_BYTES)))
    resume = encode(ResumeSession(VERSION, 1, "tag", "", (), (KeptBuffers(1, VECTOR, (), (1,) * 65_536),) * 16, 1))
    for good in (explain, resume):
        assert len(good) > MAX_CALL_BYTES
        client_service.check_call(good)
    for bad, most in (
        (explain + bytes(MAX_CALL_BYTES), limits.MAX_GRAPH_BYTES + MAX_CALL_BYTES),
        (resume + bytes(MAX_RESUME_BYTES), MAX_RESUME_BYTES),
        (encode(ListHeld(1, (0,) * MAX_CALL_BYTES)), MAX_CALL_BYTES),
    ):
        with pytest.raises(TooLarge, match=f"a call of {len(bad)} bytes; the limit is {most}"):
            client_service.check_call(bad)


def test_the_link_of_a_session_whose_stream_does_not_come_is_closed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_service, "STREAM_LIMIT_S", 0.1)
    peer = Peer(service)
    tag, _ = link_tags(peer.secret, peer.session)
    link = peer.link_to_service(session=str(peer.session), authorization=tag)
    with pytest.raises(frames.LinkLost, match="the stream of the session did not come"):
        for _ in link:
            pass
    peer.close()
    client: Client = service.core.clients.known[peer.session]
    assert client.channel.state is ChannelState.OPENED


def test_one_link_of_a_session_waits_for_its_stream_and_takes_no_long_batch(service: Service) -> None:
    """
    1. A second link is refused at once.
    2. A long batch ends the one that waits, by its length alone. Then another one may wait.
    3. Once the stream has come, the link takes long batches.
    """
    peer = Peer(service)
    connections = service.service.connections[peer.session]
    shown = {"session": str(peer.session), "authorization": link_tags(peer.secret, peer.session)[0]}
    address = f"{links.endpoint(service.address)[0]}:{peer.port}"

    def dialled() -> links.AsyncLink:
        link: links.AsyncLink = service.call(
            lambda: links.dial(address, streams.CLIENT_STREAM, shown, peer.trust, limits.LINK_SILENCE_S)
        )
        return link

    def begin_long(link: links.AsyncLink) -> None:
        assert link._transport is not None
        link._transport.write(limits.MAX_MESSAGE_BYTES.to_bytes(4, "big"))

    first = dialled()
    until(lambda: connections.link_waits)
    second = dialled()
    assert service.call(second.read) is None
    assert second.reason == client_service.SECOND_LINK
    service.call(lambda: begin_long(first))
    assert service.call(first.read) is None
    assert f"a frame of {limits.MAX_MESSAGE_BYTES} bytes came" in first.reason
    until(lambda: not connections.link_waits)
    third = dialled()
    until(lambda: connections.link_waits)
    peer.open_stream()
    assert service.call(third.read) == link_tags(peer.secret, peer.session)[1].encode()
    service.call(lambda: begin_long(third))
    peer.assert_answers(peer.outbox, peer.by_stream)
    assert service.state(peer.session) is ChannelState.LINK_OPEN
    for link in (first, second, third):
        service.call(link.close)
    peer.close()
