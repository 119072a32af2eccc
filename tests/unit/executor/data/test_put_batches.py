"""Small arrays that come to a host whole, many in one batch: what is stored, what is reported together, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from pathways_ray import limits
from pathways_ray.executor.data import server as data_server
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport.capabilities import data_token, slice_tag
from pathways_ray.transport.frames import framed
from pathways_ray.transport.messages import (
    CancelFetch,
    DataFailed,
    Fetch,
    FetchPart,
    Message,
    PutDone,
    PutOpen,
    PutPart,
    Stored,
    encode,
)
from tests.unit.executor.data.test_server import LIMIT_S, PLACED, SECRET, SESSION, SMALL, Host, Wire, answer, local
from tests.waiting import until

KIND, SPEC = ArrayType(SMALL.shape, "float32"), (("x",),)
COUNT = 60


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host that takes a whole batch in one turn, however slow it is."""
    monkeypatch.setattr(data_server, "TURN_S", LIMIT_S)
    return Host()


@pytest.fixture
def wire(host: Host) -> Iterator[Wire]:
    made = Wire(host)
    yield made
    made.link.close()


def value(number: int) -> np.ndarray[Any, Any]:
    return SMALL + np.float32(number)


def whole(number: int, living: int = -1) -> PutOpen:
    """The upload of an array, whose request and buffer have this number."""
    tag = slice_tag(SECRET, SESSION, PLACED)
    return PutOpen(number, number, KIND, SPEC, PLACED, tag, living, (value(number).tobytes(),))


def send(wire: Wire, *batch: Message) -> None:
    """Sends messages in one frame."""
    until(lambda: wire.outbox._write is not None)
    assert wire.outbox._write is not None
    wire.outbox._write(framed(encode(list(batch)))[0], True)


def stored(host: Host) -> dict[int, list[float]]:
    return {n: np.asarray(array).tolist() for n, array in host.store.of_session(SESSION).items()}


def reported(host: Host) -> list[int]:
    """The buffers that were reported since the last call."""
    found = [host.reports.get_nowait() for _ in range(host.reports.qsize())]
    return [one.buffer for one in found if isinstance(one, Stored)]


def test_arrays_that_come_together_are_reported_together_before_their_client_hears_of_any(
    host: Host, wire: Wire
) -> None:
    said: list[tuple[int, int]] = []
    report = host.server.report

    def noted(reports: Any) -> None:
        said.extend((one.buffer, wire.came.qsize()) for one in reports)
        report(reports)

    host.server.report = noted
    send(wire, *map(whole, range(1, COUNT + 1)))
    assert [wire.next() for _ in range(COUNT)] == [PutDone(number) for number in range(1, COUNT + 1)]
    assert said == [(number, 0) for number in range(1, COUNT + 1)]
    assert host.together == [COUNT]
    assert host.reports.get_nowait() == Stored(0, SESSION, 1, PLACED.mesh.id, KIND, SPEC)
    assert stored(host) == {number: value(number).tolist() for number in range(1, COUNT + 1)}
    assert all(quota.is_empty for quota in host.server.quotas.values())


def test_one_that_comes_by_the_local_socket_is_reported_before_it_is_answered_there(
    host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket, seen = local(wire), list[list[int]]()
    answers = host.server.local.send

    def noted(*answer: Any) -> bool:
        seen.append(list(host.together))
        return answers(*answer)

    monkeypatch.setattr(host.server.local, "send", noted)
    for number in (1, 2):
        assert socket.send(encode(whole(number)))
        assert answer(socket) == PutDone(number)
    assert seen == [[1], [1, 1]]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"slice_tag": "guessed"}, "no slice"),
        ({"whole": (bytes(12),)}, "4 bytes are missing of an array that came whole"),
        ({"whole": (bytes(24),)}, "part at 0 of 24 bytes does not go on at 0 of the 16 of its box"),
        ({"whole": (bytes(16), bytes(16))}, "part of box 1; this host holds 1"),
        ({"buffer": 1}, "buffer 1 is on host 0 already"),
        ({"spec": (("y",),)}, "y"),
        ({"type": ArrayType((4,), "object")}, "there is no dtype 'object'"),
    ],
    ids=["tag", "short", "long", "two", "taken", "spec", "dtype"],
)
def test_one_that_is_refused_amid_a_batch_fails_alone(host: Host, wire: Wire, wrong: dict[str, Any], says: str) -> None:
    refused = msgspec.structs.replace(whole(3), **wrong)
    send(wire, whole(1), whole(2), refused, whole(4), whole(5))
    found = [wire.next() for _ in range(5)]
    failed = found.pop(2)
    assert isinstance(failed, DataFailed)
    assert failed.request == 3
    assert says in failed.failure.message
    assert found == [PutDone(number) for number in (1, 2, 4, 5)]
    assert reported(host) == [1, 2, 4, 5]
    assert stored(host) == {number: value(number).tolist() for number in (1, 2, 4, 5)}
    assert all(quota.is_empty for quota in host.server.quotas.values())
    send(wire, whole(3))
    assert wire.next() == PutDone(3), "its number is free"


