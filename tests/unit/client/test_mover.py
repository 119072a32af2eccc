"""A mover whose controller is lost while it keeps the session's calls from leaving."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pathways_ray.client import moving
from pathways_ray.client.events import Disconnected
from pathways_ray.client.moving import Ask, Copy, Drop, Exchanged, Hold, Release, Step
from pathways_ray.client.reading import reading
from pathways_ray.errors import ControllerLost, Failure, Unschedulable, UsageError, WaitTimeout
from pathways_ray.transport.messages import (
    Completed,
    CreateSlice,
    ExchangeSlices,
    Held,
    HeldBuffer,
    Launch,
    LaunchFailed,
    ListHeld,
    Put,
    Register,
    ReleaseSlice,
    SliceCreated,
    SlicesExchanged,
    Unregister,
    Vacate,
)
from tests.unit.client.offline import LIMIT_S, VECTOR, Background, Offline
from tests.unit.client.test_snapshots import islands
from tests.unit.helpers import placed
from tests.waiting import until


@pytest.fixture
def offline() -> Offline:
    offline = Offline()
    offline.session._core.resume_tag = "tag"
    offline.session._driver.resume = lambda: None
    return offline


def carry_out(offline: Offline, steps: Generator[Step, Any, None]) -> None:
    offline.session._mover._carry_out(steps, "it was not moved", {})


def test_who_holds_the_session_does_not_wait_for_another_controller(offline: Offline) -> None:
    """The session could not come back meanwhile, and would be given up."""

    def steps() -> Generator[Step, Any, None]:
        yield Ask(ListHeld(7, ()))
        yield Hold()
        yield Ask(ListHeld(7, ()))
        yield Release()
        yield Ask(ListHeld(7, ()))

    carry_out(offline, steps())
    assert offline.controller.patient == [True, False, True]


def test_what_an_interrupted_caller_wanted_is_taken_back_unless_it_has_happened(offline: Offline) -> None:
    """
    1. The caller is interrupted before an answer is there: the next step fails, and what was done is taken back.
    2. It is interrupted once the answer has been taken: the rest is done.
    """
    mover, controller = offline.session._mover, offline.controller
    noted: list[str] = []

    def steps(interrupted_behind: type) -> Generator[Step, Any, None]:
        mover._left = threading.Event()
        try:
            for request in (ListHeld(7, ()), ExchangeSlices(7, ())):
                yield Ask(request)
                if isinstance(request, interrupted_behind):
                    mover._left.set()
        except WaitTimeout:
            noted.append("taken back")
            yield Release()
            yield Ask(ReleaseSlice(7, 1))
            raise
        yield Exchanged(())
        yield Release()
        noted.append("done")
        yield Ask(ReleaseSlice(7, 2))

    controller.answers = {ListHeld: Held(()), ExchangeSlices: SlicesExchanged(()), ReleaseSlice: None}
    with pytest.raises(WaitTimeout, match="it was not moved: its caller was interrupted"):
        carry_out(offline, steps(ListHeld))
    carry_out(offline, steps(ExchangeSlices))
    assert noted == ["taken back", "done"]
    released = [one.slice for one in controller.calls if isinstance(one, ReleaseSlice)]
    assert released == [1, 2]


def test_what_fails_of_the_process_is_the_steps_to_take_back(offline: Offline) -> None:
    noted: list[str] = []

    def full(_: ListHeld) -> None:
        raise MemoryError

    def steps() -> Generator[Step, Any, None]:
        try:
            yield Ask(ListHeld(7, ()))
        except MemoryError:
            noted.append("taken back")
            yield Ask(ReleaseSlice(7, 1))
            raise

    offline.controller.answers = {ListHeld: full}
    with pytest.raises(MemoryError):
        carry_out(offline, steps())
    assert (noted, offline.controller.calls[-1]) == (["taken back"], ReleaseSlice(7, 1))


def test_a_copy_does_not_wait_in_the_queue_of_a_session_that_is_held(offline: Offline) -> None:
    """
    1. The controller is lost before a copy leaves. It would wait for the successor, and that for the end of the move.
    2. The copy fails, and the calls of the session go on.
    """
    core, driver = offline.session._core, offline.session._driver
    made = core.new_buffers(1)

    def steps() -> Generator[Step, Any, None]:
        yield Hold()
        driver.handle(Disconnected("the controller is gone"))
        try:
            yield Copy(Register(1, b"", {}), [], made)
        except ControllerLost:
            yield Release()
            raise

    with pytest.raises(ControllerLost, match="the controller is gone"):
        Background(lambda: carry_out(offline, steps())).end()
    assert not core.pending
    assert driver.sending.acquire(timeout=1)
    driver.sending.release()


@pytest.mark.parametrize("succeeds", [True, False])
def test_the_program_of_a_copy_is_dropped_whatever_comes_of_it(offline: Offline, succeeds: bool) -> None:
    """It names the slice that was made for the move, which the controller keeps a place for as long."""
    core, copy = offline.session._core, Register(1, b"", {})
    made = core.new_buffers(1)

    def steps() -> Generator[Step, Any, None]:
        yield Hold()
        yield Copy(copy, [], made)
        yield Release()

    mover = Background(lambda: carry_out(offline, steps()))
    until(lambda: core.pending)
    launch = Launch(1, 1, (), made[0].id)
    assert offline.controller.sent == [copy, launch]
    offline.say(Completed((1,)) if succeeds else LaunchFailed(1, Failure("HostLost", "host 5 is gone")))
    mover.end()
    assert offline.controller.sent == [copy, launch, Unregister(1)]


def test_a_copy_that_has_left_is_not_waited_for_without_a_controller(offline: Offline) -> None:
    """
    1. The controller is lost with a copy under way. Its outcome comes with the successor, and that for the end of the
       move.
    2. The copy fails, and the calls of the session go on. The successor is asked what came of it.
    """
    core, driver = offline.session._core, offline.session._driver
    made = core.new_buffers(1)

    def steps() -> Generator[Step, Any, None]:
        yield Hold()
        try:
            yield Copy(Register(1, b"", {}), [], made)
        except ControllerLost:
            yield Drop(made)
            yield Release()
            raise

    mover = Background(lambda: carry_out(offline, steps()))
    until(lambda: core.pending)
    assert mover.waits
    driver.handle(Disconnected("the controller is gone"))
    with pytest.raises(ControllerLost, match="the controller is gone"):
        mover.end()
    assert driver.sending.acquire(timeout=1)
    driver.sending.release()
    (asked,) = core.resume_request("me", (), 0.0).unanswered
    assert (asked.numbers, asked.results) == ((made[0].id,), ())


def test_a_move_does_not_wait_for_a_fetch_that_waits_for_the_successor_of_the_controller(offline: Offline) -> None:
    """
    1. A fetch is under way, whose host may be gone: it waits for the controller's word, and the move for it.
    2. The controller is lost. The move fails at once, and the calls of the session go on.
    """
    driver, over = offline.session._driver, threading.Event()
    fetch = Background(lambda: reading(driver, over.wait, LIMIT_S))
    assert fetch.waits

    def steps() -> Generator[Step, Any, None]:
        yield Hold()

    mover = Background(lambda: carry_out(offline, steps()))
    assert mover.waits
    driver.handle(Disconnected("the controller is gone"))
    with pytest.raises(ControllerLost, match="the controller is gone"):
        mover.end()
    assert driver.sending.acquire(timeout=1)
    driver.sending.release()
    assert not driver.held
    over.set()
    assert fetch.end()


def test_a_slice_whose_caller_was_interrupted_is_given_back(offline: Offline) -> None:
    """1. Ctrl-C comes while the controller makes a slice: the call ends at once. 2. The slice comes, and goes again."""
    session, user, over = offline.session, threading.get_ident(), threading.Event()

    def made(_: CreateSlice) -> None:
        signal.pthread_kill(user, signal.SIGINT)
        assert over.wait(LIMIT_S)

    offline.controller.answers = {CreateSlice: made}
    with pytest.raises(KeyboardInterrupt):
        session.virtual_slice((2,), ("x",))
    over.set()
    until(lambda: len(offline.controller.calls) > 1)
    assert offline.controller.calls[1] == ReleaseSlice(session.id, 1)
    offline.controller.answers = {}
    assert session.virtual_slice((2,), ("x",)).id == 3


@pytest.mark.parametrize("call", ["suspend", "move"])
def test_a_signal_handler_amid_a_look_at_a_value_does_not_wait_for_that(offline: Offline, call: str) -> None:
    """It is refused at once, before anything is asked for or held, and the look goes on. Behind it, it would do."""
    session, refused = offline.session, []
    (x,) = session.launch(1, [], (offline.kind,))

    def handle(*_: object) -> None:
        with pytest.raises(UsageError, match="a signal handler or a destructor") as error:
            session.suspend() if call == "suspend" else session.move_slice(offline.where, -1)
        refused.append(error.value)

    def fetched(_: int) -> np.ndarray[Any, Any]:
        signal.raise_signal(signal.SIGUSR1)
        return np.ones(2, np.float32)

    offline.hosts.fetched = fetched
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        assert np.asarray(x).tolist() == [1.0, 1.0]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refused) == 1
    assert not offline.controller.calls
    assert not session._driver.held


def test_a_session_that_asks_for_a_slice_is_suspended_with_it(offline: Offline) -> None:
    """Else the slice would come to a session that is suspended, and the controller would take it for resumed."""
    asked, there = threading.Event(), threading.Event()

    def made(_: CreateSlice) -> None:
        asked.set()
        assert there.wait(LIMIT_S)

    offline.controller.answers = {CreateSlice: made, ListHeld: Held(())}
    session = offline.session
    asking = Background(lambda: session.virtual_slice((2,), ("x",)))
    assert asked.wait(LIMIT_S)
    giving_way = Background(lambda: session._mover.suspend(None, gives_way=True))
    assert giving_way.waits
    assert [type(one) for one in offline.controller.calls] == [CreateSlice]
    there.set()
    asking.end()
    giving_way.end()
    assert session._driver.suspension is not None
    assert [one.mesh.id for one in session._driver.suspension.slices] == [asking.result.id]


@pytest.mark.parametrize("work", ["make", "move"])
def test_a_slice_that_has_no_handle_yet_is_not_given_back_where_it_has_to_move(offline: Offline, work: str) -> None:
    """Its island is drained while it is made, or while arrays move to it."""
    session, mover = offline.session, offline.session._mover
    leaving: list[Background] = []

    def drained() -> None:
        if not leaving:
            leaving.append(Background(lambda: mover._vacate_one(9)))
            leaving[0]._thread.join(0.2)
            assert leaving[0].waits

    def made(_: CreateSlice) -> SliceCreated:
        if work == "make":
            drained()
        return SliceCreated(placed(9, ["1.0", "1.1"]), "tag")

    def exchanged(_: ExchangeSlices) -> SlicesExchanged:
        drained()
        return SlicesExchanged((SliceCreated(placed(offline.where.id, ["1.0", "1.1"]), "tag"),))

    offline.controller.answers = {CreateSlice: made, ListHeld: Held(()), ExchangeSlices: exchanged}
    if work == "make":
        assert not session.virtual_slice((2,), ("x",)).released
    else:
        session.move_slice(offline.where, 1)
        assert offline.where.devices == ("1.0", "1.1")
    leaving[0].end()


def test_a_session_that_gives_way_lets_its_calls_go_on_where_it_has_to_move(offline: Offline) -> None:
    """They may wait for the move."""
    session = offline.session
    session._core.pending[1] = session._core.new_buffers(1)
    giving_way = Background(lambda: session._mover.suspend(None, gives_way=True))
    assert giving_way.waits
    session._mover.vacate([])
    with pytest.raises(WaitTimeout, match="the session was not suspended: a slice of it has to move first"):
        giving_way.end()
    assert session._driver.suspension is None
    assert session._driver.sending.acquire(timeout=LIMIT_S)


def test_an_upload_that_waits_for_the_session_is_not_waited_for(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. An upload arrives while a suspension holds the session's calls. Its thread waits to tell the controller.
    2. The suspension tells the controller for it, finds the array there, and goes on at once.
    """
    session, controller, hosts = offline.session, offline.controller, offline.hosts
    begun, goes_on, upload = threading.Event(), threading.Event(), hosts.upload

    def slow(*args: Any) -> Any:
        begun.set()
        assert goes_on.wait(LIMIT_S)
        return upload(*args)

    monkeypatch.setattr(hosts, "upload", slow)
    putting = Background(lambda: session.put(np.ones(2, np.float32), offline.where, ()))
    assert begun.wait(LIMIT_S)

    def listed(_: ListHeld) -> Held:
        if not goes_on.is_set():
            goes_on.set()
            until(lambda: session._driver.arrivals)
            (buffer,) = hosts.uploads
            hosts.acknowledge(buffer)
        found = [one for one in controller.sent if isinstance(one, Put)]
        return Held(tuple(HeldBuffer(one.buffer, one.slice, one.type, one.spec) for one in found))

    controller.answers = {ListHeld: listed}

    def steps() -> Generator[Step, Any, None]:
        yield Hold()
        held = yield from moving.listed(session._core)
        assert [one.type for one in held] == [VECTOR]
        yield Release()

    carry_out(offline, steps())
    putting.end()
    assert [type(one) for one in controller.sent] == [Put], "it is told of once"


