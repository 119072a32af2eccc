"""A scheduler's core as events and commands: joining, liveness, load reports, and the story in what it reports."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from pathways_ray.errors import Failure
from pathways_ray.liveness import SILENCE_LIMIT_S
from pathways_ray.scheduler.core import LOAD_PERIOD_S, PASSED_ON, TICK_S, SchedulerCore
from pathways_ray.scheduler.events import (
    Accept,
    Command,
    ControllerConnected,
    ControllerDisconnected,
    ControllerMessage,
    Event,
    Exit,
    ForgetHosts,
    HostConnected,
    HostDisconnected,
    HostMessage,
    Kill,
    Refuse,
    Ticked,
    ToController,
    ToHosts,
    Withdraw,
)
from pathways_ray.scheduler.policies import fifo
from pathways_ray.transport.messages import (
    Abort,
    Account,
    BarrierReached,
    Decided,
    Dismissed,
    Done,
    DropProgram,
    Examine,
    Examined,
    FunctionsAhead,
    Gang,
    Heartbeat,
    Holds,
    HostDown,
    HostUp,
    IslandLaunch,
    IslandLaunchFailed,
    IslandOutcome,
    IslandOutcomes,
    IslandUp,
    Load,
    Ordered,
    Peer,
    Peers,
    Program,
    Recount,
    Running,
    ServedCalls,
    Stored,
)
from tests.unit.helpers import VECTOR
from tests.unit.scheduler.island import devices

C = TypeVar("C", bound=Command)


def up(host: int, epoch: int = 1) -> HostUp:
    return HostUp(host, epoch, "t", "d", 2, 1)


def launch(sequence: int) -> ControllerMessage:
    return ControllerMessage(IslandLaunch(sequence, 1, 1, (), 0))


def beat(host: int, epoch: int = 1) -> HostMessage:
    return HostMessage(host, epoch, Heartbeat(host))


def core_of(*hosts: int, window: int = 4, **options: Any) -> SchedulerCore:
    """A core whose hosts have joined under epoch 1 at time 0."""
    core = SchedulerCore(3, hosts, window, **options)
    for host in hosts:
        core.handle(HostConnected(up(host)), 0.0)
    return core


def history(core: SchedulerCore, events: list[tuple[float, Event]]) -> list[Command]:
    """All commands of a list of timed events but load reports."""
    commands = [command for now, event in events for command in core.handle(event, now)]
    return [c for c in commands if not (isinstance(c, ToController) and isinstance(c.message, Load))]


def those(kind: type[C], commands: list[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def downs(commands: list[Command]) -> list[HostDown]:
    return [c.message for c in those(ToController, commands) if isinstance(c.message, HostDown)]


# --- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_is_passed_on_where_nothing_of_it_is_for_the_scheduler() -> None:
    """A host is heard by it, too. One of an older epoch is not passed on, nor is what has to wait for a reunion."""
    core = core_of(0, 1)
    reports: list[Any] = [Stored(0, 1, 5, 1, VECTOR, ()), Decided(1, (7,))]
    now, lost = 0.0, list[int]()
    while now < SILENCE_LIMIT_S + 1.0:
        now += TICK_S
        assert core.passes_on(0, 1, reports, now)
        lost = core.liveness.silent(now)
    assert lost == [1]
    assert not core.passes_on(0, 1, [*reports, Done((1,))], now)
    assert not core.passes_on(0, 0, reports, now)
    assert list(core.host_batch(0, 0, reports, now)) == []
    core.members.part()
    assert not core.passes_on(0, 1, reports, now)
    assert list(core.host_batch(0, 1, reports, now)) == [ToController(reports[0])]


def test_what_is_passed_on_as_it_is_goes_to_the_controller_alone_as_well() -> None:
    core = core_of(0)
    given: list[Any] = [
        Stored(0, 1, 5, 1, VECTOR, ()),
        Decided(1, (7,)),
        Examined(1, 0, 2, b""),
        ServedCalls(0, ()),
    ]
    assert {type(message) for message in given} == PASSED_ON
    assert list(core.host_batch(0, 1, given, 0.0)) == [ToController(message) for message in given]


# --- joining ----------------------------------------------------------------------------------------------------------


def test_a_scheduler_names_itself_and_its_address_to_its_controller() -> None:
    core = SchedulerCore(3, (0,), 4)
    assert core.handle(ControllerConnected("here:1"), 0.0) == [ToController(IslandUp(3, "here:1"))]


def test_a_scheduler_without_its_controller_withdraws_the_address_and_goes_on_for_a_while() -> None:
    """Otherwise it might find the controller that is gone. What its hosts hold is of use to the next one."""
    core = core_of(0)
    assert core.handle(ControllerDisconnected("there:1"), 5.0) == [Withdraw("controller", "there:1")]
    assert not [c for c in core.handle(Ticked(), 64.0) if isinstance(c, Exit)]
    assert core.handle(Ticked(), 65.0)[:2] == [
        ToHosts(Dismissed()),
        Exit("there was no controller for 60 s"),
    ]


def test_the_next_controller_hears_the_highest_numbers_and_what_hosts_hold() -> None:
    """
    1. One launch is over, one with the hosts, one waits behind it, and so do parts of another one, which only the
       controller knew the whole of. The controller goes: these are forgotten.
    2. The next one hears of the highest numbers and of the three, and each host says what it holds, and hears what it
       may have begun already and will yet be sent. They run to their end, and the program stays with the hosts for as
       long as one waits for it.
    """
    core = SchedulerCore(3, (0,), 1)
    core.handle(HostConnected(up(0)), 0.0)
    core.handle(ControllerMessage(Program(7, b"", {}, islands=2, cross_island=True)), 0.0)
    one, two, three = (IslandLaunch(n, 1, 7, (), 10 * n, launch=n + 50, covers=(29, 30) * (n == 3)) for n in (1, 2, 3))
    for called in (one, two, three, IslandLaunch(4, 1, 7, (), -3), IslandLaunch(5, 1, 7, (-3,), 60, launch=55)):
        core.handle(ControllerMessage(called), 0.0)
    core.handle(HostMessage(0, 1, Done((1,), (5,))), 1.0)
    assert core.handle(ControllerDisconnected("there:1"), 5.0) == [Withdraw("controller", "there:1")]
    told = (
        IslandOutcome(1, 51, 1, 7, 2, False),
        IslandOutcome(1, 52, 2, 7, 2, True),
        IslandOutcome(1, 53, 3, 7, 2, True),
    )
    assert core.handle(ControllerConnected("here:1"), 6.0) == [
        ToController(IslandUp(3, "here:1", 5, 7)),
        ToController(IslandOutcomes(told)),
        ToHosts(Recount(((1, 29), (1, 30)))),
    ]
    held = HostUp(0, 1, "t", "d", 2, 1, holds=Holds({1: (4,)}, ()))
    assert core.handle(HostMessage(0, 1, held), 6.1) == [ToController(held)]
    assert core.handle(ControllerMessage(DropProgram(0, 7)), 6.2) == []
    done = core.handle(HostMessage(0, 1, Done((2,), (5,))), 7.0)
    assert done == [ToController(Done((2,), (5,))), ToHosts(three), ToHosts(DropProgram(0, 7))]
    assert not [c for c in core.handle(Ticked(), 100.0) if isinstance(c, Exit)]


def test_programs_that_only_waiting_launches_keep_go_with_them() -> None:
    """The controller is gone, and then the host, with all that another controller would have it drop."""
    core = SchedulerCore(3, (0,), 1)
    core.handle(HostConnected(up(0)), 0.0)
    for program in (7, 8):
        core.handle(ControllerMessage(Program(program, b"", {})), 0.0)
    for sequence in (1, 2):
        core.handle(ControllerMessage(IslandLaunch(sequence, 1, 7, (), 10, launch=sequence)), 0.0)
    core.handle(ControllerDisconnected("there:1"), 5.0)
    assert core.order.programs.keys() == {7}
    core.handle(HostDisconnected(0, 1), 6.0)
    assert not core.order.programs


@pytest.mark.parametrize("end", ["they run", "their host is lost"])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_session_that_no_controller_knows_goes_with_its_last_launch(resumed: bool, end: str) -> None:
    """One that comes back to the next controller keeps its queue, and its account."""
    core = SchedulerCore(3, (0,), 1)
    core.handle(HostConnected(up(0)), 0.0)
    core.handle(ControllerMessage(Account(1, "someone", 1.0, 0)), 0.0)
    core.handle(ControllerMessage(Program(7, b"", {})), 0.0)
    for sequence in (1, 2):
        core.handle(ControllerMessage(IslandLaunch(sequence, 1, 7, (), 10, launch=sequence)), 0.0)
    core.handle(ControllerDisconnected("there:1"), 5.0)
    core.handle(ControllerConnected("here:1"), 6.0)
    if resumed:
        core.handle(ControllerMessage(Account(1, "someone", 1.0, 0)), 6.0)
    assert core.order.waiting
    core.handle(HostMessage(0, 1, Done((1,), (5,))) if end == "they run" else HostDisconnected(0, 1), 7.0)
    assert not core.order.waiting
    assert (core.order.sessions.keys(), core.order.ledger.tenant_of.keys()) == (
        ({1}, {1}) if resumed else (set(), set())
    )


def test_gangs_that_are_sent_one_by_one_end_with_the_controller() -> None:
    """Nobody sends the others: a launch with the hosts is aborted, one that waits is forgotten."""
    core = SchedulerCore(3, (0,), 1)
    core.handle(HostConnected(up(0)), 0.0)
    core.handle(ControllerMessage(Program(7, b"", {})), 0.0)
    for sequence in (1, 2):
        core.handle(ControllerMessage(IslandLaunch(sequence, 1, 7, (), 10, 0, 1, launch=sequence)), 0.0)
    (aborted,) = [c.message for c in core.handle(ControllerDisconnected("there:1"), 5.0) if isinstance(c, ToHosts)]
    assert isinstance(aborted, Abort)
    assert (aborted.launches, aborted.failure.kind) == (((1, 7),), "ControllerLost")
    assert not core.order.waiting


def test_the_link_of_a_host_is_open_before_anything_is_sent_to_it() -> None:
    core = SchedulerCore(3, (0,), 4)
    core.handle(launch(1), 0.0)
    assert core.handle(HostConnected(up(0)), 0.0) == [
        Accept(0, 1),
        ToController(up(0)),
        ToHosts(IslandLaunch(1, 1, 1, (), 0)),
    ]


def test_links_of_the_old_group_are_forgotten_before_a_successor_is_accepted() -> None:
    """
    1. Hosts 0 and 1 serve under epoch 1. The successor of host 0 joins before the end of the old links was seen.
    2. Nothing may be sent to the old links any more, and host 1, which still runs, is killed.
    """
    core = core_of(0, 1)
    commands = core.handle(HostConnected(up(0, 2)), 1.0)
    assert [type(command) for command in commands] == [
        ForgetHosts,
        ToController,
        ToController,
        Kill,
        Accept,
        ToController,
    ]
    assert those(Kill, commands) == [Kill(1, 1)]
    assert [(down.host, down.reason) for down in downs(commands)] == [
        (0, "a successor joined"),
        (1, "host 0 of its island was lost: a successor joined"),
    ]


def test_a_refused_host_learns_why() -> None:
    (refusal,) = core_of(0).handle(HostConnected(up(0)), 1.0)
    assert isinstance(refusal, Refuse)
    assert refusal.reason == "epoch 1 of host 0 is over"


def test_launches_for_hosts_that_the_controller_does_not_know_yet_are_dropped() -> None:
    """
    1. The controller lists host 0 under epoch 1. The host is lost and comes back under epoch 2.
    2. A launch that the controller sent before it heard of that has failed there: it must not run.
    3. Once the controller lists epoch 2, launches run.
    """
    core = core_of(0)
    core.handle(ControllerMessage(Peers((Peer(0, 1, "t"),))), 0.0)
    core.handle(HostDisconnected(0, 1), 1.0)
    core.handle(HostConnected(up(0, 2)), 2.0)
    assert core.handle(launch(1), 2.0) == []
    core.handle(ControllerMessage(Peers((Peer(0, 2, "t"),))), 3.0)
    assert core.handle(launch(2), 3.0) == [ToHosts(IslandLaunch(2, 1, 1, (), 0))]


# --- liveness ---------------------------------------------------------------------------------------------------------


def looks(first: float, last: float) -> list[tuple[float, Event]]:
    """A look of the scheduler every `TICK_S` seconds."""
    count = round((last - first) / TICK_S) + 1
    return [(first + k * TICK_S, Ticked()) for k in range(count)]


def test_a_host_that_falls_silent_restarts_its_island() -> None:
    """
    1. Two hosts send heartbeats. Host 1 stops after 3 s.
    2. It is lost once it was silent for longer than the limit, not before; it is killed too, as it cannot end itself.
    3. It is lost once. Both are killed again every second or so, until a successor joins: a call may be lost.
    """
    core = core_of(0, 1)
    beats = [(float(now), beat(host)) for now in range(12) for host in (0, 1) if host == 0 or now <= 3]
    assert history(core, sorted([*beats, *looks(0.0, 10.9)], key=lambda pair: pair[0])) == []
    commands = history(core, looks(11.0, 11.2))
    assert those(Kill, commands) == [Kill(1, 1), Kill(0, 1)]
    assert {down.host: down.reason for down in downs(commands)}[1] == f"it did not answer for {SILENCE_LIMIT_S:.0f} s"
    assert those(Kill, history(core, looks(11.3, 14.0))) == [Kill(1, 1), Kill(0, 1)] * 2
    core.handle(HostConnected(up(0, 2)), 14.5)
    assert set(those(Kill, history(core, looks(14.6, 20.0)))) == {Kill(1, 1)}
    core.handle(HostConnected(up(1, 2)), 20.5)
    assert not {Kill(0, 1), Kill(1, 1)} & set(those(Kill, history(core, looks(20.6, 24.0))))


def test_any_message_is_a_sign_of_life_but_not_one_of_an_older_epoch() -> None:
    core = core_of(0)
    core.handle(HostConnected(up(0, 2)), 0.0)
    signs = [(now, HostMessage(0, 2, Done((99,)))) for now in (2.0, 4.0, 6.0)]
    stale = [(now, beat(0, 1)) for now in (8.0, 12.0, 14.0)]
    assert history(core, sorted([*signs, *looks(1.0, 13.9), *stale], key=lambda pair: pair[0])) == []
    assert those(Kill, history(core, looks(14.0, 14.2))) == [Kill(0, 2)]


def test_a_scheduler_that_did_not_run_itself_loses_no_host() -> None:
    """Its own pause looks like the silence of all hosts; their messages are still in its sockets."""
    core = core_of(0)
    assert history(core, [(0.5, Ticked()), *looks(60.0, 67.9)]) == []
    assert downs(history(core, looks(68.0, 68.2)))


def test_a_lost_host_is_watched_again_once_its_successor_has_joined() -> None:
    """Its process is killed until then: a link that was given up does not say whether the process at its end is gone,
    and one that was stopped keeps its devices."""
    core = core_of(0)
    assert those(Kill, core.handle(HostDisconnected(0, 1), 1.0)) == [Kill(0, 1)]
    assert set(history(core, looks(2.0, 30.0))) == {Kill(0, 1)}
    core.handle(HostConnected(up(0, 2)), 30.0)
    assert history(core, looks(30.1, 37.9)) == []
    assert those(Kill, history(core, looks(38.0, 38.2))) == [Kill(0, 2)]


def test_a_host_of_a_slow_machine_has_longer() -> None:
    """1. The host says that its machine is ten times as slow, and nothing more: 70 s of silence are not too long.
    2. Nor are they where the scheduler's machine is."""
    core = core_of(0)
    assert history(core, [(0.0, HostMessage(0, 1, Heartbeat(0, 10.0))), *looks(0.1, 70.0)]) == []
    core = core_of(0)
    slow: list[tuple[float, Event]] = [(now, Ticked(10.0)) for now, _ in looks(0.1, 70.0)]
    assert history(core, [(0.0, beat(0)), *slow]) == []
    assert set(those(Kill, history(core, looks(70.1, 80.0)))) == {Kill(0, 1)}


