"""The order of one island: the messages its hosts get and when, and those that the controller gets."""

from __future__ import annotations

import math

import msgspec
import pytest

from pathways_ray.errors import Failure
from pathways_ray.scheduler.core import TICK_S
from pathways_ray.scheduler.deadlines import MAX_STRANDED_S
from pathways_ray.scheduler.events import Command, Kill, Refuse, ToController, ToHosts
from pathways_ray.scheduler.policies import anonymous, fifo
from pathways_ray.scheduler.queues import MAX_CALLING
from pathways_ray.simulation.tables import check_order
from pathways_ray.transport.capabilities import tenant_mark
from pathways_ray.transport.messages import (
    Abort,
    Account,
    AllowEarly,
    BarrierReached,
    BarrierReleased,
    Begun,
    CancelLaunch,
    Done,
    Drop,
    DropProgram,
    DropSession,
    Enqueued,
    FromHost,
    HostDown,
    HostUp,
    IslandLaunch,
    IslandLaunchFailed,
    Peers,
    Program,
    Ready,
    ToHost,
)
from tests.unit.scheduler.island import Island, devices

BOOM = Failure("ExecutionError", "boom")
MARK = tenant_mark(anonymous(1))
"""Of the tenant of session 1, which may hand over launches once it has been alone for a while."""


def run(sequence: int, first: int = 0, gangs: int = 0) -> IslandLaunch:
    return IslandLaunch(sequence, 1, 1, (), 0, first, gangs)


def up(host: int, epoch: int = 1) -> HostUp:
    return HostUp(host, epoch, "t", "d", 2, 1)


def serving(*hosts: int, window: int = 2, limit_s: float = math.inf) -> Island:
    """An island whose hosts are all up under epoch 1."""
    island = Island(hosts, window, fifo, limit_s)
    island.from_controller(Program(1, b"", {}, "p", devices(*(f"{host}.0" for host in hosts))))
    for host in hosts:
        island.host_up(up(host))
    return island


def dispatched(commands: list[Command]) -> list[ToHost]:
    return [command.message for command in commands if isinstance(command, ToHosts)]


def told(commands: list[Command]) -> list:
    """Messages to the controller, without times, candidates and stories, which have tests of their own."""
    messages = [command.message for command in commands if isinstance(command, ToController)]
    plain = [Done(m.sequences) if isinstance(m, Done) else m for m in messages]
    return [HostDown(m.host, m.epoch, m.reason) if isinstance(m, HostDown) else m for m in plain]


# --- dispatch ---------------------------------------------------------------------------------------------------------


def test_launches_go_to_the_hosts_as_they_come_up_to_the_window() -> None:
    """
    1. Two may be with the hosts. Of three launches the third one waits.
    2. A completion lets it go.
    """
    island = serving(0)
    assert [dispatched(island.from_controller(run(k))) for k in (1, 2, 3)] == [[run(1)], [run(2)], []]
    commands = island.from_host(0, 1, Done((1,)))
    assert told(commands) == [Done((1,))]
    assert dispatched(commands) == [run(3)]


def test_completions_that_come_together_let_as_many_go() -> None:
    island = serving(0)
    for k in range(1, 6):
        island.from_controller(run(k))
    commands = island.from_host(0, 1, Done((1, 2)))
    assert told(commands) == [Done((1, 2))]
    assert dispatched(commands) == [run(3), run(4)]


@pytest.mark.parametrize("drop", [Drop(1, (5,)), DropProgram(1, 1)])
def test_drops_stay_behind_the_launches_that_came_before_them(drop: Drop | DropProgram) -> None:
    island = serving(0, window=1)
    island.from_controller(run(1))
    island.from_controller(run(2))
    assert dispatched(island.from_controller(drop)) == []
    assert dispatched(island.from_host(0, 1, Done((1,)))) == [run(2), drop]
    assert dispatched(island.from_controller(drop)) == [drop], "with nothing before them they leave at once"


def test_what_was_given_to_a_launch_that_has_succeeded_is_dropped_at_once() -> None:
    """A stream of launches that wait would keep all that was donated to those before."""
    island, drop = serving(0, window=1), Drop(1, (5,), given=True)
    island.from_controller(run(1))
    island.from_controller(run(2))
    assert dispatched(island.from_controller(drop)) == [drop]


@pytest.mark.parametrize("message", [Program(1, b"plan", {}), Peers(())])
def test_what_has_no_place_in_the_order_is_passed_on(message: Program | Peers) -> None:
    island = serving(0, window=1)
    island.from_controller(run(1))
    island.from_controller(run(2))
    assert dispatched(island.from_controller(message)) == [message]


