"""Values that are asked for with their calls: a client's streams and a host's data server, in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from pathways_ray.client.ahead import MAX_AHEAD, MAX_AHEAD_BYTES
from pathways_ray.client.array_pieces import Fetching, FetchPlan
from pathways_ray.client.buffer import DELETED, BufferRecord
from pathways_ray.client.core import ClientCore
from pathways_ray.client.data import DataLinks
from pathways_ray.client.data_link import DataLink
from pathways_ray.client.driver import Driver
from pathways_ray.client.early import MAX_REFUSED
from pathways_ray.client.questions import ask, read
from pathways_ray.client.siblings import Results
from pathways_ray.errors import BufferDeleted, Failure, HostLost, PathwaysError
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport.capabilities import data_token
from pathways_ray.transport.messages import (
    DataFailed,
    EarlyLaunch,
    EarlyRefused,
    FetchDone,
    HostAddress,
    LaunchEarly,
    Message,
    Prepared,
)
from tests.unit.client.offline import Controller
from tests.unit.executor.data.test_server import COVER, OVER, SECRET, SESSION, SMALL, Asked, Host
from tests.unit.helpers import placed
from tests.waiting import until

PROGRAM = 3
LIMIT_S = 20.0


@pytest.fixture(params=["local", "stream"])
def host(request: pytest.FixtureRequest) -> Host:
    return Host()


@pytest.fixture
def data(host: Host, request: pytest.FixtureRequest) -> Iterator[DataLinks]:
    made = DataLinks(SESSION, data_token(SECRET, SESSION, None), (HostAddress(0, 1, host.server.address),))
    host.put(1, SMALL)
    np.testing.assert_array_equal(made.fetch(1, COVER, lambda: None), SMALL)
    until(lambda: made._links[0].is_local)
    if request.node.callspec.params.get("host") == "stream":
        made._links[0].is_local = False
    yield made
    made.close(OVER)


def called(data: DataLinks, buffer: int) -> DataLink:
    """Hands a call over that asks for its result. The host leaves it to its scheduler."""
    link = data.link_of(0)
    assert link is not None
    assert data.launch_early(0, LaunchEarly(1, (), buffer), record(buffer), PROGRAM)
    return link


def record(buffer: int, plan: FetchPlan = COVER) -> BufferRecord:
    return BufferRecord(buffer, kind=SimpleNamespace(cover=plan, array=ArrayType(plan.shape, plan.dtype.name)))


def test_the_value_comes_without_another_question(host: Host, data: DataLinks) -> None:
    """1. Before somebody looks. 2. While he waits. 3. Behind a wait for its being there."""
    link = called(data, 2)
    until(lambda: host.store.waiting() == 1)
    before = data.new_request()
    host.put(2, SMALL + 2)
    np.testing.assert_array_equal(data.fetch(2, COVER, lambda: None), SMALL + 2)
    called(data, 3)
    looking = Asked(data, 3)
    until(lambda: host.store.waiting() == 1)
    host.put(3, SMALL + 3)
    looking.end()
    np.testing.assert_array_equal(looking.result, SMALL + 3)
    called(data, 4)
    host.put(4, SMALL + 4)
    data.await_values([4], (0,), lambda: False)
    np.testing.assert_array_equal(data.fetch(4, COVER, lambda: None), SMALL + 4)
    assert data.new_request() - before == 3  # this one, and those of two calls
    assert link.fetches == {}


@pytest.mark.parametrize("asked", ["with its call", "when it is waited for"])
def test_a_wait_with_a_limit_ends_with_it_or_with_the_value(host: Host, data: DataLinks, asked: str) -> None:
    """1. The value is not there in time. 2. It comes."""
    if asked == "with its call":
        link = called(data, 2)
    else:
        data.open(0)
        link = data._links[0]
    limit_s = 0.05
    for _ in range(2):
        begun = time.monotonic()
        assert not data.await_values([2], (0,), lambda: False, begun + limit_s)
        assert time.monotonic() - begun >= limit_s
    before = data.new_request()
    assert not data.await_values([2], (0,), lambda: False, time.monotonic())
    assert data.new_request() == before + 1, "nobody would hear the answer to a question"
    threading.Timer(limit_s, host.put, (2, SMALL)).start()
    assert data.await_values([2], (0,), lambda: False, time.monotonic() + LIMIT_S)
    np.testing.assert_array_equal(data.fetch(2, COVER, lambda: None), SMALL)
    assert link.fetches == {}
    assert data.awaited == {}


def test_a_message_that_is_too_long_for_a_local_socket_leaves_it_as_it_is(host: Host, data: DataLinks) -> None:
    """What has come by it is not lost, and the next question goes by it."""
    link = called(data, 2)
    host.put(2, SMALL + 2)
    until(lambda: host.store.waiting() == 0)
    time.sleep(0.1)  # the answer lies in the socket
    local = link.is_local
    assert not link.send_local(LaunchEarly(1, (), 9, ((0, bytes(1 << 20)),)))
    assert link.is_local == local
    looking = Asked(data, 2)
    looking.end()
    np.testing.assert_array_equal(looking.result, SMALL + 2)
    np.testing.assert_array_equal(data.fetch(1, COVER, lambda: None), SMALL)


def test_who_asks_without_a_thread_gets_it_too(host: Host, data: DataLinks) -> None:
    """1. It has come before he asks. 2. It comes later. 3. It cannot come. 4. He takes his question back. Without a
    local socket he has to fetch it."""
    link = called(data, 2)
    found: list[Any] = []
    host.put(2, SMALL + 2)
    if not link.is_local:
        assert ask(data, 2, COVER, found.append) is None
        np.testing.assert_array_equal(data.fetch(2, COVER, lambda: None), SMALL + 2)
        return
    answered(data, link)
    before = data.new_request()
    assert ask(data, 2, COVER, found.append) is not None
    np.testing.assert_array_equal(found.pop(), SMALL + 2)
    called(data, 3)
    assert ask(data, 3, COVER, found.append) is not None
    assert found == []
    host.put(3, SMALL + 3)
    answered(data, link)
    np.testing.assert_array_equal(found.pop(), SMALL + 3)
    called(data, 4)
    assert ask(data, 4, COVER, found.append) is not None
    host.put(4, Failure("HostLost", "it was away"))
    until(lambda: look(data) or bool(found))
    assert found == [None]
    called(data, 5)
    until(lambda: host.store.waiting() == 1)
    question = ask(data, 5, COVER, found.append)
    assert question is not None
    assert question.take_back()
    until(lambda: host.store.waiting() == 0)
    assert not question.take_back()
    assert (data.new_request() - before, found, link.fetches, data.ahead.asked) == (4, [None], {}, {})


def look(data: DataLinks) -> bool:
    """Reads what has come; false."""
    read(data)
    return False


def answered(data: DataLinks, link: DataLink) -> None:
    """Waits until all that was asked for has come, and reads it as a loop does that polls."""
    until(lambda: look(data) or all(not asked.missing for asked in link.fetches.values()))


def test_a_value_that_nobody_looks_at_is_let_go_and_said_once(host: Host, data: DataLinks) -> None:
    """One that was waited for counts as looked at. What has not come is asked for no longer."""
    ignored: list[int] = []
    data.ahead.ignored = ignored.append
    link = called(data, 2)
    until(lambda: host.store.waiting() == 1)
    data.ahead.drop(2)
    data.ahead.drop(2)
    assert ignored == [PROGRAM]
    until(lambda: host.store.waiting() == 0)
    called(data, 3)
    host.put(3, SMALL)
    data.await_values([3], (0,), lambda: False)
    data.ahead.drop(3)
    assert (ignored, link.fetches) == ([PROGRAM], {})


def test_where_it_cannot_come_it_is_asked_for_again(host: Host, data: DataLinks) -> None:
    """1. The host had failed, and has it now. 2. Its slice has moved, so that it lies elsewhere."""
    link = called(data, 2)
    host.put(2, Failure("HostLost", "it was away"))
    with pytest.raises(HostLost):
        data.await_values([2], (0,), lambda: False)
    host.put(2, SMALL + 2)
    np.testing.assert_array_equal(data.fetch(2, COVER, lambda: None), SMALL + 2)
    called(data, 3)
    host.put(3, SMALL + 3)
    moved = FetchPlan.of_array(ArrayType((4,), "float32"), (("x",),), placed(1, ["0.0"]))
    np.testing.assert_array_equal(data.fetch(3, moved, lambda: None), SMALL + 3)
    assert link.fetches == {}


def test_a_failure_that_comes_while_it_is_asked_for_is_not_lost(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread reads the answer, and may do so before the one that asks goes on."""
    host.put(2, Failure("HostLost", "it was away"))
    (link,) = data._links.values()
    ask = link.ask

    def answered(*question: Any) -> None:
        ask(*question)
        if not link.is_local:
            until(lambda: all(one.failure is not None for one in link.fetches.values()))

    monkeypatch.setattr(link, "ask", answered)
    with pytest.raises(HostLost):
        data.await_values([2], (0,), lambda: False)


