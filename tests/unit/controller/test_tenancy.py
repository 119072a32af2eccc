"""Tenants at the controller: quotas, turns on several islands, accounts of device time, the circuit breaker."""

from __future__ import annotations

import pytest

from pathways_ray.controller.circuit_breaker import MAX_DEATHS
from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.state import SendIsland
from pathways_ray.controller.tenants import Quota, Tenant
from pathways_ray.errors import Failure
from pathways_ray.limits import MIN_BUFFER_BYTES
from pathways_ray.scheduler.policies import Policy, Usage, fifo, share
from pathways_ray.scheduler.queues import MAX_CALLING
from pathways_ray.transport.messages import (
    Account,
    BuffersLost,
    Cancel,
    Done,
    Drop,
    DropSession,
    HostDown,
    HostUp,
    IslandLaunch,
    IslandLaunchFailed,
    LaunchFailed,
    Load,
)
from tests.unit.controller.harness import (
    SLICES,
    Harness,
    failure_of,
    program_over,
    sketch_with_slices,
    to_client,
    to_island,
)
from tests.unit.helpers import VECTOR

ALICE = Tenant("alice", weight=2.0, priority=1)


def front(*tenants: Tenant, window: int = 64, policy: Policy = fifo) -> Harness:
    """A front with sessions 1, 2, … of the tenants, each with program `number` over slices 1 (and 2)."""
    found = Harness(sessions=(), cross_island=CrossIslandWindow(policy, window))
    for session, tenant in enumerate(tenants, 1):
        found.launches.open_session(session, tenant)
        for slice in SLICES:
            found.launches.add_slice(session, slice)
    return found


# --- accounts ---------------------------------------------------------------------------------------------------------


def test_islands_learn_whose_a_session_is() -> None:
    launches = Harness(sessions=()).launches
    assert launches.open_session(7, ALICE) == [SendIsland(i, Account(7, "alice", 2.0, 1)) for i in (0, 1, 2)]
    assert launches.open_session(8) == [SendIsland(i, Account(8, "session 8", 1.0, 0)) for i in (0, 1, 2)]
    assert launches.island_up(1) == [
        SendIsland(1, Account(7, "alice", 2.0, 1)),
        SendIsland(1, Account(8, "session 8", 1.0, 0)),
    ], "a restarted scheduler knows no session"


def test_an_operator_changes_a_weight_while_sessions_run() -> None:
    f = front(ALICE, ALICE, Tenant("bob"))
    commands = f.launches.set_tenant(Tenant("alice", weight=5.0))
    assert [c.message for c in commands if isinstance(c, SendIsland) and c.island == 0] == [
        Account(1, "alice", 5.0, 0),
        Account(2, "alice", 5.0, 0),
    ]
    assert f.launches.ledger.usages["alice"].weight == 5.0


def test_device_time_is_counted_for_the_tenant_over_all_islands_and_sessions() -> None:
    f = front(ALICE, ALICE)
    for session in (1, 2):
        f.register(program_over(1, 2, key=session, session=session), 1)
        f.put(1, session=session)
        f.launch(1, (1,), 10, session=session)
    f.checked(f.launches.done(0, Done((1, 2), (500_000, 1_000_000))))
    f.checked(f.launches.done(1, Done((1, 2), (250_000, 250_000))))
    f.report.load(Load(0, {"alice": 3}))
    f.tick(1.0)
    (alice,) = f.tenants()
    assert alice["device_seconds"] == pytest.approx(4.0)
    assert (alice["sessions"], alice["queued"], alice["in_flight"]) == (2, 3, 0)


def test_the_share_is_that_of_the_last_ten_seconds() -> None:
    f = front(ALICE, Tenant("bob"))
    alice, bob = (f.launches.ledger.usages[name] for name in ("alice", "bob"))
    f.tick(0.0)
    bob.device_seconds = 100.0
    f.tick(5.0)
    for now in range(6, 30):
        alice.device_seconds += 3.0
        bob.device_seconds += 1.0
        f.tick(float(now))
    assert [t["share"] for t in f.tenants()] == pytest.approx([0.75, 0.25])


def test_an_account_outlives_its_sessions_but_not_that_of_a_nameless_one() -> None:
    f = front(ALICE)
    f.launches.open_session(9)
    f.launches.close_session(1)
    f.launches.close_session(9)
    assert list(f.launches.ledger.usages) == ["alice"]


# --- quotas -----------------------------------------------------------------------------------------------------------