def test_further_gangs_of_a_launch_take_no_further_room() -> None:
    """Sequential dispatch: three messages of one launch are one launch in the window."""
    island = serving(0, window=1)
    sent = [dispatched(island.from_controller(run(1, gang, 1))) for gang in (0, 1, 2)]
    assert sent == [[run(1, 0, 1)], [run(1, 1, 1)], [run(1, 2, 1)]]
    assert dispatched(island.from_controller(run(2, 0, 1))) == []
    assert told(island.from_host(0, 1, Enqueued(1, 2))) == [Enqueued(1, 2)]
    assert dispatched(island.from_host(0, 1, Done((1,)))) == [run(2, 0, 1)]


def test_further_gangs_of_a_launch_that_waits_count_as_one_launch() -> None:
    island = serving(0, window=1)
    island.from_controller(run(1, 0, 1))
    for gang in (0, 1, 2):
        island.from_controller(run(2, gang, 1))
    assert list(island.order.queues.lengths().values()) == [1]


def test_a_launch_that_has_its_room_does_not_wait_behind_those_that_wait_for_room() -> None:
    """Sequential dispatch, when more launches are under way than fit into the window.

    1. One launch has the only room, a second one and a drop wait behind it.
    2. The next gang of the first one comes. It goes at once: without it no room would ever become free.
    """
    island = serving(0, window=1)
    island.from_controller(run(1, 0, 1))
    island.from_controller(run(2, 0, 1))
    island.from_controller(Drop(1, (4,)))
    assert dispatched(island.from_controller(run(1, 1, 1))) == [run(1, 1, 1)]
    assert dispatched(island.from_host(0, 1, Done((1,)))) == [run(2, 0, 1), Drop(1, (4,))]


def test_a_further_gang_of_a_launch_that_is_over_is_not_dispatched() -> None:
    """
    1. The island has done all its gangs of a launch and said so.
    2. The controller, which had not heard of it yet, sends what is left of the launch.
    3. The hosts would take it for a new launch, and it would keep its room for ever.
    """
    island = serving(0, window=1)
    island.from_controller(run(1, 0, 1))
    island.from_host(0, 1, Done((1,)))
    assert dispatched(island.from_controller(run(1, 2, 3))) == []
    assert dispatched(island.from_controller(run(2, 0, 1))) == [run(2, 0, 1)]


@pytest.mark.parametrize("end", ["it runs", "its island is lost"])
def test_nothing_is_left_of_sessions_that_have_ended(end: str) -> None:
    """
    1. Each of 200 sessions ends while a cross-island launch of its waits, which is kept.
    2. It runs, or the island is lost.
    3. A further gang of it comes from a controller that did not know.
    """
    island = serving(0, window=1)
    order = island.order
    tables = ("sessions", "waiting", "outstanding", "cross_island", "programs")
    island.from_controller(Program(1, b"", {}, "p", devices("0.0"), True))
    before = {name: len(getattr(order, name)) for name in tables}
    for session in range(2, 202):
        first, second = 2 * session, 2 * session + 1
        island.from_controller(Account(session, f"session {session}", 1.0, 0))
        island.from_controller(IslandLaunch(first, session, 1, (), 0, 0, 1))
        island.from_controller(IslandLaunch(second, session, 1, (), 0, 0, 1))
        island.from_controller(DropSession(session))
        if end == "it runs":
            (kept,) = dispatched(island.from_host(0, 1, Done((first,))))
            assert isinstance(kept, IslandLaunch)
            assert (kept.sequence, kept.cancelled is not None) == (second, True)
            island.from_host(0, 1, Done((second,)))
        else:
            order.clear()
        island.from_controller(IslandLaunch(second, session, 1, (), 0, 1, 1))
    assert {name: len(getattr(order, name)) for name in tables} == before
    assert (order.ledger.tenant_of, order.ledger.usages, order.ledger.active) == ({}, {}, 0)


def test_nothing_is_dispatched_before_all_hosts_are_up() -> None:
    island = Island((0, 1), 4)
    assert dispatched(island.from_controller(run(1))) == []
    assert dispatched(island.host_up(up(0))) == []
    commands = island.host_up(up(1))
    assert (told(commands), dispatched(commands)) == ([up(1)], [run(1)])


# --- outcomes ---------------------------------------------------------------------------------------------------------


def test_a_launch_completes_when_every_host_has_completed_it() -> None:
    island = serving(0, 1)
    island.from_controller(run(1))
    assert island.from_host(0, 1, Done((1,))) == []
    assert island.from_host(0, 1, Done((1,))) == [], "the same host counts once"
    assert told(island.from_host(1, 1, Done((1,)))) == [Done((1,))]
    assert island.from_host(1, 1, Done((1,))) == [], "it is over"


def test_a_launch_has_failed_when_every_host_says_so() -> None:
    """
    1. Host 1 fails a launch while the others still run their part: nothing is told, the launch keeps its room.
    2. The others fail too: the launch is over. The failure that is told is the first one seen.
    """
    island = serving(0, 1, 2, window=1)
    island.from_controller(run(1))
    island.from_controller(run(2))
    later = Failure("ExecutionError", "the others do not answer")
    assert island.from_host(1, 1, IslandLaunchFailed(1, BOOM)) == []
    assert island.from_host(2, 1, IslandLaunchFailed(1, later)) == []
    commands = island.from_host(0, 1, IslandLaunchFailed(1, later))
    assert told(commands) == [IslandLaunchFailed(1, BOOM)]
    assert dispatched(commands) == [run(2)]


