"""Buffers, slices and sessions: what is freed, and when."""

from __future__ import annotations

import pytest

from pathways_ray.controller.buffers import UPLOAD_LIMIT_S
from pathways_ray.controller.state import SendIsland
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport.messages import (
    BuffersLost,
    Drop,
    DropProgram,
    DropSession,
    Holds,
    HostUp,
    IslandLaunch,
    LaunchFailed,
    Program,
    Stored,
)
from tests.unit.controller.harness import (
    SLICES,
    Harness,
    completed,
    program_over,
    release_slice,
    to_client,
    to_island,
)
from tests.unit.helpers import VECTOR


def test_freed_buffers_are_dropped_on_the_islands_that_hold_them() -> None:
    front = Harness()
    front.put(1, slice=1)
    front.put(2, slice=2)
    front.put(3, slice=1)
    commands = front.free(1, 2, 3, 99)
    assert to_island(commands, 0) == [Drop(1, (1, 3))]
    assert to_island(commands, 1) == [Drop(1, (2,))]
    assert front.free(1) == []
    assert front.buffers() == set()


def test_an_upload_that_its_client_never_told_of_is_dropped_where_it_came_to() -> None:
    """Ctrl-C came between the two. Its number may be on the way to hosts as one to drop, and is not used again."""
    front = Harness()
    assert front.stored(0, 1, 4) == front.stored(1, 1, 4) == front.stored(2, 2, 2) == []
    commands = front.free(1, 2)
    assert to_island(commands, 0) == [Drop(1, (1,))]
    assert to_island(commands, 1) == [Drop(1, (2,))]
    (lost,) = to_client(front.put(1, 4, arrives=False))
    assert isinstance(lost, BuffersLost)


def test_a_result_freed_before_it_is_there_is_dropped_behind_its_launch() -> None:
    front = Harness()
    front.register(program_over(1), 1)
    front.put(1)
    sent = to_island(front.launch(1, (1,), 2), 0) + to_island(front.free(1, 2), 0)
    assert [type(message) for message in sent] == [IslandLaunch, Drop]
    assert front.done(0, 1) == completed(1)
    assert front.buffers() == set()


def test_arrays_stay_on_a_released_slice_until_they_are_freed() -> None:
    front = Harness()
    front.register(program_over(1), 1)
    front.put(1)
    assert release_slice(front, SLICES[0])
    assert not release_slice(front, SLICES[0])
    assert len(to_island(front.launch(1, (1,), 2), 0, IslandLaunch)) == 1
    assert to_island(front.free(1, 2), 0) == [Drop(1, (1, 2))]


