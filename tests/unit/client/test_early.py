"""Calls that a client hands to their host: which, and what it makes of the host's word."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pathways_ray.client.buffer import DELETED, FAILED, INLINE, PENDING, READY, BufferRecord, Upload
from pathways_ray.client.coalesce import CoalescedLaunch
from pathways_ray.client.core import ClientCore
from pathways_ray.client.data import DataLinks
from pathways_ray.client.early import (
    ASKED_AGAIN,
    MAX_BETWEEN,
    MAX_HANDED,
    MAX_PUT,
    MAX_REFUSED,
    MAX_TOGETHER,
    MAX_UNDER_WAY,
)
from pathways_ray.client.events import Disconnected, Registered, Uploaded
from pathways_ray.client.local_reader import LocalReader
from pathways_ray.client.questions import await_there
from pathways_ray.client.siblings import Results
from pathways_ray.errors import Failure, from_failure
from pathways_ray.executor.run.early import MAX_TAKEN
from pathways_ray.limits import MAX_INLINE_BYTES, MAX_SENT_INLINE_BYTES
from pathways_ray.transport.messages import Completed, EarlyLaunch, Free, Launch, LaunchEarly, LaunchFailed, Prepared
from tests.unit.helpers import VECTOR, Sketch

HOST, KEY = 4, 77


def core_of_one(host: int = HOST) -> ClientCore:
    """A client whose program 1 is prepared on a host that takes calls."""
    core = ClientCore(1, 1024)
    core.handle(Prepared(1, KEY, host), 0.0)
    core.early.allowed(HOST, True)
    return core


def call(core: ClientCore, *arguments: BufferRecord) -> tuple[Launch | None, BufferRecord]:
    (made,) = core.new_buffers(1)
    return core.launch(1, arguments, [made]), made


def is_early(core: ClientCore, *arguments: BufferRecord) -> bool:
    return isinstance(call(core, *arguments)[0], EarlyLaunch)


def test_a_call_that_finds_nothing_under_way_is_handed_over() -> None:
    core = core_of_one()
    message, made = call(core)
    assert message == EarlyLaunch(1, 1, (), 1)
    assert (made.early, made.host) == (1, HOST)
    assert isinstance(message, EarlyLaunch)
    assert core.early.message(message) == (HOST, LaunchEarly(KEY, (), 1))


def test_it_carries_the_same_values_both_ways() -> None:
    core, inline = core_of_one(), ((0, b"12345678"),)
    message = core.launch(1, [INLINE], core.new_buffers(1), inline=inline)
    assert message == EarlyLaunch(1, 1, (0,), 1, inline)
    assert isinstance(message, EarlyLaunch)
    assert core.early.message(message) == (HOST, LaunchEarly(KEY, (0,), 1, inline))


def test_a_call_may_carry_more_where_its_host_gets_it_at_once() -> None:
    """Else its bytes would go by controller and scheduler."""
    core = ClientCore(1, 1024)
    core.handle(Prepared(1, KEY, HOST), 0.0)
    assert core.carries(1) == MAX_SENT_INLINE_BYTES
    core.early.allowed(HOST, True)
    assert (core.carries(1), core.carries(2)) == (MAX_INLINE_BYTES, MAX_SENT_INLINE_BYTES)
    assert core.carries(1, priority=3) == MAX_SENT_INLINE_BYTES
    for _ in range(MAX_UNDER_WAY):
        assert core.carries(1) == MAX_INLINE_BYTES
        assert is_early(core)
    assert core.carries(1) == MAX_SENT_INLINE_BYTES
    assert not is_early(core)


def test_its_result_may_be_the_argument_of_another_one() -> None:
    core = core_of_one()
    _, made = call(core)
    assert is_early(core, made)


def test_a_value_that_was_fetched_may_be_an_argument_before_its_launch_has_an_outcome() -> None:
    """Who waits for each value, and has begun when hosts took no calls, is ahead of all outcomes."""
    core = core_of_one()
    core.early.allowed(HOST, False)
    _, made = call(core)
    core.early.allowed(HOST, True)
    assert not is_early(core, made)  # it may not be there yet
    core.early.came(made)
    assert is_early(core, made)
    made.donate("a launch takes it")
    assert not is_early(core, made)


def test_a_stream_of_calls_is_not_handed_over_and_those_that_are_waited_for_are() -> None:
    core = core_of_one()
    made = [call(core) for _ in range(MAX_UNDER_WAY + 2)]
    assert [isinstance(message, EarlyLaunch) for message, _ in made] == [True] * MAX_UNDER_WAY + [False] * 2
    core.handle(Completed((4, 5)), 0.0)
    assert not is_early(core)
    core.handle(Completed((6,)), 0.0)
    core.early.came(made[2][1])  # and those before it were begun before it
    assert is_early(core)


def round_of(core: ClientCore, calls: int) -> list[bool]:
    """Makes calls, and then looks at the value of the last one; which of them were handed over."""
    made = [call(core) for _ in range(calls)]
    core.early.came(made[-1][1])
    return [isinstance(message, EarlyLaunch) for message, _ in made]


def test_what_was_called_before_a_value_that_has_come_is_not_under_way() -> None:
    """Three launches for each value, which were only sent once, would be ahead of all outcomes for ever."""
    core = core_of_one()
    core.early.allowed(HOST, False)
    assert round_of(core, MAX_UNDER_WAY) == [False] * MAX_UNDER_WAY
    core.early.allowed(HOST, True)
    assert round_of(core, MAX_UNDER_WAY) == [True] * MAX_UNDER_WAY


@pytest.mark.parametrize("whose", ["an upload's", "one that came before"])
def test_other_values_say_nothing_of_launches_under_way(whose: str) -> None:
    core = core_of_one()
    first = call(core)[1]
    core.early.came(first)
    for _ in range(MAX_UNDER_WAY):
        assert is_early(core)
    core.early.came(core.new_buffers(1)[0] if whose == "an upload's" else first)
    assert not is_early(core)


def test_of_the_calls_between_two_values_all_are_handed_over_or_none() -> None:
    """A part of them would have the value wait for two roads."""
    core = core_of_one()
    few, many = MAX_BETWEEN, MAX_BETWEEN + 1
    for _ in range(2):  # nothing is known yet
        assert round_of(core, few) == [True] * MAX_UNDER_WAY + [False] * (few - MAX_UNDER_WAY)
    assert round_of(core, few) == [True] * few
    assert round_of(core, many) == [True] * many
    assert round_of(core, many) == [False] * many
    assert round_of(core, 1) == [False]
    assert round_of(core, 1) == [True]


@pytest.mark.parametrize("calls", [MAX_BETWEEN, MAX_TOGETHER + 2])
def test_values_of_all_calls_of_a_round_make_it_no_shorter(calls: int) -> None:
    core, early = core_of_one(), list[list[bool]]()
    for _ in range(4):
        made = [call(core) for _ in range(calls)]
        early.append([isinstance(message, EarlyLaunch) for message, _ in made])
        for _, result in made:
            core.early.came(result)
    assert early[2:] == [[calls <= MAX_BETWEEN] * calls] * 2


def test_two_values_of_the_same_calls_are_one_round() -> None:
    core = core_of_one()
    round_of(core, 1)
    made = core.new_buffers(2)
    for _ in range(MAX_BETWEEN):
        core.launch(1, [], made := core.new_buffers(2))
    core.early.came(made[1])
    core.early.came(made[0])
    assert round_of(core, MAX_BETWEEN) == [True] * MAX_BETWEEN


def test_uploads_are_waited_for_by_who_waits_for_values_and_not_in_streams() -> None:
    core = core_of_one()
    soon = core.early.answers_soon
    assert not soon(HOST), "nothing is known of the program yet"
    round_of(core, 1)
    round_of(core, 1)
    assert [soon(HOST) for _ in range(MAX_PUT + 1)] == [True] * MAX_PUT + [False]
    round_of(core, 1)
    assert not soon(HOST + 1), "that host takes no calls"
    for _ in range(MAX_BETWEEN + 1):
        call(core)
    assert not soon(HOST), "these calls are a stream"
    core.early.came(call(core)[1])
    assert not soon(HOST), "it was one up to here"
    round_of(core, 1)
    assert soon(HOST)
    core.early.allowed(HOST, False)
    assert not soon(HOST)


def test_callers_who_wait_for_their_values_do_not_keep_those_of_others_from_their_host() -> None:
    core, threads = core_of_one(), MAX_TOGETHER + 1
    early = []
    for waiting in range(threads):
        core.early.awaited = partial(int, waiting)
        early.append(is_early(core))
    assert early == [True] * MAX_TOGETHER + [False]


def test_bytes_that_a_host_has_are_not_sent_again() -> None:
    core, inline = core_of_one(), ((0, b"12345678"),)
    made = core.new_buffers(3)
    sent: list[Any] = [core.launch(1, [INLINE], [one], inline=inline) for one in made]
    core.early.came(made[1])
    bare = EarlyLaunch(2, 1, (0,), 2)
    assert core.composed([*sent, Free((9,))]) == [sent[0], bare, sent[2], Free((9,))]


def test_bytes_that_a_host_has_left_are_sent() -> None:
    core, inline = core_of_one(), ((0, b"12345678"),)
    (made,) = core.new_buffers(1)
    sent: Any = core.launch(1, [INLINE], [made], inline=inline)
    core.early.refused(made.early)
    assert core.composed([sent]) == [sent]


def test_no_more_are_handed_over_than_hosts_take_before_they_are_sent() -> None:
    """All values come, and no outcome does."""
    assert MAX_HANDED < MAX_TAKEN
    core = core_of_one()
    for _ in range(MAX_HANDED):
        message, made = call(core)
        assert isinstance(message, EarlyLaunch)
        core.early.came(made)
    assert not is_early(core)
    core.handle(Completed((1, 2)), 0.0)
    assert is_early(core)


def test_calls_leave_as_one_whose_values_have_come() -> None:
    """Those before the last value that came have begun as well: their host takes them in turn."""
    core = core_of_one()
    made = [call(core) for _ in range(3)]
    core.early.came(made[1][1])
    begun = [isinstance(message, EarlyLaunch) and core.early.is_begun(message) for message, _ in made]
    assert begun == [True, True, False]


def test_what_one_host_has_begun_says_nothing_of_another() -> None:
    core = core_of_one()
    core.handle(Prepared(2, KEY, HOST + 1), 0.0)
    core.early.allowed(HOST + 1, True)
    elsewhere, _ = call(core)
    (made,) = core.new_buffers(1)
    here = core.launch(2, (), [made])
    core.early.came(made)
    messages: list[Any] = [elsewhere, here]
    assert [core.early.is_begun(message) for message in messages] == [False, True]


@pytest.mark.parametrize("why", ["refused", "not_handed"])
def test_calls_do_not_leave_as_one_that_a_host_has_left_or_that_came_with_values(why: str) -> None:
    core, inline = core_of_one(), ((0, b"12345678"),)
    (left, x), (after, _) = call(core), call(core)
    getattr(core.early, why)(x.early)
    (result,) = core.new_buffers(1)
    carrying = core.launch(1, [INLINE], [result], inline=inline)
    core.early.came(result)
    messages: list[Any] = [left, after, *core.early.lightened([cast(Any, carrying)])]
    assert [core.early.is_begun(message) for message in messages] == [False, True, False]


def test_calls_that_left_as_one_have_their_outcome_together() -> None:
    core = core_of_one()
    for _ in range(3):
        core.early.came(call(core)[1])
    core.coalescer._coalesced[3] = CoalescedLaunch((1, 2), cast(Any, None), 0)
    core.handle(Completed((3,)), 0.0)
    assert (core.early.handed, core.early.there, core.early.over, core.pending) == ({}, set(), set(), {})


def test_nothing_is_handed_over_that_hosts_do_not_take() -> None:
    for core in (core_of_one(-1), core_of_one(HOST + 1)):
        assert not is_early(core)
    core = core_of_one()
    core.early.allowed(HOST, False)
    assert not is_early(core)


def test_arguments_have_to_be_on_their_way_to_nowhere() -> None:
    """An array whose launch was only sent may not be there yet."""
    core = core_of_one()
    (pending,) = core.new_buffers(1)
    assert not is_early(core, pending)
    (ready,) = core.new_buffers(1)
    ready.become_ready()
    assert is_early(core, ready)


def test_priorities_go_with_the_launch_that_is_sent() -> None:
    core = core_of_one()
    x, y = core.new_buffers(2)
    x.become_ready()
    message = core.launch(1, [x], [y], priority=1)
    assert not isinstance(message, EarlyLaunch)
    assert y.early == 0


def call_donating(core: ClientCore, x: BufferRecord) -> tuple[Launch | None, BufferRecord]:
    (y,) = core.new_buffers(1)
    return core.launch(1, [x], [y], [x], "it was donated to f"), y


@pytest.mark.parametrize("how", ["ready", "pending", "value has come", "early", "uploading"])
def test_what_is_donated_goes_to_the_host_where_the_array_is_there(how: str) -> None:
    core = core_of_one()
    message, x = call(core) if how == "early" else (None, core.new_buffers(1)[0])
    if how == "ready":
        x.become_ready()
    elif how == "value has come":  # before the outcome of the launch that makes it, which was only sent
        core.early.came(x)
    elif how == "uploading":
        x.upload = Upload({HOST})
    message, y = call_donating(core, x)
    assert x.state is DELETED
    if how == "uploading":
        assert message is None
        assert core.head(0.0) is None
        core.handle(Uploaded(x, cast(Upload, x.upload), HOST), 0.0)
        (message,) = cast(Any, core.head(0.0))
    assert isinstance(message, EarlyLaunch) == (how != "pending")
    assert (y.early > 0) == (how != "pending")


def test_a_donated_array_lives_again_where_the_early_launch_fails_that_took_it() -> None:
    core = core_of_one()
    _, x = call(core)
    core.early.came(x)
    message, y = call_donating(core, x)
    assert isinstance(message, EarlyLaunch)
    core.handle(Completed((1,)), 0.0)
    core.handle(LaunchFailed(message.launch, Failure("QuotaExceeded", "full")), 0.0)
    assert (x.state, y.state) == (READY, FAILED)
    assert "lives on" in cast(Failure, y.failure).message


def refused_again_and_again(core: ClientCore) -> None:
    for _ in range(MAX_REFUSED + 1):
        message, made = call(core)
        assert isinstance(message, EarlyLaunch)
        core.early.refused(made.early)
        core.handle(Completed((made.early,)), 0.0)


def handed_over(core: ClientCore, calls: int, taken: bool) -> int:
    """How many of some calls are handed over, all of which a host takes, or refuses."""
    count = 0
    for _ in range(calls):
        message, made = call(core)
        if isinstance(message, EarlyLaunch):
            count += 1
            if not taken:
                core.early.refused(made.early)
        core.early.came(made)
        core.handle(Completed((cast(Any, message).launch,)), 0.0)
    return count


def test_of_a_program_whose_calls_are_refused_again_and_again_few_are_handed_over() -> None:
    core = core_of_one()
    refused_again_and_again(core)
    assert handed_over(core, 10 * ASKED_AGAIN, taken=False) == 10
    core.handle(Prepared(1, KEY, HOST), 0.0)
    assert is_early(core)


def test_a_program_is_handed_over_again_once_its_host_takes_it() -> None:
    """Refusals say nothing about calls to come where tenants take turns, or many calls are under way."""
    core = core_of_one()
    refused_again_and_again(core)
    assert handed_over(core, 2 * ASKED_AGAIN, taken=True) >= ASKED_AGAIN - 1
    assert handed_over(core, 100, taken=True) == 100


def test_what_is_refused_behind_the_last_refusal_does_not_give_a_program_up_for_good() -> None:
    core = core_of_one()
    made = [call(core)[1] for _ in range(3)]
    for _ in range(MAX_REFUSED):
        for one in made:
            core.early.refused(one.early)
    for one in made:
        core.early.came(one)
    core.handle(Completed(tuple([one.early for one in made])), 0.0)
    assert handed_over(core, 2 * ASKED_AGAIN, taken=True) >= ASKED_AGAIN - 1
    core.handle(Prepared(1, KEY, HOST), 0.0)
    assert is_early(core)


def test_a_program_of_which_hosts_take_calls_in_between_is_handed_over_for_good() -> None:
    core = core_of_one()
    for turn in range(4 * MAX_REFUSED):
        message, made = call(core)
        assert isinstance(message, EarlyLaunch)
        if turn % 2:
            core.early.refused(made.early)
        core.early.came(made)
        core.handle(Completed((made.early,)), 0.0)


def test_a_value_that_a_refused_call_made_later_does_not_count_as_taken() -> None:
    core = core_of_one()
    for _ in range(MAX_REFUSED + 1):
        _, made = call(core)
        core.early.refused(made.early)
        core.early.came(made)
        core.handle(Completed((made.early,)), 0.0)
    assert not is_early(core)


def test_an_outcome_leaves_nothing_of_a_call() -> None:
    core = core_of_one()
    (_, a), (_, b) = call(core), call(core)
    core.early.came(a)
    core.handle(Completed((1,)), 0.0)
    core.early.came(a)  # by a thread that was late
    core.handle(LaunchFailed(2, Failure("ExecutionError", "boom")), 0.0)
    early = core.early
    assert (early.handed, early.there, early.over) == ({}, set(), set())
    assert b.failure is not None


def test_a_program_that_is_registered_again_has_another_number() -> None:
    core, sketch = core_of_one(), Sketch()
    here = sketch.slice("4.0")
    graph = sketch.graph(sketch.call("f", sketch.argument(here), slice=here))
    core.handle(Registered(1, graph, b"", {}), 0.0)
    assert core.head(0.0) is not None
    core.remove_head()
    assert not is_early(core)


def test_a_value_that_has_come_is_ready_and_fails_with_its_launch() -> None:
    core = core_of_one()
    (_, a), (_, b) = call(core), call(core)
    core.early.came(a)
    core.early.came(b)
    assert a.state is b.state is READY
    core.handle(Completed((1,)), 0.0)
    core.handle(LaunchFailed(2, Failure("HostLost", "gone")), 0.0)
    core.early.came(b)  # by a thread that was late
    assert (a.state, b.state) == (READY, FAILED)


@pytest.mark.parametrize("how", ["it fails", "it is deleted"])
def test_a_wait_has_no_value_where_the_array_is_lost_while_it_ends(how: str) -> None:
    """The host has the value, and the array goes behind the last look of the wait for it."""
    core = core_of_one()
    _, made = call(core)

    def check(record: BufferRecord) -> None:
        if record.failure is not None:
            raise from_failure(record.failure)

    class Answers:
        def link_of(self, host: int) -> object:
            return self

        def await_values(
            self, buffers: Sequence[int], hosts: Sequence[int], is_over: Callable[[], bool], until: float | None
        ) -> bool:
            assert not is_over()
            if how == "it fails":
                made.fail(Failure("HostLost", "gone"))
            else:
                made.state = DELETED
            return True

    assert not await_there(cast(DataLinks, Answers()), core, made, check)
    assert made.state is (FAILED if how == "it fails" else DELETED)


class Asked:
    """In place of the data streams: hosts that were spoken to, and that have what they are asked for."""

    def __init__(self, *known: int) -> None:
        self.known = known
        self.reader, self.awaited = LocalReader(), dict[int, Any]()
        self.asked: list[tuple[list[int], set[int]]] = []
        self.opened: list[int] = []

    def link_of(self, host: int) -> object | None:
        return self if host in self.known else None

    def open(self, host: int) -> None:
        self.opened.append(host)

    def new_request(self) -> int:
        return 1

    def await_values(
        self, buffers: Sequence[int], hosts: Sequence[int], is_over: Callable[[], bool], until: float | None
    ) -> bool:
        assert not is_over()
        self.asked.append(([*buffers], set(hosts)))
        return until is None


def sent(core: ClientCore, *hosts: int) -> BufferRecord:
    """The only result of a launch that is only sent, on devices of these hosts."""
    (made,) = core.new_buffers(1, (kind_on(*hosts),))
    return made


def kind_on(*hosts: int) -> SimpleNamespace:
    """The kind of an array on devices of these hosts."""
    return SimpleNamespace(slice=SimpleNamespace(placed=SimpleNamespace(hosts=tuple(sorted({*hosts})))))


def test_the_hosts_of_a_result_are_asked_once_whether_it_is_there() -> None:
    core, data = core_of_one(), Asked(0, 1, 2)
    made = sent(core, 0, 0, 1, 1)
    for _ in range(2):
        assert await_there(cast(DataLinks, data), core, made, lambda record: None)
    assert data.asked == [([made.id], {0, 1})]
    assert (made.state, made.fetched) == (PENDING, True)


def test_one_question_is_for_all_that_a_launch_makes_on_a_slice() -> None:
    """But for what is there, was deleted or dropped, and for what lies elsewhere."""
    core, data = core_of_one(), Asked(0, 1)
    here, elsewhere = kind_on(0), kind_on(1)
    kinds = [here, here, elsewhere, here, here, here, here]
    results = core.new_buffers(len(kinds), tuple(kinds))
    for record in results:
        record.results = Results(1, results[0].id, kinds)
    _, second, other, deleted, there, dropped, last = results
    deleted.state, there.fetched = DELETED, True
    del core.buffers[dropped.id]
    for waited in (second, last, results[0]):
        assert await_there(cast(DataLinks, data), core, waited, lambda record: None)
    assert data.asked == [([second.id, results[0].id, last.id], {0})]
    assert await_there(cast(DataLinks, data), core, other, lambda record: None)
    assert data.asked[1:] == [([other.id], {1})]
    assert (deleted.fetched, dropped.fetched) == (False, False)


@pytest.mark.parametrize("why", ["many hosts", "a host that was not spoken to", "an upload"])
def test_the_outcome_is_waited_for_where_hosts_are_not_asked(why: str) -> None:
    core, data = core_of_one(), Asked(0, 1, 2)
    made = sent(core, *{"many hosts": (0, 3, 4), "a host that was not spoken to": (0, 3)}.get(why, (0,)))
    if why == "an upload":
        made.upload = Upload({0})
    assert not await_there(cast(DataLinks, data), core, made, lambda record: None, until=time.monotonic() + 0.01)
    assert not data.asked
    assert data.opened == ([3] if why == "a host that was not spoken to" else []), "so that it can be asked next time"


def test_a_value_that_does_not_come_in_time_is_not_there() -> None:
    core, data = core_of_one(), Asked(0)
    made = sent(core, 0)
    assert not await_there(cast(DataLinks, data), core, made, lambda record: None, until=time.monotonic())
    assert (made.fetched, made.shown) == (False, PENDING)
    assert await_there(cast(DataLinks, data), core, made, lambda record: None)
    assert made.shown is READY


@pytest.mark.parametrize("lies", ["where it was handed to", "nobody says where"])
def test_a_host_that_has_died_is_not_asked_for_what_was_handed_to_it(lies: str) -> None:
    """It might come back, and be waited for, while the outcome is there."""
    core, data = core_of_one(), Asked()
    _, made = call(core)
    if lies == "where it was handed to":
        made.kind = SimpleNamespace(slice=SimpleNamespace(placed=SimpleNamespace(hosts=(HOST,))))
    assert not await_there(cast(DataLinks, data), core, made, lambda record: None)
    assert not data.asked
    data.known = (HOST,)
    assert await_there(cast(DataLinks, data), core, made, lambda record: None)
    assert data.asked == [([made.id], {HOST})]


def test_a_value_that_has_come_is_named_with_its_launch_where_the_controller_died() -> None:
    core = core_of_one()
    core.resume_tag = "tag"
    _, made = call(core)
    made.kind = SimpleNamespace(slice=SimpleNamespace(id=1), array=VECTOR, spec=())
    core.early.came(made)
    core.handle(Disconnected("it died"), 0.0)
    request = core.resume_request("name", (), 0.0)
    assert request.kept == ()
    assert made.state is READY


def test_the_value_of_a_call_is_asked_for_with_it_where_the_last_one_was_waited_for() -> None:
    core = core_of_one()
    message, made = call(core)
    assert isinstance(message, EarlyLaunch)
    assert core.early.expected_of(message, [made]) is None
    core.early.looked_at(made)
    assert core.early.expected_of(message, [made]) is made
    core.early.ignored(message.program)
    assert core.early.expected_of(message, [made]) is None


def test_of_several_results_the_one_that_was_looked_at_first_is_asked_for() -> None:
    core = core_of_one()

    def looks(*places: int) -> int:
        """Looks at results of a call; the place of the one that the next call asks for."""
        results = core.new_buffers(3, [None] * 3)
        for one in results:
            one.results = Results(1, results[0].id, [None] * 3)
        message = core.launch(1, [], results)
        assert isinstance(message, EarlyLaunch)
        for place in places:
            core.early.looked_at(results[place])
        found = core.early.expected_of(message, results)
        core.handle(Completed((message.launch,)), 0.0)
        return results.index(found) if found is not None else -1

    assert looks() == -1
    assert looks(2, 1, 2) == 2
    assert looks() == 2
    assert looks(0, 2) == 0


def test_a_look_at_a_value_whose_launch_is_over_says_nothing_of_the_next_one() -> None:
    core = core_of_one()
    message, made = call(core)
    assert isinstance(message, EarlyLaunch)
    core.handle(Completed((message.launch,)), 0.0)
    core.early.looked_at(made)
    core.early.looked_at(BufferRecord(7, READY))
    assert core.early.expected_of(message, [made]) is None