def test_an_upload_counts_from_its_first_byte(offline: Offline) -> None:
    """
    1. A thread puts an array, whose bytes take long to leave.
    2. Meanwhile a successor of the controller would hear of it, and the session does not move.
    3. The hosts have it: the session moves, and tells the controller for the thread, which waits until it has moved.
    """
    session, controller, hosts = offline.session, offline.controller, offline.hosts
    leaving, left, held = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        leaving.set()
        assert left.wait(LIMIT_S)

    def listed(_: ListHeld) -> Held:
        held.set()
        found = [one for one in controller.sent if isinstance(one, Put)]
        return Held(tuple(HeldBuffer(one.buffer, one.slice, one.type, one.spec) for one in found))

    def steps() -> Generator[Step, Any, None]:
        yield Hold()
        found = yield from moving.listed(session._core)
        assert [one.type for one in found] == [VECTOR]
        yield Release()

    hosts.while_sending = slow
    controller.answers = {ListHeld: listed}
    putting = Background(lambda: session.put(np.ones(2, np.float32), offline.where, ()))
    assert leaving.wait(LIMIT_S)
    assert not moving.is_quiet(session._core)
    (kept,) = session._core.resume_request("me", (), 0.0).kept
    assert (kept.numbers, kept.arriving) == (tuple(hosts.uploads), True)
    mover = Background(lambda: carry_out(offline, steps()))
    assert not held.wait(0.05)
    hosts.acknowledge(next(iter(hosts.uploads)))
    mover.end()
    left.set()
    putting.end()
    assert [type(one) for one in controller.sent] == [Put], "it is told of once"