def test_a_suspended_session_launches_nothing() -> None:
    """A program without arguments would make arrays all the same."""
    f = front(Tenant("alice"))
    f.register(program_over(1, arguments=0), 1)
    f.launches.sessions[1].suspended = True
    assert failure_of(f.launch(1, (), 10)).kind == "SessionSuspended"
    f.launches.sessions[1].suspended = False
    assert len(to_island(f.launch(2, (), 20), 0, IslandLaunch)) == 1


def test_a_launch_over_the_quota_is_refused_and_what_consumes_it_too() -> None:
    """
    1. Of two sessions of a tenant that may have two launches, each has one under way.
    2. A third is refused, with asked and allowed; a consumer of its result fails for the same reason.
    3. Once one is over, the next is taken.
    """
    tenant = Tenant("alice", quota=Quota(launches=2))
    f = front(tenant, tenant)
    for session in (1, 2):
        f.register(program_over(1, key=session, session=session), 1)
        f.put(1, session=session)
        f.launch(1, (1,), 10, session=session)
    failure = failure_of(f.launch(2, (1,), 20))
    assert failure.kind == "QuotaExceeded"
    assert "'alice' may have 2 launches without an outcome; it has 2 and asks for 1 more" in failure.message
    f.done(0, 2)
    assert failure_of(f.launch(3, (20,), 30)) == failure
    f.done(0, 1)
    assert len(to_island(f.launch(4, (1,), 40), 0, IslandLaunch)) == 1


def test_bytes_over_the_quota_are_refused_and_come_back() -> None:
    """A vector on slice 1 counts as `MIN_BUFFER_BYTES`.

    1. The quota has room for two of them: a put and a result.
    2. A further put and a further launch are refused; the hosts drop what was uploaded.
    3. What is freed may be used again.
    """
    each = MIN_BUFFER_BYTES
    f = front(Tenant("alice", quota=Quota(device_bytes=2 * each)))
    f.register(program_over(1), 1)
    f.put(1)
    f.launch(1, (1,), 10)
    f.done(0, 1)
    commands = f.put(2, arrives=False)
    (lost,) = to_client(commands, kind=BuffersLost)
    assert lost.buffers == (2,)
    assert f"may hold {2 * each} bytes on devices; it holds {2 * each} and asks for {each} more" in lost.failure.message
    assert to_island(commands, 0, Drop) == [Drop(1, (2,))]
    assert to_island(f.stored(0, 2), 0, Drop) == [Drop(1, (2,))], "it arrived behind the first one"
    assert failure_of(f.launch(2, (1,), 20)).kind == "QuotaExceeded"
    assert f.tenants()[0]["device_bytes"] == 2 * 2 * VECTOR.nbytes
    f.free(10)
    assert len(to_island(f.launch(3, (1,), 30), 0, IslandLaunch)) == 1


def test_a_put_does_not_overtake_what_is_freed_behind_a_launch_that_waits() -> None:
    """The quota has room for a vector and a result.

    1. A launch waits for its upload, which is freed behind it. A further put waits for both.
    2. The upload arrives: the launch goes, the put takes the room of what it had.
    3. A put with nothing before it that waits is refused.
    """
    f = front(Tenant("alice", quota=Quota(device_bytes=2 * MIN_BUFFER_BYTES)))
    f.register(program_over(1), 1)
    f.put(1, arrives=False)
    f.launch(1, (1,), 10)
    f.free(1)
    assert f.put(2) == []
    assert f.buffers() == {1}
    commands = f.stored(0, 1)
    assert [run.arguments for run in to_island(commands, 0, IslandLaunch)] == [(1,)]
    assert to_client(commands, kind=BuffersLost) == []
    assert f.buffers() == {2, 10}
    assert len(to_client(f.put(3), kind=BuffersLost)) == 1


def donating(each: int, results: int = 1) -> Harness:
    """A quota of `each` vectors; program 1 takes over its argument, and gives so many results."""
    f = front(Tenant("alice", quota=Quota(device_bytes=each * MIN_BUFFER_BYTES)))
    sketch = sketch_with_slices("taking")
    argument = sketch.argument(1)
    made = [sketch.call(f"f{k}", argument, slice=1, donated=() if k else (0,)) for k in reversed(range(results))]
    f.register(sketch.planned(*made), 1)
    return f


