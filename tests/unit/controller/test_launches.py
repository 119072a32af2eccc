"""Launches and buffers: what the controller sends for what it is told. `front.py` has the cluster tests start from."""

from __future__ import annotations

import pytest

from pathways_ray.controller.launches import Command, SendClient
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.errors import Failure
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport.messages import (
    Completed,
    Drop,
    DropProgram,
    DropSession,
    Launch,
    LaunchFailed,
    Program,
    Put,
    Run,
    RunFailed,
)
from tests.unit.controller.front import (
    BOOM,
    SLICES,
    Front,
    program_over,
    release_slice,
    sketch_with_slices,
    to_client,
    to_island,
)


def completed(*launches: int, session: int = 1) -> list[Command]:
    return [SendClient(session, Completed(launches))]


def failure_of(commands: list[Command]) -> Failure:
    (message,) = to_client(commands)
    assert isinstance(message, LaunchFailed)
    return message.failure


# --- the life of a launch ---------------------------------------------------------------------------------------------


def test_a_launch_goes_to_its_island_and_completes_once() -> None:
    """
    1. The client puts buffer 1 and launches with it; the result will be buffer 2.
    2. The island gets one Run, with the sequence number of the cluster.
    3. The island reports; the client hears it once, and a second report changes nothing.
    """
    front = Front()
    program = front.register(program_over(1), 1)
    front.put(1)
    commands = front.launch(7, (1,), 2)
    assert to_island(commands, 0) == [Run(1, 1, program.key, (1,), 2)]
    assert len(commands) == 1
    assert front.done(0, 1) == completed(7)
    assert front.done(0, 1) == []
    assert front.failed(0, 1) == []
    assert front.buffers() == {1, 2}


def test_a_result_is_an_argument_before_it_is_there() -> None:
    front = Front()
    front.register(program_over(1), 1)
    front.put(1)
    runs = [to_island(front.launch(k, (k,), k + 1), 0)[0] for k in (1, 2, 3)]
    assert [run.sequence for run in runs] == [1, 2, 3]
    assert [(run.arguments, run.results) for run in runs] == [((1,), 2), ((2,), 3), ((3,), 4)]


def test_a_launch_on_two_islands_ends_when_both_have_reported() -> None:
    front = Front()
    front.register(program_over(1, 2), 1)
    front.put(1)
    commands = front.launch(1, (1,), 2)
    assert to_island(commands, 0, Run) == to_island(commands, 1, Run) != []
    assert to_island(commands, 2) == []
    assert front.done(1, 1) == []
    assert front.done(1, 1) == [], "the same island counts once"
    assert front.done(0, 1) == completed(1)