# --- load reports -----------------------------------------------------------------------------------------------------


def test_waiting_launches_are_reported_once_a_period() -> None:
    """The controller takes the report for a sign of life, so it comes when nothing waits, too."""
    core = core_of(0, window=1)
    core.handle(ControllerMessage(Account(1, "alice", 1.0, 0)), 0.0)
    for sequence in (1, 2, 3):
        core.handle(launch(sequence), 0.0)
    ticks = [k * LOAD_PERIOD_S / 10 for k in range(31)]
    reports = [c.message for now in ticks for c in core.handle(Ticked(), now) if isinstance(c, ToController)]
    assert reports == [Load(3, {"alice": 2})] * 4
    for sequence in (1, 2):
        core.handle(HostMessage(0, 1, Done((sequence,))), 3.0)
    assert core.handle(Ticked(), 4.0) == [ToController(Load(3, {}))]


# --- outcomes and stories ---------------------------------------------------------------------------------------------


def test_a_launch_took_what_it_took_on_the_slowest_host() -> None:
    """In microseconds on its devices, whatever their number; the controller multiplies for the tenant's account."""
    core = core_of(0, 1)
    core.handle(ControllerMessage(Program(1, b"", {}, "p", devices("0.0", "0.1", "1.0", "1.1"))), 0.0)
    core.handle(launch(1), 0.0)
    core.handle(HostMessage(0, 1, Done((1,), (300,))), 0.1)
    commands = core.handle(HostMessage(1, 1, Done((1,), (200,))), 0.2)
    assert commands == [ToController(Done((1,), (300,)))]
    (usage,) = core.order.ledger.usages.values()
    assert usage.device_seconds == pytest.approx(4 * 300e-6)


