"""Small puts by the local socket of a host, which are waited for: what arrives, which wait, and what ends the wait."""

from __future__ import annotations

import functools
import itertools
import socket as socketlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from pathways_ray import limits
from pathways_ray.client import core as core_module
from pathways_ray.client import data_link, local_reader, small_puts
from pathways_ray.client.buffer import READY, BufferRecord, Upload
from pathways_ray.client.core import ClientCore
from pathways_ray.client.data import DataLinks
from pathways_ray.client.events import Uploaded
from pathways_ray.client.living import LivingUploads
from pathways_ray.client.local_reader import LocalReader, Sleeper
from pathways_ray.errors import Failure
from pathways_ray.executor.data.upload import WholeUpload
from pathways_ray.executor.data.upload_plan import UploadPlan
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport.capabilities import data_token, slice_tag
from pathways_ray.transport.messages import DataFailed, Free, HostAddress, PutDone, PutOpen, encode
from tests.unit.executor.data.test_server import COVER, OVER, PLACED, SECRET, SESSION, SMALL, Host, Wire, local
from tests.unit.helpers import placed
from tests.waiting import until

LIMIT_S = 20.0
KIND = ArrayType(SMALL.shape, "float32")
SPEC = (("x",),)
TAG = slice_tag(SECRET, SESSION, PLACED)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def data(host: Host) -> Iterator[DataLinks]:
    made = DataLinks(SESSION, data_token(SECRET, SESSION, None), (HostAddress(0, 1, host.server.address),))
    made.answers_soon = lambda host: True
    host.put(1, SMALL)
    np.testing.assert_array_equal(made.fetch(1, COVER, lambda: None), SMALL)
    until(lambda: made._links[0].is_local)
    yield made
    made.close(OVER)


