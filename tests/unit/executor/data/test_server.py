"""A host's data server and a client's streams to it, in one process: values that come late, or never; who may ask.

The store is filled by hand, where a host's dispatcher would.
"""

from __future__ import annotations

import os
import queue
import socket as socketlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from pathways_ray import limits
from pathways_ray.client import data as client_data
from pathways_ray.client import data_link, upload_turns
from pathways_ray.client.array_pieces import ArrayFile, ArrayPipe, Fetching, FetchPlan
from pathways_ray.client.buffer import BufferRecord
from pathways_ray.client.buffer import Upload as UploadOfClient
from pathways_ray.client.core import ClientCore
from pathways_ray.client.data import DataLinks
from pathways_ray.client.questions import Question, ask_whether_there, await_there, read
from pathways_ray.errors import Failure, GraphError, HostLost, PathwaysError, SessionClosed, from_failure
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.data import client_stream, fetches
from pathways_ray.executor.data import server as data_server
from pathways_ray.executor.data import upload as upload_module
from pathways_ray.executor.data.buffer_store import MAX_LATER, MAX_LATER_SHARDS, BufferStore, may_be_later
from pathways_ray.executor.data.client_stream import MAX_PIPES, MAX_UNREAD
from pathways_ray.executor.data.server import MAX_BATCH, DataServer
from pathways_ray.executor.data.shard_reader import NEAR_BYTES, SMALL_BYTES
from pathways_ray.executor.data.upload import SharedUpload, Upload
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, SliceType
from pathways_ray.transport import streams, thread_links
from pathways_ray.transport.capabilities import data_token, slice_tag
from pathways_ray.transport.endpoints import ListenConfig
from pathways_ray.transport.frames import LinkLost, framed
from pathways_ray.transport.links import AsyncLink
from pathways_ray.transport.local_sockets import Invitation, LocalSocket, NotLocal
from pathways_ray.transport.messages import (
    FROM_HOST_DATA,
    CancelFetch,
    DataFailed,
    Fetch,
    FetchDone,
    FetchPart,
    HostAddress,
    LaunchEarly,
    LocalDoor,
    Message,
    PutDone,
    PutOpen,
    PutPart,
    ServeCall,
    Stored,
    encode,
)
from pathways_ray.transport.pipes import HostPipe, Pipe
from pathways_ray.transport.shared_memory import SharedFile
from tests.unit.helpers import placed
from tests.waiting import until

SECRET = "the data secret"
SESSION = 7
LIMIT_S = 20.0


class Host:
    """A data server with one device, and how a test fills its store."""

    def __init__(self) -> None:
        self.store = BufferStore()
        devices = jax.local_devices()[:1]
        self.compiler = Compiler(0, devices, {0: devices})
        self.reports: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.together: list[int] = []
        """How many were reported at a time."""
        self.server = DataServer(0, self.compiler, self.store, SECRET, ListenConfig(), self.report, lambda stored: None)

    def report(self, stored: Sequence[Stored]) -> None:
        self.together.append(len(stored))
        for one in stored:
            self.reports.put(one)

    def put(self, buffer: int, value: Any) -> None:
        self.store.put(SESSION, buffer, value if isinstance(value, Failure) else jax.device_put(value))


class Wire:
    """A data stream of a session, driven by hand."""

    def __init__(self, host: Host, session: int = SESSION, token: str = "") -> None:
        shown = {"session": str(session), "authorization": token or data_token(SECRET, session, None)}
        self.outbox = thread_links.Outbox()
        self.link = thread_links.ThreadLink(host.server.address, streams.DATA_STREAM, shown, self.outbox)
        self.came: queue.SimpleQueue[Message | LinkLost] = queue.SimpleQueue()
        self.doors: queue.SimpleQueue[LocalDoor] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for data in self.link:
                for message in FROM_HOST_DATA.decode_batch(data):
                    if isinstance(message, LocalDoor):
                        self.doors.put(message)
                    else:
                        self.came.put(message)
        except LinkLost as error:
            self.came.put(error)

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.outbox.send(message)

    def next(self) -> Any:
        found = self.came.get(timeout=LIMIT_S)
        if isinstance(found, LinkLost):
            raise found
        return found


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def wire(host: Host) -> Iterator[Wire]:
    made = Wire(host)
    yield made
    made.link.close()


SMALL = np.arange(4, dtype=np.float32)
OVER = Failure("SessionClosed", "the session ended: it was shut down")
BIG = np.arange(SMALL_BYTES, dtype=np.float32)


@pytest.mark.parametrize("value", [SMALL, BIG, np.zeros((0, 3), np.int8), np.float32(3)], ids=["4", "big", "0", "1"])
@pytest.mark.parametrize("first", ["value", "question"])
def test_a_value_is_answered_whether_it_or_the_question_comes_first(
    host: Host, wire: Wire, value: np.ndarray[Any, Any], first: str
) -> None:
    if first == "value":
        host.put(1, value)
    wire.send(Fetch(3, 1, (0,)))
    if first == "question":
        until(lambda: host.store.waiting() == 1)
        host.put(1, value)
    assert wire.next() == FetchPart(3, 0, 0, value.nbytes, value.tobytes())
    assert host.store.waiting() == 0


def test_a_question_gets_the_failure_that_comes_in_place_of_the_value(host: Host, wire: Wire) -> None:
    wire.send(Fetch(3, 1, (0,)), Fetch(4, 2, (0,)), Fetch(5, 2, (9,)))
    until(lambda: host.store.waiting() == 3)
    failure = Failure("HostLost", "it went", host=1)
    host.put(1, failure)
    host.put(2, SMALL)
    found = {m.request: m for m in (wire.next(), wire.next(), wire.next())}
    assert found[3] == DataFailed(3, failure)
    assert isinstance(found[4], FetchPart)
    wrong = found[5]
    assert isinstance(wrong, DataFailed)
    assert (wrong.failure.kind, wrong.failure.message) == ("GraphError", "host 0 has 1 devices, no number 9")