def test_the_loss_of_a_host_carries_the_story_of_the_launch_and_the_island() -> None:
    core = core_of(0, 1)
    core.handle(ControllerMessage(Program(1, b"", {}, "train", devices("0.0", "1.0"))), 0.0)
    core.handle(launch(7), 1.0)
    core.handle(HostMessage(0, 1, BarrierReached(0, 7, 2)), 1.5)
    core.handle(HostMessage(1, 1, BarrierReached(1, 7, 2)), 2.0)
    commands = core.handle(HostDisconnected(1, 1), 4.0)
    assert {down.story for down in downs(commands)} == {
        (
            "scheduler 3: 4.000 s before: host joined host 0: epoch 1",
            "scheduler 3: 4.000 s before: host joined host 1: epoch 1",
            "scheduler 3: 3.000 s before: dispatched session 1 launch 7: train",
            "scheduler 3: 2.000 s before: barrier 2 launch 7",
        )
    }


def test_a_launch_without_end_carries_its_own_story_not_that_of_another_one() -> None:
    core = core_of(0, limit_s=10.0, policy=fifo)
    for sequence, program in ((1, 1), (2, 2)):
        core.handle(ControllerMessage(Program(program, b"", {}, f"p{program}", devices(f"0.{program}"))), 0.0)
        core.handle(ControllerMessage(IslandLaunch(sequence, 1, program, (), 0)), 0.0)
    core.handle(HostMessage(0, 1, Done((1,))), 0.0)
    beats = {now: Heartbeat(0, 1.0, (Running(2, round(1000 * now)),)) for now in (4.0, 8.0, 10.5)}
    commands = history(core, [(t, e) for t, beat in beats.items() for e in (HostMessage(0, 1, beat), Ticked())])
    (down,) = downs(commands)
    assert down.kind == "LaunchTimeout"
    assert any("dispatched session 1 launch 2: p2" in line for line in down.story)
    assert not any("launch 1" in line for line in down.story)


