"""A session between its user's threads and its core: waiting, order over threads, Ctrl-C, closing and forks."""

from __future__ import annotations

import dis
import gc
import itertools
import os
import sys
import threading
from collections.abc import Collection
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import driver, fetches, mover
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.buffer import DELETED, READY, BufferRecord
from pathways_ray.client.core import ClientCore
from pathways_ray.client.donations import Donations
from pathways_ray.client.driver import Driver
from pathways_ray.client.ending import Queued
from pathways_ray.client.events import Resumed
from pathways_ray.client.interrupted import is_mine
from pathways_ray.client.moving import is_quiet
from pathways_ray.client.session import Session
from pathways_ray.client.slices import VirtualSlice, mesh_of
from pathways_ray.client.specs import spec_from_user
from pathways_ray.client.uploads import upload
from pathways_ray.client.why import EXPLAIN_WITHIN_S
from pathways_ray.errors import (
    BufferDeleted,
    BufferLost,
    Cancelled,
    ControllerLost,
    ExecutionError,
    Failure,
    ForeignArray,
    HostLost,
    OutOfMemory,
    PathwaysError,
    SessionClosed,
    SpecError,
    Unschedulable,
    UsageError,
    WaitTimeout,
    from_failure,
)
from pathways_ray.observe import views
from pathways_ray.observe.why import Link, Why
from pathways_ray.transport.messages import (
    BuffersLost,
    CloseSession,
    Completed,
    CreateSlice,
    Explain,
    Explained,
    Free,
    HostAddress,
    Launch,
    LaunchFailed,
    Look,
    Put,
    ReleaseSlice,
    SessionEnded,
    SessionResumed,
    Status,
    StatusReply,
    encode,
)
from tests.unit.client.offline import LIMIT_S, VECTOR, Background, Offline
from tests.unit.helpers import placed
from tests.waiting import until

BROKEN = Failure("ExecutionError", "f divided by zero")
GONE = Failure("HostLost", "host 0 is gone", host=0)
V = np.arange(2, dtype=np.float32)


@pytest.fixture
def offline() -> Offline:
    return Offline()


# --- launching --------------------------------------------------------------------------------------------------------


def test_a_call_returns_handles_at_once(offline: Offline) -> None:
    a, b = offline.session.launch(3, [], (offline.kind, offline.kind))
    assert offline.controller.take() == [Launch(1, 3, (), 1)]
    assert repr(a).endswith(", pending)")
    assert not a.is_ready()
    offline.say(Completed((1,)))
    assert a.block_until_ready(timeout=LIMIT_S) is a
    assert b.is_ready()


def test_an_array_that_is_there_is_not_asked_for_again_and_says_what_becomes_of_it(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a tree is waited for, leaf by leaf: its hosts have said so of all leaves at once."""
    monkeypatch.setattr(driver, "await_there", lambda *_: pytest.fail("its hosts are asked again"))
    a, b, c, d = offline.session.launch(3, [], (offline.kind,) * 4)
    for one in (a, b, c, d):
        one._buffer.record.fetched = True
    assert a.block_until_ready() is a
    assert a.block_until_ready(timeout=0.0) is a
    b.delete()
    with pytest.raises(BufferDeleted, match="it was deleted"):
        b.block_until_ready()
    c._buffer.record.fail(GONE)
    with pytest.raises(HostLost, match="host 0 is gone"):
        c.block_until_ready()
    offline.session.close()
    with pytest.raises(SessionClosed):
        d.block_until_ready()


def test_dropped_handles_free_their_buffers(offline: Offline) -> None:
    (a,) = offline.session.launch(3, [], (offline.kind,))
    copy = a._alias()
    offline.controller.take()
    del a
    assert offline.controller.take() == [], "a second handle is left"
    del copy
    assert offline.controller.take() == [Free((1,))]


def test_a_deleted_array_is_freed_once_and_says_why(offline: Offline) -> None:
    (a,) = offline.session.launch(3, [], (offline.kind,))
    offline.controller.take()
    a.delete()
    a.delete()
    assert offline.controller.take() == [Free((1,))]
    for use in (a.is_ready, a.block_until_ready, a.__array__):
        with pytest.raises(BufferDeleted, match="it was deleted"):
            use()
    del use
    with pytest.raises(BufferDeleted, match="the array cannot be an argument: it was deleted"):
        offline.session.check_mine(a._buffer)
    assert a.is_deleted()
    del a
    assert offline.controller.take() == []


def test_a_handle_in_a_cycle_is_freed_by_the_collector_in_the_middle_of_a_launch(offline: Offline) -> None:
    """The destructor runs in a thread that has the session's lock."""
    cycle: list[Any] = offline.session.launch(3, [], (offline.kind,))
    cycle.append(cycle)
    del cycle
    offline.controller.take()
    new_buffers = offline.session._core.new_buffers

    def collecting(*what: Any) -> Any:
        gc.collect()
        return new_buffers(*what)

    offline.session._core.new_buffers = collecting  # type: ignore[assignment,method-assign]
    offline.session.launch(3, [], (offline.kind,))
    assert Free((1,)) in offline.controller.take()


@pytest.mark.parametrize("where", ["at its last look", "with its lock in hand"])
def test_a_handle_that_goes_behind_a_queue_that_has_just_been_emptied_is_freed_at_once(
    offline: Offline, where: str
) -> None:
    """The collector runs in the thread that empties the queue, when that has looked for the last time: before the
    message that it looked at is out of the queue."""
    core, controller = offline.session._core, offline.controller
    cycle: list[Any] = offline.session.launch(3, [], (offline.kind,))
    cycle.append(cycle)
    del cycle
    x = offline.session.put(V, offline.where, ())
    (y,) = offline.session.launch(1, [x._buffer.record], (offline.kind,))
    head, remove_head = core.head, core.remove_head

    def last_look(now: float) -> Any:
        found = head(now)
        if found is None:
            core.head = head  # type: ignore[method-assign]
            core.queue.append(Queued(Free((1,))))  # as `free` does that has seen a queue that was not empty
        return found

    def removes() -> object:
        gc.collect()
        return remove_head()

    if where == "at its last look":
        core.head = last_look  # type: ignore[method-assign]
        offline.hosts.acknowledge(2)
    else:
        core.remove_head = removes
        offline.hosts.acknowledge(2)
    del y
    sent = controller.take()
    assert Launch(2, 1, (2,), 3) in sent
    assert Free((1,)) in sent
    assert not core.queue


def test_results_of_threads_that_launch_at_once_have_consecutive_numbers(offline: Offline) -> None:
    """A launch names its results by the first of them, so no other thread may get a number between."""
    offline = Offline(max_launches=1 << 20)
    kinds = (offline.kind,) * 3
    found: list[list[int]] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:

        def many() -> None:
            for _ in range(200):
                found.append([array._buffer.id for array in offline.session.launch(1, [], kinds)])

        for thread in [Background(many) for _ in range(4)]:
            thread.end()
    finally:
        sys.setswitchinterval(interval)
    assert all(numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2] for numbers in found)
    named = [message.results for message in offline.controller.take() if isinstance(message, Launch)]
    assert sorted(named) == sorted(numbers[0] for numbers in found)
    assert len(set(named)) == 800


