"""Calls that clients hand to a host before their scheduler sends them."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_ray.errors import Failure
from pathways_ray.executor.run.early import MAX_PASSED, MAX_TAKEN, MAX_UNDER_WAY, EarlyLaunches, EarlyReports
from pathways_ray.executor.run.following import FollowingLaunches
from pathways_ray.executor.run.instructions import Handed, SchedulerFound
from pathways_ray.ir.types import ArrayType
from pathways_ray.limits import MAX_DEVICE_COMPUTATIONS, MAX_EARLY_BYTES, MAX_KEPT_BYTES
from pathways_ray.transport.capabilities import tenant_mark
from pathways_ray.transport.messages import (
    AllowEarly,
    Drop,
    DropProgram,
    DropSession,
    Following,
    IslandLaunch,
    LaunchEarly,
    Recount,
)
from tests.unit.executor.run.test_core import Host, host_with_call, run
from tests.unit.helpers import VECTOR, Sketch

MARK = tenant_mark("")


def handed(results: int, *arguments: int, program: int = 1, session: int = 1, tenant: str = MARK) -> Handed:
    return Handed(session, tenant, LaunchEarly(program, arguments, results))


def host_that_takes_calls() -> Host:
    """Program 1 is a call `f`, launched once by its scheduler as launch 5 with result 500; buffer 1 is its argument."""
    host = host_with_call()
    host.handle(AllowEarly(MARK), run(5, 1))
    host.enqueued.clear()
    host.watched.clear()
    return host


def test_a_call_runs_at_once_and_is_the_launch_that_is_sent_later() -> None:
    host = host_that_takes_calls()
    host.handle(handed(600, 1))
    assert (host.enqueued, host.watched) == (["f(x)"], [(-1, ["f(x)"])])
    assert host.buffers()[600] == "f(x)"
    host.handle(run(6, 1))
    assert host.confirmed == [(-1, 6)]
    assert (host.enqueued, host.refused) == (["f(x)"], [])
    assert host.core.journal.last_sequence == 6


def test_a_call_takes_what_an_earlier_one_makes() -> None:
    host = host_that_takes_calls()
    host.handle(handed(600, 1), handed(700, 600))
    assert host.enqueued == ["f(x)", "f(f(x))"]


# --- several as one ---------------------------------------------------------------------------------------------------


def with_calls_in_a_row(host: Host, number: int, count: int = 2, kind: ArrayType = VECTOR) -> None:
    """A program of `count` calls of `f`, each of what the one before gave."""
    sketch = Sketch()
    here = sketch.slice("0.0")
    value = sketch.argument(here, type=kind)
    for _ in range(count):
        value = sketch.call("f", value, slice=here, outputs=(kind,))
    host.program(number, sketch, value)


def sent_as_one(*covers: int, program: int = 2, results: int = 602, **how: Any) -> IslandLaunch:
    return IslandLaunch(6, 1, program, (1,), results, covers=covers, **how)


def host_with_three_calls() -> Host:
    """One that has begun 600 to 602, each of the one before. Program 2 makes the same of 600's argument."""
    host = host_that_takes_calls()
    with_calls_in_a_row(host, 2, 3)
    host.handle(handed(600, 1), handed(601, 600), handed(602, 601))
    assert host.enqueued == ["f(x)", "f(f(x))", "f(f(f(x)))"]
    return host


def test_calls_that_leave_as_one_are_reported_once_and_what_lies_between_goes() -> None:
    host = host_with_three_calls()
    host.handle(Drop(1, (500,)), sent_as_one(600, 601, 602))
    assert (host.confirmed, len(host.enqueued)) == ([(-3, 6, -1, -2)], 3)
    assert host.buffers() == {1: "x", 602: "f(f(f(x)))"}
    assert host.core.early.taken == {}


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(sent_as_one(599, 600, 601, 602), id="one was not begun"),
        pytest.param(sent_as_one(600, 601, 602, 602), id="one is named twice"),
        pytest.param(sent_as_one(600, 601, results=602), id="the last one is not named"),
        pytest.param(sent_as_one(600, 601, 602, program=3), id="gives another type"),
        pytest.param(sent_as_one(600, 601, 602, cancelled=Failure("Cancelled", "late")), id="cancelled"),
    ],
)
def test_calls_that_leave_as_another_one_are_forgotten_and_that_one_runs(sent: IslandLaunch) -> None:
    host = host_with_three_calls()
    with_calls_in_a_row(host, 3, 3, ArrayType((3,), "float32"))
    host.handle(Drop(1, (500,)), sent)
    assert host.confirmed == [(599 - number, 0) for number in (600, 601, 602) if number in sent.covers]
    assert [sequence for sequence, _ in host.watched] == [-1, -2, -3, 6]
    assert host.buffers().keys() <= {1, 602}
    host.handle(DropSession(1))
    assert host.core.early.taken == {}