def test_closing_a_session_frees_all_it_held() -> None:
    """
    1. A session has a program on islands 0 and 1, a launch in flight and one that waits.
    2. It closes: every island drops what it has of the session.
    3. Reports about its launch come in late; no client hears of them. The program is dropped where it was sent.
    """
    front = Harness(max_in_flight=1, sessions=(1, 2))
    program = front.register(program_over(1, 2), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    front.launch(2, (1,), 3)
    commands = front.checked(front.launches.close_session(1))
    assert [to_island(commands, island, DropSession) for island in (0, 1, 2)] == [[DropSession(1)]] * 3
    assert not any(to_island(commands, island, DropProgram) for island in (0, 1, 2))
    assert front.launches.close_session(1) == []
    assert front.done(0, 1) == []
    commands = front.done(1, 1)
    assert commands == [SendIsland(island, DropProgram(1, program.key)) for island in (0, 1)]
    assert front.launches.in_flight == {}
    assert list(front.launches.sessions) == [2]


def test_programs_of_a_closed_session_are_not_sent_to_hosts_that_come_up() -> None:
    front = Harness(sessions=(1, 2))
    front.register(program_over(1), 1)
    front.launches.close_session(1)
    front.down(0)
    assert to_island(front.up(0, epoch=2), 0, Program) == []


# --- uploads ----------------------------------------------------------------------------------------------------------


def test_a_launch_takes_an_upload_once_all_hosts_have_it() -> None:
    """
    1. Slice 4 lies on hosts 0 and 1. A launch takes an upload that only host 0 has reported.
    2. A launch without it, on another island, passes. Host 1 reports: the first one goes.
    """
    front = Harness()
    front.register(program_over(4), 1)
    front.register(program_over(2, key=2), 2)
    front.put(1, 4, arrives=False)
    front.put(2, slice=2)
    front.stored(0, 1, 4)
    assert front.launch(1, (1,), 3) == []
    assert len(to_island(front.launch(2, (2,), 4, program=2), 1)) == 1
    assert [run.arguments for run in to_island(front.stored(1, 1, 4), 0)] == [(1,)]


def test_hosts_may_report_an_upload_before_its_client_does() -> None:
    front = Harness()
    front.register(program_over(4), 1)
    front.stored(0, 1, 4)
    front.stored(1, 1, 4)
    front.put(1, 4, arrives=False)
    assert len(to_island(front.launch(1, (1,), 2), 0)) == 1


def test_an_upload_to_some_hosts_only_fails_the_launch_in_time_and_nothing_else() -> None:
    """
    1. A client uploads three arrays to host 0 only, and launches with each of them, one after the other.
    2. After the limit all three fail, not one after the other. Another session's launch went at once.
    """
    front = Harness(sessions=(1, 2))
    front.register(program_over(4), 1)
    front.register(program_over(4, key=2, session=2), 1)
    for number in (1, 2, 3):
        front.put(number, 4, arrives=False)
        front.stored(0, number, 4)
        assert front.launch(number, (number,), 10 + number) == []
    front.put(1, 4, session=2)
    assert len(to_island(front.launch(1, (1,), 2, session=2), 0)) == 1
    assert front.tick(UPLOAD_LIMIT_S) == []
    commands = front.tick(UPLOAD_LIMIT_S + 1.0)
    failed = to_client(commands, kind=LaunchFailed)
    assert [(message.launch, message.failure.kind) for message in failed] == [(k, "BufferLost") for k in (1, 2, 3)]
    assert "buffer 1 has not come to host 1 in 20 s" in failed[0].failure.message
    assert {Drop(1, (number,)) for number in (1, 2, 3)} <= set(to_island(commands, 0, Drop))


def test_an_upload_that_is_not_what_its_client_said_fails_what_takes_it() -> None:
    front = Harness()
    front.register(program_over(4), 1)
    front.put(1, 4, arrives=False)
    front.stored(0, 1, 4)
    assert front.launch(1, (1,), 2) == []
    failure = to_client(front.stored(1, 1, 4, kind=ArrayType((3,), "float32")), kind=LaunchFailed)[0].failure
    assert failure.kind == "WireError"
    assert "buffer 1 was said to be" in failure.message


def test_what_a_lost_host_had_reported_does_not_count() -> None:
    """The client says late what it uploads: host 0 has restarted since it reported, and island 0 with it."""
    front = Harness()
    front.register(program_over(4), 1)
    front.stored(0, 1, 4)
    front.stored(1, 1, 4)
    for host in (0, 1):
        front.down(host)
        front.up(host, epoch=2)
    front.put(1, 4, arrives=False)
    front.ready(front.launches.programs[1], 0)
    front.ready(front.launches.programs[1], 1)
    assert to_island(front.launch(1, (1,), 2), 0, IslandLaunch) == []


def test_what_hosts_had_reported_counts_once_they_say_it_to_the_successor_of_their_scheduler() -> None:
    """The client says only then what it uploads; one of the hosts does not have it any more."""
    front = Harness()
    for host in (0, 1):
        front.stored(host, 1, 4)
    front.checked(front.launches.scheduler_lost([front.launches.hosts[0], front.launches.hosts[1]], "it is gone"))
    front.put(1, 4, arrives=False, epochs={0: 1, 1: 1})
    arriving = front.launches.sessions[1].arriving
    assert arriving[1].hosts == {0, 1}
    for host, uploads in ((0, (Stored(0, 1, 1, 4, VECTOR, ()),)), (1, ())):
        holds = Holds({1: (1,)} if uploads else {}, (), uploads)
        up = HostUp(host, 1, "t", "d", 2, 100, holds=holds)
        assert front.launches.host_back(0, up, holds, {}) is not None
        assert arriving[1].hosts == {1}


@pytest.mark.parametrize("is_back", [False, True])
def test_an_upload_to_a_process_that_has_ended_fails_at_once(is_back: bool) -> None:
    """Host 0 took the array and died, and what it reported with it, before its client's message came."""
    front = Harness()
    front.register(program_over(4), 1)
    front.down(0)
    if is_back:
        front.up(0, epoch=2)
    (lost,) = to_client(front.put(1, 4, arrives=False, epochs={0: 1, 1: 1}), kind=BuffersLost)
    assert lost.buffers == (1,)
    assert "buffer 1 went to host 0 just before that was lost" in lost.failure.message
    (failed,) = to_client(front.launch(1, (1,), 2), kind=LaunchFailed)
    assert failed.failure.kind == "BufferLost"
    if not is_back:
        front.up(0, epoch=2)
    assert to_client(front.put(3, 4, epochs={0: 2, 1: 1}), kind=BuffersLost) == []


def test_a_launch_whose_argument_was_lost_does_not_wait_behind_one_that_waits_for_the_host() -> None:
    front = Harness()
    front.register(program_over(2), 1)
    front.register(program_over(1, 2, key=2), 2)
    front.put(1, 2)
    front.put(2, 1)
    front.down(2)
    front.put(3, 2, arrives=False)
    assert front.launch(1, (2,), 10, program=2) == []
    (failed,) = to_client(front.launch(2, (1,), 11), kind=LaunchFailed)
    assert (failed.launch, failed.failure.kind) == (2, "BufferLost")
    assert front.launch(3, (3,), 12) == []


def test_a_number_whose_upload_was_freed_on_the_way_is_not_used_again() -> None:
    """The removal of the first array may come to a host after the second one, which would then be gone there."""
    front = Harness()
    front.register(program_over(4), 1)
    front.put(1, 4, arrives=False)
    front.free(1)
    (lost,) = to_client(front.put(1, 4, arrives=False))
    assert isinstance(lost, BuffersLost)
    assert "its number cannot be used again" in lost.failure.message
    front.put(2, 4)
    front.free(2)
    assert front.put(2, 4) == [], "this one had arrived"


def test_an_upload_that_differs_between_hosts_that_hold_the_same_part_fails_what_takes_it() -> None:
    """
    1. Hosts 0 and 1 hold the same part of an array; its client sent one of them other bytes. Neither alone is wrong.
    2. What takes the array fails with the reason, and both hosts drop it. Another one, with equal bytes, is taken.
    """
    front = Harness()
    front.register(program_over(4), 1)
    front.put(1, 4, arrives=False)
    front.stored(0, 1, 4, digests={0: b"these"})
    assert front.launch(1, (1,), 2) == []
    commands = front.stored(1, 1, 4, digests={0: b"others"})
    failure = to_client(commands, kind=LaunchFailed)[0].failure
    assert failure.kind == "WireError"
    assert "hosts 0 and 1 hold the same part of it" in failure.message
    assert Drop(1, (1,)) in to_island(commands, 0, Drop)
    front.put(3, 4, arrives=False)
    front.stored(0, 3, 4, digests={0: b"these"})
    front.stored(1, 3, 4, digests={0: b"these"})
    assert len(to_island(front.launch(2, (3,), 4), 0, IslandLaunch)) == 1


def test_hosts_that_report_before_the_client_does_are_compared_too() -> None:
    front = Harness()
    front.register(program_over(4), 1)
    front.stored(0, 1, 4, digests={0: b"these", 1: b"same"})
    front.stored(1, 1, 4, digests={0: b"others", 1: b"same"})
    (lost,) = to_client(front.put(1, 4, arrives=False), kind=BuffersLost)
    assert "hold the same part of it" in lost.failure.message


def test_uploads_that_are_freed_together_are_each_forgotten() -> None:
    """
    1. A host has one of which the client has not told, and the client tells of one that the host does not have yet.
    2. It frees both at once. What the host says of the second one later finds nothing, and is dropped there.
    """
    front = Harness()
    front.stored(0, 1, 1)
    front.put(2, 1, arrives=False)
    assert to_island(front.free(1, 2), 0, Drop) == [Drop(1, (1, 2))]
    session = front.launches.sessions[1]
    assert (session.early, session.arriving) == ({}, {})
    assert front.stored(0, 2, 1) == [SendIsland(0, Drop(1, (2,)))]
