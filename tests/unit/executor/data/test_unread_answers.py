"""Answers of a host that their client does not read: what it has made meanwhile is bounded."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any, cast

import jax
import numpy as np
import pytest

from pathways_ray.executor.data import server as data_server
from pathways_ray.executor.data.served_calls import MAX_UNREAD
from pathways_ray.executor.run.instructions import Called
from pathways_ray.transport.capabilities import tenant_mark
from pathways_ray.transport.frames import framed
from pathways_ray.transport.messages import (
    FROM_HOST_DATA,
    CancelFetch,
    DataFailed,
    EarlyAllowed,
    Fetch,
    FetchDone,
    FetchPart,
    Message,
    ServeCall,
    encode,
)
from tests.unit.executor.data.test_server import LIMIT_S, SMALL, Host, Wire, local
from tests.waiting import until


@pytest.fixture
def host() -> Host:
    return Host()


def send_as_one(wire: Wire, *messages: Message) -> None:
    """Sends messages as one batch."""
    wire.outbox._write(b"".join(framed(encode(messages), True)), True)  # type: ignore[misc]


def test_nothing_comes_along_while_a_client_does_not_read(host: Host) -> None:
    """What was asked for comes all the same, and one who waits for several values still waits for all of them."""
    wire = Wire(host)
    wire.doors.get(timeout=LIMIT_S)
    for buffer in (1, 2):
        host.put(buffer, SMALL)
    wire.send(Fetch(3, 1, (0,), ((4, 2),)))
    assert [wire.next().request, wire.next().request] == [4, 3]
    (stream,) = host.server.streams
    stream.outbox.has_room = lambda most: False  # type: ignore[method-assign]
    send_as_one(wire, Fetch(5, 1, (0,), ((6, 2),)), Fetch(7, 1, (), ((0, 2), (0, 8))))
    assert wire.next() == FetchPart(5, 0, 0, SMALL.nbytes, SMALL.tobytes())
    host.put(8, SMALL)
    assert wire.next() == FetchDone(7)
    wire.link.close()


MANY = range(1, 4 * MAX_UNREAD + 1)


@pytest.mark.parametrize("reads", [False, True])
def test_calls_of_one_batch_are_served_as_far_as_their_client_reads(host: Host, reads: bool) -> None:
    """Each is answered in the thread that has read it, before the next one is looked at."""
    taken: list[Called] = []
    value = jax.device_put(SMALL)

    def serve(called: Called) -> bool:
        taken.append(called)
        host.server.served.answer(called, [], [value])
        return True

    host.server.served._hand = serve
    host.server.early.allow(tenant_mark(""))
    wire = Wire(host)
    assert isinstance(wire.next(), EarlyAllowed)
    (stream,) = host.server.streams
    if not reads:
        paused = threading.Event()
        host.server.later(lambda _: stream.link.pause_writing(), None)
        host.server.later(lambda _: paused.set(), None)
        assert paused.wait(LIMIT_S)
    send_as_one(wire, *(ServeCall(1, (), (number,), ((0,),)) for number in MANY))
    if not reads:
        until(lambda: not stream.outbox.has_room(len(MANY) - 1))
        assert len(taken) == MAX_UNREAD + 1
        host.server.later(lambda _: stream.link.resume_writing(), None)
    answers = [wire.next() for _ in MANY]
    assert [answer.request for answer in answers] == [*MANY]
    served = [answer.request for answer in answers if not isinstance(answer, DataFailed)]
    assert served == [called.message.requests[0] for called in taken]
    assert len(served) == (len(MANY) if reads else MAX_UNREAD + 1)
    assert host.server.served._asked == {}
    wire.link.close()


def test_other_clients_are_served_between_the_messages_of_a_long_batch(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in which a turn has passed."""
    monkeypatch.setattr(data_server, "TURN_S", 0.0)
    taken: list[int] = []
    over = threading.Event()

    def withdraw(stream: Any, request: int) -> None:
        host.server.later(lambda _: taken.append(-request), None)
        taken.append(request)
        if request == 3:
            over.set()

    monkeypatch.setattr(host.server.fetches, "withdraw", withdraw)
    wire = Wire(host)
    wire.doors.get(timeout=LIMIT_S)
    send_as_one(wire, *(CancelFetch(number) for number in (1, 2, 3)))
    assert over.wait(LIMIT_S)
    assert taken[:5] == [1, -1, 2, -2, 3]
    monkeypatch.undo()
    wire.link.close()


def test_nothing_more_of_a_batch_is_taken_once_its_session_has_ended(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_server, "TURN_S", 0.0)
    taken: list[int] = []

    def withdraw(stream: Any, request: int) -> None:
        taken.append(request)
        host.store.drop_session(stream.session)

    monkeypatch.setattr(host.server.fetches, "withdraw", withdraw)
    wire = Wire(host)
    wire.doors.get(timeout=LIMIT_S)
    send_as_one(wire, *(CancelFetch(number) for number in (1, 2, 3)))
    until(lambda: not host.server.streams)
    assert taken == [1]


def test_what_is_not_small_goes_in_parts_where_its_client_does_not_read(host: Host) -> None:
    """The local socket takes some answers whole. The others wait until those before them are read, and none is lost."""
    made = Wire(host)
    door = local(made)
    value = np.arange(20_000, dtype=np.float32)
    host.put(1, value)
    (stream,) = host.server.streams
    asked = range(1, 15)
    for request in asked:
        assert door.send(encode(Fetch(request, 1, (0,))))
    first = made.next()  # the socket is full then
    whole, came, deadline = list[int](), {first.request: bytes(first.data)}, time.monotonic() + LIMIT_S
    while len(whole) + sum(len(data) == value.nbytes for data in came.values()) < len(asked):
        assert time.monotonic() < deadline, "an answer is missing"
        if not made.came.empty():
            part = made.next()
            came[part.request] = came.get(part.request, b"") + bytes(part.data)
            continue
        with contextlib.suppress(BlockingIOError):
            part = cast(Any, FROM_HOST_DATA.decode_batch(door.connection.recv(1 << 18, socket.MSG_DONTWAIT))[0])
            assert part.data == value.tobytes()
            whole.append(part.request)
    assert whole
    assert came
    assert sorted([*whole, *came]) == list(asked)
    assert set(came.values()) == {value.tobytes()}
    until(lambda: not stream.fetches)
    made.link.close()