def test_a_failed_launch_has_consumed_what_it_has_consumed_on_any_host() -> None:
    island = serving(0, 1)
    island.from_controller(run(1))
    assert island.from_host(0, 1, IslandLaunchFailed(1, BOOM, consumed=(7,))) == []
    commands = island.from_host(1, 1, IslandLaunchFailed(1, BOOM, consumed=(8,)))
    assert told(commands) == [IslandLaunchFailed(1, BOOM, consumed=(7, 8))]


@pytest.mark.parametrize("first_to_speak", ["the one that failed", "the one that did not"])
def test_hosts_that_disagree_restart_their_island(first_to_speak: str) -> None:
    """One ran a gang that the other did not: what their collectives exchange from then on is worthless."""
    island = serving(0, 1)
    island.from_controller(run(1))
    news: list[tuple[int, FromHost]] = [(0, Done((1,))), (1, IslandLaunchFailed(1, BOOM))]
    if first_to_speak == "the one that failed":
        news.reverse()
    (host, message), (other, contradiction) = news
    assert island.from_host(host, 1, message) == []
    commands = island.from_host(other, 1, contradiction)
    assert sorted(message.host for message in told(commands)) == [0, 1]
    assert {type(message) for message in told(commands)} == {HostDown}
    assert sorted(command.host for command in commands if isinstance(command, Kill)) == [0, 1]


def test_hosts_that_disagree_restart_their_island_whatever_ends_beside() -> None:
    """The report has another launch, whose end would let a third one go."""
    island = serving(0, 1)
    for sequence in (1, 2, 3):
        island.from_controller(run(sequence))
    island.from_host(1, 1, IslandLaunchFailed(1, BOOM))
    island.from_host(1, 1, Done((2,)))
    commands = island.from_host(0, 1, Done((1, 2)))
    assert sorted(command.host for command in commands if isinstance(command, Kill)) == [0, 1]


def test_hosts_that_have_yet_to_report_disagree_with_nobody() -> None:
    """
    1. A value failed whose shards are on hosts 0 and 1. Host 2, without one, has completed the launch, and consumed its
       argument.
    2. Host 1 says last that it failed, too.
    """
    island = serving(0, 1, 2)
    island.from_controller(IslandLaunch(1, 1, 1, (7,), 0))
    failed = IslandLaunchFailed(1, BOOM, (0, 1))
    assert told(island.from_host(0, 1, failed)) == []
    assert told(island.from_host(2, 1, Done((1,)))) == []
    assert told(island.from_host(1, 1, failed)) == [IslandLaunchFailed(1, BOOM, (0, 1), consumed=(7,))]


def test_a_gang_is_enqueued_when_all_hosts_say_so() -> None:
    """Sequential dispatch: a host without a part in a gang says at once that it has enqueued it, and the next one may
    not begin before those that have one say so."""
    island = serving(0, 1, 2)
    island.from_controller(run(1, 0, 1))
    for host in (2, 0):
        assert told(island.from_host(host, 1, Enqueued(1, 0))) == []
    assert told(island.from_host(1, 1, Enqueued(1, 0))) == [Enqueued(1, 0)]
    island.from_controller(run(1, 1, 1))
    assert told(island.from_host(1, 1, Enqueued(1, 1))) == []


def test_news_of_hosts_are_passed_on() -> None:
    island = serving(0, 1)
    assert told(island.from_host(0, 1, Ready(0, 7, 100))) == [Ready(0, 7, 100)]
    assert told(island.from_host(1, 1, Enqueued(3, 0))) == [Enqueued(3, 0)]


# --- input barriers ---------------------------------------------------------------------------------------------------


def test_a_barrier_is_released_when_every_host_has_the_inputs_of_the_gang() -> None:
    """
    1. Gang 2 of a launch waits for data on both hosts, gang 3 too. Each barrier is released by itself, and once.
    2. A host that says twice that its data has come counts once.
    """
    island = serving(0, 1)
    island.from_controller(run(1))
    assert island.from_host(0, 1, BarrierReached(0, 1, 2)) == []
    assert island.from_host(0, 1, BarrierReached(0, 1, 2)) == []
    assert island.from_host(1, 1, BarrierReached(1, 1, 3)) == []
    assert island.from_host(1, 1, BarrierReached(1, 1, 2)) == [ToHosts(BarrierReleased(1, 2))]
    assert island.from_host(0, 1, BarrierReached(0, 1, 3)) == [ToHosts(BarrierReleased(1, 3))]