def test_what_is_stored_is_reported_before_what_comes_behind_it_is_taken(
    host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a launch with it."""
    seen: list[list[int]] = []
    take = host.server.fetches.take

    def noted(*asked: Any) -> None:
        seen.append(list(host.together))
        take(*asked)

    monkeypatch.setattr(host.server.fetches, "take", noted)
    send(wire, whole(1), whole(2), Fetch(9, 2, (0,)), whole(3), CancelFetch(77), whole(4))
    found = [wire.next() for _ in range(5)]
    assert sorted(one.request for one in found if isinstance(one, PutDone)) == [1, 2, 3, 4]
    assert [one.data for one in found if isinstance(one, FetchPart)] == [value(2).tobytes()]
    assert seen == [[2]]
    assert host.together == [2, 1, 1]


def test_others_are_served_amid_a_long_batch_and_what_is_stored_is_reported_first(
    host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_server, "TURN_S", -1.0)
    send(wire, *map(whole, range(1, 6)))
    assert [wire.next() for _ in range(5)] == [PutDone(number) for number in range(1, 6)]
    assert host.together == [1] * 5


def test_what_is_stored_before_its_session_ends_is_reported_and_the_rest_is_not_taken(
    host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ends between two turns of its batch."""
    monkeypatch.setattr(data_server, "TURN_S", -1.0)
    opened: list[int] = []
    begin = host.server._open

    def noted(stream: Any, message: PutOpen, *came: Any) -> Any:
        opened.append(message.request)
        if message.request == 2:
            host.server._loop.call_soon(host.store.drop_session, SESSION)
        return begin(stream, message, *came)

    monkeypatch.setattr(host.server, "_open", noted)
    until(lambda: bool(host.server.streams))
    send(wire, *map(whole, range(1, 6)))
    until(lambda: not host.server.streams and not host.server.quotas)
    assert opened == [1, 2]
    assert reported(host) == [1, 2]
    assert not host.store.count()


def test_a_batch_whose_stream_ends_amid_it_is_stored_and_reported(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are here: the controller, which hears of them otherwise, would wait for the host."""
    monkeypatch.setattr(data_server, "TURN_S", -1.0)
    wire = Wire(host)
    begin = host.server._open

    def noted(stream: Any, message: PutOpen, *came: Any) -> Any:
        if message.request == 2:
            stream.link.close()
        return begin(stream, message, *came)

    monkeypatch.setattr(host.server, "_open", noted)
    until(lambda: bool(host.server.streams))
    send(wire, *map(whole, range(1, 6)))
    until(lambda: not host.server.streams and not host.server.quotas)
    assert reported(host) == [1, 2, 3, 4, 5]
    assert stored(host).keys() == {1, 2, 3, 4, 5}


def test_what_is_stored_is_reported_before_one_behind_it_waits_for_frees(host: Host) -> None:
    """What it waits for may be freed behind a launch with those before it."""
    allowed = 2 * limits.MIN_BUFFER_BYTES
    limited = Wire(host, token=data_token(SECRET, SESSION, allowed, "alice"))
    send(limited, whole(1, 4096), whole(2, 8192), whole(3, 4096), whole(4, 8192))
    until(lambda: host.together == [2])
    assert [limited.next(), limited.next()] == [PutDone(1), PutDone(2)]
    host.store.drop(SESSION, (1,))
    assert limited.next() == PutDone(3)
    refused = limited.next()
    assert f"where uploads of the tenant hold {allowed}" in refused.failure.message
    assert reported(host) == [1, 2, 3]
    limited.link.close()


def test_arrays_that_come_whole_count_within_a_quota_and_a_refused_one_does_not(host: Host) -> None:
    limited = Wire(host, token=data_token(SECRET, SESSION, 2 * limits.MIN_BUFFER_BYTES, "alice"))
    wrong = msgspec.structs.replace(whole(2), whole=(bytes(3),))
    send(limited, whole(1), wrong, whole(3), whole(4))
    assert [type(limited.next()) for _ in range(4)] == [PutDone, DataFailed, PutDone, DataFailed]
    (quota,) = host.server.quotas.values()
    assert not quota.reserved
    host.store.drop(SESSION, (1, 3))
    assert quota.is_empty
    limited.link.close()


def test_a_number_that_comes_in_parts_is_not_taken_by_one_that_comes_whole(host: Host, wire: Wire) -> None:
    """Neither the number of the buffer nor, as long as the first is under way, its bytes."""
    part = PutPart(1, 0, 0, value(5).tobytes())
    opening = msgspec.structs.replace(whole(1), buffer=5, whole=())
    send(wire, opening, whole(5), part)
    refused, done = wire.next(), wire.next()
    assert "buffer 5 is on its way already" in refused.failure.message
    assert (refused.request, done) == (5, PutDone(1))
    assert reported(host) == [5]
    assert stored(host) == {5: value(5).tolist()}
    assert all(quota.is_empty for quota in host.server.quotas.values())


def test_the_limit_of_what_is_under_way_holds_for_what_comes_whole(
    host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_UPLOAD_BYTES", limits.MIN_BUFFER_BYTES)
    opening = msgspec.structs.replace(whole(1), whole=())
    send(wire, whole(2), whole(3), opening, whole(4), PutPart(1, 0, 0, value(1).tobytes()), whole(5))
    found = [wire.next() for _ in range(5)]
    assert [one.request for one in found] == [2, 3, 4, 1, 5]
    assert f"4096 are on their way; {limits.MIN_BUFFER_BYTES} are allowed at a time" in found[2].failure.message
    assert [type(one) for one in found].count(DataFailed) == 1


def test_what_is_stored_is_noted_before_anything_else_is(
    host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that rejoins amid a batch says what it holds, and what it has noted of that. What is not among the latter
    would be dropped."""
    noted: list[int] = []
    unnoted: list[set[int]] = []
    add = host.store.add
    monkeypatch.setattr(host.server, "note", lambda one: noted.append(one.buffer))

    def adds(*given: Any) -> bool:
        unnoted.append(set(host.store.of_session(SESSION)) - {*noted})
        return add(*given)

    monkeypatch.setattr(host.store, "add", adds)
    send(wire, *map(whole, range(1, COUNT + 1)))
    until(lambda: len(noted) == COUNT)
    assert unnoted == [set()] * COUNT
    assert host.together == [COUNT]
