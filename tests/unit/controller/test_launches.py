"""Launches and buffers: the messages that the controller sends. `harness.py` has the cluster that tests start from."""

from __future__ import annotations

import pytest

from pathways_ray.controller.backlog import MAX_DEFERRED_CALLS
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.status import of_launches
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure
from pathways_ray.ir.types import ArrayType
from pathways_ray.observe import recorder
from pathways_ray.scheduler.policies import OPERATOR
from pathways_ray.transport.messages import (
    Completed,
    Done,
    Drop,
    IslandLaunch,
    LaunchFailed,
    Prepared,
    Put,
    Served,
    ServedCalls,
)
from tests.unit.controller.harness import BOOM, Harness, completed, failure_of, program_over, to_client, to_island

# --- the life of a launch ---------------------------------------------------------------------------------------------


def test_a_launch_goes_to_its_island_and_completes_once() -> None:
    """
    1. The client puts buffer 1 and launches with it; the result will be buffer 2.
    2. The island gets one IslandLaunch, with the sequence number of the cluster.
    3. The island reports; the client hears it once, and a second report changes nothing.
    """
    front = Harness()
    program = front.register(program_over(1), 1)
    front.put(1)
    commands = front.launch(7, (1,), 2)
    assert to_island(commands, 0) == [IslandLaunch(1, 1, program.key, (1,), 2, launch=7)]
    assert len(commands) == 1
    assert front.done(0, 1) == completed(7)
    assert front.done(0, 1) == []
    assert front.failed(0, 1) == []
    assert front.buffers() == {1, 2}


def test_a_result_is_an_argument_before_it_is_there() -> None:
    front = Harness()
    front.register(program_over(1), 1)
    front.put(1)
    runs = [to_island(front.launch(k, (k,), k + 1), 0)[0] for k in (1, 2, 3)]
    assert [run.sequence for run in runs] == [1, 2, 3]
    assert of_launches(front.launches, front.report, {})["launches"] == 3
    assert [(run.arguments, run.results) for run in runs] == [((1,), 2), ((2,), 3), ((3,), 4)]


def test_a_launch_on_two_islands_ends_when_both_have_reported() -> None:
    front = Harness()
    front.register(program_over(1, 2), 1)
    front.put(1)
    commands = front.launch(1, (1,), 2)
    assert to_island(commands, 0, IslandLaunch) == to_island(commands, 1, IslandLaunch) != []
    assert to_island(commands, 2) == []
    assert front.done(1, 1) == []
    assert front.done(1, 1) == [], "the same island counts once"
    assert front.done(0, 1) == completed(1)