def test_a_slice_that_the_successor_was_not_told_of_is_asked_for_again(offline: Offline) -> None:
    """The controller dies after its answer. The session comes back before its thread has noted the slice."""

    def dies(_: CreateSlice) -> None:
        del offline.controller.answers[CreateSlice]
        offline.session._driver.handle(Disconnected("the controller is gone"))

    offline.controller.answers = {CreateSlice: dies}
    made = offline.session.virtual_slice((2,), ("x",))
    first, released, again = offline.controller.calls
    assert (type(first), released, type(again)) == (CreateSlice, ReleaseSlice(7, 1), CreateSlice)
    assert (made.id, made.released) == (3, False)
    assert [one.placed.mesh.id for one in offline.session._mover.slices_held(suspended=False)] == [3]


def test_a_slice_that_finds_no_place_keeps_no_other_one_on_an_island_that_is_drained(offline: Offline) -> None:
    session, controller = offline.session, offline.controller
    large, small = session.virtual_slice((2,), ("x",)), session.virtual_slice((2,), ("x",))
    asked: list[int] = []

    def made(request: CreateSlice) -> SliceCreated:
        asked.append(request.instead)
        if request.instead == large.id:
            raise Unschedulable("no island can hold it")
        return SliceCreated(placed(9, ["1.0", "1.1"]), "tag")

    def exchanged(_: ExchangeSlices) -> SlicesExchanged:
        return SlicesExchanged((SliceCreated(placed(small.id, ["1.0", "1.1"]), "tag"),))

    controller.answers = {CreateSlice: made, ListHeld: Held(()), ExchangeSlices: exchanged}
    offline.say(Vacate((large.id, small.id)))
    until(lambda: small.devices == ("1.0", "1.1"))
    assert asked == [large.id, small.id]
    assert large.devices == ("0.0", "0.1")