def test_a_launch_waits_while_too_many_have_no_outcome() -> None:
    offline = Offline(max_launches=8)
    arrays = [offline.session.launch(1, [], (offline.kind,)) for _ in range(8)]
    late = Background(lambda: offline.session.launch(1, [], (offline.kind,)))
    until(lambda: late.waits)
    assert len(offline.controller.take()) == 8
    offline.say(Completed((1, 2)))
    late.end()
    assert [message.launch for message in offline.controller.take() if isinstance(message, Launch)] == [9]
    assert len(arrays) == 8


def test_a_launch_that_waits_for_room_ends_with_the_session() -> None:
    offline = Offline(max_launches=1)
    held = offline.session.launch(1, [], (offline.kind,))
    late = Background(lambda: offline.session.launch(1, [], (offline.kind,)))
    until(lambda: late.waits)
    offline.session._driver.disconnected("gone")
    with pytest.raises(SessionClosed, match="the session is closed: gone"):
        late.end()
    assert held[0]._buffer.record.failure is not None


# --- outcomes ---------------------------------------------------------------------------------------------------------


def test_waiting_raises_the_failure_of_the_launch(offline: Offline) -> None:
    (a,) = offline.session.launch(1, [], (offline.kind,))
    waiting = Background(a.block_until_ready)
    offline.say(LaunchFailed(1, BROKEN))
    with pytest.raises(ExecutionError, match="f divided by zero"):
        waiting.end()
    with pytest.raises(ExecutionError, match="f divided by zero"):
        np.asarray(a)


def test_waiting_has_a_limit(offline: Offline) -> None:
    (a,) = offline.session.launch(1, [], (offline.kind,))
    with pytest.raises(WaitTimeout, match=r"the array was not ready within 0\.01 s"):
        a.block_until_ready(timeout=0.01)


def test_an_array_deleted_while_it_is_waited_for(offline: Offline) -> None:
    (a,) = offline.session.launch(1, [], (offline.kind,))
    waiting = Background(a.block_until_ready)
    until(lambda: waiting.waits)
    a.delete()
    offline.say(Completed((1,)))
    with pytest.raises(BufferDeleted, match="it was deleted"):
        waiting.end()


def test_ready_arrays_end_with_their_session(offline: Offline) -> None:
    (a,) = offline.session.launch(1, [], (offline.kind,))
    offline.say(Completed((1,)), SessionEnded("the tenant is gone"))
    with pytest.raises(SessionClosed, match="the session ended: the tenant is gone"):
        a.block_until_ready()
    with pytest.raises(SessionClosed, match="the session ended: the tenant is gone"):
        np.asarray(a)
    assert offline.hosts.failure == Failure("SessionClosed", "the session ended: the tenant is gone")