@pytest.mark.parametrize("last", [SMALL, Failure("HostLost", "gone")], ids=["a value", "a failure"])
def test_a_wait_for_several_values_ends_once_all_are_there(host: Host, data: DataLinks, last: Any) -> None:
    """They are put one by one, the one that is named first before the others."""
    ended: list[str] = []

    def wait() -> None:
        try:
            data.await_values([2, 3, 4], (0,), lambda: False)
            ended.append("a value")
        except HostLost:
            ended.append("a failure")

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    for buffer in (2, 3):
        until(lambda: host.store.waiting() == 1)
        host.put(buffer, SMALL)
        time.sleep(0.05)  # an answer would come within it
        assert not ended
    until(lambda: host.store.waiting() == 1)
    host.put(4, last)
    waiting.join(LIMIT_S)
    assert ended == ["a failure" if isinstance(last, Failure) else "a value"]
    assert (data.awaited, data._links[0].fetches) == ({}, {})


def test_workers_look_for_many_who_wait_for_several_values(host: Host, data: DataLinks) -> None:
    """More than the thread that stores a value looks for by itself."""
    waiting = [threading.Thread(target=data.await_values, args=([2, 3], (0,), lambda: False)) for _ in range(20)]
    for one in waiting:
        one.start()
    until(lambda: host.store.waiting() == len(waiting))
    host.put(2, SMALL)
    until(lambda: host.store.waiting() == len(waiting))
    assert all(one.is_alive() for one in waiting)
    host.put(3, SMALL)
    for one in waiting:
        one.join(LIMIT_S)
    assert not any(one.is_alive() for one in waiting)
    until(lambda: host.store.waiting() == 0)


