"""Hosts that go and come: what the controller tells whom, and what becomes of launches and buffers."""

from __future__ import annotations

import pytest

from pathways_ray.controller.launches import Launches
from pathways_ray.controller.state import SendClient
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure
from pathways_ray.limits import HOST_ABSENCE_LIMIT_S
from pathways_ray.simulation.tables import check_launches
from pathways_ray.transport.messages import (
    Abort,
    BuffersLost,
    Completed,
    Drop,
    HostAddress,
    HostDown,
    HostUp,
    IslandLaunch,
    Launch,
    LaunchFailed,
    Peer,
    Peers,
    Program,
    Put,
    Ready,
    Stored,
)
from tests.unit.controller.harness import BOOM, SLICES, Harness, failure_of, program_over, to_client, to_island
from tests.unit.helpers import VECTOR


def test_a_host_that_comes_up_is_made_known_to_everybody() -> None:
    front = Harness(sessions=(1, 2))
    commands = front.up(3, epoch=2)
    for island in (0, 1, 2):
        (peers,) = to_island(commands, island)
        assert isinstance(peers, Peers)
        assert Peer(3, 2, "transfer-3-2", data_address="data-3-2") in peers.peers
        assert {peer.host for peer in peers.peers} == {0, 1, 2, 3}
    assert to_client(commands, 1) == to_client(commands, 2) == [HostAddress(3, 2, "data-3-2")]


def test_a_lost_host_fails_what_is_in_flight_on_its_island_at_once() -> None:
    """
    1. Launch 1 runs on islands 0 and 1, launch 2 on island 0 alone, launch 3 on island 2.
    2. Host 2 of island 1 is lost. Launch 1 fails and its results are taken back on both islands, should they come.
    3. The others go on.
    """
    front = Harness()
    front.register(program_over(1, 2), 1)
    front.register(program_over(1, key=2), 2)
    front.register(program_over(3, key=3), 3)
    front.put(1)
    front.put(2, slice=3)
    front.launch(1, (1,), 10, program=1)
    front.launch(2, (1,), 20, program=2)
    front.launch(3, (2,), 30, program=3)
    commands = front.down(2)
    lost = Failure("HostLost", "host 2 was lost: killed", host=2)
    assert to_client(commands, kind=LaunchFailed) == [LaunchFailed(1, lost)]
    assert [to_island(commands, island, Drop) for island in (0, 1, 2)] == [[Drop(1, (10,))], [Drop(1, (10,))], []]
    assert to_client(front.done(0, 1, 2)) == [Completed((2,), (0,))]
    assert to_client(front.done(2, 3)) == [Completed((3,), (0,))]
    assert front.launches.in_flight == {}


def test_buffers_on_a_lost_host_are_lost_and_their_owners_are_told() -> None:
    """
    1. Buffer 1 lies on hosts 0, buffer 2 on host 2; result 3 is still being made on host 2.
    2. Host 2 is lost: buffer 2 is lost now, and a launch with it fails; buffer 3 fails with its launch.
    """
    front = Harness(sessions=(1, 2))
    front.register(program_over(2), 1)
    front.put(1, slice=1)
    front.put(2, slice=2)
    front.put(2, slice=2, session=2)
    front.launch(1, (2,), 3)
    commands = front.down(2)
    lost = Failure("BufferLost", "the buffer was on host 2, which is gone: killed", host=2)
    assert to_client(commands, 1, BuffersLost) == to_client(commands, 2, BuffersLost) == [BuffersLost((2,), lost)]
    assert to_client(front.launch(2, (2,), 4)) == [LaunchFailed(2, lost)]
    assert to_client(front.down(0), kind=BuffersLost)[0].buffers == (1,)


