"""Limits of time: who is over them, and who only stands beside or behind."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pathways_ray.errors import Failure
from pathways_ray.scheduler.deadlines import LONGEST_BEAT_S, STUCK_BEHIND_OTHERS_LIMITS, STUCK_LIMITS
from pathways_ray.scheduler.devices import MIN_DEVICE_LAUNCHES
from pathways_ray.scheduler.events import Command, HostMessage, Kill, Ticked, ToController, ToHosts
from pathways_ray.scheduler.order import MAX_ENDED
from pathways_ray.scheduler.policies import fifo, share
from pathways_ray.transport.messages import (
    Account,
    Compiling,
    Done,
    DropProgram,
    Heard,
    Heartbeat,
    Holds,
    HostDown,
    HostUp,
    IslandLaunch,
    IslandLaunchFailed,
    Program,
    Ready,
    Running,
)
from tests.unit.scheduler.island import Island, devices

LIMIT_S = 10.0
COMPILE_LIMIT_S = 5.0


def island(*hosts: int, **programs: tuple[str, ...]) -> Island:
    """Its programs are numbered from 1 on, and are of the session of that number."""
    made = Island(hosts, 128, fifo, LIMIT_S, COMPILE_LIMIT_S)
    for host in hosts:
        made.host_up(HostUp(host, 1, "t", "d", 2, 1))
    for number, (name, places) in enumerate(programs.items(), 1):
        made.from_controller(Account(number, name, 1.0, 0))
        made.from_controller(Program(number, b"", {}, name, devices(*places)))
    return made


def launch(made: Island, sequence: int, program: int) -> None:
    made.from_controller(IslandLaunch(sequence, program, program, (), 0))


def beat(
    made: Island, now: float, host: int, running: Mapping[int, float], queued: tuple[int, ...] = (), program: int = 0
) -> None:
    """A host says since when it is at which launches; `program` is theirs where nobody has sent them yet."""
    made.now = now
    entries = tuple(Running(sequence, round(1000 * (now - at)), program) for sequence, at in running.items())
    made._handle(HostMessage(host, 1, Heartbeat(host, 1.0, entries, queued)))


def downs(commands: list[Command]) -> list[HostDown]:
    found = [c.message for c in commands if isinstance(c, ToController)]
    return [message for message in found if isinstance(message, HostDown)]


def test_who_runs_beside_an_endless_launch_is_not_blamed_for_it() -> None:
    """Two tenants on devices of their own: one with a launch without end, the other with one short launch after
    another, which is always the first on its device."""
    made = island(0, innocent=("0.0",), endless=("0.1",))
    launch(made, 1, 2)
    for sequence in range(2, 14):
        launch(made, sequence, 1)
        commands = made.tick(float(sequence - 2), running={1: 0.0} if sequence > 2 else {})
        if sequence < 13:
            assert commands == []
            made.from_host(0, 1, Done((sequence,), (900_000,)))
    (down,) = downs(commands)
    assert (down.kind, down.candidates, down.compiling, down.decided) == ("LaunchTimeout", (1,), (), True)


def test_a_tenant_is_charged_with_the_time_of_a_launch_that_does_not_end() -> None:
    made = island(0, innocent=("0.0",), endless=("0.1",))
    launch(made, 1, 2)
    for now in range(12):
        commands = made.tick(float(now), running={1: 0.0})
    assert [down.kind for down in downs(commands)] == ["LaunchTimeout"]
    usages = made.core.order.ledger.usages
    assert usages["endless"].device_seconds == pytest.approx(11.0)
    assert usages["innocent"].device_seconds == 0.0
    assert not usages["endless"].busy


def test_the_time_behind_others_in_a_device_queue_does_not_count() -> None:
    """A launch on both hosts is at the head on host 0, and waits there for host 1, which others keep for longer than
    the limit, each of them for less. Then it runs itself."""
    made = island(0, 1, wide=("0.0", "1.0"), narrow=("1.0",))
    launch(made, 1, 2)
    launch(made, 2, 2)
    launch(made, 3, 1)
    for now, head, since in ((8.0, 1, 0.0), (16.0, 2, 8.5)):
        beat(made, now, 0, {3: 0.0})
        beat(made, now, 1, {head: since}, (3,))
        assert made._handle(Ticked()) == [], "nobody is over the limit"
        made.from_host(1, 1, Done((head,), (8_000_000,)))
        made.from_host(0, 1, Done((head,)))
    for now in (20.0, 25.9, 27.0):
        beat(made, now, 0, {3: 0.0})
        beat(made, now, 1, {3: 16.1})
        commands = made._handle(Ticked())
        assert bool(commands) == (now > 26.1)
    assert downs(commands)[0].candidates == (3,)


def test_launches_that_wait_for_each_other_end_their_island_without_blame() -> None:
    """Two hosts have taken two launches in different orders: each is at the head on one, and behind on the other."""
    made = island(0, 1, one=("0.0", "1.0"), other=("0.0", "1.0"))
    for sequence in (1, 2, 3):
        launch(made, sequence, min(sequence, 2))
    ends = LIMIT_S + 2 + STUCK_LIMITS * LIMIT_S
    for now in (1.0, LIMIT_S, LIMIT_S + 2, ends, ends + 0.5):
        other = 3 if now <= LIMIT_S else 2  # one that ends: those get on
        beat(made, now, 0, {1: 0.0}, (2, 3))
        beat(made, now, 1, {other: 0.0}, (1,))
        commands = made._handle(Ticked())
        assert bool(commands) == (now > ends)
    down = downs(commands)[0]
    assert (down.kind, down.candidates) == ("HostLost", ())
    assert "has waited for" in down.reason


def test_a_launch_that_has_failed_and_left_a_computation_on_a_device_is_blamed_for_it() -> None:
    made = island(0, two_outputs=("0.0",))
    launch(made, 1, 1)
    made.from_host(0, 1, IslandLaunchFailed(1, Failure("ExecutionError", "the other output")))
    assert downs(made.tick(LIMIT_S, running={1: 0.5})) == []
    (down,) = downs(made.tick(LIMIT_S + 1, running={1: 0.5}))
    assert (down.kind, down.candidates, down.decided) == ("LaunchTimeout", (1,), True)
    assert "launch 1, which has failed, was first" in down.reason


def test_a_launch_that_is_over_has_not_run_since_its_host_was_heard() -> None:
    """
    1. It ends in time, less than a heartbeat before the limit.
    2. It ends beyond the limit, right after its host has said that it runs, and before the scheduler looks.
    """
    made = island(0, brief=("0.0",))
    for sequence, heard, looks in ((1, LIMIT_S - 0.5, LIMIT_S + 0.4), (2, LIMIT_S + 0.1, LIMIT_S + 0.2)):
        launch(made, sequence, 1)
        beat(made, heard, 0, {sequence: 0.0})
        made.from_host(0, 1, Done((sequence,), (9_600_000,)))
        made.now = looks
        assert downs(made._handle(Ticked())) == []


def of_tenant(name: str, limit_s: float) -> Island:
    """Host 0, and a program of a tenant that has a limit of its own."""
    made = island(0)
    made.from_controller(Account(1, name, 1.0, 0, limit_s))
    made.from_controller(Program(1, b"", {}, "its program", devices("0.0"), tenant=name))
    return made


def test_a_launch_that_is_over_has_the_limit_that_it_had() -> None:
    """It ended, within the limit of its tenant, which is a longer one than that of the runtime. Its host has yet to be
    heard again, and others that were brief have ended since."""
    made = of_tenant("patient", 3 * LIMIT_S)
    launch(made, 1, 1)
    assert downs(made.tick(2 * LIMIT_S, running={1: 0.0})) == []
    made.from_host(0, 1, Done((1,), (20_000_000,)))
    for sequence in range(2, MAX_ENDED + 2):
        launch(made, sequence, 1)
        made.from_host(0, 1, Done((sequence,), (10,)))
    made.now += 0.5
    assert downs(made._handle(Ticked())) == []


@pytest.mark.parametrize("heard_before", [False, True])
@pytest.mark.parametrize("limit_s", [LIMIT_S / 2, 3 * LIMIT_S])
def test_what_a_launch_that_has_failed_left_on_a_device_has_its_tenants_limit(
    limit_s: float, heard_before: bool
) -> None:
    """Also once its program is dropped, where its host has said before that it runs."""
    made = of_tenant("its own", limit_s)
    launch(made, 1, 1)
    if heard_before:
        assert downs(made.tick(1.0, running={1: 0.0})) == []
    made.from_host(0, 1, IslandLaunchFailed(1, Failure("ExecutionError", "the other output")))
    if heard_before:
        made.from_controller(DropProgram(1, 1))
    assert downs(made.tick(limit_s - 0.5, running={1: 0.0})) == []
    (down,) = downs(made.tick(limit_s + 0.5, running={1: 0.0}))
    assert f"the limit is {limit_s:.0f} s" in down.reason


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("limit_s", [LIMIT_S / 2, 3 * LIMIT_S])
def test_what_was_only_handed_over_has_the_limit_of_its_tenant(limit_s: float, dropped: bool) -> None:
    """As a call that its host serves, of which the scheduler never hears otherwise."""
    made = of_tenant("its own", limit_s)
    beat(made, 1.0, 0, {-3: 0.0}, program=1)
    assert downs(made._handle(Ticked())) == []
    if dropped:
        made.from_controller(DropProgram(1, 1))
    beat(made, limit_s - 0.2, 0, {-3: 0.0}, program=1)
    assert downs(made._handle(Ticked())) == []
    made.now = limit_s + 0.5
    assert downs(made._handle(Ticked())) == [], "it may have ended since"
    beat(made, limit_s + 0.8, 0, {-3: 0.0}, program=1)
    (down,) = downs(made._handle(Ticked()))
    assert (down.kind, down.compiling, down.decided) == ("LaunchTimeout", (1,), True)
    assert f"the limit is {limit_s:.0f} s" in down.reason


def test_the_program_of_what_was_only_handed_over_is_blamed_whichever_host_was_heard_last() -> None:
    """Host 0 is at it; the other one is through with its part, or not yet at it. After the restart nothing is left."""
    made = island(0, 1, endless=("0.0", "1.0"))
    for now in (LIMIT_S, LIMIT_S + 1.0):
        beat(made, now, 0, {-3: 0.0}, program=1)
        beat(made, now, 1, {})
        commands = made._handle(Ticked())
    down, other = downs(commands)
    assert (down.kind, down.compiling, other.compiling) == ("LaunchTimeout", (1,), ())
    assert "a launch of program 'endless' that was only handed over" in down.reason
    assert not made.core.deadlines.early


def test_a_launch_that_is_at_no_device_ends_its_island_without_blame() -> None:
    made = island(0, waiting=("0.0",))
    launch(made, 1, 1)
    assert [downs(made.tick(float(now))) for now in range(1, int(STUCK_LIMITS * LIMIT_S) + 1)] == [[]] * 20
    (down,) = downs(made.tick(STUCK_LIMITS * LIMIT_S + 1.5))
    assert (down.kind, down.candidates, down.compiling) == ("HostLost", (), ())
    assert "has waited for" in down.reason


def test_an_island_waits_for_what_another_one_may_yet_compute() -> None:
    """1. A tenant has a longer limit of its own, which a launch of it on another island may take. 2. A launch over
    several islands may be behind others there, each within its limit."""
    made = island(0, waiting=("0.0",))
    made.from_controller(Account(7, "slow", 1.0, 0, 3 * LIMIT_S))
    launch(made, 1, 1)
    assert [downs(made.tick(float(now))) for now in range(1, int(STUCK_LIMITS * 3 * LIMIT_S) + 1)] == [[]] * 60
    assert len(downs(made.tick(STUCK_LIMITS * 3 * LIMIT_S + 1.5))) == 1
    made = island(0)
    made.from_controller(Account(1, "over two", 1.0, 0))
    made.from_controller(Program(1, b"", {}, "over two", devices("0.0"), cross_island=True))
    launch(made, 1, 1)
    ends = STUCK_BEHIND_OTHERS_LIMITS * LIMIT_S
    assert [downs(made.tick(float(now))) for now in range(1, int(ends) + 1)] == [[]] * int(ends)
    assert len(downs(made.tick(ends + 1.5))) == 1


def test_a_compilation_has_a_limit_and_who_is_over_it_is_blamed_alone() -> None:
    made = island(0, 1, quick=("0.0",), slow=("0.1",))
    launch(made, 1, 1)
    for program in (1, 2):
        made.from_host(1, 1, Compiling(1, program))
    made.from_host(1, 1, Ready(1, 1, 0))
    for now in range(int(COMPILE_LIMIT_S) + 1):
        assert made.tick(float(now)) == []
    commands = made.tick(COMPILE_LIMIT_S + 0.1)
    first, second = downs(commands)
    assert (first.host, first.kind, first.candidates, first.compiling, first.decided) == (1, "HostLost", (), (2,), True)
    assert "compiled program 'slow' for 5 s; the limit is 5 s" in first.reason
    assert (second.host, second.candidates, second.compiling) == (0, (), ())
    assert {command for command in commands if isinstance(command, Kill)} == {Kill(0, 1), Kill(1, 1)}
    for host in (0, 1):
        made.host_up(HostUp(host, 2, "t", "d", 2, 1))
    assert made.tick(100.0) == [], "the next process has a time of its own"


def test_what_a_host_compiles_has_the_limit_also_under_the_successor_of_its_scheduler() -> None:
    """
    1. The host comes with what it holds, and says what it compiles. It says so again to another controller, which takes
       nothing from the time.
    2. The program was dropped meanwhile: its compilation is over the limit all the same.
    """
    made = Island((0,), 128, fifo, LIMIT_S, COMPILE_LIMIT_S)
    made.host_up(HostUp(0, 1, "t", "d", 2, 1, holds=Holds({}, (7,))))
    for now in range(int(COMPILE_LIMIT_S) + 1):
        made.from_host(0, 1, Compiling(0, 7))
        assert made.tick(float(now)) == []
    (down,) = downs(made.tick(COMPILE_LIMIT_S + 0.1))
    assert (down.host, down.compiling, down.decided) == (0, (7,), True)
    assert "it compiled a program that was dropped, or that an earlier scheduler sent, for 5 s" in down.reason


@pytest.mark.parametrize("kind", ["HostLost", "LaunchTimeout"])
def test_what_is_over_a_limit_ends_those_that_have_come_to_the_successor_of_their_scheduler(kind: str) -> None:
    """Host 0 was lost with the scheduler, and has not come. Host 1 has, and compiles for too long, or runs something
    that nobody here knows."""
    made = Island((0, 1), 128, fifo, LIMIT_S, COMPILE_LIMIT_S)
    made.host_up(HostUp(1, 1, "t", "d", 2, 1, holds=Holds({}, (7,), heard=Heard())))
    running = {3: 0.0} if kind == "LaunchTimeout" else {}
    if not running:
        made.from_host(1, 1, Compiling(1, 7))
    commands: list[Command] = []
    now = 0.0
    while not commands and now < 20.0:
        now += 1.0
        commands = made.tick(now, running=running)
    assert [(down.host, down.kind) for down in downs(commands)] == [(1, kind)]
    assert Kill(1, 1) in commands


def test_what_is_over_a_limit_ends_those_that_have_come_back() -> None:
    """The island restarts, and host 0 has yet to come. Host 1 has, and runs something that nobody here knows."""
    made = island(0, 1)
    made.host_lost(0, 1)
    made.host_up(HostUp(1, 2, "t", "d", 2, 1))
    assert downs(made.tick(1.0, running={3: 0.0})) == []
    commands = made.tick(LIMIT_S + 1.0, running={3: 0.0})
    assert [(down.host, down.kind) for down in downs(commands)] == [(1, "LaunchTimeout")]
    assert Kill(1, 2) in commands


def test_a_host_that_does_not_run_does_not_compile() -> None:
    """Its heartbeats are late, or its machine is crowded: a compilation is charged for the time that it had."""
    made = island(0, slow=("0.0",))
    made.from_host(0, 1, Compiling(0, 1))
    made.tick(0.0)
    assert made.tick(10 * COMPILE_LIMIT_S) == []
    (seconds,) = made.core.deadlines.compiling.values()
    assert seconds == LONGEST_BEAT_S


def test_a_host_that_dies_names_what_it_compiled_and_the_first_on_each_of_its_devices() -> None:
    made = island(0, 1, a=("0.0",), b=("0.0", "0.1"), c=("0.1",), d=("1.0",))
    for sequence, program in enumerate((1, 2, 3, 4), 1):
        made.order.programs[program].seconds.measure(0.001)  # otherwise they would go one after the other
        launch(made, sequence, program)
    made.from_host(0, 1, Compiling(0, 3))
    made.from_host(1, 1, Compiling(1, 4))
    down = downs(made.host_lost(0, 1))[0]
    assert (down.host, down.candidates, down.compiling, down.decided) == (0, (1, 2), (3,), False)


def test_sets_of_devices_that_overlap_have_one_window_on_the_device_that_they_share() -> None:
    """A tenant with forty sets that have device 0 gets no more in front of the others there than one with one set."""
    made = Island((0,), 128, share)
    made.host_up(HostUp(0, 1, "t", "d", 8, 1))
    for session, tenant in ((1, "honest"), (2, "greedy")):
        made.from_controller(Account(session, tenant, 1.0, 0))
    made.from_controller(Program(1, b"", {}, "honest", devices("0.0")))
    for k in range(40):
        places = ["0.0", *(f"0.{bit + 1}" for bit in range(6) if k >> bit & 1)]
        made.from_controller(Program(2 + k, b"", {}, f"long {k}", devices(*places)))
    sequence = 0
    for _ in range(3):
        for k in range(40):
            sequence += 1
            made.from_controller(IslandLaunch(sequence, 2, 2 + k, (), 0))
    contended_window = len(made.order.outstanding)
    made.from_controller(IslandLaunch(1000, 1, 1, (), 0))
    sent: list[int] = []
    while 1000 not in sent:
        first = next(iter(made.order.outstanding))
        commands = made.from_host(0, 1, Done((first,), (1_000_000,)))
        sent += [c.message.sequence for c in commands if isinstance(c, ToHosts) and isinstance(c.message, IslandLaunch)]
        assert len(sent) < contended_window + MIN_DEVICE_LAUNCHES
    assert contended_window <= 40, "200 ms of 5 ms each while nobody else is there"