def test_the_loss_of_the_controller_carries_the_last_events(offline: Offline) -> None:
    (a,) = offline.session.launch(1, [], (offline.kind,))
    offline.say(HostAddress(3, 2, ""))
    offline.session._driver.disconnected("the controller is gone (reset)")
    with pytest.raises(ControllerLost, match="the session ended: the controller is gone") as caught:
        a.block_until_ready()
    assert [note.partition(": ")[0] for note in caught.value.__notes__] == ["client of session 7"] * 2
    assert "host moved session 7 host 3: down" in caught.value.__notes__[0]
    assert "launches without an outcome: 1" in caught.value.__notes__[1]
    assert offline.hosts.moved == [HostAddress(3, 2, "")]


def hanging_up(offline: Offline) -> tuple[pw.Array, threading.Event]:
    """An array whose host hangs up in the middle of a fetch, and what is set once that has begun."""
    (a,) = offline.session.launch(1, [], (offline.kind,))
    offline.say(Completed((1,)))
    began = threading.Event()

    def broken(_: int) -> Any:
        began.set()
        raise from_failure(Failure("HostLost", "it closed the stream", host=0))

    offline.hosts.fetched = broken
    return a, began


def test_a_fetch_that_fails_names_the_cause_that_the_controller_knows(offline: Offline) -> None:
    """1. A host hangs up in the middle of a fetch. 2. The controller says shortly after that the array is lost."""
    a, began = hanging_up(offline)
    fetching = Background(lambda: np.asarray(a))
    assert began.wait(LIMIT_S)
    offline.say(BuffersLost((1,), GONE))
    with pytest.raises(HostLost, match="host 0 is gone"):
        fetching.end()


def test_a_fetch_of_an_upload_that_was_refused_and_dropped_says_why_it_was(offline: Offline) -> None:
    """1. The controller refuses an upload; its host drops it. 2. A fetch finds it gone. 3. The client hears why."""
    a, began = hanging_up(offline)

    def dropped(_: int) -> Any:
        began.set()
        raise from_failure(Failure("BufferDeleted", "buffer 1 was dropped", host=0))

    offline.hosts.fetched = dropped
    fetching = Background(lambda: np.asarray(a))
    assert began.wait(LIMIT_S)
    offline.say(BuffersLost((1,), Failure("OutOfMemory", "it can never fit")))
    with pytest.raises(OutOfMemory, match="it can never fit"):
        fetching.end()


def test_a_fetch_that_lost_its_array_to_a_delete_waits_for_no_cause(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "CAUSE_LIMIT_S", 3600.0)
    a, began = hanging_up(offline)

    def dropped(_: int) -> Any:
        a.delete()
        began.set()
        raise from_failure(Failure("BufferDeleted", "buffer 1 was dropped", host=0))

    offline.hosts.fetched = dropped
    fetching = Background(lambda: np.asarray(a))
    assert began.wait(LIMIT_S)
    with pytest.raises(BufferDeleted):
        fetching.end()


def test_the_cause_of_a_failed_fetch_is_named_by_the_successor_of_a_controller_that_went_with_the_host(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "CAUSE_LIMIT_S", 0.0)
    a, began = hanging_up(offline)
    own = offline.session._driver
    offline.session._core.resume_tag, own.resume = "tag", lambda: None
    own.disconnected("the controller is gone")
    fetching = Background(lambda: np.asarray(a))
    assert began.wait(LIMIT_S)
    own.handle(Resumed(SessionResumed("secret", 1, (), (), (1,))))
    with pytest.raises(BufferLost, match="when the session had another controller"):
        fetching.end()


def refused(offline: Offline) -> tuple[pw.Array, Background]:
    """An array whose launch has no outcome, and its fetch: the host has not got an argument, and has said so."""
    (z,) = offline.session.launch(1, [], (offline.kind,))
    asked = threading.Event()

    def missing(_: int) -> Any:
        asked.set()
        raise from_failure(Failure("BufferLost", "buffer 12 is not on this host (host restarted?)"))

    offline.hosts.fetched = missing
    fetching = Background(lambda: np.asarray(z))
    assert asked.wait(LIMIT_S)
    threading.Event().wait(0.1)
    assert fetching.waits
    return z, fetching


@pytest.mark.parametrize(
    ("said", "seen", "text"),
    [
        (LaunchFailed(1, Failure("Cancelled", "before it began")), Cancelled, "before it began"),
        (LaunchFailed(1, Failure("BufferLost", "host 0 was lost with it")), BufferLost, "host 0 was lost with it"),
        (Completed((1,)), BufferLost, "buffer 12 is not on this host"),
        (SessionEnded("the tenant is gone"), SessionClosed, "the tenant is gone"),
    ],
)
def test_a_fetch_that_lacks_an_argument_waits_until_the_launch_says_why(
    offline: Offline, monkeypatch: pytest.MonkeyPatch, said: Any, seen: type[Exception], text: str
) -> None:
    """A launch before was cancelled, or is lost. However long others of its session take, which are reported first."""
    monkeypatch.setattr(fetches, "CAUSE_LIMIT_S", 0.0)
    _, fetching = refused(offline)
    offline.say(said)
    with pytest.raises(seen, match=text):
        fetching.end()