def test_what_failed_to_arrive_on_one_host_has_failed_on_all() -> None:
    island = serving(0, 1, 2)
    island.from_controller(run(1))
    assert island.from_host(1, 1, BarrierReached(1, 1, 0, BOOM)) == []
    assert island.from_host(0, 1, BarrierReached(0, 1, 0)) == []
    assert island.from_host(2, 1, BarrierReached(2, 1, 0, Failure("HostLost", "another"))) == [
        ToHosts(BarrierReleased(1, 0, BOOM))
    ]


def test_barriers_of_launches_that_are_over_are_not_released() -> None:
    island = serving(0)
    assert island.from_host(0, 1, BarrierReached(0, 7, 0)) == []
    island.from_controller(run(1))
    island.host_lost(0, 1)
    island.host_up(up(0, 2))
    assert island.from_host(0, 1, BarrierReached(0, 1, 0)) == []
    assert island.from_host(0, 2, BarrierReached(0, 1, 0)) == []


# --- losses and epochs ------------------------------------------------------------------------------------------------


def test_an_epoch_that_is_not_newer_is_refused() -> None:
    island = serving(0)
    assert island.host_up(up(0, epoch=1)) == [Refuse(0, 1)]
    island.host_lost(0, 1)
    assert island.host_up(up(0, epoch=1)) == [Refuse(0, 1)], "it was lost under this epoch"
    assert told(island.host_up(up(0, epoch=2))) == [up(0, 2)]
    assert island.host_up(up(5)) == [Refuse(5, 1)], "a host of another island"


def test_a_lost_host_clears_what_was_with_the_hosts_and_is_reported_once() -> None:
    """
    1. One launch is with the hosts, one waits, a drop waits behind it.
    2. The host is lost: the controller is told and fails both; all is forgotten, since a host starts empty.
    3. News of the loss that come again, or of an older epoch, change nothing.
    """
    island = serving(0, window=1)
    for message in (run(1), run(2), Drop(1, (4,))):
        island.from_controller(message)
    commands = island.host_lost(0, 1)
    assert told(commands) == [HostDown(0, 1, "its process ended")]
    assert dispatched(commands) == []
    assert island.host_lost(0, 1) == []
    assert island.from_host(0, 1, Done((1,))) == [], "a message of an epoch that is over"
    assert dispatched(island.from_controller(run(3))) == []
    commands = island.host_up(up(0, epoch=2))
    assert dispatched(commands) == [run(3)]
    assert island.host_lost(0, 1) == []
    assert island.from_host(0, 1, Done((3,))) == [], "said by the predecessor"
    assert told(island.from_host(0, 2, Done((3,)))) == [Done((3,))]


def test_a_host_that_never_was_is_not_lost() -> None:
    assert Island((0,), 1).host_lost(0, 0) == []
    assert serving(0).host_lost(7, 1) == []


def test_a_successor_tells_that_its_predecessor_is_gone() -> None:
    island = serving(0)
    island.from_controller(run(1))
    commands = island.host_up(up(0, epoch=2))
    assert [type(message) for message in told(commands)] == [HostDown, HostUp]
    assert island.from_host(0, 2, Done((1,))) == [], "launches of the predecessor are forgotten"


def test_the_hosts_of_an_island_go_together() -> None:
    """Survivors may sit in a collective with the lost host: they are killed and come back with it.

    1. Host 1 of three is lost. All three are reported down, each once, and killed.
    2. What the survivors still say counts for nothing.
    3. Launches wait until all three are back under the next epoch.
    """
    island = serving(0, 1, 2)
    island.from_controller(run(1))
    commands = island.host_lost(1, 1)
    assert sorted(message.host for message in told(commands)) == [0, 1, 2]
    assert {c for c in commands if isinstance(c, Kill)} == {Kill(0, 1), Kill(1, 1), Kill(2, 1)}
    assert island.from_host(0, 1, IslandLaunchFailed(1, BOOM)) == []
    assert island.host_lost(0, 1) == []
    island.from_controller(run(2))
    assert [dispatched(island.host_up(up(host, 2))) for host in (2, 0, 1)] == [[], [], [run(2)]]
    assert [told(island.from_host(host, 2, Done((2,)))) for host in (0, 1, 2)] == [[], [], [Done((2,))]]


def test_a_silent_host_is_killed_itself() -> None:
    island = serving(0, 1)
    assert [island.tick(k * TICK_S, silent=0) for k in range(80)] == [[]] * 80
    commands = island.tick(8.1, silent=0) + island.tick(8.2, silent=0)
    assert [message.reason for message in told(commands)] == [
        "it did not answer for 8 s",
        "host 0 of its island was lost: it did not answer for 8 s",
    ]
    assert [c for c in commands if isinstance(c, Kill)] == [Kill(0, 1), Kill(1, 1)]