def test_a_failure_or_the_end_of_the_stream_ends_a_wait_for_it(host: Host, data: DataLinks) -> None:
    link = called(data, 2)
    looking = Asked(data, 2)
    until(lambda: host.store.waiting() == 1)
    looking.stop = BufferDeleted("it was deleted")
    data.wake()
    looking.end()
    assert isinstance(looking.error, BufferDeleted)
    until(lambda: host.store.waiting() == 0)
    called(data, 3)
    another = Asked(data, 3)
    until(lambda: host.store.waiting() == 1)
    link.end("its process was lost")
    another.end()
    assert isinstance(another.error, PathwaysError)


def test_not_all_values_are_asked_for_with_their_calls(host: Host, data: DataLinks) -> None:
    """
    1. Not big ones.
    2. Nor those that lie on several hosts.
    3. Nor one behind a few that nobody has looked at. The first of them is given up: it may have been donated.
    """
    (link,) = data._links.values()
    big = FetchPlan.of_array(ArrayType((MAX_AHEAD_BYTES,), "int16"), ((),), placed(1, ["0.0"]))
    assert data.ahead.ask(link, record(9, big), data._requests, PROGRAM) is None
    apart = FetchPlan.of_array(ArrayType((4,), "int16"), (("x",),), placed(1, ["0.0", "1.0"]))
    assert data.ahead.ask(link, record(9, apart), data._requests, PROGRAM) is None
    ignored: list[int] = []
    data.ahead.ignored = ignored.append
    for buffer in range(2, 2 + MAX_AHEAD):
        called(data, buffer)
    until(lambda: host.store.waiting() == MAX_AHEAD)
    assert data.ahead.ask(link, record(9), data._requests, PROGRAM) is None
    assert ignored == [PROGRAM]
    until(lambda: host.store.waiting() == MAX_AHEAD - 1)
    called(data, 99)
    host.put(2, SMALL)
    np.testing.assert_array_equal(data.fetch(2, COVER, lambda: None), SMALL)


def test_one_that_is_asked_for_as_its_stream_ends_does_not_wait(data: DataLinks) -> None:
    (link,) = data._links.values()
    link.end("its process was lost")
    asked = data.ahead.ask(link, record(9), data._requests, PROGRAM)
    assert asked is not None
    data.ahead.enter(2, asked)
    assert data.ahead.take(2) is None