class Putting:
    """A put in a thread of its own, what was told of it, and how it ended."""

    def __init__(self, data: DataLinks, value: np.ndarray[Any, Any] = SMALL, tag: str = TAG) -> None:
        self.told: list[Failure | None] = []
        self.begun: list[Upload] = []
        self.raised: BaseException | None = None
        link = small_puts.host_link(data, value, PLACED)
        assert link is not None
        self._what = data, link, 9, value, ArrayType(value.shape, value.dtype.name), SPEC, PLACED, tag
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            small_puts.put(*self._what, self._answered, self.begun.append)
        except BaseException as error:
            self.raised = error

    def _answered(self, upload: Upload, host: int, failure: Failure | None) -> None:
        self.told.append(failure)
        upload.done = True

    def ended(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "it hangs"

    def end(self) -> list[Failure | None]:
        self.ended()
        return self.told


@pytest.mark.parametrize("value", [SMALL, np.zeros((0, 3), np.int8)[0:0].reshape(0), np.arange(9, dtype=np.uint8)])
def test_it_is_stored_when_the_put_is_over_and_may_be_changed_then(
    host: Host, data: DataLinks, value: np.ndarray[Any, Any]
) -> None:
    before = value.copy()
    one = Putting(data, value)
    assert one.end() == [None]
    assert len(one.begun) == 1
    value += 1
    stored: Any = host.store.get(SESSION, 9)
    np.testing.assert_array_equal(np.asarray(stored), before)
    value -= 1
    assert all(quota.is_empty for quota in host.server.quotas.values())


def test_a_refusal_is_told_and_ends_it(host: Host, data: DataLinks) -> None:
    (failure,) = Putting(data, tag="guessed").end()
    assert failure is not None
    assert failure.kind == "AuthenticationError"
    assert host.store.get(SESSION, 9) is None


def test_the_end_of_the_host_ends_it(host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has it, and says nothing."""
    monkeypatch.setattr(host.server, "_take", lambda *message: None)
    one = Putting(data)
    until(lambda: bool(one.begun))
    data._links[0].end("its process was lost")
    (failure,) = one.end()
    assert failure is not None
    assert failure.kind == "HostLost"


def test_it_goes_by_the_stream_where_the_local_socket_takes_nothing(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = data._links[0]
    monkeypatch.setattr(link, "send_local", lambda *message: False)
    assert Putting(data).end() == [None]
    np.testing.assert_array_equal(np.asarray(host.store.get(SESSION, 9)), SMALL)


def test_ctrl_c_ends_the_wait_and_the_answer_is_read_all_the_same(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has left. What waits for it, as the free of an array without a handle, would wait without end."""
    taken: list[Any] = []
    take, wait, first = host.server._take, data.reader.wait, [True]
    monkeypatch.setattr(host.server, "_take", lambda *message: taken.append(message))

    def interrupted(*given: Any) -> None:
        if first:
            first.clear()
            until(lambda: bool(taken))
            raise KeyboardInterrupt
        wait(*given)

    monkeypatch.setattr(data.reader, "wait", interrupted)
    one = Putting(data)
    one.ended()
    assert isinstance(one.raised, KeyboardInterrupt)
    assert (one.told, len(data._links[0].uploads)) == ([], 1)
    assert host.server._loop is not None
    host.server._loop.call_soon_threadsafe(take, *taken[0])
    until(lambda: one.told == [None])
    assert not data._links[0].uploads


def test_ctrl_c_before_it_has_left_ends_its_upload(data: DataLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data._links[0], "ask", interrupted)
    one = Putting(data)
    (failure,) = one.end()
    assert isinstance(one.raised, KeyboardInterrupt)
    assert failure is not None
    assert failure.kind == "Cancelled"
    assert not data._links[0].uploads


def test_an_answer_that_ctrl_c_cuts_off_is_taken_by_the_next_who_reads(data: DataLinks) -> None:
    """At each step of what takes it: who waits for his own upload may read the answer to another thread's."""
    files, link = {data_link.__file__, core_module.__file__, local_reader.__file__}, data._links[0]

    def run(at: int) -> bool:
        """Interrupts the thread that reads, at a step; whether it came to that."""
        core, steps, records = ClientCore(1, 1000), itertools.count(), list[BufferRecord]()

        def told(record: BufferRecord, upload: Upload, host: int, failure: Failure | None) -> None:
            core.handle(Uploaded(record, upload, host, failure), 0.0)

        for request in (1001, 1002):
            (record,) = core.new_buffers(1)
            record.upload = Upload({0})
            link.uploads[request] = data_link.Sent(record.upload, functools.partial(told, record))
            records.append(record)
        assert core.free(records[0]) is None
        reader, (mine, theirs) = LocalReader(), socketlib.socketpair(socketlib.AF_UNIX, socketlib.SOCK_SEQPACKET)
        reader.add(mine, link._take_local)
        for request in (1001, 1002):
            theirs.send(encode([PutDone(request)]))

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename in files and event == "line" and next(steps) == at:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        before, came = sys.gettrace(), False
        sys.settrace(trace)
        try:
            reader.wait(lambda: records[1].state is READY, Sleeper(), 1.0)
        except KeyboardInterrupt:
            came = True
        finally:
            sys.settrace(before)
        reader.wait(lambda: all(one.state is READY for one in records), Sleeper(), 1.0, time.monotonic() + 1.0)
        assert [one.state for one in records] == [READY, READY], f"lost at step {at}"
        assert Free((records[0].id,)) in [queued.message for queued in core.queue], f"the free is lost at step {at}"
        mine.close()
        theirs.close()
        return came

    steps = next(at for at in itertools.count() if not run(at))
    assert steps > 50


def test_an_upload_that_is_stored_stays_so_when_its_link_ends() -> None:
    core = ClientCore(1, 1000)
    (record,) = core.new_buffers(1)
    record.upload = upload = Upload({0})
    core.handle(Uploaded(record, upload, 0), 0.0)
    core.handle(Uploaded(record, upload, 0, Failure("HostLost", "its process was lost")), 0.0)
    assert (record.state, record.failure) == (READY, None)


def test_another_thread_that_reads_has_it_go_on(host: Host, data: DataLinks) -> None:
    asked = threading.Thread(target=data.fetch, args=(5, COVER, lambda: None), daemon=True)
    asked.start()
    until(lambda: host.store.waiting() == 1 and bool(data.reader._leader))
    assert Putting(data).end() == [None]
    host.put(5, SMALL)
    asked.join(LIMIT_S)
    assert not asked.is_alive()


def test_which_puts_wait(data: DataLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    big = np.zeros(limits.MAX_WHOLE_BYTES + 1, np.uint8)

    def waits(value: Any = SMALL, where: PlacedSlice = PLACED) -> bool:
        return small_puts.host_link(data, value, where) is not None

    assert waits()
    assert waits(big[1:])
    assert not waits(big)
    assert not waits(where=placed(1, ["0.0", "1.0"]))
    assert not waits(where=placed(1, ["3.0"])), "nothing was asked of that host"
    monkeypatch.setattr(data_link._thread, "reads", True, raising=False)
    assert not waits(), "this thread is the one that would read the answer"
    monkeypatch.undo()
    data.living = LivingUploads(data_token(SECRET, SESSION, 1 << 20))
    assert not waits(), "within a quota it may wait for frees"
    data.living = LivingUploads(data_token(SECRET, SESSION, None))
    data.answers_soon = lambda host: False
    assert not waits()
    data.answers_soon = lambda host: True
    data._links[0].is_local = False
    assert not waits()


# --- the host ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def wire(host: Host) -> Iterator[Wire]:
    made = Wire(host)
    yield made
    made.link.close()


@pytest.mark.parametrize(
    "whole",
    [(b"12345678" * 3,), (bytes(16), bytes(16)), (b"",), (b"1234",)],
    ids=["long", "two", "none", "short"],
)
def test_bytes_that_do_not_fit_are_refused_and_take_nothing_of_the_quota(
    host: Host, wire: Wire, whole: tuple[Any, ...]
) -> None:
    socket = local(wire)
    opening = PutOpen(1, 9, KIND, SPEC, PLACED, TAG, whole=whole)
    assert socket.send(encode(opening))
    refused = wire.next()
    assert isinstance(refused, DataFailed)
    assert refused.failure.kind == "WireError"
    assert all(quota.is_empty for quota in host.server.quotas.values())
    good = msgspec.structs.replace(opening, request=2, whole=(SMALL.tobytes(),))
    wire.send(good)
    assert wire.next() == PutDone(2), "what came by the stream is answered there"


def test_a_slice_is_not_another_session_s_because_it_was_looked_at_before(host: Host, wire: Wire) -> None:
    good = PutOpen(1, 9, KIND, SPEC, PLACED, TAG, whole=(SMALL.tobytes(),))
    wire.send(good)
    assert wire.next() == PutDone(1)
    other = Wire(host, SESSION + 1)
    other.send(good)
    refused = other.next()
    assert isinstance(refused, DataFailed)
    assert refused.failure.kind == "AuthenticationError"
    other.link.close()


def test_what_comes_whole_is_small_and_holds_nothing_of_its_batch(host: Host, wire: Wire) -> None:
    """Its bytes are a view of all messages that came together."""
    opening = PutOpen(1, 9, ArrayType((1 << 20,), "uint8"), SPEC, PLACED, TAG, whole=(bytes(1 << 20),))
    wire.send(opening)
    refused = wire.next()
    assert isinstance(refused, DataFailed)
    assert f"1048576 bytes came with their array; {limits.MAX_WHOLE_BYTES} may" in refused.failure.message
    came = bytearray(SMALL.tobytes())
    opening = PutOpen(1, 9, KIND, SPEC, PLACED, TAG, whole=(memoryview(came),))
    upload = WholeUpload(opening, UploadPlan(KIND, SPEC, PLACED, 0), None)
    assert (upload.missing, upload.message.whole) == (0, ())
    came[:] = bytes(len(came))
    assert [data.tobytes() for data in upload.buffers] == [SMALL.tobytes()]