def test_a_host_that_joins_a_group_which_is_lost_already_is_sent_away() -> None:
    """The hosts of an island form a group under one epoch; it can break before all of them have reached the scheduler.

    1. Of hosts 0 and 1, host 0 joins under epoch 2 and is lost again.
    2. Host 1 arrives under epoch 2: its group is gone. It is not taken, and killed, so that both meet again under 3.
    """
    island = serving(0, 1)
    island.host_lost(0, 1)
    island.host_up(up(0, 2))
    island.host_lost(0, 2)
    commands = island.host_up(up(1, 2))
    assert Refuse(1, 2) in commands
    assert Kill(1, 2) in commands
    assert told(commands) == []
    assert [type(message) for host in (0, 1) for message in told(island.host_up(up(host, 3)))] == [HostUp, HostUp]


# --- launches without end ---------------------------------------------------------------------------------------------


def test_a_launch_that_keeps_its_devices_too_long_ends_with_its_island() -> None:
    """
    1. The limit is 10 s. Launches one after the other, together longer than that, are fine.
    2. One that stays first for longer is reported as the cause, and the island's hosts are killed.
    """
    island = serving(0, 1, window=4, limit_s=10.0)
    for k in (1, 2, 3):
        island.from_controller(run(k))
    for k in (1, 2):
        assert island.tick(8.0 * k) == []
        for host in (0, 1):
            island.from_host(host, 1, Done((k,)))
    assert island.tick(24.0, running={3: 16.0}) == []
    commands = island.tick(27.0, running={3: 16.0})
    downs = [c.message for c in commands if isinstance(c, ToController) and isinstance(c.message, HostDown)]
    assert [(d.host, d.kind, d.candidates) for d in downs] == [(0, "LaunchTimeout", (3,)), (1, "LaunchTimeout", ())]
    assert downs[0].decided
    assert "launch 3" in downs[0].reason
    assert "the limit is 10 s" in downs[0].reason
    assert [c for c in commands if isinstance(c, Kill)] == [Kill(0, 1), Kill(1, 1)]
    assert {type(command) for command in island.tick(50.0)} <= {Kill}, "again, should a call have been lost"


def test_launches_that_have_ended_elsewhere_leave_the_queue_and_the_hosts_are_told() -> None:
    """
    1. Program 1 runs on several islands. Launch 1 is with the hosts, 2 waits, a drop behind it, then 3.
    2. Launches 1 and 2 have ended on another island: the hosts are told, 2 is taken out, its drop goes.
    3. The hosts end launch 1: launch 3 goes.
    """
    island = serving(0, 1, window=1)
    island.from_controller(Program(1, b"", {}, cross_island=True))
    for message in (run(1), run(2), Drop(1, (7,)), run(3)):
        island.from_controller(message)
    lost = Failure("HostLost", "host 9 was lost", host=9)
    abort = Abort(((1, 1), (2, 1)), lost)
    over = ToController(IslandLaunchFailed(2, lost))
    assert island.from_controller(abort) == [ToHosts(abort), ToHosts(Drop(1, (7,))), over]
    for host in (0, 1):
        commands = island.from_host(host, 1, IslandLaunchFailed(1, lost))
    assert ToHosts(run(3)) in commands
    check_order(island.order)


def test_a_tenant_may_have_a_limit_of_its_own() -> None:
    """Below the runtime's, and above it; it holds from the next look on when the operator changes it."""
    for own, late in ((5.0, 5.5), (20.0, 20.5)):
        island = serving(0, window=4, limit_s=10.0)
        island.from_controller(Account(1, "alice", 1.0, 0, own))
        island.from_controller(run(1))
        island.tick(1.0, running={1: 0.0})
        assert island.tick(own - 0.5, running={1: 0.0}) == []
        commands = island.tick(late, running={1: 0.0})
        (down,) = [c.message for c in commands if isinstance(c, ToController) and isinstance(c.message, HostDown)]
        assert down.kind == "LaunchTimeout"
        assert f"the limit is {own:.0f} s" in down.reason


def test_hosts_that_wait_in_a_gang_another_one_failed_to_enter_do_not_wait_for_ever() -> None:
    """
    1. A launch fails on host 0. Host 1 is busy with the one before it: that is no reason.
    2. Then it is first on host 1's devices, and does not end: the island restarts.
    """
    island = serving(0, 1, window=4)
    for k in (1, 2):
        island.from_controller(run(k))
    assert island.tick(0.0) == []
    assert island.from_host(0, 1, IslandLaunchFailed(2, BOOM)) == []
    assert island.tick(60.0) == []
    for host in (0, 1):
        island.from_host(host, 1, Done((1,)))
    for k in range(int(MAX_STRANDED_S) + 1):
        assert island.tick(61.0 + k) == []
    commands = island.tick(61.0 + MAX_STRANDED_S + 1)
    assert [c for c in commands if isinstance(c, Kill)] == [Kill(0, 1), Kill(1, 1)]
    assert "failed on host 0, and host 1 waits in it: boom" in told(commands)[0].reason