def test_the_thread_that_waits_for_a_launch_gives_few_answers(
    host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks for more is answered by the workers of his stream, at once."""
    monkeypatch.setattr(fetches, "is_computed", lambda value: False)
    wire.send(Fetch(1, 1, (0, 0)), *(Fetch(request, 1, (0,)) for request in (2, 3, 4, 5)))
    until(lambda: host.store.waiting() == 5)
    later = list[Callable[[], None]]()
    host.store.put(SESSION, 1, jax.device_put(SMALL), later)
    assert len(later) == MAX_LATER
    assert sorted(wire.next().request for _ in range(4)) == [1, 1, 4, 5]
    for answer in later:
        answer()
    assert sorted(wire.next().request for _ in range(2)) == [2, 3]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
@pytest.mark.parametrize("first", ["the question", "the values"])
def test_a_question_whether_several_are_there_is_answered_once_all_are(
    host: Host, wire: Wire, order: tuple[int, ...], first: str
) -> None:
    question = Fetch(5, 1, (), ((0, 2), (0, 3)))
    if first == "the question":
        wire.send(question)
        for number in order:
            until(lambda: host.store.waiting() == 1)
            host.put(number, np.zeros(1 << 20, np.uint8))
    else:
        for number in order:
            host.put(number, SMALL)
        wire.send(question)
    assert wire.next() == FetchDone(5)
    assert host.store.waiting() == 0


def test_such_a_question_is_taken_back_wherever_it_waits(host: Host, wire: Wire) -> None:
    wire.send(Fetch(5, 1, (), ((0, 2), (0, 3))))
    until(lambda: host.store.waiting() == 1)
    host.put(1, SMALL)
    until(lambda: host.store.waiting() == 1)
    wire.send(CancelFetch(5))
    until(lambda: host.store.waiting() == 0)
    host.put(2, SMALL)
    host.put(3, SMALL)
    wire.send(Fetch(6, 1, (), ((0, 2), (0, 3))))
    assert wire.next() == FetchDone(6)


def test_such_a_question_fails_with_any_of_them(host: Host, wire: Wire) -> None:
    failure = Failure("HostLost", "it went", host=1)
    host.put(1, SMALL)
    host.put(2, failure)
    wire.send(Fetch(5, 1, (), ((0, 2),)), Fetch(6, 2, (), ((0, 1),)))
    found = sorted((wire.next(), wire.next()), key=lambda message: message.request)
    assert found == [DataFailed(5, failure), DataFailed(6, failure)]


def test_such_a_question_holds_up_no_launch_with_what_another_one_makes(
    host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that dispatch, and that watch a launch, wait for nothing else: a worker of the stream does."""
    slow = jax.device_put(SMALL)
    host.store.put(SESSION, 2, slow)
    computed = threading.Event()
    monkeypatch.setattr(fetches, "is_computed", lambda value: value is not slow or computed.is_set())
    waited: list[threading.Thread] = []
    value = host.server.reader.value

    def waits(session: int, buffer: int) -> Any:
        waited.append(threading.current_thread())
        assert computed.wait(30)
        return value(session, buffer)

    monkeypatch.setattr(host.server.reader, "value", waits)
    wire.send(Fetch(5, 1, (), ((0, 2),)))
    until(lambda: host.store.waiting() == 1)
    later = list[Callable[[], None]]()
    host.store.put(SESSION, 1, jax.device_put(SMALL), later)
    for answer in later:
        answer()
    computed.set()
    assert wire.next() == FetchDone(5)
    assert threading.current_thread() not in waited


def test_the_first_of_these_answers_may_be_of_a_few_shards() -> None:
    assert may_be_later([], MAX_LATER_SHARDS)
    assert not may_be_later([], MAX_LATER_SHARDS + 1)
    answers: list[Callable[[], None]] = [lambda: None] * MAX_LATER
    assert may_be_later(answers[:1], 1)
    assert not may_be_later(answers[:1], 2)
    assert not may_be_later(answers, 1)


def test_a_question_for_what_was_dropped_in_between(host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value comes, and is dropped before a worker has looked at it."""
    put = host.store.get
    monkeypatch.setattr(host.store, "get", lambda session, buffer: None)
    wire.send(Fetch(3, 1, (0,)))
    until(lambda: host.store.waiting() == 1)
    host.put(1, SMALL)
    answer = wire.next()
    assert put(SESSION, 1) is not None
    assert isinstance(answer, DataFailed)
    assert answer.failure.kind == "BufferDeleted"


def test_a_question_for_what_a_launch_has_overwritten_fails_by_itself(host: Host, wire: Wire) -> None:
    host.put(4, np.zeros(3, np.float32))
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(host.store.get(SESSION, 4)))
    host.put(5, np.ones(3, np.float32))
    wire.send(Fetch(1, 4, (0,)), Fetch(2, 5, (0,)))
    found = {type(message): message for message in (wire.next(), wire.next())}
    assert isinstance(failed := found[DataFailed], DataFailed)
    assert failed.request == 1
    assert isinstance(part := found[FetchPart], FetchPart)
    assert part.request == 2


def test_a_number_that_never_comes_leaves_nothing_behind(host: Host, wire: Wire) -> None:
    """
    1. Three questions for buffers that will never be; one is withdrawn, and so is one that was never asked.
    2. The value of the withdrawn one comes after all: nobody is told.
    3. The stream ends: the host has forgotten all of them.
    """
    wire.send(Fetch(1, 11, (0,)), Fetch(2, 12, (0,)), Fetch(3, 13, (0,)))
    until(lambda: host.store.waiting() == 3)
    wire.send(CancelFetch(2), CancelFetch(77))
    until(lambda: host.store.waiting() == 2)
    host.put(12, SMALL)
    host.put(13, SMALL)
    assert wire.next() == FetchPart(3, 0, 0, 16, SMALL.tobytes())
    wire.link.close()
    until(lambda: host.store.waiting() == 0)
    assert not host.server.streams


def test_the_end_of_a_session_ends_its_questions_and_no_others(host: Host, wire: Wire) -> None:
    other = Wire(host, SESSION + 1)
    wire.send(Fetch(1, 11, (0,)))
    other.send(Fetch(1, 11, (0,)))

    def end() -> None:
        until(lambda: host.store.waiting() == 2)
        host.store.drop_session(SESSION)

    threading.Thread(target=end).start()
    with pytest.raises(LinkLost, match="the session has ended"):
        wire.next()
    until(lambda: host.store.waiting() == 1)
    host.store.put(SESSION + 1, 11, jax.device_put(SMALL))
    assert isinstance(other.next(), FetchPart)
    other.link.close()
    with pytest.raises(LinkLost, match="wrong data token, or its session has ended"):
        Wire(host).next()


def test_a_session_sees_its_own_numbers_only(host: Host) -> None:
    """Number 1 of session 7 is there; session 8 fetches its own number 1 and gets no answer."""
    host.put(1, SMALL)
    other = Wire(host, SESSION + 1)
    other.send(Fetch(1, 1, (0,)))
    until(lambda: host.store.waiting() == 1)
    other.send(Fetch(1, 1, (0,)))
    refused = other.next()
    assert isinstance(refused, DataFailed), "a second question of the same number"
    assert refused.failure.kind == "QuotaExceeded"
    other.link.close()
    with pytest.raises(LinkLost, match="wrong data token"):
        Wire(host, SESSION, data_token(SECRET, SESSION + 1, None)).next()


def test_questions_over_the_limit_are_refused(host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REQUESTS", 3)
    wire.send(*[Fetch(k, 11, (0,)) for k in range(4)])
    refused = wire.next()
    assert isinstance(refused, DataFailed)
    assert (refused.request, refused.failure.kind) == (3, "QuotaExceeded")
    host.put(11, SMALL)
    assert {wire.next().request for _ in range(3)} == {0, 1, 2}


@pytest.mark.parametrize("asked", [1, 40])
def test_who_asks_for_many_arrays_does_not_have_them_copied_by_the_thread_that_stores_them(
    host: Host, wire: Wire, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host that is the thread that dispatches for all tenants. It copies for a lone fetch, which is quicker."""
    copied: list[threading.Thread] = []
    copy = host.server.reader._joined

    def noted(shards: Sequence[jax.Array]) -> bytes:
        copied.append(threading.current_thread())
        return copy(shards)

    monkeypatch.setattr(host.server.reader, "_joined", noted)
    wire.send(*[Fetch(k, 11, (0,)) for k in range(asked)])
    until(lambda: host.store.waiting() == asked)
    host.put(11, SMALL)
    assert {wire.next().request for _ in range(asked)} == set(range(asked))
    mine = copied.count(threading.current_thread())
    assert len(copied) == asked
    assert mine == 1 if asked == 1 else mine < asked / 2


# --- the client's side ------------------------------------------------------------------------------------------------


KIND = ArrayType((4,), "float32")
PLACED = PlacedSlice.on(SliceType(1, (1,), ("x",)), 0, (Device(0, 0),))
COVER = FetchPlan.of_array(KIND, (("x",),), PLACED)


@pytest.fixture
def data(host: Host) -> Iterator[DataLinks]:
    made = DataLinks(SESSION, data_token(SECRET, SESSION, None), (HostAddress(0, 1, host.server.address),))
    yield made
    made.close(OVER)


class Asked:
    """A fetch in a thread of its own; `check` raises what the test says."""

    def __init__(self, data: DataLinks, buffer: int, *others: Any) -> None:
        self.others = others
        self.stop: PathwaysError | None = None
        self.result: Any = None
        self.error: PathwaysError | None = None
        self._data, self._buffer = data, buffer
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _check(self) -> None:
        if self.stop is not None:
            raise self.stop

    def _run(self) -> None:
        try:
            self.result = self._data.fetch(self._buffer, COVER, self._check, *self.others)
        except PathwaysError as error:
            self.error = error

    def end(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "it hangs"


def test_a_fetch_that_has_no_point_any_more_ends_and_is_withdrawn(host: Host, data: DataLinks) -> None:
    """The controller says that the launch has failed: no host will ever have the value."""
    asked = Asked(data, 5)
    until(lambda: host.store.waiting() == 1)
    asked.stop = GraphError("the launch failed")
    data.wake()
    asked.end()
    assert asked.error is asked.stop
    until(lambda: host.store.waiting() == 0)


def test_a_fetch_ends_when_its_host_or_its_session_goes(host: Host, data: DataLinks) -> None:
    """
    1. The host is said to be down while a question stands.
    2. It is there again, under its next epoch; the next question is answered.
    3. The session is closed while a question stands.
    """
    asked = Asked(data, 5)
    until(lambda: host.store.waiting() == 1)
    data.host_changed(HostAddress(0, 1, ""))
    asked.end()
    assert isinstance(asked.error, HostLost)
    data.host_changed(HostAddress(0, 2, host.server.address))
    again = Asked(data, 5)
    until(lambda: host.store.waiting() == 1)
    host.put(5, SMALL)
    again.end()
    np.testing.assert_array_equal(again.result, SMALL)
    last = Asked(data, 6)
    until(lambda: host.store.waiting() == 1)
    data.close(OVER)
    last.end()
    assert isinstance(last.error, SessionClosed), "what is under way ends for the reason given"
    until(lambda: host.store.waiting() == 0)


def test_an_upload_is_reported_before_it_is_acknowledged_and_has_its_number_for_itself(host: Host, wire: Wire) -> None:
    """
    1. An array comes in one part: the controller is told of it, and then the client.
    2. Another one under the same number is refused, and the first one stays.
    """
    for request, value in ((1, 1.0), (2, 2.0)):
        wire.outbox.send_all([_open(request), PutPart(request, 0, 0, np.full(4, value, np.float32).tobytes())])
    assert wire.came.get(timeout=LIMIT_S) == PutDone(1)
    assert host.reports.get_nowait() == Stored(0, SESSION, 77, 1, ArrayType((4,), "float32"), ((),))
    refused = wire.came.get(timeout=LIMIT_S)
    assert isinstance(refused, DataFailed)
    assert "buffer 77 is on host 0 already" in refused.failure.message
    assert host.reports.empty()
    assert np.asarray(host.store.get(SESSION, 77)).tolist() == [1.0] * 4


def _open(request: int) -> PutOpen:
    where = placed(1, ["0.0"])
    return PutOpen(request, 77, ArrayType((4,), "float32"), ((),), where, slice_tag(SECRET, SESSION, where))


def failing_later() -> jax.Array:
    """An array whose computation asks for 64 TiB, behind one that takes a while."""
    matrix = jax.ShapeDtypeStruct((600, 600), np.float32)
    asks = jax.jit(lambda a: jax.numpy.zeros((1 << 22, 1 << 22), np.float32) + a[0, 0]).lower(matrix).compile()
    busy = jax.jit(lambda a: jax.lax.fori_loop(0, 100, lambda _, x: x @ x * 1e-3, a)).lower(matrix).compile()
    failing: jax.Array = asks(busy(np.ones((600, 600), np.float32)))
    return failing


@pytest.mark.parametrize("wait", [False, True], ids=["at once", "once it has failed"])
def test_a_value_that_ran_out_of_memory_is_a_failure_and_the_host_goes_on(host: Host, wire: Wire, wait: bool) -> None:
    value = failing_later()
    if wait:
        with pytest.raises(jax.errors.JaxRuntimeError):
            value.block_until_ready()
    host.store.put(SESSION, 1, value)
    host.put(2, SMALL)
    wire.send(Fetch(3, 1, (0,)))
    failed = wire.next()
    assert isinstance(failed, DataFailed)
    assert "Out of memory" in failed.failure.message
    wire.send(Fetch(4, 2, (0,)))
    assert wire.next() == FetchPart(4, 0, 0, SMALL.nbytes, SMALL.tobytes())


def put(request: int, buffer: int, value: np.ndarray[Any, Any]) -> list[Message]:
    kind = ArrayType(value.shape, value.dtype.name)
    tag = slice_tag(SECRET, SESSION, PLACED)
    return [PutOpen(request, buffer, kind, (("x",),), PLACED, tag), PutPart(request, 0, 0, value.tobytes())]


def test_a_big_array_goes_to_the_devices_while_others_are_served(
    host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. A big array takes its time on its way to the devices.
    2. A small one and a question overtake it.
    3. It is there, and its client hears of it.
    """
    hold, array = threading.Event(), upload_module.Upload.array

    def slow(upload: Any, compiler: Compiler) -> jax.Array:
        assert upload.size <= SMALL_BYTES or hold.wait(LIMIT_S)
        return array(upload, compiler)

    monkeypatch.setattr(upload_module.Upload, "array", slow)
    wire.send(*put(1, 1, BIG), *put(2, 2, SMALL), Fetch(3, 2, (0,)))
    assert {type(wire.next()), type(wire.next())} == {PutDone, FetchPart}
    assert host.store.get(SESSION, 1) is None
    hold.set()
    assert wire.next() == PutDone(1)
    np.testing.assert_array_equal(host.store.get(SESSION, 1), BIG)


def test_an_array_that_is_there_does_not_wait_behind_many_that_are_computed(host: Host, wire: Wire) -> None:
    """Those who serve with a slow program and a quick one, by some threads each, ask so."""
    matrix = jax.ShapeDtypeStruct((600, 600), np.float32)
    slow = jax.jit(lambda a: jax.lax.fori_loop(0, 300, lambda _, x: x @ x * 1e-3, a)).lower(matrix).compile()
    host.put(1, LARGE)
    host.store.put(SESSION, 2, slow(np.ones((600, 600), np.float32)))
    wire.send(*(Fetch(request, 2, (0,)) for request in range(2, 9)))
    until(lambda: any(stream._looked_at for stream in host.server.streams))
    wire.send(Fetch(1, 1, (0,)))
    came = [wire.next().request for _ in range(8)]
    assert came[0] == 1
    assert sorted(came) == list(range(1, 9))


def test_a_big_array_that_devices_refuse_fails_alone(host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(upload: Any, compiler: Compiler) -> jax.Array:
        raise MemoryError("no room")

    monkeypatch.setattr(upload_module.Upload, "array", refuses)
    wire.send(*put(1, 1, BIG))
    failed = wire.next()
    assert isinstance(failed, DataFailed)
    assert "no room" in failed.failure.message
    assert all(quota.is_empty for quota in host.server.quotas.values())


def test_a_session_has_a_limit_of_streams(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_server, "MAX_STREAMS", 3)
    wires = []
    for count in range(1, 4):
        wires.append(Wire(host))
        until(lambda count=count: len(host.server.streams) == count)  # type: ignore[misc]
    with pytest.raises(LinkLost, match="the session has 3 data streams to this host"):
        Wire(host).next()
    Wire(host, SESSION + 1).send(Fetch(1, 1, (0,)))
    until(lambda: host.store.waiting() == 1)
    wires[0].link.close()
    until(lambda: len(host.server.streams) == 3)
    again = Wire(host)
    host.put(2, SMALL)
    again.send(Fetch(4, 2, (0,)))
    assert again.next() == FetchPart(4, 0, 0, SMALL.nbytes, SMALL.tobytes())
    for made in (*wires, again):
        made.link.close()


def test_a_tenant_has_a_limit_of_streams(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sessions share it: each stream takes threads and descriptors of the host, which others need too."""
    monkeypatch.setattr(data_server, "MAX_TENANT_STREAMS", 3)

    def opened(session: int, tenant: str) -> Wire:
        return Wire(host, session, data_token(SECRET, session, None, tenant))

    wires = []
    for session in range(1, 4):
        wires.append(opened(session, "alice"))
        until(lambda count=session: len(host.server.streams) == count)  # type: ignore[misc]
    with pytest.raises(LinkLost, match="the tenant has 3 data streams to this host"):
        opened(4, "alice").next()
    wires.append(opened(5, "bob"))
    until(lambda: len(host.server.streams) == 4)
    wires[0].link.close()
    until(lambda: len(host.server.streams) == 3)
    wires.append(opened(4, "alice"))
    until(lambda: len(host.server.streams) == 4)
    for made in wires:
        made.link.close()


def test_small_results_come_along_and_others_do_not(host: Host, wire: Wire) -> None:
    """They come before the one that was asked for, whose answer wakes the client. The others are not spoken of."""
    host.put(1, SMALL)
    host.put(2, SMALL + 1)
    host.put(3, BIG)
    host.put(4, Failure("ComputationFailed", "it failed"))
    wire.send(Fetch(10, 1, (0,), ((11, 3), (12, 4), (13, 2), (14, 5))))
    assert wire.next() == FetchPart(13, 0, 0, SMALL.nbytes, (SMALL + 1).tobytes())
    assert wire.next() == FetchPart(10, 0, 0, SMALL.nbytes, SMALL.tobytes())
    wire.send(Fetch(15, 1, (0,)))
    assert wire.next() == FetchPart(15, 0, 0, SMALL.nbytes, SMALL.tobytes())


def test_a_client_gets_sixty_results_with_one_question(host: Host, data: DataLinks) -> None:
    """They are stored one after the other, as a launch ends; the question is there before."""
    early: dict[int, np.ndarray[Any, Any]] = {}
    asked = Asked(data, 1, dict.fromkeys(range(2, 61), COVER), early)
    until(lambda: host.store.waiting() == 1)
    for number in range(60, 0, -1):
        host.put(number, SMALL + number)
    asked.end()
    np.testing.assert_array_equal(asked.result, SMALL + 1)
    assert {number: value[0] for number, value in early.items()} == {number: number for number in range(2, 61)}
    assert not any(link.fetches for link in data._links.values())


# --- arrays in files in memory ----------------------------------------------------------------------------------------


def local(wire: Wire) -> LocalSocket:
    """The local socket of a stream."""
    door = wire.doors.get(timeout=LIMIT_S)
    return LocalSocket(Invitation(door.name, door.tag, door.answer))


def answer(door: LocalSocket) -> Any:
    """The next message that comes by a local socket."""
    door.connection.settimeout(LIMIT_S)
    (message,) = FROM_HOST_DATA.decode_batch(door.connection.recv(1 << 17))
    return message


def in_file(value: np.ndarray[Any, Any], size: int = 0) -> SharedFile:
    file = SharedFile.create(size or value.nbytes)
    file.write(value, 0)
    return file


def whole(kind: ArrayType) -> FetchPlan:
    return FetchPlan.of_array(kind, (("x",),), PLACED)


LARGE = np.arange(1 << 17, dtype=np.float32)
LARGE_KIND = ArrayType(LARGE.shape, "float32")


@pytest.mark.parametrize("may_read", [True, False])
def test_a_big_array_goes_there_and_comes_back_by_a_pipe(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch, may_read: bool
) -> None:
    """No part of it goes over the stream. The caller may change it afterwards, and what comes back is the caller's.
    Where the host may read the client's memory, nothing is written to it."""

    def refused(*_: Any) -> Any:
        raise PermissionError("this process may not be read")

    monkeypatch.setattr("pathways_ray.client.data_link.MIN_READ_BYTES", 1)
    if may_read:
        monkeypatch.setattr(HostPipe, "read", None)
    else:
        monkeypatch.setattr("pathways_ray.transport.pipes.PeerMemory", refused)
    parts: list[Message] = []
    monkeypatch.setattr(Upload, "add", lambda self, part: parts.append(part))
    monkeypatch.setattr(Fetching, "add", lambda self, part: parts.append(part))
    value, done = LARGE.copy(), threading.Event()
    data.upload(1, value, LARGE_KIND, (("x",),), PLACED, slice_tag(SECRET, SESSION, PLACED), lambda *_: done.set())
    value[:] = 0
    assert done.wait(LIMIT_S)
    found = data.fetch(1, whole(LARGE_KIND), lambda: None)
    np.testing.assert_array_equal(found, LARGE)
    found[:] = 1
    np.testing.assert_array_equal(data.fetch(1, whole(LARGE_KIND), lambda: None), LARGE)
    assert not parts


def test_a_fetch_of_columns_comes_in_a_file(host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FetchPlan.of_array(LARGE_KIND, (("x",),), PLACED)
    monkeypatch.setattr(FetchPlan, "goes_by_pipe", False)
    host.put(1, LARGE)
    monkeypatch.setattr(HostPipe, "write", None)
    np.testing.assert_array_equal(data.fetch(1, plan, lambda: None), LARGE)


def test_a_client_that_reads_nothing_of_what_it_fetches_holds_up_itself_only(host: Host, data: DataLinks) -> None:
    """
    1. A client asks by pipes for more arrays than the host sends it at a time, and reads none.
    2. Another one gets its array.
    3. One question is taken back, and the stream ends: so do the pipes.
    """
    larger = np.arange(1 << 22, dtype=np.float32)
    host.put(1, larger)
    stubborn = Wire(host)
    socket = local(stubborn)
    (stream,) = host.server.streams
    pipes = {request: Pipe() for request in range(1, 7)}
    for request, pipe in pipes.items():
        assert socket.send(encode(Fetch(request, 1, (0,))), pipe.other)
        pipe.other = None
    begun = {answer(socket).request for _ in range(4)}
    found = data.fetch(1, whole(ArrayType(larger.shape, "float32")), lambda: None)
    np.testing.assert_array_equal(found, larger)
    back = min(begun)
    assert socket.send(encode(CancelFetch(back)))
    until(lambda: back not in stream.fetches)
    with pytest.raises(EOFError):
        pipes[back].read([np.empty(larger.nbytes, np.uint8)])
    begun.add(answer(socket).request)
    stubborn.link.close()
    until(lambda: not stream.fetches)
    for request, pipe in pipes.items():
        if request != back:
            with pytest.raises(EOFError):
                pipe.read([np.empty(larger.nbytes, np.uint8)])


@pytest.mark.parametrize("kind", [socketlib.SOCK_DGRAM, socketlib.SOCK_SEQPACKET])
def test_a_socket_that_is_no_pipe_is_refused_for_a_fetch(host: Host, wire: Wire, kind: int) -> None:
    host.put(1, jax.block_until_ready(jax.device_put(LARGE)))  # what is computed is refused by the way of the question
    mine, theirs = socketlib.socketpair(socketlib.AF_UNIX, kind)
    with mine:
        socket = local(wire)
        assert socket.send(encode(Fetch(1, 1, (0,))), SharedFile(theirs.detach()))
        refused = answer(socket)
    assert isinstance(refused, DataFailed)
    assert "no end of a pipe" in refused.failure.message


def test_a_host_lost_while_it_sends_an_array_is_said_so(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.put(1, LARGE)
    monkeypatch.setattr(HostPipe, "write", lambda self, arrays: (self._socket.send(b"some"), self.end()))
    with pytest.raises(HostLost, match=f"{LARGE.nbytes - 4} bytes of an array are missing"):
        data.fetch(1, whole(LARGE_KIND), lambda: None)
    assert not data._links[0].pipes
    monkeypatch.setattr(HostPipe, "write", lambda self, arrays: data._links[0].end("its process was lost"))
    with pytest.raises(HostLost, match="its process was lost"):
        data.fetch(1, whole(LARGE_KIND), lambda: None)


def opening(request: int) -> PutOpen:
    return PutOpen(request, request, LARGE_KIND, (("x",),), PLACED, slice_tag(SECRET, SESSION, PLACED))


def piped(socket: LocalSocket, request: int) -> Pipe:
    """An upload that is begun, and has no bytes yet."""
    pipe = Pipe()
    assert socket.send(encode(opening(request)), pipe.other)
    pipe.other = None
    return pipe


def test_who_waits_for_a_big_array_is_told_where_it_reads_and_all_others_by_the_stream(host: Host, wire: Wire) -> None:
    """Nobody may wait, and the local socket be read much later: what goes on with an upload needs its answer."""
    door = local(wire)
    piped(door, 1).write([LARGE])
    assert answer(door) == wire.next() == PutDone(1)


def test_a_thread_that_waits_for_an_upload_reads_the_answer_itself(host: Host, data: DataLinks) -> None:
    """Here nothing of it comes by the stream."""
    host.put(9, LARGE)
    data.fetch(9, whole(LARGE_KIND), lambda: None)
    (stream,) = host.server.streams
    stream.outbox.send = lambda message: None  # type: ignore[method-assign]
    core, told = ClientCore(SESSION, 1024), list[str]()
    (record,) = core.new_buffers(1)

    def acknowledge(upload: UploadOfClient, number: int, failure: Failure | None) -> None:
        record.become_ready()
        told.append(threading.current_thread().name)

    where = LARGE_KIND, (("x",),), PLACED, slice_tag(SECRET, SESSION, PLACED)
    record.upload = data.upload(record.id, LARGE, *where, acknowledge)
    assert await_there(data, core, record, lambda record: None)
    assert told == [threading.current_thread().name]


def test_a_wait_for_an_upload_ends_with_its_failure_and_at_its_time(host: Host, data: DataLinks) -> None:
    core = ClientCore(SESSION, 1024)
    (record,) = core.new_buffers(1)
    record.upload = UploadOfClient({0}, {0: 1})
    assert not await_there(data, core, record, lambda record: None, until=time.monotonic() + 0.01)
    waiting = ThreadPoolExecutor(1).submit(await_there, data, core, record, check_of(record))
    until(lambda: bool(data.awaited))
    record.fail(Failure("HostLost", "gone"))
    data.look()
    assert not waiting.result(LIMIT_S)
    assert not data.awaited


def check_of(record: BufferRecord) -> Callable[[BufferRecord], None]:
    """The look of a wait, which raises the failure of an array."""

    def check(_: BufferRecord) -> None:
        if record.failure is not None:
            raise from_failure(record.failure)

    return check


def test_a_pipe_that_ends_early_fails_its_upload_and_takes_nothing_of_the_quota(host: Host, wire: Wire) -> None:
    pipe = piped(local(wire), 1)
    pipe.write([LARGE[:-1]])
    refused = wire.next()
    assert isinstance(refused, DataFailed)
    assert "4 bytes of an array are missing" in refused.failure.message
    assert host.store.get(SESSION, 1) is None
    assert all(quota.is_empty for quota in host.server.quotas.values())


def test_pipes_without_bytes_hold_up_no_other_client_and_end_with_their_stream(host: Host, data: DataLinks) -> None:
    """
    1. A client opens pipes and sends nothing, more than it may have.
    2. Another one puts an array, and gets it back.
    3. The first one's stream ends: so do the pipes, and what they took of the quota is free.
    """
    stubborn = Wire(host)
    socket = local(stubborn)
    pipes = [piped(socket, request) for request in range(1, 2 + MAX_PIPES)]
    refused = stubborn.next()
    assert isinstance(refused, DataFailed)
    assert refused.failure.kind == "QuotaExceeded"
    (stream,) = host.server.streams
    done = threading.Event()
    data.upload(99, LARGE, LARGE_KIND, (("x",),), PLACED, slice_tag(SECRET, SESSION, PLACED), lambda *_: done.set())
    assert done.wait(LIMIT_S)
    stubborn.link.close()
    until(lambda: not stream.handed)
    for pipe in pipes:
        pipe.write([LARGE])  # returns: the host has hung up
    np.testing.assert_array_equal(data.fetch(99, whole(LARGE_KIND), lambda: None), LARGE)
    assert host.store.get(SESSION, 1) is None


def test_uploads_with_descriptors_are_counted_until_they_are_stored(host: Host, wire: Wire) -> None:
    """
    1. Two pipes without bytes hold up the threads that store. Files come for arrays of no bytes, which wait there and
       take nothing of the quota. What is over the limit is refused.
    2. The pipes end: what had waited is stored, and there is room for further ones.
    """
    empty = ArrayType((0,), "float32")
    socket, over = local(wire), 5
    pipes = [piped(socket, request) for request in (1, 2)]
    before = len(os.listdir("/proc/self/fd"))
    for request in range(3, MAX_PIPES + 1 + over):
        message = msgspec.structs.replace(opening(request), type=empty)
        assert socket.send(encode(message), SharedFile.create(1))
    refused = [wire.next() for _ in range(over)]
    assert [one.request for one in refused] == list(range(MAX_PIPES + 1, MAX_PIPES + 1 + over))
    assert {one.failure.kind for one in refused} == {"QuotaExceeded"}
    assert len(os.listdir("/proc/self/fd")) <= before + MAX_PIPES
    for pipe in pipes:
        pipe.end()
    answers = [wire.next() for _ in range(MAX_PIPES)]
    assert {one.request for one in answers if isinstance(one, DataFailed)} == {1, 2}
    assert {one.request for one in answers if isinstance(one, PutDone)} == set(range(3, MAX_PIPES + 1))
    assert socket.send(encode(msgspec.structs.replace(opening(99), type=empty)), SharedFile.create(1))
    assert wire.next() == PutDone(99)


def test_an_upload_whose_stream_ends_right_before_it_is_stored_takes_nothing_of_the_quota(
    host: Host, wire: Wire
) -> None:
    socket = local(wire)
    (stream,) = host.server.streams
    stream.storing.shutdown()
    assert socket.send(encode(opening(1)), in_file(LARGE))
    refused = wire.next()
    assert isinstance(refused, DataFailed)
    assert stream.quota.is_empty
    assert not stream.handed


def test_arrays_wait_for_their_turn_while_a_host_stores_others(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. A host stores nothing. A thread hands it as many arrays in files as it may, and waits.
    2. A callback puts one in the thread that reads what the host says. It goes in parts: that thread must not wait.
    3. The host goes on: all of them arrive.
    """
    goes_on, array = threading.Event(), SharedUpload.array
    failures: queue.SimpleQueue[Failure | None] = queue.SimpleQueue()
    tag = slice_tag(SECRET, SESSION, PLACED)

    def stored(self: SharedUpload, compiler: Compiler) -> jax.Array:
        assert goes_on.wait(LIMIT_S)
        return array(self, compiler)

    monkeypatch.setattr(SharedUpload, "array", stored)
    value, count = ArrayFile(in_file(LARGE), LARGE.shape, LARGE.dtype), 3 * upload_turns.MAX_PIPES

    def put(*numbers: int) -> None:
        for number in numbers:
            data.upload(number, value, LARGE_KIND, (("x",),), PLACED, tag, lambda *outcome: failures.put(outcome[-1]))

    def called_back() -> None:
        data_link._thread.reads = True
        put(count)

    waiting = threading.Thread(target=put, args=range(1, count), daemon=True)
    waiting.start()
    until(lambda: 0 in data._links and len(data._links[0]._turns._handed) == upload_turns.MAX_PIPES)
    calling = threading.Thread(target=called_back, daemon=True)
    calling.start()
    calling.join(LIMIT_S)
    assert not calling.is_alive()
    assert waiting.is_alive()
    goes_on.set()
    assert [failures.get(timeout=LIMIT_S) for _ in range(count)] == [None] * count
    assert not data._links[0]._turns._handed


@pytest.mark.parametrize("answered", [False, True])
def test_ctrl_c_in_an_upload_ends_it_and_it_was_known_before(
    data: DataLinks, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """It has one outcome, also where the host, which sees the end of the pipe, answers first."""
    known: list[UploadOfClient] = []
    failed: list[Any] = []
    end = Pipe.end

    def ended(self: Pipe) -> None:
        if answered:
            end(self)
            until(lambda: bool(failed))

    def interrupted(self: Pipe, arrays: Any, done: Any, readable: bool) -> None:
        assert len(known) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(Pipe, "write", interrupted)
    monkeypatch.setattr(Pipe, "end", ended)
    tag = slice_tag(SECRET, SESSION, PLACED)
    with pytest.raises(KeyboardInterrupt):
        data.upload(1, LARGE, LARGE_KIND, (("x",),), PLACED, tag, lambda *args: failed.append(args), known.append)
    monkeypatch.undo()
    ((upload, number, failure),) = failed
    assert (upload, number, failure.kind) == (known[0], 0, "WireError" if answered else "Cancelled")


def test_arrays_of_more_threads_than_there_may_be_pipes_all_arrive(host: Host, data: DataLinks) -> None:
    """The host reads two at a time. What finds no pipe waits for one."""
    threads = 3 * MAX_PIPES
    failures: queue.SimpleQueue[Failure | None] = queue.SimpleQueue()
    tag = slice_tag(SECRET, SESSION, PLACED)

    def put(number: int) -> None:
        data.upload(number, LARGE, LARGE_KIND, (("x",),), PLACED, tag, lambda *outcome: failures.put(outcome[-1]))

    data.link_to(0).takes_files(LARGE.nbytes)
    for number in range(1, threads + 1):
        threading.Thread(target=put, args=(number,), daemon=True).start()
    assert [failures.get(timeout=LIMIT_S) for _ in range(threads)] == [None] * threads
    for number in (1, threads):
        np.testing.assert_array_equal(host.store.get(SESSION, number), LARGE)


@pytest.mark.parametrize("readable", [True, False])
def test_an_upload_ends_when_its_host_is_lost(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """The host never reads: the thread that puts goes on once the link has ended."""
    for how in ("read", "read_there"):
        monkeypatch.setattr(HostPipe, how, lambda *_: threading.Event().wait(LIMIT_S))
    monkeypatch.setattr("pathways_ray.transport.pipes.READING_S", LIMIT_S if readable else 0.01)
    failed: list[Any] = []
    much = np.zeros(1 << 24, np.uint8)  # more than the system takes ahead of a reader
    thread = threading.Thread(
        target=lambda: data.upload(
            1,
            much,
            ArrayType(much.shape, "uint8"),
            (("x",),),
            PLACED,
            "",
            lambda upload, host, failure: failed.append(failure),
        )
    )
    data.link_to(0)
    monkeypatch.setattr(client_stream, "is_slice_tag", lambda *_: True)
    thread.start()
    until(lambda: bool(data._links[0].pipes))
    data._links[0].end("its process was lost")
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert failed[0].kind == "HostLost"


def away(_: Any) -> Any:
    """A local socket for one that is on another machine."""
    raise NotLocal("connection refused")


@pytest.mark.parametrize("way", ["local", "away"])
def test_an_array_that_somebody_else_writes_to_a_pipe(
    way: str, host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host of the machine reads it itself; one elsewhere is not sent it, and nothing of it is read. A writer
    that hangs up before the end has nothing stored."""
    if way == "away":
        monkeypatch.setattr(data_link, "LocalSocket", away)
    failures: queue.SimpleQueue[Failure | None] = queue.SimpleQueue()

    def put(number: int, value: np.ndarray[Any, Any]) -> None:
        """A put of what has the bytes of `value`, and no more."""
        pipe = Pipe()
        assert pipe.other is not None
        given = ArrayPipe(pipe.other, LARGE.shape, LARGE.dtype)
        writer = threading.Thread(target=pipe.write, args=([value],), daemon=True)
        writer.start()
        tag = slice_tag(SECRET, SESSION, PLACED)
        data.upload(number, given, LARGE_KIND, (("x",),), PLACED, tag, lambda *outcome: failures.put(outcome[-1]))
        writer.join(LIMIT_S)

    if way == "away":
        with pytest.raises(NotLocal, match="which its host does not take"):
            put(1, LARGE)
        assert failures.empty()
        return
    put(1, LARGE)
    assert failures.get(timeout=LIMIT_S) is None
    np.testing.assert_array_equal(host.store.get(SESSION, 1), LARGE)
    assert data._links[0].is_local
    put(2, LARGE[:-1])
    failure = failures.get(timeout=LIMIT_S)
    assert failure is not None
    assert "4 bytes of an array are missing" in failure.message
    assert data._links[0].passed == {}


def test_who_writes_to_a_pipe_of_another_hears_when_its_host_is_lost(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host holds its end, and never reads."""
    monkeypatch.setattr(HostPipe, "read", lambda self, buffers: threading.Event().wait(LIMIT_S))
    mine, theirs = socketlib.socketpair()
    mine.settimeout(LIMIT_S)
    given = ArrayPipe(SharedFile(theirs.detach()), LARGE.shape, LARGE.dtype)
    data.link_to(0).takes_files(LARGE.nbytes)
    tag, failed = slice_tag(SECRET, SESSION, PLACED), threading.Event()
    data.upload(1, given, LARGE_KIND, (("x",),), PLACED, tag, lambda *_: failed.set())
    data._links[0].end("its process was lost")
    with mine:
        assert mine.recv(1) == b""
    assert failed.is_set()


@pytest.mark.parametrize("end", ["client", "host"])
def test_without_memory_for_files_arrays_go_in_parts(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    def full(*_: Any) -> Any:
        raise OSError("no space left")

    host.put(1, LARGE)
    if end == "client":
        monkeypatch.setattr(SharedFile, "create", full)
        monkeypatch.setattr(data_link, "Pipe", full)
        monkeypatch.setattr(client_data, "Pipe", full)
        done = threading.Event()
        data.upload(2, LARGE, LARGE_KIND, (("x",),), PLACED, slice_tag(SECRET, SESSION, PLACED), lambda *_: done.set())
        assert done.wait(LIMIT_S)
        np.testing.assert_array_equal(host.store.get(SESSION, 2), LARGE)
    else:
        monkeypatch.setattr(SharedFile, "write_box", full)
    np.testing.assert_array_equal(data.fetch(1, whole(LARGE_KIND), lambda: None), LARGE)


def test_a_client_on_another_machine_sends_parts(host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_link, "LocalSocket", away)
    host.put(1, LARGE)
    np.testing.assert_array_equal(data.fetch(1, whole(LARGE_KIND), lambda: None), LARGE)


def test_arrays_that_go_in_parts_wait_until_their_host_has_stored_some(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. A host on another machine takes its time. There are copies of two arrays; who puts a third one waits.
    2. It goes on, and all arrive.
    3. One that is larger than the limit goes alone.
    """
    monkeypatch.setattr(data_link, "LocalSocket", away)
    monkeypatch.setattr(upload_turns, "MAX_COMING_BYTES", 2 * LARGE.nbytes)
    hold, array, done = threading.Event(), upload_module.Upload.array, threading.Semaphore(0)

    def slow(upload: Any, compiler: Compiler) -> jax.Array:
        assert hold.wait(LIMIT_S)
        return array(upload, compiler)

    monkeypatch.setattr(upload_module.Upload, "array", slow)
    tag = slice_tag(SECRET, SESSION, PLACED)

    def put_all(first: int, value: np.ndarray[Any, Any], count: int) -> None:
        kind = ArrayType(value.shape, "float32")
        for number in range(first, first + count):
            data.upload(number, value, kind, (("x",),), PLACED, tag, lambda *_: done.release())

    puts = threading.Thread(target=put_all, args=(1, LARGE, 5))
    puts.start()
    link = data.link_to(0)
    until(lambda: len(link._turns._coming) == 2)
    puts.join(0.2)
    assert puts.is_alive()
    assert len(link._turns._coming) == 2
    hold.set()
    puts.join(LIMIT_S)
    put_all(6, np.tile(LARGE, 3), 2)
    assert all(done.acquire(timeout=LIMIT_S) for _ in range(7))
    assert link._turns._coming == {}


def test_what_devices_compute_with_cannot_be_changed_by_its_client(host: Host, wire: Wire) -> None:
    """
    1. A client keeps its own descriptor of an upload. Once the host has it, the client cannot write to it any more.
    2. It keeps a mapping that it may write to: the upload is refused.
    """
    socket, file = local(wire), in_file(LARGE)
    opening = PutOpen(1, 1, LARGE_KIND, (("x",),), PLACED, slice_tag(SECRET, SESSION, PLACED))
    assert socket.send(encode(opening), file)
    assert wire.next() == PutDone(1)
    with pytest.raises(PermissionError):
        os.pwrite(file.descriptor, b"x", 0)
    kept = in_file(LARGE)
    mapping = kept.bytes(LARGE.nbytes, writable=True)
    assert socket.send(encode(msgspec.structs.replace(opening, request=2, buffer=2)), kept)
    refused = wire.next()
    assert isinstance(refused, DataFailed)
    assert "cannot be sealed" in refused.failure.message
    assert host.store.get(SESSION, 2) is None
    mapping[:] = 0
    np.testing.assert_array_equal(host.store.get(SESSION, 1), LARGE)


@pytest.mark.parametrize("size", [4, 1 << 22])
def test_a_file_of_the_wrong_size_is_refused_and_takes_nothing_of_the_quota(host: Host, wire: Wire, size: int) -> None:
    socket = local(wire)
    opening = PutOpen(1, 1, LARGE_KIND, (("x",),), PLACED, slice_tag(SECRET, SESSION, PLACED))
    assert socket.send(encode(opening), SharedFile.create(size))
    refused = wire.next()
    assert isinstance(refused, DataFailed)
    assert f"a file in memory of {size} bytes came for an array of {LARGE.nbytes}" in refused.failure.message
    assert all(quota.is_empty for quota in host.server.quotas.values())
    host.put(2, jax.block_until_ready(jax.device_put(LARGE)))  # what is computed is refused by the way of the question
    assert socket.send(encode(Fetch(2, 2, (0,))), SharedFile.create(size))
    refused = answer(socket)
    assert isinstance(refused, DataFailed)
    assert "bytes came for an array" in refused.failure.message


def test_an_upload_in_a_file_needs_the_same_rights(host: Host, wire: Wire) -> None:
    socket = local(wire)
    assert socket.send(encode(PutOpen(1, 1, LARGE_KIND, (("x",),), PLACED, "guessed")), in_file(LARGE))
    refused = wire.next()
    assert isinstance(refused, DataFailed)
    assert refused.failure.kind == "AuthenticationError"


@pytest.mark.parametrize(
    "message", [PutDone(1), CancelFetch(1), PutPart(1, 0, 0, b"x")], ids=lambda m: type(m).__name__
)
def test_what_does_not_belong_on_a_local_socket_ends_the_stream(host: Host, wire: Wire, message: Message) -> None:
    socket = local(wire)
    assert socket.send(encode(message))
    if isinstance(message, CancelFetch):  # of a fetch that is over: nothing happens
        host.put(2, SMALL)
        wire.send(Fetch(2, 2, (0,)))
        assert wire.next() == FetchPart(2, 0, 0, SMALL.nbytes, SMALL.tobytes())
        return
    with pytest.raises(LinkLost):
        wire.next()


def test_questions_with_files_hold_few_descriptors_of_the_host(host: Host, wire: Wire) -> None:
    """
    1. A client asks with many files for buffers that are not there.
    2. The host keeps some of them; with the stream they are gone, and so are questions that are taken back.
    """
    socket = local(wire)
    before = len(os.listdir("/proc/self/fd"))
    for request in range(1, 101):
        assert socket.send(encode(Fetch(request, request, (0,))), SharedFile.create(LARGE.nbytes))
    until(lambda: host.store.waiting() == 100)
    assert len(os.listdir("/proc/self/fd")) <= before + data_server.MAX_FILES
    host.put(100, LARGE)
    assert isinstance(wire.next(), FetchPart)  # over the limit: it comes over the stream
    for request in range(1, 100):
        assert socket.send(encode(CancelFetch(request)))
    until(lambda: host.store.waiting() == 0)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.parametrize(
    ("make", "waiting"),
    [
        pytest.param(lambda request: LaunchEarly(1, (), request, (), request, (0,)), 51, id="LaunchEarly"),
        pytest.param(CancelFetch, 1, id="CancelFetch"),
        pytest.param(lambda request: ServeCall(1, (), (request,), ((0,),)), 1, id="ServeCall"),
    ],
)
def test_a_message_that_needs_no_file_keeps_none(
    host: Host, wire: Wire, make: Callable[[int], Message], waiting: int
) -> None:
    """A call may ask for its result, which may never be there: only what is small comes then, in a message."""
    socket = local(wire)
    before = len(os.listdir("/proc/self/fd"))
    for request in range(1, 51):
        assert socket.send(encode(make(request)), SharedFile.create(LARGE.nbytes))
    assert socket.send(encode(Fetch(51, 51, (0,))))
    until(lambda: host.store.waiting() == waiting)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_no_more_is_read_of_a_local_socket_while_its_client_leaves_answers_unread(host: Host, wire: Wire) -> None:
    """
    1. A client reads nothing, and sends questions by its local socket that are refused.
    2. The host keeps some refusals, and then takes no more questions.
    3. The client reads: all that was asked is answered, and further questions are taken.
    """
    socket = local(wire)
    (stream,) = host.server.streams
    host.server.later(AsyncLink.pause_writing, stream.link)  # as the loop does when the kernel takes no more
    question = encode(Fetch(1, 9, (0,)))
    sent = 0
    while socket.send(question):
        sent += 1
        assert sent < 20 * MAX_UNREAD
    assert len(stream.outbox._batcher) <= MAX_UNREAD + 1 < sent
    host.server.later(AsyncLink.resume_writing, stream.link)
    assert {type(wire.next()) for _ in range(sent - 1)} == {DataFailed}  # the first one waits
    assert socket.send(question)
    assert isinstance(wire.next(), DataFailed)


def test_many_threads_get_their_small_values_by_one_local_socket(host: Host, data: DataLinks) -> None:
    """
    1. Ten threads ask for values that are not there. One of them reads for all.
    2. The values come, in another order; a question among them is taken back.
    """
    host.put(1, SMALL)
    np.testing.assert_array_equal(data.fetch(1, COVER, lambda: None), SMALL)
    until(lambda: data._links[0].is_local)
    asked = [Asked(data, number) for number in range(2, 12)]
    until(lambda: host.store.waiting() == 10)
    asked[5].stop = SessionClosed("over")
    data.wake()
    asked[5].end()
    assert isinstance(asked[5].error, SessionClosed)
    for number in (11, 3, 5, 2, 4, 6, 8, 9, 10):
        host.put(number, SMALL + number)
    for number, one in enumerate(asked, 2):
        one.end()
        if number != 7:
            np.testing.assert_array_equal(one.result, SMALL + number)
    assert host.store.waiting() == 0


def test_a_host_that_stood_still_is_asked_by_its_local_socket_again(host: Host, data: DataLinks) -> None:
    """
    1. The host stands still, and its local socket is full: a further question goes by the stream, a call to no host.
    2. All questions are taken back, and the host goes on: nothing overtakes, so none of them is left there.
    3. Questions and calls go by the local socket.
    """
    host.put(1, SMALL)
    np.testing.assert_array_equal(data.fetch(1, COVER, lambda: None), SMALL)
    (link,) = data._links.values()
    until(lambda: link.is_local)
    goes_on = threading.Event()
    host.server._loop.call_soon_threadsafe(goes_on.wait, LIMIT_S)
    before = data.new_request()
    while link.send_local(Fetch(data.new_request(), 9, ())):
        pass
    link.ask(Fetch(data.new_request(), 9, ()))
    asked_with_it = BufferRecord(8, kind=SimpleNamespace(cover=COVER))
    assert not data.launch_early(0, LaunchEarly(1, (), 8), asked_with_it)
    assert data.ahead.take(8) is None, "nobody was asked for the value"
    for request in reversed(range(before, data.new_request())):
        link.outbox.send(CancelFetch(request))
    goes_on.set()
    for local in (False, True):  # each is answered behind all that went by the same way
        link.is_local = local
        np.testing.assert_array_equal(data.fetch(1, COVER, lambda: None), SMALL)
    assert host.store.waiting() == 0
    asked = data.launch_early(0, LaunchEarly(1, (), 8)), link.send_local(Fetch(data.new_request(), 9, ()))
    assert asked == (True, True)
    until(lambda: host.store.waiting() == 1)


def test_questions_may_be_taken_back_by_the_local_socket_in_any_number(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comes behind its question, so nothing else that has come is taken for it."""
    host.put(1, SMALL)
    np.testing.assert_array_equal(data.fetch(1, COVER, lambda: None), SMALL)
    (link,) = data._links.values()
    until(lambda: link.is_local)
    caught_up = list[object]()
    monkeypatch.setattr(host.server.local, "catch_up", lambda *given: caught_up.append(given))
    for _ in range(200):
        assert link.send_local(Fetch(request := data.new_request(), 9, ()))
        assert link.send_local(CancelFetch(request))
    np.testing.assert_array_equal(data.fetch(1, COVER, lambda: None), SMALL)
    assert (host.store.waiting(), caught_up) == (0, [])


def test_a_host_says_when_a_value_is_there_with_no_thread_that_waits(host: Host, data: DataLinks) -> None:
    """1. One comes, one cannot, one is not waited for any longer. 2. From another machine nothing is asked so."""
    host.put(1, SMALL)
    np.testing.assert_array_equal(data.fetch(1, COVER, lambda: None), SMALL)
    until(lambda: data._links[0].is_local)
    said: dict[int, bool] = {}

    def asked(number: int) -> Question:
        found = ask_whether_there(data, number, 0, lambda came: said.update({number: came}))
        assert found is not None
        return found

    def answers() -> dict[int, bool]:
        read(data)
        return said

    given_up = [asked(number) for number in (2, 3, 4)][-1]
    until(lambda: host.store.waiting() == 3)
    assert answers() == {}
    host.put(2, SMALL)
    host.put(3, OVER)
    assert given_up.take_back()
    until(lambda: answers() == {2: True, 3: False})
    until(lambda: host.store.waiting() == 0)
    assert not data._links[0].fetches
    data._links[0].is_local = False
    assert ask_whether_there(data, 5, 0, lambda came: None) is None


def test_a_lone_shard_comes_in_a_file_as_an_array_does(host: Host, data: DataLinks) -> None:
    """Into a file of the caller's, and, by a stream of another machine, in parts to the same file."""
    plan = FetchPlan.of_shard(LARGE_KIND, (("x",),), PLACED, 0)
    host.put(1, LARGE)
    for local in (True, False):
        data.link_to(0).takes_files = lambda size, local=local: local  # type: ignore[method-assign, misc]
        into = SharedFile.create(LARGE.nbytes)
        found = data.fetch(1, plan, lambda: None, None, None, into)
        np.testing.assert_array_equal(found, LARGE)
        np.testing.assert_array_equal(into.bytes(LARGE.nbytes).view(LARGE.dtype), LARGE.reshape(-1))
        found[:] = 0  # in a fork of the client, say: others have what was fetched
        np.testing.assert_array_equal(into.bytes(LARGE.nbytes).view(LARGE.dtype), LARGE.reshape(-1))


# --- clients that are not of this project -----------------------------------------------------------------------------


def test_a_batch_of_very_many_messages_is_not_decoded(host: Host, wire: Wire) -> None:
    """To decode it, and to take its messages one by one, would keep the loop from all others for seconds."""
    host.put(1, SMALL)
    hostile = Wire(host, session=8)
    hostile.doors.get(timeout=LIMIT_S)
    hostile.outbox._write(framed(encode([CancelFetch(1)] * (MAX_BATCH + 1)))[0], True)  # type: ignore[misc]
    with pytest.raises(LinkLost, match="a batch of 16385 messages; the limit is 16384"):
        hostile.next()
    wire.send(Fetch(1, 1, (0,)))
    assert wire.next().data == SMALL.tobytes()


def test_a_batch_that_is_too_long_is_refused_by_its_length(host: Host) -> None:
    hostile = Wire(host)
    hostile.doors.get(timeout=LIMIT_S)
    hostile.outbox._write((9 << 20).to_bytes(4, "big"), True)  # type: ignore[misc]
    with pytest.raises(LinkLost, match="a frame of 9437184 bytes came; the limit is 8388613"):
        hostile.next()


def test_a_question_for_very_many_shards_is_not_kept(host: Host) -> None:
    """A number takes a byte on the way and eight here, for as long as the question waits."""
    hostile = Wire(host)
    hostile.send(Fetch(1, 99, (0,) * (limits.MAX_FETCHED_SHARDS + 1)))
    with pytest.raises(LinkLost, match="length <= 4096"):
        hostile.next()
    assert host.store.waiting() == 0


def test_arrays_without_bytes_are_counted_too(host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the controller hears nothing of are here alone, and may be put without end."""
    monkeypatch.setattr(data_server, "MAX_BUFFERS", 5)
    empty = np.zeros(0, np.float32)
    for request in range(1, 6):
        wire.send(put(request, request, empty)[0])
        assert wire.next() == PutDone(request)
    wire.send(put(6, 6, empty)[0])
    refused = wire.next()
    assert refused.failure.kind == "QuotaExceeded"
    host.store.drop(SESSION, (1,))
    wire.send(put(7, 7, empty)[0])
    assert wire.next() == PutDone(7)


@pytest.mark.parametrize("items", [0, 1])
def test_small_arrays_count_as_the_controller_counts_them(host: Host, items: int) -> None:
    """Each takes some kilobytes of its host, whatever its bytes are."""
    allowed = 2 * limits.MIN_BUFFER_BYTES
    limited = Wire(host, token=data_token(SECRET, SESSION, allowed, "alice"))
    array = np.zeros(items, np.float32)
    for request in range(1, 3):
        limited.send(*put(request, request, array)[: 1 + items])
        assert limited.next() == PutDone(request)
    limited.send(put(3, 3, array)[0])
    refused = limited.next()
    assert refused.failure.kind == "QuotaExceeded"
    assert f"asks for 4096 bytes on the devices of a host, where uploads of the tenant hold {allowed}" in str(refused)
    host.store.drop(SESSION, (1,))
    limited.send(*put(4, 4, array)[: 1 + items])
    assert limited.next() == PutDone(4)
    limited.link.close()


def test_other_clients_are_served_between_the_batches_of_one(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that have come together are no turn of the loop by themselves."""
    taken: list[int] = []
    between = threading.Event()

    def withdraw(stream: Any, request: int) -> None:
        if not taken:
            host.server.later(lambda _: taken.append(0), None)
        taken.append(request)
        if request == 2:
            between.set()

    monkeypatch.setattr(host.server.fetches, "withdraw", withdraw)
    several = Wire(host)
    several.doors.get(timeout=LIMIT_S)
    data = b"".join(framed(encode([CancelFetch(number)]))[0] for number in (1, 2))
    several.outbox._write(data, True)  # type: ignore[misc]
    assert between.wait(LIMIT_S)
    assert taken[:3] == [1, 0, 2]
    monkeypatch.undo()
    several.link.close()


def test_files_of_fetches_are_counted_while_others_are_answered(host: Host, wire: Wire) -> None:
    """
    1. A client asks by its local socket, with a file, and the files before are counted. Meanwhile another thread
       answers one of these questions.
    2. The question is answered as well: its client would wait for ever.
    3. One without a file has nothing counted: there may be thousands, and all clients wait for that.
    """
    door = local(wire)
    host.put(1, LARGE)
    host.put(2, SMALL)
    door.send(encode(Fetch(1, 99, (0,))))
    until(lambda: bool(host.server.streams) and any(stream.fetches for stream in host.server.streams))
    (stream,) = host.server.streams
    looks = []

    class Answered:
        """A fetch that another thread answers at the moment at which it is looked at."""

        pipe = None

        @property
        def file(self) -> None:
            looks.append(stream.fetches.pop(3, None))

    stream.fetches[2] = Answered()  # type: ignore[assignment]
    stream.fetches[3] = stream.fetches[1]
    stream.fetches[4] = stream.fetches[1]
    door.send(encode(Fetch(5, 1, (0,))), SharedFile.create(LARGE.nbytes))
    done = answer(door)
    assert isinstance(done, FetchDone)
    assert done.request == 5
    assert len(looks) == 1
    door.send(encode(Fetch(6, 2, (0,))))
    part = answer(door)
    assert isinstance(part, FetchPart)
    assert part.request == 6
    assert len(looks) == 1
    for number in (2, 3, 4):
        stream.fetches.pop(number, None)
    door.close()


def test_a_host_that_serves_no_more_ends(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on dispatching, and its heartbeats with it, so that nobody started it again."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(os, "_exit", ended.put)

    def fail(_: None) -> None:
        raise SystemExit("the loop ends")

    host.server.later(fail, None)
    assert ended.get(timeout=LIMIT_S) == 1


@pytest.mark.parametrize("begun", [False, True])
def test_a_host_that_cannot_begin_to_serve_says_why(host: Host, monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    """At once, whether its thread failed before its loop ran or within it; whoever made it is to decide what ends."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)

    def run(serve: Callable[[], None]) -> None:
        if not begun:
            raise ImportError("no such name")
        serve()

    given = host.compiler, host.store, SECRET, ListenConfig(data="192.0.2.1"), host.report, print
    with pytest.raises(RuntimeError, match=r"host 3 cannot serve data at 192\.0\.2\.1") as caught:
        DataServer(3, *given, run=run)
    assert isinstance(caught.value.__cause__, OSError if begun else ImportError)
    assert not ended


def test_a_pipe_that_is_taken_back_while_its_array_is_read_ends(
    host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that reads has not made it its own yet: nobody else could end it."""
    goes_on, reads, writes = threading.Event(), threading.Event(), list[Any]()
    arrays = host.server.reader.arrays

    def read(*what: Any) -> Any:
        reads.set()
        assert goes_on.wait(LIMIT_S)
        return arrays(*what)

    monkeypatch.setattr(host.server.reader, "arrays", read)
    monkeypatch.setattr(HostPipe, "write", lambda self, arrays: writes.append(self))
    door, pipe = local(wire), Pipe()
    host.put(1, LARGE)
    assert door.send(encode(Fetch(1, 1, (0,))), pipe.other)
    pipe.other = None
    assert reads.wait(LIMIT_S)
    (stream,) = host.server.streams
    wire.send(CancelFetch(1))
    until(lambda: not stream.fetches)
    goes_on.set()
    with pytest.raises(EOFError):
        pipe.read([np.empty(LARGE.nbytes, np.uint8)])
    assert not writes


def test_a_value_is_near_by_the_bytes_that_are_asked_for(host: Host, wire: Wire) -> None:
    """A replicated one has all of them on each device. Those of a sharded one are its own."""
    value = SimpleNamespace(shape=(20_000,), dtype=np.dtype(np.float32))
    local_one = SimpleNamespace(message=Fetch(1, 1, (0,)), local=object(), file=None)
    local_two = SimpleNamespace(message=Fetch(1, 1, (0, 1)), local=object(), file=None)
    by_stream = SimpleNamespace(message=Fetch(1, 1, (0,)), local=None, file=None)
    server = SimpleNamespace(_most=2, _near_bytes=NEAR_BYTES)
    is_small: Any = fetches.FetchServer._is_small
    assert is_small(server, value, local_one)
    assert not is_small(server, value, by_stream)
    for shard, small in (((20_000,), False), ((10_000,), True)):
        value.sharding = SimpleNamespace(shard_shape=lambda shape, shard=shard: shard)
        assert is_small(server, value, local_two) == small


def test_no_more_comes_along_than_fits_into_the_answer(host: Host, wire: Wire) -> None:
    big, small = np.zeros(NEAR_BYTES // 4 - 100, np.float32), np.zeros(60, np.float32)
    door = local(wire)
    host.put(1, big)
    host.put(2, small)
    host.put(3, small)
    assert door.send(encode(Fetch(1, 1, (0,), ((2, 2), (3, 3)))))
    door.connection.settimeout(LIMIT_S)
    parts = FROM_HOST_DATA.decode_batch(door.connection.recv(1 << 18))
    assert [part.request for part in parts if isinstance(part, FetchPart)] == [2, 1]
