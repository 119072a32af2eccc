"""A client's connection and its upgrade to a direct link, against a controller that follows a script. Real sockets."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pathways_ray.client import connection as connection_module
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.connection import TRANSITIONS, Channel, Step, after
from pathways_ray.client.session import Session
from pathways_ray.errors import (
    AuthenticationError,
    ControllerLost,
    Failure,
    PathwaysError,
    SessionClosed,
    Unschedulable,
    UsageError,
    WireError,
)
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport import grpc_streams, links, streams
from pathways_ray.transport.batcher import batches
from pathways_ray.transport.capabilities import link_tags
from pathways_ray.transport.endpoints import Tls
from pathways_ray.transport.messages import (
    REQUEST,
    TO_CONTROLLER,
    VERSION,
    Accepted,
    CloseSession,
    Completed,
    CreateSlice,
    Explain,
    Explained,
    Free,
    HostAddress,
    Launch,
    Message,
    OpenSession,
    Refused,
    Register,
    SessionEnded,
    SessionOpened,
    Upgrade,
    Upgraded,
    encode,
)
from tests.unit.helpers import Sketch
from tests.waiting import until

KIND = ArgumentType.of(ArrayType((2,), "float32"), False, None, ())
TOKEN, SECRET, SESSION = "the operator's", "the session's secret", 5
LIMIT_S = 20.0


def batch_of(*messages: Message) -> bytes:
    return b"".join(batches(messages))


class Controller:
    """The controller's end on a loop in a thread of its own.

    It answers each launch with `Completed`, by the connection that the protocol says. `by_stream` and `by_link` have
    the messages that came; `upgrade` is awaited before `Upgraded` is sent.
    """

    def __init__(self, tls: Tls | None = None) -> None:
        self.tls = tls
        self.by_stream: list[Message] = []
        self.by_link: list[Message] = []
        self.requests: list[Any] = []
        self.streams = 0
        self.stream: Any = None
        self.link: links.AsyncLink | None = None
        self.port: int | None = None
        self.answers: dict[type, Any] = {}
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._started.wait(LIMIT_S)

    async def _main(self) -> None:
        self.loop, self._stop, self.upgrade = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self.upgrade.set()
        self._writing = asyncio.Lock()
        self._upgraded, self._hang_up = asyncio.Event(), asyncio.Event()
        handlers: dict[str, Any] = {streams.CALL: self._call, streams.CLIENT_STREAM: self._stream}
        server, self.address = await grpc_streams.serve(handlers, "127.0.0.1", tls=self.tls)
        doors, address = await links.serve({streams.CLIENT_STREAM: self._link}, "127.0.0.1", tls=self.tls)
        self.link_port = links.endpoint(address)[1]
        self._started.set()
        await self._stop.wait()
        doors.close()
        await server.stop(0)

    async def _call(self, context: Any) -> None:
        request = REQUEST.decode(await context.read())
        self.requests.append(request)
        token = dict(context.invocation_metadata()).get("authorization")
        if isinstance(request, OpenSession):
            reply: Message = Refused(Failure("AuthenticationError", "the token is wrong"))
            if token == TOKEN:
                port = self.link_port if self.port is None else self.port
                reply = SessionOpened(SESSION, SECRET, "data", (), ("gpu",), True, 64, port)
        else:
            assert token == SECRET
            reply = self.answers.get(type(request), Accepted())
        await context.write(encode(reply))

    async def _stream(self, context: Any) -> None:
        metadata = grpc_streams.metadata_of(context)
        assert (metadata["session"], metadata["authorization"]) == (str(SESSION), SECRET)
        self.stream = context
        self.streams += 1
        reader = asyncio.ensure_future(self._read_stream(context))
        hung_up = asyncio.ensure_future(self._hang_up.wait())
        await asyncio.wait({reader, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        reader.cancel()

    async def _read_stream(self, context: Any) -> None:
        while (data := await grpc_streams.reading(context)) is not None:
            for message in TO_CONTROLLER.decode_batch(data):
                self.by_stream.append(message)
                if isinstance(message, Upgrade):
                    await self.upgrade.wait()
                    await self.write(batch_of(Upgraded()))
                    self._upgraded.set()
                elif isinstance(message, Launch):
                    await self.write(batch_of(Completed((message.launch,), (1,))))

    async def _link(self, link: links.AsyncLink) -> None:
        tag, answer = link_tags(SECRET, SESSION)
        if (link.metadata.get("session"), link.metadata.get("authorization")) != (str(SESSION), tag):
            link.close("unknown session or wrong secret")
            return
        self.link = link
        link.put(answer.encode())
        await self._upgraded.wait()
        while (data := await link.read()) is not None:
            for message in TO_CONTROLLER.decode_batch(data):
                self.by_link.append(message)
                if isinstance(message, Launch):
                    link.put(batch_of(Completed((message.launch,), (1,))))

    async def write(self, batch: bytes) -> None:
        """Sends a batch by the stream; gRPC takes one at a time."""
        async with self._writing:
            await self.stream.write(batch)

    # --- for tests ----------------------------------------------------------------------------------------------------

    def say(self, *messages: Message, by_link: bool = False) -> None:
        batch = batch_of(*messages)
        if by_link:
            assert self.link is not None
            self.call(self.link.put, batch)
        else:
            self.call(self.write, batch)

    def end_stream(self) -> None:
        self.call(self._hang_up.set)

    def call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Runs on the controller's loop."""

        async def run() -> Any:
            found = work(*arguments)
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(LIMIT_S)

    def connect(self, **options: Any) -> Session:
        scheme, ca = ("grpc://", None) if self.tls is None else ("grpcs://", self.tls.ca)
        return Session.connect(scheme + self.address, TOKEN, ca=ca, **options)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