def test_calls_that_leave_as_one_of_a_program_that_is_gone_are_forgotten() -> None:
    host = host_with_three_calls()
    host.handle(Drop(1, (500,)), sent_as_one(600, 601, 602, program=9))
    assert host.confirmed == [(-1, 0), (-2, 0), (-3, 0)]
    assert host.buffers() == {1: "x"}


def far(host: Host, number: int, receives: bool) -> None:
    """A program that gives what `f` gives, and sends it to another island, or takes it from there."""
    sketch = Sketch()
    here, there = sketch.slice("0.0", "0.1"), sketch.slice("5.0", island=-1)
    if receives:
        results = [sketch.call("f", sketch.call("far", sketch.argument(there), slice=there), slice=here)]
    else:
        made = sketch.call("f", sketch.argument(here), slice=here)
        results = [made, sketch.call("far", made, slice=there)]
    host.plan = sketch.planned(*results).plans[0]
    host.ready(number)


@pytest.mark.parametrize("receives", [False, True])
def test_nothing_covers_what_another_island_waits_for(receives: bool) -> None:
    """A client may say so: its launch is begun nevertheless, and the other island gets its part."""
    host = host_that_takes_calls()
    far(host, 2, receives)
    host.handle(handed(600, 1), IslandLaunch(6, 1, 2, (1,), 600, covers=(600,)))
    assert host.confirmed == [(-1, 0)]


def test_a_call_that_comes_late_is_not_begun_that_left_with_others() -> None:
    """They gave what one before it made: its own number is higher."""
    host = host_that_takes_calls()
    with_calls_in_a_row(host, 2, 1)
    host.handle(handed(600, 1), IslandLaunch(6, 1, 2, (1,), 600, covers=(600, 601)), handed(601, 600))
    assert host.refused == [601]
    assert host.core.early.taken == {}


def test_a_call_that_comes_late_is_not_begun_that_was_cancelled() -> None:
    """It waited for its scheduler, which hosts heard nothing of: nobody would drop what it makes."""
    host = host_that_takes_calls()
    host.handle(Drop(1, (500, 600)), handed(600, 1), handed(601, 1))
    assert host.refused == [600]
    assert [results for _, results in host.core.early.taken] == [601]


def test_in_whatever_order_calls_are_named_the_last_one_is_reported() -> None:
    host = host_with_three_calls()
    host.handle(sent_as_one(602, 600, 601))
    assert host.confirmed == [(-3, 6, -1, -2)]


def test_calls_that_left_as_one_and_wait_with_the_scheduler_stay_as_the_controller_dies() -> None:
    host = host_with_three_calls()
    host.handle(Recount(((1, 600), (1, 601), (1, 602))), sent_as_one(600, 601, 602))
    assert (host.confirmed, len(host.enqueued)) == ([(-3, 6, -1, -2)], 3)


# --- what another host hands over -------------------------------------------------------------------------------------


def test_what_another_host_hands_over_is_the_launch_that_is_sent_later() -> None:
    """Its tenant is that of the program: hosts say nothing of it."""
    host = host_that_takes_calls()
    host.handle(handed(-10, 1, tenant=""))
    assert host.enqueued == ["f(x)"]
    host.handle(IslandLaunch(6, 1, 1, (1,), -10))
    assert (host.confirmed, host.enqueued) == ([(-1, 6)], ["f(x)"])


def test_later_launches_do_not_keep_a_host_from_what_was_numbered_before() -> None:
    host = host_that_takes_calls()
    host.handle(IslandLaunch(6, 1, 1, (1,), -20), handed(-10, 1, tenant=""))
    assert host.enqueued == ["f(x)", "f(x)"]