def test_the_first_report_of_an_island_is_its_report() -> None:
    front = Front()
    front.register(program_over(1, 2), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    assert front.done(1, 1) == []
    assert front.failed(1, 1) == []
    assert front.done(0, 1) == completed(1)


def test_completions_that_come_together_leave_together() -> None:
    front = Front(sessions=(1, 2))
    front.register(program_over(1), 1)
    front.register(program_over(1, key=2, session=2), 1)
    for session in (1, 2):
        front.put(1, session=session)
        for k in (1, 2):
            front.launch(10 * session + k, (1,), 1 + k, session=session)
    commands = front.done(0, 1, 3, 2)
    assert commands == completed(11, 12) + completed(21, session=2)


def test_a_sequence_nobody_knows_is_ignored() -> None:
    front = Front()
    assert front.done(0, 99) == []
    assert front.failed(0, 99) == []


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_launches_that_do_not_fit_fail_with_the_reason_and_send_nothing() -> None:
    front = Front()
    front.register(program_over(1, arguments=2), 1)
    front.put(1)
    front.put(2, slice=2)
    assert failure_of(front.launch(1, (1,), 10)) == Failure(
        "GraphError", "program '1' takes 2 buffers, the launch gives 1"
    )
    assert failure_of(front.launch(2, (1, 99), 20)).message == "buffer 99 of this session does not exist (deleted?)"
    assert failure_of(front.launch(3, (1, 2), 30)) == Failure(
        "GraphError", "program '1' takes uint64[8] on slice 1; buffer 2 is uint64[8] on slice 2"
    )
    assert failure_of(front.launch(4, (), 40, program=9)).kind == "WireError"
    assert front.launches.in_flight == {}


def test_a_session_names_only_its_own_buffers() -> None:
    front = Front(sessions=(1, 2))
    front.register(program_over(1), 1)
    front.put(5, session=2)
    assert failure_of(front.launch(1, (5,), 6)).kind == "BufferDeleted"
    assert front.free(5) == []
    assert front.buffers(2) == {5}


@pytest.mark.parametrize("array", [ArrayType((8,), "nonsense"), ArrayType((-8,), "float32"), ArrayType((7,), "int8")])
def test_a_put_of_something_that_is_no_array_of_the_slice_makes_no_buffer(array: ArrayType) -> None:
    """Everybody's status adds up the bytes of all buffers: one that has no size would end it."""
    front = Front()
    front.checked(front.launches.from_client(1, Put(1, 1, array, (("x",),))))
    assert front.buffers() == set()


def test_a_put_on_a_slice_the_session_never_had_makes_no_buffer() -> None:
    front = Front()
    front.put(1, slice=99)
    assert front.buffers() == set()


def test_a_program_that_could_not_be_planned_fails_its_launches() -> None:
    front = Front()
    refused = Failure("GraphError", "no such slice")
    front.register(PlannedProgram(1, 1, "p", failure=refused), 1)
    assert failure_of(front.launch(1, (), 5)) == refused


def test_a_program_that_does_not_compile_fails_waiting_and_later_launches_and_their_consumers() -> None:
    """
    1. The program is not compiled yet: two launches wait, the second one consumes what the first one makes.
    2. A host reports that it cannot compile it. Both fail with what the host said, and so does every later one.
    """
    front = Front()
    program = front.register(program_over(1), 1, ready=False)
    front.put(1)
    front.launch(1, (1,), 2)
    front.launch(2, (2,), 3)
    refused = Failure("CompileError", "too big", host=0)
    assert to_client(front.ready(program, 0, refused)) == [LaunchFailed(1, refused), LaunchFailed(2, refused)]
    assert failure_of(front.launch(3, (1,), 4)) == refused
    front.free(2, 3, 4)
    assert front.buffers() == {1}


def test_a_failed_value_fails_its_consumers_with_the_same_cause() -> None:
    front = Front()
    front.register(program_over(1), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    assert to_client(front.failed(0, 1)) == [LaunchFailed(1, BOOM)]
    assert failure_of(front.launch(2, (2,), 3)) == BOOM
    assert failure_of(front.launch(3, (3,), 4)) == BOOM


# --- the order of a session -------------------------------------------------------------------------------------------


def test_launches_wait_for_their_program_and_leave_in_order() -> None:
    """
    1. Program 1 is on two hosts and not compiled on either; program 2 is ready.
    2. Launch 1 of program 1, then launch 2 of program 2, a put and a free: all wait behind launch 1.
    3. One host is ready: still nothing. The other one is: all leave, in the order of the calls.
    """
    front = Front()
    waited_for = front.register(program_over(1, 2), 1, ready=False)
    front.register(program_over(1, key=2), 2)
    front.put(1)
    assert front.launch(1, (1,), 10, program=1) == []
    assert front.launch(2, (1,), 20, program=2) == []
    assert front.put(30) == []
    assert front.free(1) == []
    assert front.buffers() == {1}
    assert front.ready(waited_for, 0) == []
    commands = front.ready(waited_for, 2)
    assert [type(m) for m in to_island(commands, 0)] == [Run, Run, Drop]
    assert [m.sequence for m in to_island(commands, 0, Run)] == [1, 2]
    assert front.buffers() == {10, 20, 30}


def test_one_session_waiting_does_not_hold_up_another() -> None:
    front = Front(sessions=(1, 2))
    front.register(program_over(1), 1, ready=False)
    front.register(program_over(1, key=2, session=2), 1)
    for session in (1, 2):
        front.put(1, session=session)
    assert front.launch(1, (1,), 2) == []
    assert len(to_island(front.launch(1, (1,), 2, session=2), 0, Run)) == 1


def test_a_session_has_a_limited_number_of_launches_in_flight() -> None:
    """
    1. Two may be in flight: of four launches two leave.
    2. Each outcome, good or bad, lets the next one go.
    """
    front = Front(max_in_flight=2)
    front.register(program_over(1), 1)
    front.put(1)
    sent = [len(to_island(front.launch(k, (1,), k + 1), 0, Run)) for k in (1, 2, 3, 4)]
    assert sent == [1, 1, 0, 0]
    assert [m.sequence for m in to_island(front.done(0, 2), 0, Run)] == [3]
    assert [m.sequence for m in to_island(front.failed(0, 1), 0, Run)] == [4]
    assert front.done(0, 3, 4) == completed(3, 4)


def test_a_launch_that_fails_at_once_does_not_wait_for_room() -> None:
    front = Front(max_in_flight=1)
    front.register(program_over(1), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    assert failure_of(front.launch(2, (99,), 3)).kind == "BufferDeleted"


# --- root causes ------------------------------------------------------------------------------------------------------


def test_a_failed_launch_waits_for_the_launches_it_consumes_from() -> None:
    """
    1. Launch 1 runs on islands 0 and 1; launch 2 consumes its result on island 1.
    2. Island 1 reports that launch 2 failed, without saying why. Nothing is told yet.
    3. Island 0 reports why launch 1 failed, island 1 that its part is over. Both have the same cause.
    """
    front = Front()
    front.register(program_over(1, 2), 1)
    front.register(program_over(2, key=2), 2)
    front.put(1)
    front.launch(1, (1,), 2)
    front.launch(2, (2,), 3, program=2)
    assert front.failed(1, 2, Failure("BufferLost", "no input", "f0")) == []
    assert front.failed(0, 1) == []
    assert to_client(front.done(1, 1)) == [LaunchFailed(1, BOOM), LaunchFailed(2, BOOM)]


def test_a_failure_of_its_own_is_kept_when_the_producers_did_well() -> None:
    front = Front()
    front.register(program_over(1), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    front.launch(2, (2,), 3)
    assert front.failed(0, 2) == []
    commands = front.done(0, 1)
    assert to_client(commands) == [Completed((1,)), LaunchFailed(2, BOOM)]


def test_the_failure_that_names_a_node_is_the_cause() -> None:
    front = Front()
    front.register(program_over(1, 2), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    front.failed(1, 1, Failure("ExecutionError", "the peer sent nothing"))
    assert failure_of(front.failed(0, 1)) == BOOM


def test_a_long_chain_of_failed_launches_ends_whole() -> None:
    """
    1. 1,000 launches, each consuming the one before, run on islands 0 and 1 at once.
    2. Island 1 reports all of them failed; none can be told before the first one's cause is known.
    3. Island 0 reports the first one, then the rest.
    """
    count = 1000
    front = Front(max_in_flight=count)
    sketch = sketch_with_slices("both")
    x = sketch.argument(1)
    y = sketch.call("f", x, slice=1)
    sketch.call("g", x, slice=2)
    front.register(sketch.planned(y, sketch.call("g", x, slice=2)), 1)
    front.put(0)
    for k in range(1, count + 1):
        front.launches.from_client(1, Launch(k, 1, (2 * k - 2,), 2 * k))
    for k in range(1, count + 1):
        assert front.launches.run_failed(1, RunFailed(k, BOOM)) == []
    for k in range(count, 1, -1):
        assert front.launches.run_failed(0, RunFailed(k, BOOM)) == []
    failed = to_client(front.failed(0, 1))
    assert [message.launch for message in failed] == list(range(1, count + 1))


def test_many_launches_released_at_once_leave_whole() -> None:
    """
    1. Launch 1 waits for its program; 2,000 launches of a program without any work wait behind it.
    2. The program is ready: all leave, and those without work are complete at once.
    """
    front = Front()
    program = front.register(program_over(1), 1, ready=False)
    front.register(sketch_with_slices("nothing").planned(key=2), 2)
    front.put(1)
    front.launch(1, (1,), 2)
    for k in range(2, 2002):
        front.launches.from_client(1, Launch(k, 2, (), 10 * k))
    commands = front.ready(program, 0)
    assert [m.launches[0] for m in to_client(commands, kind=Completed)] == list(range(2, 2002))


# --- buffers, slices, sessions ----------------------------------------------------------------------------------------


def test_freed_buffers_are_dropped_on_the_islands_that_hold_them() -> None:
    front = Front()
    front.put(1, slice=1)
    front.put(2, slice=2)
    front.put(3, slice=1)
    commands = front.free(1, 2, 3, 99)
    assert to_island(commands, 0) == [Drop(1, (1, 3))]
    assert to_island(commands, 1) == [Drop(1, (2,))]
    assert front.free(1) == []
    assert front.buffers() == set()


def test_a_result_freed_before_it_is_there_is_dropped_behind_its_launch() -> None:
    front = Front()
    front.register(program_over(1), 1)
    front.put(1)
    sent = to_island(front.launch(1, (1,), 2), 0) + to_island(front.free(1, 2), 0)
    assert [type(message) for message in sent] == [Run, Drop]
    assert front.done(0, 1) == completed(1)
    assert front.buffers() == set()


def test_arrays_stay_on_a_released_slice_until_they_are_freed() -> None:
    front = Front()
    front.register(program_over(1), 1)
    front.put(1)
    assert release_slice(front, SLICES[0])
    assert not release_slice(front, SLICES[0])
    assert len(to_island(front.launch(1, (1,), 2), 0, Run)) == 1
    assert to_island(front.free(1, 2), 0) == [Drop(1, (1, 2))]


def test_closing_a_session_frees_all_it_held() -> None:
    """
    1. A session has a program on islands 0 and 1, a launch in flight and one that waits.
    2. It closes: every island drops what it has of the session, the program is dropped where it was sent.
    3. Reports about its launch come in late; nobody hears of them.
    """
    front = Front(max_in_flight=1, sessions=(1, 2))
    program = front.register(program_over(1, 2), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    front.launch(2, (1,), 3)
    commands = front.checked(front.launches.close_session(1))
    assert [to_island(commands, island, DropSession) for island in (0, 1, 2)] == [[DropSession(1)]] * 3
    assert [to_island(commands, island, DropProgram) for island in (0, 1, 2)] == [
        [DropProgram(program.key)],
        [DropProgram(program.key)],
        [],
    ]
    assert front.launches.close_session(1) == []
    assert front.done(0, 1) == []
    assert front.failed(1, 1) == []
    assert front.launches.in_flight == {}
    assert list(front.launches.sessions) == [2]


def test_programs_of_a_closed_session_are_not_sent_to_hosts_that_come_up() -> None:
    front = Front(sessions=(1, 2))
    front.register(program_over(1), 1)
    front.launches.close_session(1)
    front.down(0)
    assert to_island(front.up(0, epoch=2), 0, Program) == []