def test_a_result_may_take_the_room_of_an_argument_that_is_donated() -> None:
    """
    1. The quota is full: a step takes its state over, and the next one that, before the first is done.
    2. A launch with more results than it gives up is refused.
    3. One that fails gives the room back with the state, and there is none for others.
    """
    f = donating(1)
    f.put(1)
    for k in (1, 2, 3):
        assert len(to_island(f.launch(k, (k,), k + 1), 0, IslandLaunch)) == 1
        assert f.tenants()[0]["device_bytes"] == 2 * VECTOR.nbytes
    assert "asks for 4096 more" in to_client(f.put(9), kind=BuffersLost)[0].failure.message
    for k in (1, 2):
        f.done(0, k)
    f.failed(0, 3)
    assert f.buffers() >= {3}
    assert f.launches.sessions[1].charged_bytes == MIN_BUFFER_BYTES
    more = donating(1, results=2)
    more.put(1)
    assert "it holds 4096 and asks for 4096 more" in failure_of(more.launch(1, (1,), 10)).message


def test_what_waits_to_take_the_room_of_its_argument_keeps_no_put_waiting() -> None:
    f = donating(2)
    f.put(1, arrives=False)
    f.launch(1, (1,), 10)
    f.launch(2, (10,), 20)
    f.put(2)
    assert f.buffers() == {1, 2}
    assert [run.results for run in to_island(f.stored(0, 1), 0, IslandLaunch)] == [10, 20]
    f.done(0, 1, 2)
    assert f.buffers() == {2, 20}


def test_a_number_stands_for_one_buffer() -> None:
    """Under a number that is taken, a second buffer could lie on another island's devices without being counted.

    1. A launch that gives its result the number of an array is refused, and the array stays.
    2. A put under the number of a result changes nothing.
    """
    f = front(Tenant("alice", quota=Quota(device_bytes=100 * MIN_BUFFER_BYTES)))
    f.register(program_over(1, 2), 1)
    f.put(1)
    assert failure_of(f.launch(1, (1,), 1)).message == "launch 1 gives its result number 1, which is taken"
    f.launch(2, (1,), 10)
    before = f.tenants()
    f.put(10, slice=3)
    assert f.tenants() == before
    assert f.buffers() == {1, 10}


def test_a_failed_launch_takes_no_bytes() -> None:
    f = front(Tenant("alice", quota=Quota(device_bytes=2 * MIN_BUFFER_BYTES)))
    f.register(program_over(1), 1)
    f.put(1)
    f.launch(1, (1,), 10)
    f.failed(0, 1)
    assert len(to_island(f.launch(2, (1,), 20), 0, IslandLaunch)) == 1


# --- several islands --------------------------------------------------------------------------------------------------


def test_a_cross_island_launch_behind_many_calls_of_its_session_holds_back_nobody() -> None:
    """Its island keeps it behind calls that may take for ever, and cross-island launches have one order for all."""
    f = front(Tenant("a"), Tenant("b"))
    f.register(program_over(1, key=1), 1).calls = True
    for session in (1, 2):
        f.register(program_over(1, 2, key=10 + session, session=session), 2)
        f.put(1, session=session)
    calls = [f.launch(k, (1,), 10 + k) for k in range(1, MAX_CALLING + 2)]
    assert all(to_island(commands, 0, IslandLaunch) for commands in calls)
    assert not to_island(f.launch(20, (1,), 50, program=2), 0, IslandLaunch), "a call may wait on the island"
    (other,) = to_island(f.launch(1, (1,), 50, program=2, session=2), 0, IslandLaunch)
    (mine,) = to_island(f.done(0, 1), 0, IslandLaunch)
    assert (other.session, mine.session, mine.results) == (2, 1, 50)
    f.done(0, *range(2, MAX_CALLING + 2))
    assert not f.launches.cross_island.calling


def test_cross_island_launches_wait_for_room_and_take_turns() -> None:
    """
    1. The window is two. Tenant 1 has four launches over both islands, then tenant 2 has two.
    2. As they end, the two tenants take turns, though tenant 1 came first.
    """
    f = front(Tenant("a"), Tenant("b"), window=2, policy=share)
    for session in (1, 2):
        f.register(program_over(1, 2, key=session, session=session), 1)
        f.put(1, session=session)
    for k in range(4):
        f.launch(k, (1,), 10 + k)
    for k in range(2):
        f.launch(k, (1,), 10 + k, session=2)
    assert len(f.launches.in_flight) == 2
    owners = [r.session for r in f.launches.in_flight.values()]
    for sequence in range(1, 7):
        for island in (0, 1):
            f.checked(f.launches.done(island, Done((sequence,), (10_000,))))
        owners += [r.session for r in f.launches.in_flight.values() if r.sequence > len(owners)]
    assert (owners[2], owners[-1]) == (2, 1)
    assert sorted(owners) == [1, 1, 1, 1, 2, 2]