@pytest.mark.parametrize(
    "before",
    [
        pytest.param((IslandLaunch(6, 1, 1, (1,), -10), Drop(1, (-10,))), id="was sent"),
        pytest.param((Drop(1, (-9, -10)),), id="is never sent"),
        pytest.param(
            (
                IslandLaunch(6, 1, 1, (1,), -10),
                Drop(1, (-10,)),
                *(Drop(1, (-k,)) for k in range(11, 11 + 2 * MAX_PASSED)),
            ),
            id="was sent long ago",
        ),
        pytest.param(
            tuple(Drop(1, (-k,)) for k in range(11, 11 + 2 * MAX_PASSED)), id="was numbered before as many as are kept"
        ),
        pytest.param((AllowEarly(""),), id="is not allowed"),
        pytest.param((AllowEarly(tenant_mark("another")),), id="is of another tenant"),
    ],
)
def test_what_comes_too_late_is_not_begun_and_no_client_hears_of_it(before: tuple[Any, ...]) -> None:
    host = host_that_takes_calls()
    host.handle(*before)
    held, ran = host.buffers(), len(host.enqueued)
    host.handle(handed(-10, 1, tenant=""))
    assert (host.buffers(), len(host.enqueued), host.refused) == (held, ran, [])


def test_the_value_of_a_launch_says_what_follows() -> None:
    early, follows = EarlyLaunches(), (Following(1, 1, 7, (1,), -2), None, Following(1, 1, 8, (1,), -3))
    for value, wanted in ((-5, follows[0]), (0, follows[0]), (1, None), (2, follows[2]), (9, follows[2])):
        early.following[6] = follows
        assert early.decided(6, value) == wanted
        assert early.decided(6, value) is None
    early.following = {6: follows, 7: follows}
    early.undecided(6)
    assert list(early.following) == [7]
    early.controller_lost(())
    assert early.decided(7, 0) is None


def test_what_follows_is_told_where_it_is() -> None:
    """On this host or another one; those of a session that has ended nowhere."""

    class Others:
        def hand_over(self, host: int, following: Following) -> None:
            told.append((host, following))

    told: list[Any] = []
    early, others = EarlyLaunches(), Others()
    launches = FollowingLaunches(0, early, others, lambda session: session == 2, told.append)
    here, there, over = (Following(host, session, 7, (1,), -2) for host, session in ((0, 1), (1, 1), (0, 2)))
    for sequence, following in enumerate((here, there, over)):
        early.following[sequence] = (following,)
        launches.decided(sequence, 0)
    launches.decided(99, 0)
    mine = Handed(1, "", LaunchEarly(7, (1,), -2))
    assert told == [mine, (1, there)]
    launches.take(here)
    assert told[2:] == [mine]


# --- what is left to the scheduler ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(handed(600, 1, tenant=tenant_mark("another")), id="of another tenant"),
        pytest.param(handed(600, 1, tenant=""), id="of nobody"),
        pytest.param(handed(600, 1, program=2), id="of a program that is not here"),
        pytest.param(handed(600, 1, session=2), id="of a session without the argument"),
        pytest.param(handed(600, 999), id="with an argument that is not here"),
        pytest.param(handed(600, 2), id="with an argument of another kind"),
        pytest.param(handed(600, 3), id="with an argument that has failed"),
        pytest.param(handed(600), id="without its argument"),
        pytest.param(handed(600, 1, 1), id="with an argument too many"),
        pytest.param(handed(500, 1), id="that was sent"),
        pytest.param(handed(400, 1), id="that was called before one that was sent"),
        pytest.param(handed(700, 1), id="whose result is taken"),
    ],
)
def test_a_call_is_left_to_the_scheduler(call: Handed) -> None:
    host = host_that_takes_calls()
    host.store.put(1, 2, "long")
    host.store.put(1, 3, Failure("ExecutionError", "boom"))
    host.store.put(1, 700, "y")
    before = host.buffers()
    host.handle(call)
    assert host.refused == [call.message.results]
    assert (host.enqueued, host.buffers()) == ([], before)


def test_nothing_is_taken_before_the_scheduler_allows_it_or_after_it_forbids_it() -> None:
    host = host_with_call()
    host.handle(run(5, 1), handed(600, 1), AllowEarly(MARK), handed(700, 1), AllowEarly(""), handed(800, 1))
    assert host.refused == [600, 800]
    assert host.allowed == [MARK, ""]


def test_a_program_has_to_have_been_launched_by_the_scheduler() -> None:
    """Which says of what kinds its arguments are."""
    host = host_with_call()
    host.handle(AllowEarly(MARK), handed(600, 1))
    assert host.refused == [600]


def test_a_busy_host_takes_nothing() -> None:
    host = host_that_takes_calls()
    host.busy = MAX_UNDER_WAY
    host.handle(handed(550, 1))
    assert host.refused == []
    host.busy = MAX_UNDER_WAY + 1
    host.handle(handed(600, 1))
    assert host.refused == [600]


