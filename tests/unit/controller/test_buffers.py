"""Buffers, slices and sessions: what is freed, and when."""

from __future__ import annotations

from pathways_ray.transport.messages import Drop, DropProgram, DropSession, IslandLaunch, Program
from tests.unit.controller.harness import SLICES, Harness, completed, program_over, release_slice, to_island


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
    2. It closes: every island drops what it has of the session, the program is dropped where it was sent.
    3. Reports about its launch come in late; nobody hears of them.
    """
    front = Harness(max_in_flight=1, sessions=(1, 2))
    program = front.register(program_over(1, 2), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    front.launch(2, (1,), 3)
    commands = front.checked(front.launches.close_session(1))
    assert [to_island(commands, island, DropSession) for island in (0, 1, 2)] == [[DropSession(1)]] * 3
    assert [to_island(commands, island, DropProgram) for island in (0, 1, 2)] == [
        [DropProgram(1, program.key)],
        [DropProgram(1, program.key)],
        [],
    ]
    assert front.launches.close_session(1) == []
    assert front.done(0, 1) == []
    assert front.failed(1, 1) == []
    assert front.launches.in_flight == {}
    assert list(front.launches.sessions) == [2]


def test_programs_of_a_closed_session_are_not_sent_to_hosts_that_come_up() -> None:
    front = Harness(sessions=(1, 2))
    front.register(program_over(1), 1)
    front.launches.close_session(1)
    front.down(0)
    assert to_island(front.up(0, epoch=2), 0, Program) == []