@pytest.mark.parametrize(("full", "tried"), [((), [2]), ((2,), [2, 3]), ((2, 3, 4), [2, 3, 4, -1])])
def test_a_slice_that_stays_apart_from_others_leaves_a_drained_island_for_one_without_them(
    offline: Offline, monkeypatch: pytest.MonkeyPatch, full: tuple[int, ...], tried: list[int]
) -> None:
    """Some islands cannot hold it. Where none of these can, any will do."""
    session, controller = offline.session, offline.controller
    where, copies, others = (session.virtual_slice((2,), ("x",)) for _ in range(3))
    for one, island in ((where, 0), (copies, 1), (others, 4)):
        one.placed = replace(one.placed, island=island)
    copies.stay_apart([where, copies, others])
    others.release()
    states = ("up", "draining", "up", "up", "up", "away")
    monkeypatch.setattr(session, "status", lambda: islands(*states), raising=False)
    asked: list[int] = []

    def made(request: CreateSlice) -> SliceCreated:
        asked.append(request.island)
        if request.island in full:
            raise Unschedulable("this island cannot hold it")
        return SliceCreated(placed(9, ["1.0", "1.1"]), "tag")

    def exchanged(_: ExchangeSlices) -> SlicesExchanged:
        return SlicesExchanged((SliceCreated(placed(copies.id, ["1.0", "1.1"]), "tag"),))

    controller.answers = {CreateSlice: made, ListHeld: Held(()), ExchangeSlices: exchanged}
    offline.say(Vacate((copies.id,)))
    until(lambda: copies.devices == ("1.0", "1.1"))
    assert asked == tried


def test_a_process_without_room_for_a_thread_moves_when_it_is_asked_again(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover, story = offline.session._mover, offline.session._core.story

    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        mover.vacate([1])
        mover.make_way(True)
    assert [one.detail for one in story.entries()][-2:] == ["can't start new thread"] * 2
    mover.vacate([1])
    until(lambda: any(isinstance(one, ReleaseSlice) for one in offline.controller.calls))
