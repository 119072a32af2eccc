"""Cancelling: a launch that waits ends at once; one that an island has begun with is marked."""

from __future__ import annotations

from typing import Any

from pathways_ray.controller.cancellation import CANCELLED, CANCELLED_LATE
from pathways_ray.transport.messages import (
    Cancel,
    CancelLaunch,
    CancelRefused,
    Completed,
    Drop,
    IslandLaunchFailed,
    LaunchFailed,
)
from tests.unit.controller.harness import Harness, failure_of, program_over, to_client, to_island


def cancelled(front: Harness, launch: int) -> list[Any]:
    session = front.launches.sessions[1]
    return front.checked(front.launches.cancellation.cancel(session, Cancel(launch)))


def serving(max_in_flight: int = 100, ready: bool = True) -> Harness:
    front = Harness(max_in_flight=max_in_flight)
    front.register(program_over(1), 1, ready=ready)
    front.put(1)
    return front


def test_a_launch_behind_others_ends_at_once_and_those_that_take_from_it_too() -> None:
    """1. One launch may be in flight; two wait, the second takes from the first. 2. The first is cancelled."""
    front = serving(max_in_flight=1)
    for launch, argument in ((1, 1), (2, 1), (3, 3)):
        front.launch(launch, (argument,), launch + 1)
    assert to_client(cancelled(front, 2)) == [LaunchFailed(2, CANCELLED), LaunchFailed(3, CANCELLED)]
    assert to_client(front.done(0, 1)) == [Completed((1,), (0,))]
    assert front.launches.backlog(1) == 0


def test_a_launch_whose_program_is_compiled_ends_at_once() -> None:
    front = serving(ready=False)
    front.launch(1, (1,), 2)
    front.launch(2, (2,), 3)
    assert to_client(cancelled(front, 1)) == [LaunchFailed(1, CANCELLED), LaunchFailed(2, CANCELLED)]
    assert front.launches.backlog(1) == 0


def test_what_waits_behind_a_deferred_launch_goes_when_that_is_cancelled() -> None:
    """
    1. One launch may be in flight, and is. Another one waits for its compilation, a third for room.
    2. The second one's program is ready: now it waits for room as well, and the third behind it.
    3. It is cancelled, the first one ends: the third one goes.
    """
    front = serving(max_in_flight=1)
    slow = front.register(program_over(3, key=2), 2, ready=False)
    front.put(2, slice=3)
    front.launch(1, (1,), 3)
    front.launch(2, (2,), 4, program=2)
    front.launch(3, (1,), 5)
    front.ready(slow, 3)
    assert to_client(cancelled(front, 2)) == [LaunchFailed(2, CANCELLED)]
    assert to_client(front.done(0, 1)) == [Completed((1,), (0,))]
    assert to_client(front.done(0, 2)) == [Completed((3,), (0,))]


def test_the_island_ends_a_launch_in_its_queue() -> None:
    front = serving()
    front.launch(1, (1,), 2)
    assert to_island(cancelled(front, 1), 0) == [CancelLaunch(1, CANCELLED)]
    commands = front.checked(front.launches.run_failed(0, IslandLaunchFailed(1, CANCELLED)))
    assert failure_of(commands) == CANCELLED


def test_a_launch_that_has_begun_is_marked() -> None:
    """
    1. The island says that its hosts have it. The client hears of it, what it makes is dropped behind it, and counts
       as failed for all that is called later.
    2. It is over: its outcome is that it was cancelled.
    """
    front = serving()
    front.launch(1, (1,), 2)
    cancelled(front, 1)
    commands = front.checked(front.launches.cancellation.begun(1))
    assert to_client(commands) == [CancelRefused(1, CANCELLED_LATE)]
    assert to_island(commands, 0) == [Drop(1, (2,))]
    assert front.checked(front.launches.cancellation.begun(1)) == [], "said by a second island"
    assert failure_of(front.launch(2, (2,), 3)) == CANCELLED_LATE
    assert failure_of(front.done(0, 1)) == CANCELLED_LATE


def test_a_launch_that_is_over_or_never_was_cannot_be_cancelled() -> None:
    front = serving()
    front.launch(1, (1,), 2)
    front.done(0, 1)
    for launch in (1, 7):
        assert to_client(cancelled(front, launch)) == [CancelRefused(launch, CANCELLED_LATE)]
    assert front.checked(front.launches.cancellation.begun(7)) == []


def test_islands_hear_once_of_each_launch_however_often_it_is_cancelled() -> None:
    front = serving()
    for launch in range(1, 5):
        front.launch(launch, (launch,), launch + 1)
    told = to_island(cancelled(front, 1), 0, CancelLaunch)
    assert [message.sequence for message in told] == [1, 2, 3, 4]
    assert cancelled(front, 1) == cancelled(front, 3) == []


def test_a_launch_that_takes_a_result_many_times_is_one_consumer() -> None:
    """Others would be looked through for it, as often, by whatever ends or cancels the launch before."""
    front = serving()
    front.register(program_over(1, key=2, arguments=100), 2)
    front.launch(1, (1,), 2)
    front.launch(2, (2,) * 100, 3, program=2)
    assert front.launches.in_flight[1].consumers == [2]
    assert front.launches.in_flight[2].producers == (1,)