def test_the_loss_of_a_host_names_no_launches_of_others() -> None:
    core = core_of(0, 1)
    for number, tenant in ((1, "alice"), (2, "bob")):
        core.handle(ControllerMessage(Account(number, tenant, 1.0, 0)), 0.0)
        core.handle(ControllerMessage(Program(number, b"", {}, f"of {tenant}", devices("0.0", "1.0"))), 0.0)
        core.handle(ControllerMessage(IslandLaunch(number, number, number, (), 0)), 0.0)
    core.handle(HostMessage(1, 1, IslandLaunchFailed(2, Failure("ExecutionError", "bob's error"))), 1.0)
    found = downs(core.handle(HostDisconnected(0, 1), 2.0))
    assert [(down.host, down.launch) for down in found] == [(0, 1), (1, 1)]
    for down in found:
        assert any("launch 1: of alice" in line for line in down.story)
        assert not any("bob" in line for line in down.story)


@pytest.mark.parametrize(("tenant", "launch"), [("alice", 1), ("bob", 0)])
def test_a_clash_of_launches_of_two_tenants_is_about_neither(tenant: str, launch: int) -> None:
    """Its reason names both, and a launch is told to its tenant."""
    core = core_of(0, 1)
    for number, name in ((1, "alice"), (2, tenant)):
        core.handle(ControllerMessage(Account(number, name, 1.0, 0)), 0.0)
        core.handle(ControllerMessage(Program(number, b"", {}, f"p{number}", devices("0.0", "1.0"))), 0.0)
        core.handle(ControllerMessage(IslandLaunch(number, number, number, (), 0)), 0.0)
    one, two = Gang(1, 0, 0b11), Gang(2, 0, 0b11)
    core.handle(HostMessage(0, 1, Ordered(0, (one, two))), 1.0)
    found = downs(core.handle(HostMessage(1, 1, Ordered(1, (two, one))), 1.0))
    assert {down.launch for down in found} == {launch}


