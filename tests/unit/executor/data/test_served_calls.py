"""Calls that a host serves: a client's streams and a host's data server, in one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from pathways_ray.client.array_pieces import FetchPlan
from pathways_ray.client.data import DataLinks
from pathways_ray.client.served import ServedCall, Server, values_of
from pathways_ray.errors import Failure, PathwaysError, SessionClosed, from_failure
from pathways_ray.executor.data.served_calls import MAX_UNREAD, ServedCalls
from pathways_ray.executor.run.instructions import Called
from pathways_ray.ir.types import ArrayType
from pathways_ray.limits import MAX_SERVED_BYTES
from pathways_ray.transport.capabilities import data_token, tenant_mark
from pathways_ray.transport.frames import LinkLost
from pathways_ray.transport.messages import DataFailed, EarlyAllowed, HostAddress, ServeCall
from tests.unit.executor.data.test_server import COVER, OVER, SECRET, SESSION, SMALL, Host, Wire
from tests.unit.helpers import placed
from tests.waiting import until

PAIR = FetchPlan.of_array(ArrayType((2, 3), "int32"), (), placed(1, ["0.0"]))
VALUES = [SMALL, np.arange(6, dtype=np.int32).reshape(2, 3)]


class Serving:
    """A host whose dispatcher is a test: `calls` are those that came to it, unless it `takes` none."""

    def __init__(self, takes: bool = True) -> None:
        self.host = Host()
        self.calls: queue.SimpleQueue[Called] = queue.SimpleQueue()
        self.served = self.host.server.served
        self.host.server.early.allow(tenant_mark(""))
        self.served._hand = lambda called: self.calls.put(called) or True if takes else False

    def answers(self, answer: Callable[[Called], None]) -> None:
        """Has each call that comes from now on answered, in another thread."""
        threading.Thread(target=lambda: [answer(self.calls.get()) for _ in range(99)], daemon=True).start()


@pytest.fixture
def serving() -> Serving:
    return Serving()


@pytest.fixture(params=["local", "stream"])
def data(serving: Serving, request: pytest.FixtureRequest) -> Iterator[DataLinks]:
    host = serving.host
    made = DataLinks(SESSION, data_token(SECRET, SESSION, None), (HostAddress(0, 1, host.server.address),))
    host.put(1, SMALL)
    np.testing.assert_array_equal(made.fetch(1, COVER, lambda: None), SMALL)
    until(lambda: made._links[0].is_local)
    made._links[0].is_local = request.param == "local"
    yield made
    made.close(OVER)


def asked(data: DataLinks, check: Callable[[], None] = lambda: None, plans: Any = (COVER, PAIR)) -> Any:
    return values_of(data, ServedCall(Server(0, 5), (1, 0), ((1, b"12"),), plans), check)


def test_a_call_gets_all_its_values(serving: Serving, data: DataLinks) -> None:
    serving.answers(lambda called: serving.served.answer(called, [], [jax.device_put(value) for value in VALUES]))
    for _ in range(3):
        for found, value in zip(asked(data), VALUES, strict=True):
            np.testing.assert_array_equal(found, value)
            assert found.flags.writeable, "it is the caller's own"
    link = data.link_of(0)
    assert link is not None
    assert (link.fetches, serving.served._asked) == ({}, {})


def test_the_host_gets_the_call_as_it_was_made(serving: Serving, data: DataLinks) -> None:
    def answer(called: Called) -> None:
        message = called.message
        assert (called.session, message.program, message.arguments, message.inline) == (
            SESSION,
            5,
            (1, 0),
            ((1, b"12"),),
        )
        assert message.devices == ((0,), (0,))
        serving.served.answer(called, [], [jax.device_put(value) for value in VALUES])

    serving.answers(answer)
    assert len(asked(data)) == 2


@pytest.mark.parametrize("takes", [False, True])
def test_a_call_that_is_left_says_so_at_once(takes: bool) -> None:
    serving = Serving(takes)
    serving.answers(serving.served.leave)
    data = DataLinks(SESSION, data_token(SECRET, SESSION, None), (HostAddress(0, 1, serving.host.server.address),))
    assert asked(data) is None, "there is no stream yet"
    serving.host.put(1, SMALL)
    data.fetch(1, COVER, lambda: None)
    found = asked(data)
    assert isinstance(found, PathwaysError)
    assert "has to be launched" in str(found)
    assert serving.served._asked == {}
    data.close(OVER)


LARGE = [np.zeros(MAX_SERVED_BYTES // 4 - 3, np.float32), np.zeros((2, 3), np.int32)]


BROKEN = Failure("ExecutionError", "it broke")


@pytest.mark.parametrize(
    ("values", "completing"),
    [
        pytest.param([BROKEN, VALUES[1]], [], id="a failure"),
        pytest.param(VALUES, [BROKEN], id="a failure of what is no result"),
        pytest.param([VALUES[0]], [], id="fewer than were asked for"),
        pytest.param(LARGE, [], id="too much"),
    ],
)
def test_a_call_is_left_whose_values_cannot_be_sent(
    serving: Serving, data: DataLinks, values: list[Any], completing: list[Any]
) -> None:
    made = [value if isinstance(value, Failure) else jax.device_put(value) for value in values]
    serving.answers(lambda called: serving.served.answer(called, completing, made))
    assert isinstance(asked(data), PathwaysError)
    assert serving.served._asked == {}


def test_a_host_that_goes_ends_the_wait(serving: Serving, data: DataLinks) -> None:
    def go(called: Called) -> None:
        link = data.link_of(0)
        assert link is not None
        link.close()

    serving.answers(go)
    assert isinstance(asked(data), PathwaysError)


def test_the_end_of_the_session_ends_the_wait(serving: Serving, data: DataLinks) -> None:
    ended = threading.Event()

    def check() -> None:
        if ended.is_set():
            raise from_failure(OVER)

    def end(called: Called) -> None:
        ended.set()
        data.wake()

    serving.answers(end)
    assert isinstance(asked(data, check), SessionClosed)


def test_an_answer_behind_ctrl_c_finds_nobody(serving: Serving, data: DataLinks) -> None:
    late: list[Called] = []

    def check() -> None:
        if late:
            raise KeyboardInterrupt

    def answer(called: Called) -> None:
        if called.number == 1:
            late.append(called)
            data.wake()
        else:
            serving.served.answer(called, [], [jax.device_put(value + 1) for value in VALUES])

    serving.answers(answer)
    with pytest.raises(KeyboardInterrupt):
        asked(data, check)
    serving.served.answer(late[0], [], [jax.device_put(value) for value in VALUES])
    np.testing.assert_array_equal(asked(data)[0], SMALL + 1)


def test_a_client_that_may_not_or_asks_for_much_or_reads_nothing_is_left(serving: Serving) -> None:
    messages: list[Any] = []
    outbox = SimpleNamespace(send=messages.append, has_room=lambda most: len(messages) <= most)
    stream: Any = SimpleNamespace(session=1, grant=SimpleNamespace(tenant="t"), outbox=outbox)
    sent = list[Any]()

    def on_loop() -> ServedCalls:
        server = serving.host.server
        made = ServedCalls(
            server.reader, server.local, lambda one: one is stream, lambda called: sent.append(called) or True
        )
        made._loop = SimpleNamespace(call_soon_threadsafe=lambda act, *rest: act(*rest))  # type: ignore[assignment]
        return made

    ready: queue.SimpleQueue[ServedCalls] = queue.SimpleQueue()
    serving.host.server.later(lambda _: ready.put(on_loop()), None)
    served = ready.get(timeout=20)
    served.take(stream, ServeCall(1, (), (4,), ((0, 0),)))
    assert (len(sent), [message.request for message in messages]) == (0, [4])
    for number in range(2 * MAX_UNREAD):
        served.take(stream, ServeCall(1, (), (number,), ((0,),)))
        if sent and len(messages) <= MAX_UNREAD:
            served.answer(sent[-1], [], [jax.device_put(SMALL)])
    assert len(sent) == MAX_UNREAD
    assert all(isinstance(message, DataFailed) for message in messages[MAX_UNREAD + 1 :])
    stranger: Any = SimpleNamespace(session=2, grant=SimpleNamespace(tenant="u"), outbox=outbox)
    messages.clear()
    served.take(stranger, ServeCall(1, (), (5,), ((0,),)))
    assert (len(sent), [message.request for message in messages]) == (MAX_UNREAD, [5])
    assert served._asked == {}


def test_a_client_that_asks_for_nothing_is_hung_up_on(serving: Serving) -> None:
    wire = Wire(serving.host)
    assert isinstance(wire.next(), EarlyAllowed)
    wire.send(ServeCall(1, (), (), ()))
    with pytest.raises(LinkLost, match="asks for none"):
        wire.next()