@pytest.mark.parametrize(
    ("kind", "decided", "about"),
    [
        ("HostLost", False, 1),
        ("HostLost", True, 1),
        ("LaunchTimeout", True, 1),
        ("OrderMismatch", True, 1),
        ("OrderMismatch", True, 0),
    ],
)
def test_tenants_beside_a_launch_at_fault_do_not_learn_its_name_or_number(kind: str, decided: bool, about: int) -> None:
    """What ended a host names the launch to its own tenant and to the operator; where it names those of several
    tenants, to the operator alone."""
    front = Harness(sessions=())
    for session, name in ((1, "alice"), (2, "bob"), (3, "alice")):
        front.launches.open_session(session, Tenant(name))
        for slice in SLICES:
            front.launches.add_slice(session, slice)
        program = program_over(1, key=session, session=session)
        program.name = f"of {name}"
        front.register(program, 1)
        front.put(1, session=session)
        front.put(2, session=session)
        front.launch(1, (1,), 100, session=session)
    reason = "launch 1 of program 'of alice' failed: 'of alice'" if decided else "its process ended"
    story = ("scheduler 0: 1.000 s before: dispatched session 1 launch 1: of alice",)
    candidates = (1,) if kind == "LaunchTimeout" or not decided else ()
    commands = front.launches.host_down(HostDown(0, 1, reason, kind, candidates, story, (), decided, about))
    texts = {}
    for session in (1, 2, 3):
        mine = [c.message for c in commands if isinstance(c, SendClient) and c.session == session]
        (failed,) = [one.failure for one in mine if isinstance(one, LaunchFailed)]
        (lost,) = [one.failure for one in mine if isinstance(one, BuffersLost)]
        assert failed.kind == (kind if kind == "OrderMismatch" or session == 1 else "HostLost")
        texts[session] = "\n".join((failed.message, lost.message, *failed.story))
        assert failed.host == 0
        assert "host up host 1" in texts[session]
        if not about or session == 2:
            assert "alice" not in texts[session]
            assert "launch 1" not in texts[session]
            assert (reason in texts[session]) is not decided
        else:
            assert reason in failed.message
            assert reason in lost.message
            assert story[0] in failed.story
            assert "admitted session 1 launch 1: of alice" in texts[session]
    assert any(reason in entry.text(0.0) for entry in front.launches.story.lifecycle)
    for one in front.launches.story.lines(0.0, hosts=frozenset({0})):
        assert "alice" not in one, "nor does who waits for the host later"


def test_everybody_is_told_that_a_host_is_gone_once() -> None:
    front = Harness()
    commands = front.down(2)
    (peers,) = to_island(commands, 0, Peers)
    assert {peer.host for peer in peers.peers} == {0, 1, 3}
    assert to_client(commands, kind=HostAddress) == [HostAddress(2, 1, "")]
    assert front.down(2) == [], "it is gone already"
    front.up(2, epoch=2)
    assert front.down(2, epoch=1) == [], "news of an older epoch"
    assert front.down(99) == [], "nobody knows it"
    assert front.down(2, epoch=2) != []


def test_a_failed_launch_that_waits_for_its_producer_ends_with_the_host() -> None:
    """
    1. Launch 1 runs on islands 0 and 1; launch 2 consumes from it on island 0.
    2. Launch 2 has failed on island 0 and waits for the outcome of launch 1, which island 1 has yet to give.
    3. Host 0 is lost: both are on its island, and each ends once.
    """
    front = Harness()
    sketch_program = program_over(1, 2, 1)
    front.register(sketch_program, 1)
    front.register(program_over(1, key=2), 2)
    front.put(1)
    front.launch(1, (1,), 2)
    front.launch(2, (2,), 3, program=2)
    front.failed(0, 1)
    assert front.failed(0, 2) == []
    failed = to_client(front.down(0), kind=LaunchFailed)
    assert sorted(message.launch for message in failed) == [1, 2]
    assert front.launches.in_flight == {}


def test_a_launch_that_lost_its_host_does_not_wait_for_its_producers() -> None:
    """
    1. Launch 1 runs on island 1; launch 2 consumes its result on islands 1 and 0.
    2. Host 0 is lost: launch 2 fails at once, though launch 1 goes on and completes.
    """
    front = Harness()
    front.register(program_over(2), 1)
    front.register(program_over(2, 1, key=2), 2)
    front.put(1, slice=2)
    front.launch(1, (1,), 2)
    front.launch(2, (2,), 3, program=2)
    assert [message.launch for message in to_client(front.down(0), kind=LaunchFailed)] == [2]
    assert to_client(front.done(1, 1)) == [Completed((1,), (0,))]