def test_a_clash_with_a_launch_that_is_over_is_told_to_all_by_numbers() -> None:
    """Whose it was is not known any more. All heard nothing but that their island starts again."""
    core = core_of(0, 1)
    core.handle(ControllerMessage(Program(1, b"", {}, "p")), 0.0)
    core.handle(launch(2), 0.0)
    core.handle(HostMessage(0, 1, Ordered(0, (Gang(1, 0, 0b11), Gang(2, 0, 0b11)))), 1.0)
    found = downs(core.handle(HostMessage(1, 1, Ordered(1, (Gang(2, 0, 0b11), Gang(1, 0, 0b11)))), 1.0))
    assert {(down.kind, down.launch, down.decided) for down in found} == {("OrderMismatch", 0, False)}
    assert all(
        down.reason.endswith("host 0 had gang 0 of launch 1 where host 1 had gang 0 of launch 2") for down in found
    )


def test_hosts_with_different_orders_are_reported_with_the_launch_at_fault() -> None:
    core = core_of(0, 1)
    core.handle(ControllerMessage(Program(1, b"", {}, "p")), 0.0)
    for sequence in (1, 2):
        core.handle(launch(sequence), 0.0)
    one, two = Gang(1, 0, 0b11), Gang(2, 0, 0b11)
    assert core.handle(HostMessage(0, 1, Ordered(0, (one, two))), 1.0) == []
    commands = core.handle(HostMessage(1, 1, Ordered(1, (two, one))), 1.0)
    assert {down.kind for down in downs(commands)} == {"OrderMismatch"}
    said = downs(commands)[1].reason
    assert "host 0 had gang 0 of launch 1 of program 'p' where host 1 had gang 0 of launch 2" in said
    assert any("dispatched session 1 launch 1: p" in line for line in downs(commands)[0].story)


def test_who_asks_what_a_program_was_compiled_to_asks_the_hosts() -> None:
    core = SchedulerCore(0, [0], 4)
    core.handle(HostConnected(up(0)), 0.0)
    ask = Examine(3, 9, "alice")
    assert core.handle(ControllerMessage(ask), 0.0) == [ToHosts(ask)]
    said = Examined(3, 0, 9, b"{}")
    assert core.handle(HostMessage(0, 1, said), 0.0) == [ToController(said)]


def test_functions_ahead_of_their_program_go_to_the_hosts() -> None:
    core = SchedulerCore(0, [0], 4)
    core.handle(HostConnected(up(0)), 0.0)
    ahead = FunctionsAhead("alice", False, {"f": b"code"})
    assert core.handle(ControllerMessage(ahead), 0.0) == [ToHosts(ahead)]