def test_those_go_that_a_session_held_back_which_ends() -> None:
    """
    1. The window is two, and island 1 has two launches of tenant 1. Tenant 2 waits for it, and for island 2.
    2. Tenant 3 wants islands 0 and 2, and waits behind tenant 2, which has a claim to one of them.
    """
    f = front(Tenant("a"), Tenant("b"), Tenant("c"), window=2)
    f.register(program_over(1, 2), 1)
    f.register(program_over(2, 3, key=2), 2)
    f.register(program_over(2, 3, key=3, session=2), 1)
    f.register(program_over(1, 3, key=4, session=3), 1)
    for number, slice, session in ((1, 1, 1), (2, 2, 1), (1, 2, 2), (1, 1, 3)):
        f.put(number, slice=slice, session=session)
    f.launch(1, (1,), 10)
    f.launch(2, (2,), 20, program=2)
    f.launch(1, (1,), 10, session=2)
    assert to_island(f.launch(1, (1,), 10, session=3), 0, IslandLaunch) == []
    (sent,) = to_island(f.checked(f.launches.close_session(2)), 0, IslandLaunch)
    assert sent.session == 3


def test_launches_of_one_island_pass_those_that_wait_for_several() -> None:
    f = front(Tenant("a"), Tenant("b"), window=1)
    for session in (1, 2):
        f.register(program_over(1, 2, key=10 + session, session=session), 1)
        f.register(program_over(1, key=20 + session, session=session), 2)
        f.put(1, session=session)
    f.launch(1, (1,), 10)
    assert to_island(f.launch(1, (1,), 10, session=2), 0, IslandLaunch) == []
    assert to_island(f.launch(2, (1,), 20, session=2, program=2), 0, IslandLaunch) == [], "behind its session's own"
    assert len(to_island(f.launch(2, (1,), 20, program=2), 0, IslandLaunch)) == 1


def test_who_waits_for_several_islands_is_not_passed_by_who_wants_one_of_them() -> None:
    cross_island = CrossIslandWindow(fifo, window=1)
    a, b, c = Usage("a"), Usage("b"), Usage("c")
    assert cross_island.may_start(1, 1, a, (0, 1), 0.0)
    cross_island.start((0, 1))
    assert not cross_island.may_start(2, 1, b, (1, 2), 0.0)
    assert not cross_island.may_start(3, 1, c, (2, 3), 0.0), "island 2 has room, but session 2 waits for it"
    assert cross_island.next_session(0.0) is None
    cross_island.end((0, 1))
    assert cross_island.next_session(0.0) == 2
    assert cross_island.may_start(2, 1, b, (1, 2), 0.0)


def test_launches_of_one_session_wait_each_for_their_own_islands() -> None:
    """One that decides may be passed by a later one on other islands, and keeps its place when that one goes. What
    follows of it when it has gone has a place like any other."""
    cross_island = CrossIslandWindow(fifo, window=1)
    a, b = Usage("a"), Usage("b")
    for islands in ((0, 1), (2, 3)):
        cross_island.start(islands)
        for session, usage in ((1, a), (2, b)):
            assert not cross_island.may_start(session, session + islands[0], usage, islands, 0.0)
    assert list(cross_island.queued) == [(1, 1), (2, 2), (1, 3), (2, 4)]
    cross_island.end((2, 3))
    assert cross_island.next_session(0.0) == 1
    assert not cross_island.may_start(1, 1, a, (0, 1), 0.0)
    assert cross_island.may_start(1, 3, a, (2, 3), 0.0)
    cross_island.start((2, 3))
    cross_island.end((0, 1))
    assert cross_island.next_session(0.0) == 1
    assert cross_island.may_start(1, 1, a, (0, 1), 0.0)
    assert not cross_island.may_start(1, 1, a, (0, 1), 0.0), "its next part is behind session 2"
    assert cross_island.next_session(0.0) == 2


def test_a_launch_keeps_its_place_when_a_later_one_of_its_session_is_cancelled() -> None:
    f = front(Tenant("a"), Tenant("b"), window=1)
    for session in (1, 2):
        f.register(program_over(1, 2, key=session, session=session), 1)
        f.put(1, session=session)
    for number, session in ((1, 2), (1, 1), (2, 2), (2, 1)):
        f.launch(number, (1,), 10 * number, session=session)
    f.checked(f.launches.cancellation.cancel(f.launches.sessions[1], Cancel(2)))
    commands = f.done(0, 1) + f.done(1, 1)
    assert [message.session for message in to_island(commands, 0, IslandLaunch)] == [1]