def test_the_first_report_of_an_island_is_its_report() -> None:
    front = Harness()
    front.register(program_over(1, 2), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    assert front.done(1, 1) == []
    assert front.failed(1, 1) == []
    assert front.done(0, 1) == completed(1)


def test_completions_that_come_together_leave_together() -> None:
    front = Harness(sessions=(1, 2))
    front.register(program_over(1), 1)
    front.register(program_over(1, key=2, session=2), 1)
    for session in (1, 2):
        front.put(1, session=session)
        for k in (1, 2):
            front.launch(10 * session + k, (1,), 1 + k, session=session)
    commands = front.done(0, 1, 3, 2)
    assert commands == completed(11, 12, shared=True) + completed(21, session=2, shared=True)


def test_a_sequence_nobody_knows_is_ignored() -> None:
    front = Harness()
    assert front.done(0, 99) == []
    assert front.failed(0, 99) == []


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_launches_that_do_not_fit_fail_with_the_reason_and_send_nothing() -> None:
    front = Harness()
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
    front = Harness(sessions=(1, 2))
    front.register(program_over(1), 1)
    front.put(5, session=2)
    assert failure_of(front.launch(1, (5,), 6)).kind == "BufferDeleted"
    assert front.free(5) == []
    assert front.buffers(2) == {5}


@pytest.mark.parametrize("array", [ArrayType((8,), "nonsense"), ArrayType((-8,), "float32"), ArrayType((7,), "int8")])
def test_a_put_of_something_that_is_no_array_of_the_slice_makes_no_buffer(array: ArrayType) -> None:
    """Everybody's status adds up the bytes of all buffers: one that has no size would end it."""
    front = Harness()
    front.checked(front.launches.admission.call(front.launches.sessions[1], Put(1, 1, array, (("x",),))))
    assert front.buffers() == set()


def test_a_put_on_a_slice_the_session_never_had_makes_no_buffer() -> None:
    front = Harness()
    front.put(1, slice=99)
    assert front.buffers() == set()


def test_a_program_that_could_not_be_planned_fails_its_launches() -> None:
    front = Harness()
    refused = Failure("GraphError", "no such slice")
    front.register(PlannedProgram(1, 1, "p", failure=refused), 1)
    assert failure_of(front.launch(1, (), 5)) == refused


def test_a_program_that_does_not_compile_fails_waiting_and_later_launches_and_their_consumers() -> None:
    """
    1. The program is not compiled yet: two launches wait, the second one consumes what the first one makes.
    2. A host reports that it cannot compile it. Both fail with what the host said, and so does every later one.
    """
    front = Harness()
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
    front = Harness()
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
    2. Launch 1 of program 1, then launch 2 of program 2, on the same island and with the same array, and a free of
       that: all wait behind launch 1. A put has nothing to do with them.
    3. One host is ready: still nothing. The other one is: all leave, in the order of the calls.
    """
    front = Harness()
    waited_for = front.register(program_over(1, 2), 1, ready=False)
    front.register(program_over(1, key=2), 2)
    front.put(1)
    assert front.launch(1, (1,), 10, program=1) == []
    assert front.launch(2, (1,), 20, program=2) == []
    assert front.put(30) == []
    assert front.free(1) == []
    assert front.buffers() == {1, 30}
    assert front.ready(waited_for, 0) == []
    commands = front.ready(waited_for, 2)
    assert [type(m) for m in to_island(commands, 0)] == [IslandLaunch, IslandLaunch, Drop]
    assert [m.sequence for m in to_island(commands, 0, IslandLaunch)] == [1, 2]
    assert front.buffers() == {10, 20, 30}


def test_what_has_nothing_to_do_with_a_lost_host_passes() -> None:
    """
    1. Host 2, all of island 1, is away. Launch 1 is for it and waits, and so does launch 2, of what launch 1 makes.
    2. Launches on islands 0 and 2 pass. One that needs islands 0 and 1 waits; from then on island 0 has to as well.
    3. A free of launch 1's argument and of another array frees the other one.
    4. The host is back: what waited leaves in the order of the calls.
    """
    front = Harness()
    over = [front.register(program_over(*slices, key=k), k) for k, slices in enumerate([(2,), (1,), (3,), (1, 2)], 1)]
    front.down(2)
    for number, slice in enumerate([2, 1, 3, 1, 1], 1):
        front.put(number, slice=slice)
    assert front.launch(1, (1,), 10, program=1) == []
    assert front.launch(2, (10,), 20, program=1) == []
    assert len(to_island(front.launch(3, (2,), 30, program=2), 0, IslandLaunch)) == 1
    assert len(to_island(front.launch(4, (3,), 40, program=3), 2, IslandLaunch)) == 1
    assert front.launch(5, (4,), 50, program=4) == []
    assert front.launch(6, (5,), 60, program=2) == []
    assert [m.buffers for m in to_island(front.free(1, 2), 0, Drop)] == [(2,)]
    assert front.buffers() == {1, 3, 4, 5, 30, 40}
    commands = front.up(2, epoch=2)
    for program in over:
        commands += front.ready(program, 2)
    runs = {island: [m.results for m in to_island(commands, island, IslandLaunch)] for island in (0, 1, 2)}
    assert runs == {0: [50, 60], 1: [10, 20, 50], 2: []}
    assert front.buffers() == {3, 4, 5, 10, 20, 30, 40, 50, 60}


def test_a_launch_is_not_set_aside_for_a_buffer_that_may_come_to_be() -> None:
    front = Harness()
    front.register(program_over(2), 1, ready=False)
    front.put(1, slice=2)
    assert front.launch(1, (1,), 10, program=1) == []
    assert "77" in failure_of(front.launch(2, (77,), 20, program=1)).message


def test_deferred_launches_over_the_limit_are_not_passed() -> None:
    """A launch over the limit of deferred ones holds up what comes after it, as one in flight too many does."""
    front = Harness()
    front.register(program_over(2), 1, ready=False)
    front.register(program_over(1, key=2), 2)
    front.put(1, slice=2)
    front.put(2)
    for k in range(MAX_DEFERRED_CALLS):
        assert front.launch(1 + k, (1,), 100 + k, program=1) == []
    assert front.launch(500, (2,), 500, program=2) == []
    assert front.launches.backlog(1) == MAX_DEFERRED_CALLS + 1


def test_one_session_waiting_does_not_hold_up_another() -> None:
    front = Harness(sessions=(1, 2))
    front.register(program_over(1), 1, ready=False)
    front.register(program_over(1, key=2, session=2), 1)
    for session in (1, 2):
        front.put(1, session=session)
    assert front.launch(1, (1,), 2) == []
    assert len(to_island(front.launch(1, (1,), 2, session=2), 0, IslandLaunch)) == 1


def test_a_session_has_a_limited_number_of_launches_in_flight() -> None:
    """
    1. Two may be in flight: of four launches two leave.
    2. Each outcome, good or bad, lets the next one go.
    """
    front = Harness(max_in_flight=2)
    front.register(program_over(1), 1)
    front.put(1)
    sent = [len(to_island(front.launch(k, (1,), k + 1), 0, IslandLaunch)) for k in (1, 2, 3, 4)]
    assert sent == [1, 1, 0, 0]
    assert [m.sequence for m in to_island(front.done(0, 2), 0, IslandLaunch)] == [3]
    assert [m.sequence for m in to_island(front.failed(0, 1), 0, IslandLaunch)] == [4]
    assert front.done(0, 3, 4) == completed(3, 4)


def test_a_launch_that_fails_at_once_does_not_wait_for_room() -> None:
    front = Harness(max_in_flight=1)
    front.register(program_over(1), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    assert failure_of(front.launch(2, (99,), 3)).kind == "BufferDeleted"


# --- news for clients -------------------------------------------------------------------------------------------------


def registered(front: Harness) -> PlannedProgram:
    """Program 9 over two hosts."""
    program = program_over(1, key=9)
    front.launches.register(1, 9, program)
    return program


def test_a_client_hears_once_when_a_program_is_compiled_on_all_hosts() -> None:
    front = Harness()
    program = registered(front)
    hosts = sorted(program.hosts)
    said = [to_client(front.ready(program, host)) for host in (*hosts, *hosts)]
    assert said == [[]] * (len(hosts) - 1) + [[Prepared(9, program.key, hosts[0])]] + [[]] * len(hosts)


def test_a_client_does_not_hear_of_compiled_programs_where_every_gang_is_sent_by_itself() -> None:
    front = Harness(parallel=False)
    program = registered(front)
    assert [to_client(front.ready(program, host)) for host in program.hosts] == [[]] * len(program.hosts)


def test_a_program_that_cannot_be_compiled_is_never_prepared() -> None:
    front = Harness()
    program = registered(front)
    first, *others = sorted(program.hosts)
    front.ready(program, first, BOOM)
    assert [to_client(front.ready(program, host)) for host in others] == [[]] * len(others)


def test_a_client_hears_what_a_launch_took_on_each_device() -> None:
    """An island reports microseconds on its devices; the account of the tenant gets them times the two of slice 1."""
    front = Harness()
    front.register(program_over(1), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    assert to_client(front.launches.done(0, Done((1,), (250,)))) == [Completed((1,), (250,))]
    assert [usage.device_seconds for usage in front.launches.ledger.usages.values()] == pytest.approx([500e-6])


def test_calls_that_a_host_has_served_are_in_the_accounts_and_are_no_launches() -> None:
    """
    1. Of a program on two devices, of one that is gone, and of a session that is over: all of them the operator's.
    2. Who comes later is ahead of the one that was served by one report, on two devices, and not by all of them.
    """
    front = Harness()
    front.register(program_over(1), 1)
    (key,), (first,) = front.launches.programs, front.launches.sessions
    tables, before, over, late = front.launches.tables, front.launches.tables.sequence, first + 1, first + 2
    front.launches.open_session(over)
    front.launches.close_session(over)
    served = Served(first, key, 3, 250), Served(first, 99, 1, 10), Served(over, key, 2, 5)
    front.launches.outcomes.served(0, ServedCalls(0, served))
    assert tables.ledger.device_seconds() == {OPERATOR: pytest.approx(520e-6)}
    assert (tables.recorder.served, tables.recorder.busy) == (6, {0: pytest.approx(520e-6)})
    assert (front.launches.tables.sequence, front.launches.in_flight) == (before, {})
    for _ in range(60):
        front.launches.outcomes.served(0, ServedCalls(0, (Served(first, key, 1, 1_000_000),)))
    front.launches.open_session(late)
    tables.ledger.enter(tables.ledger.of(late))
    assert tables.ledger.of(first).virtual - tables.ledger.of(late).virtual == pytest.approx(2.0)


def test_the_served_calls_of_a_session_are_its_tenants_however_many_others_have_come_and_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "MAX_SESSIONS", 2)
    front = Harness(sessions=())
    front.launches.open_session(1, Tenant("alice"))
    for session in range(2, 6):
        front.launches.open_session(session, Tenant("bob"))
        front.launches.close_session(session)
    front.launches.outcomes.served(0, ServedCalls(0, (Served(1, 99, 1, 250),)))
    assert front.launches.tables.ledger.device_seconds()["alice"] == pytest.approx(250e-6)


def test_a_client_hears_whether_others_have_launches_under_way() -> None:
    front = Harness(sessions=(1, 2))
    for session in (1, 2):
        front.register(program_over(1, key=session, session=session), 1)
        front.put(1, session=session)
    for launch in (1, 2, 3):
        front.launch(launch, (1,), 1 + launch)
    front.launch(1, (1,), 2, session=2)
    assert to_client(front.done(0, 1)) == [Completed((1,), (0,), contended=True)]
    assert to_client(front.done(0, 4), session=2) == [Completed((1,), (0,), contended=True)], "session 1 has"
    assert to_client(front.done(0, 2)) == [Completed((2,), (0,), contended=False)]