def test_a_host_with_a_launch_that_waits_takes_nothing() -> None:
    """What that has yet to enqueue comes first: the scheduler sent it before."""
    host = host_that_takes_calls()
    far(host, 2, receives=True)
    host.handle(IslandLaunch(6, 1, 2, (1,), 700))
    assert host.core.active
    host.handle(handed(800, 1))
    assert host.refused == [800]


def test_a_host_takes_no_more_computations_than_devices_do_without_a_wait() -> None:
    """The thread that enqueues would wait, and so would all that it does besides. One launch may have more."""
    host = host_that_takes_calls()
    for under_way, own in [
        (MAX_DEVICE_COMPUTATIONS - 1, 1),
        (MAX_DEVICE_COMPUTATIONS, 1),
        (1, MAX_DEVICE_COMPUTATIONS),
    ]:
        host.computations, host.driver.programs[1].computations = under_way, own
        host.handle(handed(600 + under_way, 1))
    assert host.refused == [600 + MAX_DEVICE_COMPUTATIONS, 601]
    host.computations = 0
    host.driver.programs[1].computations = 2 * MAX_DEVICE_COMPUTATIONS
    host.handle(handed(700, 1))
    assert 700 not in host.refused


def test_a_client_that_sends_nothing_is_given_up() -> None:
    host = host_that_takes_calls()
    host.handle(*(handed(600 + k, 1) for k in range(MAX_TAKEN + 1)))
    assert host.refused == [600 + MAX_TAKEN]
    host.handle(IslandLaunch(6, 1, 1, (1,), 600), handed(700, 1))
    assert host.refused == [600 + MAX_TAKEN]


@pytest.mark.parametrize(("donated", "kept_bytes"), [((), 0), ((0,), 0), ((0,), MAX_KEPT_BYTES)])
def test_only_programs_that_take_the_memory_of_nothing_begin_early(donated: tuple[int, ...], kept_bytes: int) -> None:
    host, sketch = Host(), Sketch()
    here = sketch.slice("0.0")
    made = sketch.call("f", sketch.argument(here), slice=here, donated=donated)
    host.program(1, sketch, made, kept_bytes=kept_bytes)
    host.store.put(1, 1, "x")
    host.handle(AllowEarly(MARK), run(5, 1), handed(600, 1))
    assert host.refused == ([600] if donated and not kept_bytes else [])


@pytest.mark.parametrize(
    ("size", "specs", "small"),
    [(MAX_EARLY_BYTES // 16, "", True), (MAX_EARLY_BYTES // 8, "", False), (MAX_EARLY_BYTES // 8, "x", True)],
)
def test_only_programs_of_small_results_begin_early(size: int, specs: str, small: bool) -> None:
    """Whatever its client makes of that: there may be no room for them. Each of the two devices counts."""
    host, sketch = Host(), Sketch()
    here = sketch.slice("0.0", "0.1")
    made = sketch.call(
        "f", sketch.argument(here), slice=here, outputs=[ArrayType((size,), "uint64")], output_specs=specs
    )
    host.program(1, sketch, made)
    host.store.put(1, 1, "x")
    host.handle(AllowEarly(MARK), run(5, 1), handed(600, 1))
    assert host.refused == ([] if small else [600])


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(IslandLaunch(6, 1, 1, (2,), 600), id="with another argument"),
        pytest.param(IslandLaunch(6, 1, 1, (1,), 600, cancelled=Failure("Cancelled", "late")), id="cancelled"),
    ],
)
def test_a_launch_that_is_sent_otherwise_than_it_was_handed_over_is_what_counts(sent: IslandLaunch) -> None:
    host = host_that_takes_calls()
    host.store.put(1, 2, "z")
    host.handle(handed(600, 1), sent)
    assert host.confirmed == [(-1, 0)]
    assert [sequence for sequence, _ in host.watched] == [-1, 6]
    assert host.buffers()[600] != "f(x)"