def test_a_closed_session_makes_room_for_those_behind_it() -> None:
    f = front(Tenant("a"), Tenant("b"), window=1)
    for session in (1, 2):
        f.register(program_over(1, 2, key=session, session=session), 1)
        f.put(1, session=session)
        f.launch(1, (1,), 10, session=session)
    assert [r.session for r in f.launches.in_flight.values()] == [1]
    commands = f.checked(f.launches.close_session(1))
    assert to_island(commands, 0, DropSession) == [DropSession(1)]
    for island in (0, 1):
        f.checked(f.launches.run_failed(island, IslandLaunchFailed(1, Failure("SessionClosed", "over"))))
    assert [r.session for r in f.launches.in_flight.values()] == [2]


# --- circuit breaker --------------------------------------------------------------------------------------------------


def killing(f: Harness, epoch: int, launch: int, kind: str = "HostLost", crash: str = "") -> list:
    """A launch of program 1, and the death of host 0 with it first in line."""
    start(f, launch)
    sequence = f.launches.tables.sequence
    down = HostDown(0, epoch, "killed", kind, (sequence,), decided=kind != "HostLost")
    commands = f.checked(f.launches.host_down(down))
    message = HostUp(0, epoch + 1, "t", "d", 2, 100, crash)
    f.checked(f.launches.host_up(0, message))
    f.put(1)
    return commands


def start(f: Harness, launch: int) -> None:
    """A launch of program 1, whose hosts compile it again if they have to."""
    f.launch(launch, (1,), 10 * launch)
    for host in sorted(f.launches.programs[1].unready):
        f.ready(f.launches.programs[1], host)


def first(f: Harness) -> None:
    f.register(program_over(1), 1)
    f.put(1)


def succeed(f: Harness, launch: int) -> None:
    start(f, launch)
    f.done(0, f.launches.tables.sequence)


def test_a_program_that_never_succeeded_is_refused_after_three_deaths() -> None:
    f = Harness()
    first(f)
    for k in range(1, MAX_DEATHS + 1):
        assert len(to_client(killing(f, k, k), kind=LaunchFailed)) == 1
    failure = failure_of(f.launch(9, (1,), 90))
    assert failure.kind == "ProgramRefused"
    assert failure.message.count("killed") == MAX_DEATHS
    f.register(program_over(1, key=5), 2)
    assert failure_of(f.launch(10, (1,), 100, program=2)) == failure, "registered again, it is the same program"


def test_a_program_that_succeeded_once_may_see_any_number_of_hosts_killed() -> None:
    f = Harness()
    first(f)
    succeed(f, 1)
    for k in range(1, 4 * MAX_DEATHS):
        killing(f, k, k + 1)
    assert not f.launches.circuit_breaker.refused


def test_a_program_is_not_blamed_for_a_crash_after_the_death_that_it_was_there_for() -> None:
    """Its host was killed, and came back; days later that crashes while it has no scheduler, which would have said
    what ran there."""
    f = Harness()
    first(f)
    for k in range(1, 2 * MAX_DEATHS, 2):
        succeed(f, 2 * k)
        killing(f, k, 2 * k + 1)
        f.checked(f.launches.scheduler_lost([f.launches.hosts[0]], "its scheduler is gone"))
        f.checked(f.launches.host_up(0, HostUp(0, k + 2, "t", "d", 2, 100, "Segmentation fault")))
        f.put(1)
    assert not f.launches.circuit_breaker.refused
    assert not f.launches.circuit_breaker.pending


@pytest.mark.parametrize("how", [{"kind": "LaunchTimeout"}, {"crash": "Segmentation fault"}])
def test_a_program_that_is_to_blame_is_refused_though_it_succeeds_in_between(how: dict[str, str]) -> None:
    f = Harness()
    first(f)
    for k in range(1, MAX_DEATHS + 1):
        assert not f.launches.circuit_breaker.refused
        succeed(f, 2 * k)
        killing(f, k, 2 * k + 1, **how)
    failure = failure_of(f.launch(99, (1,), 990))
    assert failure.kind == "ProgramRefused"
    assert failure.message.count(next(iter(how.values())) if "crash" in how else "killed") == MAX_DEATHS


def test_a_cross_island_launch_of_a_plain_cluster_needs_no_policy() -> None:
    f = Harness()
    assert isinstance(f.launches, Launches)
    f.register(program_over(1, 2), 1)
    f.put(1)
    assert len(to_island(f.launch(1, (1,), 10), 1, IslandLaunch)) == 1