def test_any_result_of_a_call_can_be_asked_for_with_it(host: Host, data: DataLinks) -> None:
    (link,) = data._links.values()
    assert data.launch_early(0, LaunchEarly(1, (), 2), record(4), PROGRAM)
    host.put(2, SMALL + 2)
    host.put(4, SMALL + 4)
    before = data.new_request()
    np.testing.assert_array_equal(data.fetch(4, COVER, lambda: None), SMALL + 4)
    assert data.new_request() == before + 1
    assert link.fetches == {}


@pytest.mark.parametrize("kind", ["same", "other"])
def test_a_call_that_asks_under_a_number_that_is_taken_does_not_disturb_the_first(
    host: Host, data: DataLinks, kind: str
) -> None:
    """A client that says so twice gets a failure for one of them, and its stream goes on."""
    link = called(data, 2)
    (request,) = link.fetches
    data.launch_early(0, LaunchEarly(1, (), 2 if kind == "same" else 3, (), request, (0,)))
    data.launch_early(0, LaunchEarly(1, (), 4, (), data.new_request(), (17,)))  # no such device
    host.put(4, jax.numpy.zeros(4))
    host.put(5, SMALL + 5)
    np.testing.assert_array_equal(data.fetch(5, COVER, lambda: None), SMALL + 5)


def test_a_call_of_a_program_that_is_refused_as_it_leaves_asks_for_nothing(host: Host, data: DataLinks) -> None:
    """The reading thread hears the last refusal between the choice of a host and the call's leaving for it."""
    core, controller = ClientCore(SESSION, 16), Controller()
    driver = Driver(core, controller, data)  # type: ignore[arg-type]
    core.handle(Prepared(PROGRAM, 1, 0), 0.0)
    core.early.allowed(0, True)
    _, made = core.new_buffers(2, [record(0).kind] * 2)
    message = core.launch(PROGRAM, (), [made])
    assert isinstance(message, EarlyLaunch)
    core.early.looked_at(made)
    (link,) = data._links.values()
    for _ in range(MAX_REFUSED + 1):
        link._on_message(EarlyRefused(made.id))
    driver.hand_over(message)
    assert link.fetches == {}
    looking = Asked(data, made.id)
    until(lambda: host.store.waiting() == 1)
    host.put(made.id, SMALL)
    looking.end()
    np.testing.assert_array_equal(looking.result, SMALL)