def with_two_results(host: Host, number: int, there: str = "0.0") -> None:
    """A program of two calls of one argument, with a result each; known by a launch, which leaves nothing behind."""
    sketch = Sketch()
    here = sketch.slice(there)
    x = sketch.argument(here)
    host.program(number, sketch, sketch.call("g", x, slice=here), sketch.call("h", x, slice=here))
    host.handle(run(5, 1, program=number), Drop(1, (500, 501)))
    host.enqueued.clear()


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        pytest.param((run(6, 1, results=600),), {600: "f(x)"}, id="another program is sent"),
        pytest.param((DropProgram(1, 2), run(6, 1, results=600)), {600: "f(x)"}, id="its program is gone"),
        pytest.param((Drop(1, (600,)),), dict[int, str](), id="fewer results are dropped"),
    ],
)
def test_what_an_early_launch_made_goes_with_it(gone: tuple[Any, ...], left: dict[int, str]) -> None:
    """The controller knows, and charges for, what those launches make that it sends: nothing else may stay."""
    host = host_that_takes_calls()
    with_two_results(host, 2)
    host.handle(Drop(1, (500,)), AllowEarly(MARK), handed(600, 1, program=2))
    assert host.buffers() == {1: "x", 600: "g(x)", 601: "h(x)"}
    host.handle(*gone)
    assert host.buffers() == {1: "x"} | left


@pytest.mark.parametrize("gone", [Drop(1, (600,)), DropSession(1), Recount()])
def test_a_call_that_is_never_sent_is_not_reported(gone: Any) -> None:
    host = host_that_takes_calls()
    host.handle(handed(600, 1), gone)
    assert host.confirmed == [(-1, 0)]
    assert host.core.early.taken == {}


def test_a_call_that_waits_with_the_scheduler_as_the_controller_dies_is_not_begun_once_more() -> None:
    """The scheduler sends it to the next controller's host, as it does with all that it has; of two calls one waits."""
    host = host_that_takes_calls()
    host.handle(handed(600, 1), handed(700, 1))
    held, ran = host.buffers(), len(host.enqueued)
    host.handle(Recount(((1, 600),)))
    assert host.confirmed == [(-2, 0)]
    host.handle(run(6, 1))
    assert (host.buffers(), len(host.enqueued)) == (held, ran)
    assert host.confirmed == [(-2, 0), (-1, 6)]


@pytest.mark.parametrize("results", [600, -10])
def test_nothing_is_kept_of_a_session_that_has_ended(results: int) -> None:
    """Neither of what began before its end, nor of what comes behind it, with all that it takes."""
    host = host_that_takes_calls()
    late = Handed(1, MARK, LaunchEarly(1, (0,), results, ((0, bytes(VECTOR.nbytes)),)))
    launch = IslandLaunch(6, 1, 1, (1,), results - 1, cancelled=Failure("Cancelled", "its session has ended"))
    host.handle(handed(results, 1), DropSession(1), late, launch)
    early = host.core.early
    assert (early.taken, early._newest, early._passed) == ({}, {}, {})


def test_branches_begin_early_under_the_numbers_that_another_controller_gives_again() -> None:
    host = host_that_takes_calls()
    host.handle(handed(-10, 1, tenant=""), run(6, 1, results=-10), Drop(1, (-10,)), SchedulerFound(), Recount())
    host.handle(AllowEarly(MARK), handed(-10, 1, tenant=""))
    assert [sequence for sequence, _ in host.watched] == [-1, -2]


def test_a_branch_that_waits_with_the_scheduler_begins_once_whatever_comes_of_the_controller() -> None:
    """The next one gives its numbers again, but not those that wait: what tells of one of them comes late."""
    host = host_that_takes_calls()
    host.handle(handed(-10, 1, tenant=""), Recount(((1, -10),)), run(6, 1, results=-10))
    host.handle(AllowEarly(MARK), handed(-10, 1, tenant=""), Drop(1, (-10, -4)), handed(-4, 1, tenant=""))
    assert (host.confirmed, [sequence for sequence, _ in host.watched]) == ([(-1, 6)], [-1])


def test_a_lost_scheduler_allows_nothing() -> None:
    host = host_that_takes_calls()
    host.handle(handed(600, 1), SchedulerFound(), handed(700, 1))
    assert host.refused == [700]
    host.handle(run(6, 1))
    assert host.confirmed == [(-1, 6)]


def test_a_report_waits_for_the_number_and_the_number_for_the_report() -> None:
    reports: EarlyReports[str] = EarlyReports()
    assert reports.ended(-1, "one") == 0
    assert reports.sent(-1, 5) == "one"
    assert (reports.sequence_of(-2), reports.sent(-2, 6), reports.sequence_of(-2)) == (-2, None, 6)
    assert reports.ended(-2, "two") == 6
    assert (reports.sent(-3, 0), reports.ended(-3, "three")) == (None, 0)
    assert len(reports) == 0