@pytest.fixture(params=["plain", "tls"])
def controller(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    monkeypatch.setattr(connection_module, "LINK_DIAL_LIMIT_S", LIMIT_S)  # also on a busy machine
    made = Controller(request.getfixturevalue("certificate") if request.param == "tls" else None)
    yield made
    made.stop()


def assert_answers(session: Session) -> None:
    (array,) = session.launch(1, [], (KIND,))
    array.block_until_ready(timeout=LIMIT_S)


def on_link(session: Session) -> bool:
    return session._connection.state is Channel.ON_LINK


def launches(messages: list[Message]) -> list[int]:
    return [message.launch for message in messages if isinstance(message, Launch)]


def ended(session: Session) -> str:
    """The reason why a session that is about to end has ended."""
    until(lambda: session.closed_because)
    return session.closed_because


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_life_of_a_connection_goes_from_the_stream_to_the_link() -> None:
    state = Channel.ON_STREAM
    for step, following in [
        (Step.STREAM_MESSAGE, Channel.ON_STREAM),
        (Step.LINK_OPENED, Channel.UPGRADING),
        (Step.STREAM_MESSAGE, Channel.UPGRADING),
        (Step.UPGRADED, Channel.ON_LINK),
        (Step.LINK_ENDED, Channel.CLOSED),
    ]:
        state = after(state, step)
        assert state is following


@pytest.mark.parametrize(("state", "step"), list(itertools.product(Channel, Step)))
def test_a_step_that_the_table_does_not_have_is_against_the_protocol(state: Channel, step: Step) -> None:
    if step in TRANSITIONS[state]:
        assert after(state, step) is TRANSITIONS[state][step]
        return
    with pytest.raises(WireError, match=rf"broke the upgrade to a direct link: {step.name} in state {state.name}"):
        after(state, step)


def test_the_end_of_the_stream_closes_every_state() -> None:
    assert {after(state, Step.STREAM_ENDED) for state in Channel} == {Channel.CLOSED}


# --- opening ----------------------------------------------------------------------------------------------------------


def test_a_session_opens_with_the_version_and_a_name(controller: Controller) -> None:
    with controller.connect(name="me") as session:
        assert controller.requests == [OpenSession(VERSION, "me")]
        assert (session.id, session.platforms) == (SESSION, ("cuda",))
    assert controller.requests[-1] == CloseSession(SESSION)


def test_a_wrong_token_is_refused_by_the_controller_or_before(controller: Controller) -> None:
    scheme, ca = ("grpc://", None) if controller.tls is None else ("grpcs://", controller.tls.ca)
    with pytest.raises(AuthenticationError, match="the token is wrong"):
        Session.connect(scheme + controller.address, "another", ca=ca)
    for token in ("ü", "a\nb", None):
        with pytest.raises(AuthenticationError, match="the token is missing or wrong"):
            Session.connect(scheme + controller.address, token)  # type: ignore[arg-type]
    assert controller.streams == 0


def test_an_address_that_is_none_or_not_served() -> None:
    with pytest.raises(UsageError, match="a cluster's address looks like grpc://host:port, not 'localhost:1'"):
        Session.connect("localhost:1", TOKEN)
    with pytest.raises(UsageError, match="a port is below 65536"):
        Session.connect("grpc://127.0.0.1:99999", TOKEN)
    with pytest.raises(ControllerLost, match=r"the controller at grpc://127\.0\.0\.1:1 does not answer"):
        Session.connect("grpc://127.0.0.1:1", TOKEN, timeout=0.5)


def test_the_controllers_refusal_of_a_call_is_raised(controller: Controller) -> None:
    controller.answers[CreateSlice] = Refused(Failure("Unschedulable", "no island has 9 devices"))
    with controller.connect() as session, pytest.raises(Unschedulable, match="no island has 9 devices"):
        session.virtual_slice((9,))


def test_a_program_that_may_be_registered_again_is_before_it_is_asked_for(controller: Controller) -> None:
    """Who compiles it hears as much as a launch does."""
    with controller.connect() as session:
        sketch = Sketch("p")
        where = sketch.slice("0.0")
        graph = sketch.graph(sketch.call("f", sketch.argument(where), slice=where))
        program = session.register(graph, b"graph", {"f": b"code"})
        full, wrong = Failure("QuotaExceeded", "the tenant holds too much"), Failure("GraphError", "it has a cycle")
        for failure, again in ((full, program), (wrong, 0)):
            controller.answers[Explain] = Refused(failure, again)
            with pytest.raises(PathwaysError, match=failure.message):
                session.explain(program, b"graph")
        controller.answers[Explain] = Explained("", "", {})
        session.explain(program, b"graph")
        assert_answers(session)
        found = [message for message in controller.by_stream + controller.by_link if isinstance(message, Register)]
    assert found == [Register(program, b"graph", {"f": b"code"})] * 2


# --- the upgrade ------------------------------------------------------------------------------------------------------


def test_a_call_that_is_not_patient_waits_for_no_other_controller() -> None:
    connection = connection_module.Connection("grpc://127.0.0.1:1", TOKEN)
    connection.unsettle()
    with pytest.raises(ControllerLost, match="its successor is looked for"):
        connection.call(CloseSession(SESSION), LIMIT_S, patient=False)
    connection.close()


def test_a_call_on_a_connection_that_was_hung_up_meanwhile_says_so() -> None:
    """The search for another controller hangs up, while a thread of the user's is about to call."""
    connection = connection_module.Connection("grpc://127.0.0.1:1", TOKEN)
    connection.close()
    with pytest.raises(ControllerLost, match="does not answer"):
        connection.call(CloseSession(SESSION), LIMIT_S, patient=False)


def test_a_question_has_leave_what_was_called_before() -> None:
    """It is to be answered with what that did, as far as may be."""
    said: list[str] = []

    class Outbox(grpc_streams.GrpcOutbox):
        def hurry(self) -> None:
            said.append("hurry")

    def ask(*_: Any, **__: Any) -> bytes:
        said.append("ask")
        return encode(Accepted())

    connection = connection_module.Connection("grpc://127.0.0.1:1", TOKEN)
    connection.outbox, connection._unary = Outbox(), ask
    assert connection.call(CloseSession(SESSION), LIMIT_S) == Accepted()
    assert said == ["hurry", "ask"]
    connection.close()


def test_messages_take_the_link_and_upgrade_is_the_last_one_on_the_stream(controller: Controller) -> None:
    with controller.connect() as session:
        assert_answers(session)
        assert on_link(session)
        assert_answers(session)
    assert controller.by_stream == [Upgrade()]
    assert launches(controller.by_link) == [1, 2]


@pytest.mark.parametrize("port", [0, 1])
def test_without_a_link_the_stream_carries_messages(controller: Controller, port: int) -> None:
    """The controller names no port; or nothing serves the port that it names."""
    controller.port = port
    with controller.connect() as session:
        assert_answers(session)
        assert session._connection.state is Channel.ON_STREAM
    assert launches(controller.by_stream) == [1]
    assert controller.by_link == []


def test_messages_during_the_upgrade_are_neither_lost_nor_overtaken(controller: Controller) -> None:
    """
    1. The controller has read `Upgrade` and does not answer yet: launches wait, news of hosts come by the stream.
    2. It answers: the launches come by the link, in order.
    """
    controller.call(controller.upgrade.clear)
    with controller.connect() as session:
        arrays = [session.launch(1, [], (KIND,))[0] for _ in range(20)]
        until(lambda: controller.by_stream == [Upgrade()])
        assert session._connection.state is Channel.UPGRADING
        controller.say(HostAddress(7, 3, "127.0.0.1:7"), HostAddress(8, 3, ""))
        until(lambda: 8 in session._data._addresses)
        assert session._data._addresses[7].address == "127.0.0.1:7"
        assert not any(array.is_ready() for array in arrays)
        controller.call(controller.upgrade.set)
        for array in arrays:
            array.block_until_ready(timeout=LIMIT_S)
    assert controller.by_stream == [Upgrade()]
    assert launches(controller.by_link) == list(range(1, 21))


def test_frees_of_results_come_behind_their_launches(controller: Controller) -> None:
    with controller.connect() as session:
        for _ in range(5):
            assert_answers(session)
        session.flush()
        until(lambda: sum(len(m.buffers) for m in controller.by_link if isinstance(m, Free)) == 5)
    seen: set[int] = set()
    for message in controller.by_link:
        if isinstance(message, Launch):
            seen.add(message.results)
        elif isinstance(message, Free):
            assert seen.issuperset(message.buffers)


def test_a_link_that_leads_elsewhere_is_not_taken(controller: Controller) -> None:
    """Where the client is, the port is another one's: of one that knows no such path, and of one that takes any
    handshake. Neither gets the secret, and the stream carries the messages."""
    heard: list[str] = []

    async def takes_all(link: links.AsyncLink) -> None:
        heard.append(str(link.metadata))
        link.put(b"welcome")
        await link.read()

    async def other(handlers: dict[str, links.Handler]) -> tuple[asyncio.Server, str]:
        return await links.serve(handlers, "127.0.0.1", tls=controller.tls)

    for handlers in ({}, {streams.CLIENT_STREAM: takes_all}):
        server, address = controller.call(other, handlers)
        controller.port = links.endpoint(address)[1]
        with controller.connect() as session:
            assert_answers(session)
            assert session._connection.state is Channel.ON_STREAM
        controller.call(server.close)
    assert len(heard) == 1
    assert SECRET not in heard[0]


@pytest.mark.parametrize("by_link", [False, True])
def test_an_upgrade_out_of_order_ends_the_session(controller: Controller, by_link: bool) -> None:
    """`Upgraded` comes unasked, by the stream; or a second time, by the link."""
    controller.port = None if by_link else 0
    with controller.connect() as session:
        assert_answers(session)
        controller.say(Upgraded(), by_link=by_link)
        state = "ON_LINK" if by_link else "ON_STREAM"
        assert f"the controller broke the upgrade to a direct link: UPGRADED in state {state}" in ended(session)


def test_a_message_on_the_stream_after_the_upgrade_ends_the_session(controller: Controller) -> None:
    with controller.connect() as session:
        assert_answers(session)
        controller.say(HostAddress(7, 3, ""))
        assert "STREAM_MESSAGE in state ON_LINK" in ended(session)


def test_what_an_old_link_has_left_does_not_reach_the_next_connection(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    with controller.connect() as session:
        assert_answers(session)
        connection, heard = session._connection, list[Message]()
        with monkeypatch.context() as patch:
            patch.setattr(connection, "_receive", heard.extend)
            patch.setattr(connection, "_link", [batch_of(HostAddress(7, 3, ""))])
            connection._read_link(connection._starts - 1)
            assert heard == []
            connection._read_link(connection._starts)
            assert heard == [HostAddress(7, 3, "")]


# --- the end ----------------------------------------------------------------------------------------------------------


def test_the_end_of_the_link_is_the_end_of_the_session(controller: Controller) -> None:
    session = controller.connect()
    assert_answers(session)
    controller.call(controller.link.close, "the island is on fire")  # type: ignore[union-attr]
    assert ended(session) == "the controller is gone (the island is on fire)"
    with pytest.raises(SessionClosed, match="the island is on fire"):
        session.launch(1, [], (KIND,))
    session.close()


@pytest.mark.parametrize("port", [None, 0])
def test_whatever_ends_the_thread_that_reads_is_the_reason(controller: Controller, port: int | None) -> None:
    """By the link, and by the stream."""
    controller.port = port
    session = controller.connect()

    def look() -> None:
        session.unwatch(look)
        raise SystemExit(3)

    session.watch(look)
    session.launch(1, [], (KIND,))
    assert ended(session) == "the controller is gone (SystemExit: 3)"
    session.close()


def test_the_end_of_the_stream_is_the_end_of_the_session(controller: Controller) -> None:
    """As when gRPC's pings find that the client has stopped."""
    session = controller.connect()
    assert_answers(session)
    (array,) = session.launch(1, [], (KIND,))
    controller.end_stream()
    assert "the controller is gone" in ended(session)
    with pytest.raises(ControllerLost, match="the session ended: the controller is gone") as caught:
        array.block_until_ready(timeout=LIMIT_S)
    assert any("controller lost session 5" in note for note in caught.value.__notes__)
    session.close()


def test_a_better_reason_from_the_link_counts_when_the_stream_ends_first(controller: Controller) -> None:
    session = controller.connect()
    assert_answers(session)

    def both() -> None:
        controller._hang_up.set()
        controller.loop.call_later(0.2, controller.link.close, "the operator said so")  # type: ignore[union-attr]

    controller.call(both)
    assert ended(session) == "the controller is gone (the operator said so)"
    session.close()


def test_the_controller_ends_a_session_by_its_carrier(controller: Controller) -> None:
    for port in (0, None):
        controller.port = port
        session = controller.connect()
        assert_answers(session)
        controller.say(SessionEnded("the tenant is gone"), by_link=port is None)
        assert ended(session) == "the tenant is gone"
        with pytest.raises(PathwaysError, match="the tenant is gone"):
            session.launch(1, [], (KIND,))
        session.close()


def test_a_session_that_closes_during_the_upgrade_gives_its_socket_back(controller: Controller) -> None:
    controller.call(controller.upgrade.clear)
    session = controller.connect()
    (array,) = session.launch(1, [], (KIND,))
    link = session._connection._link
    assert link is not None
    assert link._connection is not None
    session.close()
    assert link._connection.fileno() == -1
    assert session._connection.state is Channel.CLOSED
    with pytest.raises(SessionClosed, match="it was shut down"):
        array.block_until_ready(timeout=LIMIT_S)
    controller.call(controller.upgrade.set)


def test_a_closed_session_leaves_no_thread_and_no_socket(controller: Controller) -> None:
    session = controller.connect()
    assert_answers(session)
    link = session._connection._link
    assert link is not None
    assert link._connection is not None
    readers = session._connection._readers
    assert len(readers) == 2
    session.close()
    session.close()
    until(lambda: not any(reader.is_alive() for reader in readers))
    assert link._connection.fileno() == -1
    with pytest.raises(SessionClosed, match="the session is closed: it was shut down"):
        session.status()


def test_garbage_on_the_stream_ends_the_session(controller: Controller) -> None:
    controller.port = 0
    with controller.connect() as session:
        assert_answers(session)
        controller.call(controller.write, b"\x91\xc1")
        assert ended(session).startswith("the controller is gone (")


@pytest.mark.parametrize("by_link", [False, True], ids=["stream", "link"])
def test_whatever_goes_wrong_in_the_reader_ends_the_session_for_all_that_wait(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, by_link: bool
) -> None:
    """A message at which this client breaks: nobody reads any more, and no thread is left waiting."""
    if not by_link:
        controller.port = 0
    with controller.connect() as session:
        assert_answers(session)
        if by_link:
            until(lambda: on_link(session))
        handle = session._core.handle

        def breaks(event: Any, now: float) -> Any:
            if isinstance(event, Completed):
                raise KeyError("no such thing")
            return handle(event, now)

        monkeypatch.setattr(session._core, "handle", breaks)
        session._core.pending[99] = session._core.new_buffers(1)
        (waited_for,) = session._core.pending[99]
        controller.say(Completed((99,)), by_link=by_link)
        assert ended(session) == "the controller is gone (KeyError: 'no such thing')"
        with pytest.raises(ControllerLost, match="no such thing"):
            session.wait(waited_for)
        assert waited_for.failure is not None
        until(lambda: not any(reader.is_alive() for reader in session._connection._readers))


def test_a_thread_that_outlives_its_connection_ends_no_other_one(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of the lost controller keeps it busy for longer than it is waited for."""
    controller.port = 0
    monkeypatch.setattr(connection_module, "JOIN_LIMIT_S", 0.0)
    busy, goes_on = threading.Event(), threading.Event()
    with controller.connect() as session:
        assert_answers(session)
        connection = session._connection
        (reader,) = connection._readers
        receive = connection._receive

        def waits(_: Any) -> None:
            busy.set()
            assert goes_on.wait(LIMIT_S)

        connection._receive = waits
        controller.say(HostAddress(0, 1, ""))
        assert busy.wait(LIMIT_S)
        connection._hang_up()
        connection._channel = grpc_streams.channel(connection._address, connection._trust)
        connection._receive = receive
        session._connect()
        goes_on.set()
        reader.join(LIMIT_S)
        assert not reader.is_alive()
        assert_answers(session)