def test_what_a_lost_host_sets_free_goes_on() -> None:
    """
    1. One launch may be in flight: launch 1 on island 1, launch 2 on island 0 waits for it.
    2. Host 2 is lost. Launch 1 fails, and launch 2 leaves at once.
    """
    front = Harness(max_in_flight=1)
    front.register(program_over(2), 1)
    front.register(program_over(1, key=2), 2)
    front.put(1, slice=2)
    front.put(2, slice=1)
    front.launch(1, (1,), 3)
    assert front.launch(2, (2,), 4, program=2) == []
    commands = front.down(2)
    assert [message.sequence for message in to_island(commands, 0, IslandLaunch)] == [2]
    assert to_client(front.done(0, 2)) == [Completed((2,), (0,))]


def test_the_successor_of_a_host_gets_its_programs_before_launches_go_on() -> None:
    """
    1. Host 0 goes and comes back under epoch 2: its island gets the program again, others do not.
    2. A launch waits until the new incarnation has compiled it.
    """
    front = Harness()
    program = front.register(program_over(1, 2), 1)
    front.register(program_over(3, key=2), 2)
    front.down(0)
    front.put(1)
    assert front.launch(1, (1,), 2) == []
    commands = front.up(0, epoch=2)
    assert to_island(commands, 0, Program) == [program.messages[0]]
    assert to_island(commands, 1, Program) == to_island(commands, 2, Program) == []
    assert front.launch(2, (1,), 3) == []
    assert [message.sequence for message in to_island(front.ready(program, 0), 1, IslandLaunch)] == [1, 2]


def test_a_launch_waits_for_a_successor_but_not_for_ever() -> None:
    """
    1. At time 100 host 2 is lost; a launch that needs it waits.
    2. Just within the limit it still waits; past the limit it fails and says how long the host has been down.
    3. A later launch fails at once, until the host is back.
    """
    front = Harness()
    program = front.register(program_over(1, 2), 1)
    front.put(1)
    assert front.tick(100.0) == []
    front.down(2)
    assert front.launch(1, (1,), 2) == []
    assert front.tick(100.0 + HOST_ABSENCE_LIMIT_S) == []
    late = to_client(front.tick(100.0 + HOST_ABSENCE_LIMIT_S + 2))
    assert late == [LaunchFailed(1, Failure("HostLost", "host 2 has been down for 22 s", host=2))]
    assert [message.launch for message in to_client(front.launch(2, (1,), 3))] == [2]
    front.up(2, epoch=2)
    assert to_island(front.launch(3, (1,), 4), 1, Program) == [program.messages[1]]
    assert len(to_island(front.ready(program, 2), 0, IslandLaunch)) == 1


def test_a_launch_does_not_wait_for_ever_for_another_host_of_its_island() -> None:
    """The scheduler dispatches nothing while one of the island's hosts is away, whichever it is.

    1. The program needs host 0 only, but host 1 of the same island is lost for good.
    2. A launch is not sent into the queue of an island that stands still: it waits here, and fails past the limit.
    """
    front = Harness()
    front.register(program_over(1), 1)
    front.put(1)
    front.tick(100.0)
    front.down(1)
    assert to_client(front.launch(1, (1,), 2)) == []
    late = to_client(front.tick(100.0 + HOST_ABSENCE_LIMIT_S + 2), kind=LaunchFailed)
    assert [(message.launch, message.failure.kind) for message in late] == [(1, "HostLost")]
    assert front.launches.in_flight == {}


def test_another_host_of_the_island_comes_back() -> None:
    front = Harness()
    program = front.register(program_over(1), 1)
    front.put(1)
    front.down(1)
    sent = to_island(front.launch(1, (1,), 2), 0, IslandLaunch) + to_island(front.up(1, epoch=2), 0, IslandLaunch)
    sent += to_island(front.ready(program, 0), 0, IslandLaunch)
    assert [message.sequence for message in sent] == [1], "once, when the island can work"