def test_a_host_that_is_stopped_in_a_gang_that_another_one_failed_to_enter_is_not_taken_for_one_that_waits() -> None:
    """
    1. A launch fails on host 0, which goes on. Host 1 is not heard: it was stopped, or is slow.
    2. It comes back, and has as long as any other for the launch from then on.
    """
    island = serving(0, 1)
    island.tick(0.0)
    island.from_controller(run(1))
    island.from_host(0, 1, IslandLaunchFailed(1, BOOM))
    limit_s = island.core.liveness.limit_s
    assert limit_s > MAX_STRANDED_S + 1
    for k in range(1, int(limit_s)):
        assert island.tick(float(k), silent=1) == []
    assert [island.tick(limit_s - 1 + k) for k in range(3)] == [[]] * 3
    assert told(island.from_host(1, 1, IslandLaunchFailed(1, BOOM))) == [IslandLaunchFailed(1, BOOM)]


def test_hosts_without_part_in_what_failed_may_take_their_time() -> None:
    island = serving(0, 1)
    island.from_controller(run(1))
    island.tick(0.0)
    island.from_host(0, 1, IslandLaunchFailed(1, BOOM, (0,)))
    assert island.tick(100.0) == []
    assert told(island.from_host(1, 1, Done((1,)))) == [IslandLaunchFailed(1, BOOM, (0,))]


# --- computations on a device -----------------------------------------------------------------------------------------


def test_no_more_computations_are_on_a_device_than_leave_its_host_free() -> None:
    """
    1. A loop without end, and behind it as many small launches as make 28 computations: the rest waits here.
    2. When the session ends, what waits ends too; the hosts never had it.
    """
    island = serving(0, window=128)
    island.from_controller(Program(1, b"", {}, "small", devices("0.0"), computations=2))
    for k in range(1, 21):
        island.from_controller(run(k))
    assert list(island.order.outstanding) == list(range(1, 15))
    assert sum(record.program.computations for record in island.order.outstanding.values()) == 28
    ended = told(island.from_controller(DropSession(1)))
    assert [message.sequence for message in ended] == list(range(15, 21))


def test_a_full_device_is_refilled_with_many_launches_at_once() -> None:
    """
    1. One launch shows that they are short.
    2. A stream of them fills the device. As long as half of them are left no more follow, then as many as fit.
    3. The rest ends, however far the device was refilled.
    """
    island = serving(0, window=128)
    island.from_controller(Program(1, b"", {}, "small", devices("0.0")))
    island.from_controller(run(1))
    island.from_host(0, 1, Done((1,), (100,)))
    for k in range(2, 102):
        island.from_controller(run(k))
    assert list(island.order.outstanding) == list(range(2, 30))
    for k in range(2, 15):
        assert dispatched(island.from_host(0, 1, Done((k,)))) == []
    assert dispatched(island.from_host(0, 1, Done((15,)))) == [run(k) for k in range(30, 44)]
    while island.order.outstanding:
        island.from_host(0, 1, Done((next(iter(island.order.outstanding)),)))
    assert not island.order.waiting


def inline(sequence: int) -> Island:
    """An island of two hosts that run program 1 within the call that enqueues it, and program 2 in device queues; a
    launch of 1 has shown that it takes 100 us."""
    island = serving(0, 1, window=64)
    for number in (1, 2):
        island.from_controller(Program(number, b"", {}, "p", devices("0.0", "1.0")))
    for host in (0, 1):
        island.from_host(host, 1, Ready(host, 1, 0, None, False))
        island.from_host(host, 1, Ready(host, 2, 0))
    island.from_controller(run(sequence))
    end(island, sequence)
    return island


def end(island: Island, sequence: int) -> None:
    for host in (0, 1):
        island.from_host(host, 1, Done((sequence,), (100,)))


def test_what_runs_within_the_call_that_enqueues_it_takes_no_room_in_device_queues() -> None:
    """
    1. Launches go to the hosts up to the window of the island, and all end.
    2. Those of a program that queues have the whole queue.
    """
    island = inline(1)
    for k in range(2, 202):
        island.from_controller(run(k))
    assert len(island.order.outstanding) == 64
    while island.order.outstanding:
        end(island, next(iter(island.order.outstanding)))
    assert not island.order.waiting
    island.from_controller(IslandLaunch(202, 1, 2, (), 0))
    end(island, 202)
    for k in range(203, 240):
        island.from_controller(IslandLaunch(k, 1, 2, (), 0))
    assert len(island.order.outstanding) == 28


def test_it_takes_room_until_all_hosts_of_the_slice_say_that_nothing_queues() -> None:
    island = inline(1)
    island.from_controller(Program(3, b"", {}, "p", devices("0.0", "1.0")))
    island.from_host(0, 1, Ready(0, 3, 0, None, False))
    island.from_controller(IslandLaunch(2, 1, 3, (), 0))
    end(island, 2)
    for k in range(3, 40):
        island.from_controller(IslandLaunch(k, 1, 3, (), 0))
    assert len(island.order.outstanding) == 28