def test_a_fetch_that_lacks_an_argument_ends_with_the_array(offline: Offline) -> None:
    z, fetching = refused(offline)
    z.delete()
    with pytest.raises(BufferDeleted, match="it was deleted"):
        fetching.end()


def test_a_fetch_of_a_failed_launch_names_its_failure_instead_of_the_symptom(offline: Offline) -> None:
    (a,) = offline.session.launch(1, [], (offline.kind,))

    def broken(_: int) -> Any:
        offline.say(LaunchFailed(1, BROKEN))
        raise from_failure(Failure("BufferDeleted", "there is no such buffer"))

    offline.hosts.fetched = broken
    with pytest.raises(ExecutionError, match="f divided by zero"):
        np.asarray(a)


# --- uploads ----------------------------------------------------------------------------------------------------------


def test_an_upload_is_an_array_that_is_ready_once_hosts_have_it(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for it is woken by that, and not by the end of a slice of waiting."""
    monkeypatch.setattr(driver, "WAIT_SLICE_S", 10 * LIMIT_S)
    x = offline.session.put(V, offline.where, ())
    assert offline.controller.take() == [Put(1, 1, VECTOR, ())]
    assert offline.hosts.arrays[1].tolist() == [0.0, 1.0]
    waiting = Background(x.block_until_ready)
    offline.hosts.acknowledge(1)
    assert waiting.end() is x


def several(offline: Offline, count: int = 5) -> list[tuple[np.ndarray, ArgumentType]]:
    """Small arrays to put, and a type for each."""
    return [(V + np.float32(k), offline.kind) for k in range(count)]


def test_small_arrays_leave_together_and_the_controller_hears_of_all_of_them(offline: Offline) -> None:
    made = offline.session.upload_all(several(offline, 70))
    assert offline.controller.take() == [Put(n, 1, VECTOR, (), {0: 1}) for n in range(1, 71)]
    assert offline.hosts.batches == [[*range(1, 65)], [*range(65, 71)]]
    assert [offline.hosts.arrays[n].tolist() for n in (1, 70)] == [[0.0, 1.0], [69.0, 70.0]]
    for n in range(1, 71):
        offline.hosts.acknowledge(n, GONE if n == 7 else None)
    assert [x.is_ready() for n, x in enumerate(made, 1) if n != 7] == [True] * 69
    with pytest.raises(HostLost, match="host 0 is gone"):
        made[6].block_until_ready()


def test_those_whose_slice_moves_meanwhile_are_sent_where_it_is(offline: Offline) -> None:
    """Others on a slice that stays are sent once."""
    stays = VirtualSlice(offline.session, placed(2, ["0.1"]), "")
    kinds = [ArgumentType.of(VECTOR, False, where, ()) for where in (offline.where, stays, offline.where)]

    def move() -> None:
        offline.hosts.while_sending = lambda: None
        offline.where.placed = placed(1, ["0.2", "0.3"])

    offline.hosts.while_sending = move
    made = offline.session.upload_all([(V, kind) for kind in kinds])
    assert offline.hosts.batches == [[1, 2, 3], [1, 3]]
    assert [one.buffer for one in offline.controller.take() if isinstance(one, Put)] == [2, 1, 3]
    assert not offline.session._driver.arrivals
    assert len(made) == 3


@pytest.mark.parametrize("where", ["sweep", "send", "handle"])
def test_ctrl_c_amid_uploads_leaves_no_record_of_any(
    offline: Offline, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As their numbers are there and no handle is; as they leave; and as the controller is to hear of them."""
    driver, core = offline.session._driver, offline.session._core

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(offline.hosts.link_to(0) if where == "send" else driver, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            offline.session.upload_all(several(offline))
    gc.collect()
    for number in [*offline.hosts.uploads]:
        offline.hosts.acknowledge(number)
    assert (core.buffers, core.freed, driver.arrivals) == ({}, {}, [])
    assert not offline.hosts.link_to(0).uploads


def test_a_launch_behind_an_upload_leaves_with_its_acknowledgement(offline: Offline) -> None:
    x = offline.session.put(V, offline.where, ())
    offline.controller.take()
    (y,) = offline.session.launch(1, [x._buffer.record], (offline.kind,))
    assert offline.controller.take() == []
    offline.hosts.acknowledge(1)
    assert offline.controller.take() == [Launch(1, 1, (1,), 2)]
    assert not y.is_ready()


def test_what_waited_for_an_upload_is_left_to_the_thread_of_the_link(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads the answer may be amid another call: Ctrl-C there would lose the launch, and nobody would know."""
    said: list[str] = []
    x = offline.session.put(V, offline.where, ())
    offline.session.launch(1, [x._buffer.record], (offline.kind,))
    monkeypatch.setattr(offline.controller, "leave", lambda *_: said.append("leave"))
    monkeypatch.setattr(offline.controller, "hurry", lambda: said.append("hurry"))
    offline.hosts.acknowledge(1)
    assert said == ["hurry"]
    assert Launch(1, 1, (1,), 2) in offline.controller.take()


def test_an_upload_and_a_flush_have_leave_what_is_in_no_hurry(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other sessions see in the status what was put."""
    said: list[str] = []
    monkeypatch.setattr(offline.controller, "hurry", lambda: said.append(f"hurry {len(offline.controller.sent)}"))
    offline.session.put(V, offline.where, ())
    assert said == ["hurry 1"]
    offline.session._driver.flush()
    assert said == ["hurry 1"] * 2


def test_a_failed_upload_fails_the_array_and_its_launches(offline: Offline) -> None:
    x = offline.session.put(V, offline.where, ())
    (y,) = offline.session.launch(1, [x._buffer.record], (offline.kind,))
    waiting = Background(y.block_until_ready)
    offline.hosts.acknowledge(1, GONE)
    for array in (x, y):
        with pytest.raises(HostLost, match="host 0 is gone"):
            array.block_until_ready()
    with pytest.raises(HostLost, match="host 0 is gone"):
        waiting.end()


def test_an_upload_that_cannot_begin_leaves_nothing_behind(offline: Offline) -> None:
    def refused(*_: Any) -> Any:
        raise from_failure(GONE)

    offline.hosts.upload = refused  # type: ignore[assignment, method-assign]
    with pytest.raises(HostLost, match="host 0 is gone"):
        offline.session.put(V, offline.where, ())
    assert offline.controller.take() == [Free((1,))]
    assert not offline.session._core.queue


def test_what_cannot_be_put(offline: Offline) -> None:
    with pytest.raises(SpecError, match="put"):
        offline.session.put(np.zeros(3, np.float32), offline.where, (("x",),))
    offline.where.released = True
    with pytest.raises(UsageError, match="was released; nothing can be put there"):
        offline.session.put(V, offline.where, ())


# --- flushing ---------------------------------------------------------------------------------------------------------


def test_flushing_returns_when_the_last_upload_has_arrived(offline: Offline) -> None:
    offline.session.flush()
    x = offline.session.put(V, offline.where, ())
    y = offline.session.launch(1, [x._buffer.record], (offline.kind,))
    flushing = Background(offline.session.flush)
    until(lambda: flushing.waits)
    offline.hosts.acknowledge(1)
    flushing.end()
    assert offline.controller.take()[-1] == Launch(1, 1, (1,), 2)
    assert len(y) == 1


def test_flushing_waits_without_polling(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes for a change, or to let Ctrl-C in; not a thousand times a second."""
    x = offline.session.put(V, offline.where, ())
    held = offline.session.launch(1, [x._buffer.record], (offline.kind,))
    looks: list[float] = []
    wait_until = offline.session._driver.wait_until
    monkeypatch.setattr(
        offline.session._driver,
        "wait_until",
        lambda condition, limit: (looks.append(limit), wait_until(condition, limit)),
    )
    with pytest.raises(WaitTimeout, match="uploads did not finish within 1 s"):
        offline.session.flush(timeout=1.0)
    assert len(looks) <= 4
    assert len(held) == 1


def test_flushing_says_that_the_controller_is_away(offline: Offline) -> None:
    x = offline.session.put(V, offline.where, ())
    held = offline.session.launch(1, [x._buffer.record], (offline.kind,))
    offline.session._driver.core.away = "the controller is gone"
    offline.hosts.acknowledge(1)
    with pytest.raises(WaitTimeout, match=r"^the controller is gone, and what was called was not sent within 0\.2 s$"):
        offline.session.flush(timeout=0.2)
    assert len(held) == 1


def test_flushing_ends_with_the_session(offline: Offline) -> None:
    x = offline.session.put(V, offline.where, ())
    held = offline.session.launch(1, [x._buffer.record], (offline.kind,))
    flushing = Background(offline.session.flush)
    until(lambda: flushing.waits)
    offline.session._driver.disconnected("gone")
    with pytest.raises(SessionClosed, match="the session is closed: gone"):
        flushing.end()
    assert len(held) == 1


# --- slices and calls -------------------------------------------------------------------------------------------------


def test_the_default_slice_is_made_once_for_all_threads(offline: Offline) -> None:
    """
    1. A thread asks for the default slice, and the controller takes its time.
    2. Another one asks too: it waits. A launch does not.
    3. The answer comes: both have the same slice.
    """
    answer = threading.Event()
    asked = threading.Event()

    def slow(_: CreateSlice) -> None:
        asked.set()
        assert answer.wait(LIMIT_S)

    offline.controller.answers[CreateSlice] = slow
    first = Background(offline.session.default_slice)
    assert asked.wait(LIMIT_S)
    second = Background(offline.session.default_slice)
    array = Background(lambda: offline.session.launch(1, [], (offline.kind,))).end()
    assert offline.controller.take() == [Launch(1, 1, (), 1)]
    assert len(array) == 1
    assert second.waits
    answer.set()
    assert first.end() is second.end()
    assert offline.session.default_slice() is first.result
    assert [type(call) for call in offline.controller.calls] == [CreateSlice]


def test_a_default_slice_that_was_refused_is_asked_for_again(offline: Offline) -> None:
    offline.controller.answers[CreateSlice] = from_failure(Failure("Unschedulable", "no island is up"))
    for _ in range(2):
        with pytest.raises(PathwaysError, match="no island is up"):
            offline.session.default_slice()
    del offline.controller.answers[CreateSlice]
    assert offline.session.default_slice().axes == ("x",)


def test_a_slice_is_made_and_released_by_the_controller(offline: Offline) -> None:
    with offline.session.virtual_slice((2,), ("x",), island=1, platform="cpu", name="mine") as made:
        assert offline.controller.calls == [CreateSlice(7, (2,), ("x",), 1, "cpu", "mine")]
        assert repr(made) == "slice mine (x=2)"
        assert (made.size, made.devices, made.island) == (2, ("0.0", "0.1"), 0)
    made.release()
    assert offline.controller.calls[1:] == [ReleaseSlice(7, 1)]
    offline.session._driver.disconnected("gone")
    VirtualSlice(offline.session, made.placed, "").release()
    assert len(offline.controller.calls) == 2, "it went with the session"


def test_what_is_asked_of_a_slice_may_be_texts_of_numpy(offline: Offline) -> None:
    """No message takes them."""
    text = np.str_
    made = offline.session.virtual_slice((2,), name=text("mine"), platform=text("cpu"), generation=text("v1"))
    (asked,) = offline.controller.calls
    assert [type(one) for one in (asked.name, asked.platform, asked.generation)] == [str] * 3
    assert encode(asked) == encode(CreateSlice(7, (2,), ("x",), -1, "cpu", "mine", generation="v1"))
    assert type(made.name) is str


@pytest.mark.parametrize("error", [ControllerLost("it does not answer"), KeyboardInterrupt()])
def test_a_slice_whose_release_failed_is_released_by_the_next_call(offline: Offline, error: BaseException) -> None:
    where = offline.session.virtual_slice((2,), ("x",))

    def fail(_: ReleaseSlice) -> None:
        raise error

    offline.controller.answers[ReleaseSlice] = fail
    with pytest.raises(type(error)):
        where.release()
    assert not where.released
    del offline.controller.answers[ReleaseSlice]
    where.release()
    assert where.released
    assert offline.controller.calls[1:] == [ReleaseSlice(7, where.id)] * 2


@pytest.mark.parametrize("options", [{"name": 3}, {"platform": 3}, {"island": -1}, {"island": True}])
def test_options_of_a_slice_that_are_of_the_wrong_kind(offline: Offline, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"of a slice are text|takes the number of an island"):
        offline.session.virtual_slice((2,), **options)
    assert offline.controller.calls == []


def test_calls_carry_the_session_and_need_it_open(offline: Offline) -> None:
    offline.controller.answers[Status] = StatusReply('{"islands": []}')
    offline.controller.answers[Explain] = Explained("a plan", "an order", {})
    assert offline.session.status() == {"islands": []}
    assert offline.session.explain(-1, b"graph").plan == "a plan"
    assert offline.controller.calls == [Status(7), Explain(7, -1, b"graph")]
    offline.session._driver.disconnected("gone")
    for call in (offline.session.status, offline.session.check_open, lambda: offline.session.virtual_slice((1,))):
        with pytest.raises(SessionClosed, match="the session is closed: gone"):
            call()


def test_an_array_of_another_session_is_no_argument(offline: Offline) -> None:
    (a,) = Offline().session.launch(1, [], (offline.kind,))
    with pytest.raises(ForeignArray, match="the array belongs to another session"):
        offline.session.check_mine(a._buffer)


def test_an_array_of_a_session_that_was_closed_cannot_be_fetched_there(offline: Offline) -> None:
    before = Offline()
    (a,) = before.session.launch(1, [], (offline.kind,))
    before.session._driver.disconnected("gone")
    with pytest.raises(
        ForeignArray, match=r"belongs to another session, now closed \(gone\), and went with it: make or"
    ):
        offline.session.check_mine(a._buffer)


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    pass


def interrupted(codes: Collection[CodeType], step: int, work: Any) -> bool:
    """Runs `work`, and raises at that one of the places in `codes` where the interpreter looks for signals; whether it
    came to that."""
    steps = itertools.count()
    names = {code: {one.offset: one.opname for one in dis.get_instructions(code)} for code in codes}
    last = ""

    def trace(at: FrameType, event: str, _: object) -> Any:
        nonlocal last
        if at.f_code not in names:
            return None
        at.f_trace_opcodes = True
        if event == "opcode":
            name = names[at.f_code].get(at.f_lasti, "")
            looks = last.startswith("CALL") or name in ("RESUME", "JUMP_BACKWARD")
            last = name
            if looks and next(steps) == step:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks whether any frame is traced so as tracing begins
    sys.settrace(trace)
    try:
        work()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_ctrl_c_at_any_step_of_the_queue_loses_no_message_and_sends_none_twice() -> None:
    """
    1. Three launches wait for an upload, which has arrived.
    2. The queue is released, and interrupted at each step of that in turn.
    3. It is released again: each launch has left once, in order, and the queue is empty.
    """
    for step in itertools.count():
        offline = Offline()
        x = offline.session.put(V, offline.where, ())
        offline.controller.take()
        held = [offline.session.launch(1, [x._buffer.record], (offline.kind,)) for _ in range(3)]
        assert x._buffer.record.upload is not None
        x._buffer.record.upload.done = True
        cut = interrupted((Driver.release_queue.__code__,), step, offline.session._driver.release_queue)
        offline.session._driver.release_queue()
        sent = [message.launch for message in offline.controller.take() if isinstance(message, Launch)]
        assert sent == [1, 2, 3], f"step {step}"
        assert not offline.session._core.queue
        assert len(held) == 3
        if not cut:
            break
    assert step > 10


def test_ctrl_c_in_an_upload_leaves_nothing_that_is_to_be_told_of_it() -> None:
    for step in itertools.count():
        offline = Offline()

        def put(offline: Offline = offline) -> None:
            offline.session.put(V, offline.where, ())

        cut = interrupted((upload.__code__,), step, put)
        driver = offline.session._driver
        assert (driver.arrivals, is_mine(driver.sending)) == ([], False), f"step {step}"
        if not cut:
            break
    assert step > 6


def test_ctrl_c_in_a_launch_leaves_no_lock_behind() -> None:
    for step in itertools.count():
        offline = Offline()

        def call(offline: Offline = offline) -> None:
            offline.session.launch(1, [], (offline.kind,))

        cut = interrupted((Session.launch.__code__,), step, call)
        assert not is_mine(offline.session._driver.sending), f"step {step}"
        (array,) = offline.session.launch(1, [], (offline.kind,))
        last = next(m for m in reversed(offline.controller.take()) if isinstance(m, Launch))
        offline.say(Completed((last.launch,)))
        assert array.block_until_ready(timeout=LIMIT_S) is array
        if not cut:
            break
    assert step > 3


@pytest.mark.parametrize("code", [Session.launch.__code__, ClientCore.launch.__code__, Donations.give.__code__])
def test_a_launch_that_ctrl_c_ends_is_not_waited_for(code: Any) -> None:
    """Its caller has no result, whether it has left or not. What was donated to it is gone, or lives; the session is
    quiet, so its slices may move."""
    gone = 0
    for step in itertools.count():
        offline = Offline()
        (x,) = offline.session.launch(1, [], (offline.kind,))
        offline.say(Completed((1,)))
        record = x._buffer.record

        def call(offline: Offline = offline, record: Any = record) -> None:
            offline.session.launch(1, [record], (offline.kind,), [record], "it was donated")

        cut = interrupted((code,), step, call)
        core = offline.session._core
        if not cut:
            break
        left = [m.launch for m in offline.controller.take() if isinstance(m, Launch) and m.launch > 1]
        if core.pending:  # it was through
            assert left == [2], f"step {step}"
            offline.say(Completed((2,)))
        assert is_quiet(core), f"step {step}"
        assert (record.id in core.buffers) == (record.state is READY), f"step {step}"
        gone += record.state is not READY
    assert step > 1
    assert gone or code is Donations.give.__code__


@pytest.mark.parametrize("before", [0, 1])
def test_a_call_that_ctrl_c_ends_amid_its_donations_loses_those_that_were_noted(
    before: int, offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have left with them. Its others live on, and nothing stays of its result."""
    held = offline.session.launch(1, [], (offline.kind, offline.kind))
    offline.say(Completed((1,)))
    records, steps, donate = [x._buffer.record for x in held], itertools.count(), BufferRecord.donate

    def interrupted(record: BufferRecord, why: str) -> None:
        if next(steps) == before:
            raise Interrupt
        donate(record, why)

    monkeypatch.setattr(BufferRecord, "donate", interrupted)
    offline.controller.take()
    with pytest.raises(Interrupt):
        offline.session.launch(1, records, (offline.kind,), records, "it was donated")
    gone, living = records[:before], records[before:]
    assert [record.state for record in records] == [DELETED] * len(gone) + [READY] * len(living)
    sent = offline.controller.take()
    assert [record for record in records if Free((record.id,)) in sent] == gone
    core = offline.session._core
    assert is_quiet(core)
    assert set(core.buffers) == {record.id for record in living}


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pending(offline: Offline) -> Any:
    return offline.session.launch(1, [], (offline.kind,))[0]


def test_closing_ends_the_session_on_both_sides(offline: Offline, pending: Any) -> None:
    with offline.session:
        assert not offline.session.closed
    assert offline.session.closed
    assert offline.controller.calls == [CloseSession(7)]
    assert offline.controller.closed
    assert offline.hosts.failure == Failure("SessionClosed", "the session ended: it was shut down")
    with pytest.raises(SessionClosed, match="the session ended: it was shut down"):
        pending.block_until_ready()
    offline.session.close()
    assert len(offline.controller.calls) == 1


def test_closing_does_not_need_an_answer(offline: Offline) -> None:
    offline.controller.answers[CloseSession] = ControllerLost("it does not answer")
    offline.session.close()
    assert offline.session.closed_because == "it was shut down"
    assert offline.controller.closed


def test_closing_a_lost_session_hangs_up_and_asks_for_nothing(offline: Offline) -> None:
    offline.session._driver.disconnected("gone")
    offline.session.close()
    assert offline.controller.calls == []
    assert offline.controller.closed
    assert offline.session.closed_because == "gone"


def test_a_fork_leaves_the_session_to_its_parent(
    offline: Offline, pending: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever locks other threads had when the process forked."""
    offline.controller.take()
    with offline.session._driver.sending, offline.session._driver.changed:
        offline.session.leave_to_parent()
    with pytest.raises(SessionClosed, match="this one is a fork of; use multiprocessing's 'spawn'"):
        offline.session.launch(1, [], (offline.kind,))
    del pending
    monkeypatch.setattr(os, "getpid", lambda: -1)
    offline.session.close()
    assert (offline.controller.calls, offline.controller.closed, offline.controller.take()) == ([], False, [])


@pytest.mark.parametrize(("timeout", "asked_s"), [(1.0, 0.5), (60.0, EXPLAIN_WITHIN_S)])
def test_the_end_of_a_wait_is_explained_within_half_of_its_timeout(
    offline: Offline, timeout: float, asked_s: float
) -> None:
    """The controller may not answer at all, and a user who allows a second is not to wait for three more."""
    pending = offline.session.launch(3, [], (offline.kind,))[0]
    for answer, notes in ((StatusReply(views.encode(Why("", (Link("w"),))).decode()), 1), (ControllerLost("away"), 0)):
        offline.controller.answers[Look] = answer
        error = WaitTimeout("it was not ready in time")
        offline.session.explain_timeout(error, pending._buffer.record, timeout)
        assert len(getattr(error, "__notes__", ())) == notes
        assert offline.controller.timeouts[-1] == asked_s


def test_a_move_that_has_to_wait_for_too_long_says_for_what(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the session is under way, and the controller knows why."""
    why = Why("session 7", (Link("launch 640 runs on host 0, for 9.0 s"),))
    offline.controller.answers[Look] = StatusReply(views.encode(why).decode())
    monkeypatch.setattr(mover, "QUIET_LIMIT_S", 0.0)
    pending = offline.session.launch(3, [], (offline.kind,))
    with pytest.raises(WaitTimeout, match=r"was not moved: the session had calls under way for 0 s") as caught:
        offline.where.move()
    assert caught.value.__notes__ == ["launch 640 runs on host 0, for 9.0 s"]
    assert Look(7, "session", 0, 7) in offline.controller.calls
    del pending


def test_a_slice_with_a_long_axis_name_is_refused() -> None:
    assert mesh_of((1,), "x" * 64) == ((1,), ("x" * 64,))
    for axes in (("x" * 65,), ("x", "x")):
        with pytest.raises(Unschedulable, match="must be different and not empty, and have up to 64 characters"):
            mesh_of((1,) * len(axes), axes)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((float("inf"),), None), ((float("nan"),), None), ((2,), 3), ((2,), (3,)), (None, 3), (2.5, None)],
)
def test_a_slice_of_no_whole_sizes_or_of_no_names_is_refused(shape: Any, axes: Any) -> None:
    with pytest.raises(UsageError, match=r"a slice has whole sizes and axis names; got shape .* and axes "):
        mesh_of(shape, axes)


@pytest.mark.parametrize(
    ("shape", "axes", "says"),
    [
        ((1, 2, 2, 1), None, r"a slice has 1 to 3 axes, \(1, 2, 2, 1\) has 4"),
        ((2, 2), ("x",), r"slice shape \(2, 2\) and axis names \('x',\) differ in number"),
    ],
)
def test_a_slice_of_too_many_axes_or_names_is_refused_before_the_controller_is_asked(
    shape: Any, axes: Any, says: str
) -> None:
    with pytest.raises(Unschedulable, match=says):
        mesh_of(shape, axes)


@pytest.mark.parametrize("axes", [np.array(["x", "y"]), ("x", np.str_("y"))])
def test_axis_names_of_numpy_are_those_of_python(axes: Any) -> None:
    """No message takes a string of NumPy."""
    _, names = mesh_of((2, 2), axes)
    asked = [encode(CreateSlice(1, (2, 2), given, -1, "", "")) for given in (names, ("x", "y"))]
    assert asked[0] == asked[1]
    spec = spec_from_user(P(np.str_("x"), (np.str_("y"),)), names)
    assert {type(axis) for dimension in spec for axis in dimension} == {str}