@pytest.mark.parametrize("late", ["done", "failed"])
def test_reports_about_a_launch_that_failed_with_its_host_are_ignored(late: str) -> None:
    front = Harness()
    front.register(program_over(1, 2), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    assert to_client(front.down(2), kind=LaunchFailed) != []
    assert (front.done(0, 1) if late == "done" else front.failed(0, 1)) == []


def test_the_cause_of_a_lost_argument_is_handed_on() -> None:
    """A launch in flight whose argument was lost with the host fails with what became of the argument."""
    front = Harness()
    front.register(program_over(2), 1)
    front.put(1, slice=2)
    front.launch(1, (1,), 2)
    (failed,) = to_client(front.down(2), kind=LaunchFailed)
    assert failed.failure.host == 2
    assert to_client(front.launch(2, (2,), 3)) == [LaunchFailed(2, failed.failure)]
    assert BOOM.host == 0


def test_a_host_that_has_not_joined_is_away_from_the_start() -> None:
    """
    1. The controller has restarted. Island 0 is back, the machine of island 1 is not.
    2. A session gets slices on both, since the resource manager expects the island back, and launches across them.
    3. The launch waits as long as for a host that was lost, and no longer. The host joins after all: the next one goes.
    """
    launches = Launches(True, 1024)
    launches.membership.expect({0: [0, 1], 1: [2]})
    for host in (0, 1):
        launches.host_up(0, HostUp(host, 1, "t", "d", 2, 100))
    launches.open_session(1)
    for placed in SLICES[:2]:
        launches.add_slice(1, placed)
    program = program_over(1, 2)
    launches.register(1, 1, program)
    launches.admission.call(launches.sessions[1], Put(1, 1, VECTOR, ()))
    launches.stored(Stored(0, 1, 1, 1, VECTOR, ()))
    launches.ready(Ready(0, program.key, 0))
    assert launches.admission.call(launches.sessions[1], Launch(1, 1, (1,), 2)) == []
    assert launches.tick(HOST_ABSENCE_LIMIT_S) == []
    failure = failure_of(launches.tick(HOST_ABSENCE_LIMIT_S + 1.0))
    assert (failure.kind, failure.host) == ("HostLost", 2)
    launches.host_up(1, HostUp(2, 1, "t", "d", 2, 100))
    launches.ready(Ready(2, program.key, 0))
    commands = launches.admission.call(launches.sessions[1], Launch(2, 1, (1,), 3))
    assert len(to_island(commands, 1, IslandLaunch)) == 1
    check_launches(launches)


@pytest.mark.parametrize("full", [False, True])
def test_a_host_that_starts_again_knows_a_program_before_its_launch_also_without_a_part_in_it(full: bool) -> None:
    """Those with a part have compiled it before that host has come. The launch may have to wait for something else."""
    front = Harness(max_in_flight=0 if full else 100)
    program = front.register(program_over(1), 1)
    assert program.hosts == {0}
    front.put(1)
    for host in (0, 1):
        front.down(host)
    front.up(0, epoch=2)
    front.put(2)
    front.launch(1, (2,), 3)
    front.ready(program, 0)
    found = to_island(front.up(1, epoch=2), 0)
    kinds = [type(message) for message in found if isinstance(message, Program | IslandLaunch)]
    assert kinds == ([Program] if full else [Program, IslandLaunch])


def test_islands_that_live_are_told_of_a_launch_that_has_failed_elsewhere() -> None:
    """Without the story, and of those only that may wait for others: a launch on one host ends by itself."""
    front = Harness()
    front.register(program_over(1, 2), 1)
    front.register(program_over(1, key=2), 2)
    front.put(1)
    front.launch(1, (1,), 2)
    front.launch(2, (1,), 3, program=2)
    commands = front.down(2)
    (abort,) = to_island(commands, 0, Abort)
    assert abort.launches == ((1, 1),)
    assert (abort.failure.kind, abort.failure.host, abort.failure.story) == ("HostLost", 2, ())
    assert to_island(front.failed(0, 2), 0, Abort) == []


def test_nobody_is_told_of_a_failure_that_reaches_all_as_a_value() -> None:
    front = Harness()
    front.register(program_over(1, 2), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    front.failed(0, 1)
    assert to_island(front.failed(1, 1), 0, Abort) == []