def test_a_call_that_finds_its_host_s_local_socket_full_is_not_said_to_have_begun(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value of one behind it has come. The call goes by no other way, on which that would overtake it."""
    core, controller = ClientCore(SESSION, 16), Controller()
    driver = Driver(core, controller, data)  # type: ignore[arg-type]
    core.handle(Prepared(PROGRAM, 1, 0), 0.0)
    core.early.allowed(0, True)
    data.early = None  # this host leaves all calls to its scheduler, and would say so at any time
    (link,) = data._links.values()
    messages: list[EarlyLaunch] = []
    for full in (True, False):
        (made,) = core.new_buffers(1, [record(0).kind])
        message = core.launch(PROGRAM, (), [made])
        assert isinstance(message, EarlyLaunch)
        with monkeypatch.context() as patch:
            if full:
                patch.setattr(link, "send_local", lambda *_: False)
            driver.hand_over(message)
        messages.append(message)
    core.early.came(made)
    assert [core.early.is_begun(one) for one in messages] == [not link.is_local, True]


def test_a_call_that_ctrl_c_stops_on_its_way_asks_for_nothing(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (link,) = data._links.values()

    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(link, "send_local", interrupted)
        patch.setattr(link.outbox, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            called(data, 2)
    assert link.fetches == {}
    looking = Asked(data, 2)
    until(lambda: host.store.waiting() == 1)
    host.put(2, SMALL)
    looking.end()
    np.testing.assert_array_equal(looking.result, SMALL)


@pytest.mark.parametrize("when", ["while another thread waits for it", "before its call has left"])
def test_a_value_that_is_deleted_meanwhile_is_let_go(host: Host, data: DataLinks, when: str) -> None:
    """Its last handle goes where there is nothing to drop yet."""
    data.ahead.buffers = buffers = {2: record(2)}

    def delete() -> bool:
        buffers.pop(2, None)
        data.ahead.drop(2)
        return True

    if when == "before its call has left":
        delete()
    link = called(data, 2)
    if when != "before its call has left":
        data.await_values([2], (0,), delete)
    assert (data.ahead.asked, link.fetches) == ({}, {})
    until(lambda: host.store.waiting() == 0)


def test_a_value_that_is_donated_before_its_call_has_left_is_not_asked_for(host: Host, data: DataLinks) -> None:
    """Both calls waited for an upload."""
    data.ahead.buffers = {2: record(2)}
    data.ahead.buffers[2].donate("it was donated to f")
    link = called(data, 2)
    assert (data.ahead.asked, link.fetches) == ({}, {})
    until(lambda: host.store.waiting() == 0)


class TakenMeanwhile(dict[int, Fetching]):
    """Questions of a stream, of which other threads take each out right after it has been looked up."""

    def __contains__(self, request: object) -> bool:
        return self.pop(request, None) is not None  # type: ignore[call-overload]

    def get(self, request: int, default: Any = None) -> Any:
        return self.pop(request, default)


@pytest.mark.parametrize(
    "answer",
    [lambda request: DataFailed(request, OVER), FetchDone],
    ids=["a failure", "a file"],
)
def test_an_answer_to_who_has_just_given_up_does_no_harm(data: DataLinks, answer: Callable[[int], Message]) -> None:
    link = called(data, 2)
    link.fetches = TakenMeanwhile(link.fetches)
    (request,) = list(link.fetches)
    link._on_message(answer(request))
    assert (link.dead, link.fetches) == (None, {})


def several(count: int, first: int = 2) -> list[BufferRecord]:
    """The results of a call, with what they have in common."""
    made = [record(first + k) for k in range(count)]
    for one in made:
        one.results = Results(PROGRAM, first, [other.kind for other in made])
    return made


def hand_over(data: DataLinks, made: list[BufferRecord], place: int = 0) -> None:
    data.ahead.buffers = {one.id: one for one in made}
    assert data.launch_early(0, LaunchEarly(1, (), made[0].id), made[place], PROGRAM)


def test_small_results_come_with_the_one_that_is_asked_for_with_its_call(host: Host, data: DataLinks) -> None:
    (link,) = data._links.values()
    hand_over(data, several(3), 1)
    for buffer in (2, 4, 3):  # that for which it asks comes last: a host that computes has all at once
        host.put(buffer, SMALL + buffer)
    early: dict[int, Any] = {}
    np.testing.assert_array_equal(data.fetch(3, COVER, lambda: None, early=early), SMALL + 3)
    assert sorted(early) == [2, 4]
    for buffer, value in early.items():
        np.testing.assert_array_equal(value, SMALL + buffer)
    assert link.fetches == {}


def test_those_that_are_not_there_yet_or_of_no_use_do_not_come(host: Host, data: DataLinks) -> None:
    """1. Two of three are computed. 2. None was of use: none is asked for. 3. Nobody looks: nothing is left."""
    (link,) = data._links.values()
    hand_over(data, several(3))
    host.put(3, SMALL + 3)
    host.put(2, SMALL + 2)
    early: dict[int, Any] = {}
    np.testing.assert_array_equal(data.fetch(2, COVER, lambda: None, early=early), SMALL + 2)
    assert list(early) == [3]
    made = several(3, 12)
    assert made[0].results is not None
    data.ahead.siblings.keep(made[0].results, {13: SMALL})
    data.ahead.siblings.forget(13)
    hand_over(data, made)
    assert data.ahead.asked[12].along == {}
    data.ahead.siblings.of(made[0].results, 12)
    data.ahead.siblings.of(made[0].results, 13)
    hand_over(data, several(3, 22))
    assert sorted(data.ahead.asked[22].along) == [23, 24]
    for buffer in (12, 22):
        data.ahead.drop(buffer)
    assert link.fetches == {}
    until(lambda: host.store.waiting() == 0)


def test_results_that_are_gone_or_elsewhere_do_not_come_along(data: DataLinks) -> None:
    made = several(4)
    made[1].state = DELETED
    made[2].kind.cover = FetchPlan.of_array(ArrayType((4,), "float32"), (("x",),), placed(1, ["1.0"]))
    hand_over(data, made)
    assert sorted(data.ahead.asked[2].along) == [5]


def test_who_asks_without_a_thread_takes_nothing_along(host: Host, data: DataLinks) -> None:
    """Nobody would look at it, nor let it go."""
    (link,) = data._links.values()
    if not link.is_local:
        return
    found: list[Any] = []
    hand_over(data, several(3))
    assert ask(data, 2, COVER, found.append) is not None
    for buffer in (3, 4, 2):
        host.put(buffer, SMALL + buffer)
    answered(data, link)
    np.testing.assert_array_equal(found.pop(), SMALL + 2)
    assert link.fetches == {}
    hand_over(data, several(3, 12))
    assert data.ahead.asked[12].along == {}