@pytest.mark.parametrize("before", ["in a queue", "of several islands", "none, but a second session"])
def test_behind_anything_else_cheap_computations_take_room(before: str) -> None:
    """
    1. A loop without end is on the devices, or a launch that waits for another island; or another session has the
       island too, which could have handed such a loop to a host.
    2. Of cheap launches that follow only so many go that the thread which enqueues them is not held up.
    3. When the loop is over and they are, the window is open again.
    """
    island = inline(1)
    if before == "none, but a second session":
        island.from_controller(Account(1, "one", 1.0, 0))
        island.from_controller(Account(2, "one", 1.0, 0))
    else:
        island.from_controller(Program(3, b"", {}, "p", devices("0.0", "1.0"), before != "in a queue"))
        island.from_controller(IslandLaunch(2, 1, 3, (), 0))
    for k in range(3, 63):
        island.from_controller(run(k))
    assert len([1 for k in island.order.outstanding if k != 2]) <= 28
    while island.order.outstanding:
        end(island, next(iter(island.order.outstanding)))
    island.from_controller(DropSession(2))
    for k in range(63, 163):
        island.from_controller(run(k))
    assert len(island.order.outstanding) == 64


def test_cheap_computations_that_ended_with_their_hosts_are_not_counted() -> None:
    """
    1. Hosts start again, and a cheap launch ends with them.
    2. Behind one in a queue, cheap launches take room, as they would if that one had never been.
    """
    island = inline(1)
    island.from_controller(run(2))
    for host in (0, 1):
        island.host_up(up(host, epoch=2))
    assert (island.order.inline, island.order.outstanding) == (0, {})
    island.from_controller(IslandLaunch(3, 1, 2, (), 0))
    for k in range(4, 64):
        island.from_controller(run(k))
    assert len(island.order.outstanding) <= 28


def test_another_tenant_waits_behind_few_launches_that_take_no_room() -> None:
    """
    1. A tenant has a launch.
    2. Another one has many that would lie in no device queue: as many are with the host as if they did.
    """
    island = serving(0, window=128)
    island.from_controller(Account(2, "other", 1.0, 0))
    island.from_controller(Program(1, b"", {}, "small", devices("0.0")))
    island.from_host(0, 1, Ready(0, 1, 0, None, False))
    for session, sequence in ((1, 1), (2, 2)):
        island.from_controller(IslandLaunch(sequence, session, 1, (), 0))
        island.from_host(0, 1, Done((sequence,), (100,)))
    island.from_controller(IslandLaunch(3, 2, 1, (), 0))
    for k in range(4, 60):
        island.from_controller(run(k))
    assert len(island.order.outstanding) == 28


def test_a_launch_of_very_many_computations_goes_alone() -> None:
    island = serving(0)
    island.from_controller(Program(1, b"", {}, "big", devices("0.0"), computations=100))
    assert dispatched(island.from_controller(run(1))) == [run(1)]
    assert dispatched(island.from_controller(run(2))) == []
    assert dispatched(island.from_host(0, 1, Done((1,)))) == [run(2)]


# --- cancelling -------------------------------------------------------------------------------------------------------

CANCELLED = Failure("Cancelled", "the launch was cancelled")


def test_a_launch_that_waits_is_taken_out_of_the_queue() -> None:
    """
    1. One launch is with the hosts; two wait, with a drop between them.
    2. The second is cancelled: it ends here, and the drop behind it goes at once.
    3. The third runs when there is room.
    """
    island = serving(0, window=1)
    for message in (run(1), run(2), Drop(1, (4,)), run(3)):
        island.from_controller(message)
    commands = island.from_controller(CancelLaunch(2, CANCELLED))
    assert told(commands) == [IslandLaunchFailed(2, CANCELLED)]
    assert [c.message for c in commands if isinstance(c, ToHosts)] == [Drop(1, (4,))]
    assert dispatched(island.from_host(0, 1, Done((1,)))) == [run(3)]
    assert island.order.ledger.active == 1


def test_hosts_drop_what_a_launch_covers_that_is_taken_out() -> None:
    """They have begun these, and hear nothing of the launch itself."""
    island = serving(0, window=1)
    island.from_controller(run(1))
    island.from_controller(msgspec.structs.replace(run(2), covers=(600, 601)))
    commands = island.from_controller(CancelLaunch(2, CANCELLED))
    assert [c.message for c in commands if isinstance(c, ToHosts)] == [Drop(1, (600, 601))]


def test_a_launch_in_the_middle_or_alone_is_taken_out_too() -> None:
    island = serving(0, window=1)
    for k in (1, 2, 3, 4):
        island.from_controller(run(k))
    assert told(island.from_controller(CancelLaunch(3, CANCELLED))) == [IslandLaunchFailed(3, CANCELLED)]
    assert told(island.from_controller(CancelLaunch(2, CANCELLED))) == [IslandLaunchFailed(2, CANCELLED)]
    assert told(island.from_controller(CancelLaunch(4, CANCELLED))) == [IslandLaunchFailed(4, CANCELLED)]
    assert not island.order.waiting
    assert island.from_host(0, 1, Done((1,))) == [ToController(Done((1,), (0,)))]
    assert island.order.ledger.active == 0


def test_a_session_that_cancels_a_later_launch_has_waited_as_long_as_before() -> None:
    """What comes to the head counts from then on; what stays there from when it came."""
    island = serving(0, window=1)
    island.now = 1.0
    for k in (1, 2, 3, 4):
        island.from_controller(run(k))
    island.now = 50.0
    candidate = island.order.waiting[1].candidate
    island.from_controller(CancelLaunch(4, CANCELLED))
    assert (candidate.arrival, candidate.since) == (2, 1.0)
    island.from_controller(CancelLaunch(2, CANCELLED))
    assert (candidate.arrival, candidate.since) == (3, 50.0)


def test_a_launch_with_the_hosts_has_begun_and_one_that_is_over_is_nobody_s() -> None:
    island = serving(0)
    island.from_controller(run(1))
    assert told(island.from_controller(CancelLaunch(1, CANCELLED))) == [Begun(1)]
    island.from_host(0, 1, Done((1,)))
    assert island.from_controller(CancelLaunch(1, CANCELLED)) == []


def test_a_launch_over_several_islands_keeps_its_place_and_computes_nothing() -> None:
    island = serving(0, window=1)
    island.from_controller(Program(1, b"", {}, "across", cross_island=True))
    for k in (1, 2):
        island.from_controller(run(k))
    assert island.from_controller(CancelLaunch(2, CANCELLED)) == []
    (message,) = dispatched(island.from_host(0, 1, Done((1,))))
    assert isinstance(message, IslandLaunch)
    assert (message.sequence, message.cancelled) == (2, CANCELLED)


def test_launches_that_wait_for_host_functions_keep_nobody_else_waiting() -> None:
    """
    1. Session 1 has as many launches with the hosts as may call host functions; a further one waits.
    2. Session 2 has a program that was never measured: it finds the devices free, and passes the one that waits.
    3. A call that is over lets the next one go.
    """
    island = serving(0, window=128)
    for session in (1, 2):
        island.from_controller(Account(session, f"tenant {session}", 1.0, 0))
    island.from_controller(Program(1, b"", {}, "calls", devices("0.0"), calls=True))
    island.from_controller(Program(2, b"", {}, "computes", devices("0.0")))
    sent = [dispatched(island.from_controller(run(k))) for k in range(1, MAX_CALLING + 2)]
    assert sent == [[run(k)] for k in range(1, MAX_CALLING + 1)] + [[]]
    other = IslandLaunch(100, 2, 2, (), 0)
    assert dispatched(island.from_controller(other)) == [other]
    assert dispatched(island.from_host(0, 1, Done((3,)))) == [run(MAX_CALLING + 1)]


def test_an_island_that_waits_for_a_host_function_is_not_stuck() -> None:
    island = serving(0, limit_s=1.0)
    island.from_controller(Program(1, b"", {}, "calls", devices("0.0"), calls=True))
    island.from_controller(run(1))
    assert [message for k in range(1, 10) for message in dispatched(island.tick(float(k)))] == [AllowEarly(MARK)]


# --- early launches ---------------------------------------------------------------------------------------------------


def test_a_host_hears_that_nobody_may_hand_over_launches_before_those_of_another_tenant_come() -> None:
    island = serving(0, window=4)
    island.from_controller(run(1))
    assert dispatched(island.tick(1.0)) == [AllowEarly(MARK)]
    other = IslandLaunch(2, 2, 1, (), 0)
    assert dispatched(island.from_controller(other))[0] == AllowEarly("")


def test_one_that_is_through_may_not_while_another_tenant_still_has_launches() -> None:
    island = serving(0, window=4)
    island.from_controller(Program(2, b"", {}, "q", devices("0.1")))
    island.from_controller(run(1))
    island.from_controller(IslandLaunch(2, 2, 2, (), 0))
    island.from_host(0, 1, Done((2,)))
    assert list(island.order.outstanding) == [1]
    assert dispatched(island.tick(1.0)) == [], "the launch of the other one came before the last, and is not over"
    island.from_host(0, 1, Done((1,)))
    assert dispatched(island.tick(2.0)) == [AllowEarly(tenant_mark(anonymous(2)))]


def test_several_hosts_take_no_launches_of_clients() -> None:
    island = serving(0, 1, window=4)
    island.from_controller(run(1))
    assert dispatched(island.tick(1.0)) == []


def test_a_host_that_starts_again_is_told_again() -> None:
    island = serving(0, window=4)
    island.from_controller(run(1))
    island.tick(1.0)
    island.host_up(up(0, epoch=2))
    assert dispatched(island.tick(2.0)) == []
    island.from_controller(run(2))
    assert dispatched(island.tick(3.0)) == [AllowEarly(MARK)]
