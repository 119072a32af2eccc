"""The invariants of the design hold in every run, whatever goes wrong, and no mix of programs waits on itself."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pathways_ray.client.core import ClientCore
from pathways_ray.client.events import Resumed
from pathways_ray.controller.events import IslandDisconnected
from pathways_ray.controller.hosts import Hosts
from pathways_ray.controller.islands import Islands
from pathways_ray.controller.requests import Requests
from pathways_ray.controller.state import Send
from pathways_ray.controller.takeover import Takeover
from pathways_ray.simulation import faults
from pathways_ray.simulation.__main__ import main
from pathways_ray.simulation.network import Process
from pathways_ray.simulation.policies import POLICIES
from pathways_ray.simulation.settings import Settings
from pathways_ray.simulation.world import World
from pathways_ray.transport.messages import BuffersLost, HeldSlices, Holds, HostUp
from tests.drawn import drawn
from tests.simulation.planted import BUGS
from tests.simulation.planted_leading import DYING

FAULTS = 5


@pytest.mark.parametrize(
    ("first", "seeds"), [(0, 50), *(pytest.param(first, 350, marks=pytest.mark.long) for first in (50, 350, 650))]
)
@pytest.mark.timeout(1500)
def test_a_thousand_seeds_with_faults_hold_every_invariant(
    first: int, seeds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """At least 5 faults in each. What does not hold is printed with the command that shows it again."""
    words = ["--first", str(first), "--seeds", str(drawn(seeds)), "--faults", str(FAULTS)]
    assert main(words) == 0, capsys.readouterr().out


@pytest.mark.parametrize("loops", [0.0, 1.0])
def test_programs_come_and_go(loops: float) -> None:
    """A client drops programs while launches of them wait and run, and registers others, of functions that it dropped
    among them."""
    for seed in range(drawn(60)):
        settings = replace(Settings.drawn(seed, FAULTS, ""), replaces=0.5, loops=loops)
        assert World(seed, settings).run().violations == [], f"seed {seed}"


@pytest.mark.parametrize(("first", "seeds"), [(0, 15), pytest.param(15, 25, marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_mix_of_programs_can_wait_on_itself(policy: str, first: int, seeds: int) -> None:
    """Programs that go to and fro between islands and take each other's results, under any policy, one without rhyme or
    reason among them. Only two launches fit on an island, and the controller lets all that cross islands go at once: if
    an order could wait on itself, it would. Nothing goes wrong otherwise, so every launch must get through."""
    for seed in range(first, first + drawn(seeds)):
        settings = replace(Settings.drawn(seed, 0, policy), window=2, cross_island_window=1024, max_in_flight=1024)
        assert World(seed, settings).run().violations == [], f"seed {seed}"


def test_nobody_alive_is_ended_while_the_machine_is_slow() -> None:
    """For 30 s every process stands still for up to 15 s again and again. All launches get through, and none fails."""
    for seed in range(drawn(40)):
        settings = replace(Settings.drawn(seed, 0, ""), starved_s=30.0, poison=0.0, flaws=0.0, changes=0, moves=0.0)
        settings = replace(settings, decisions=0.0)  # the limit of a launch that decides counts such a pause
        result = World(seed, settings).run()
        assert result.violations == [], f"seed {seed}"
        assert result.launches > 0


def test_hosts_keep_the_order_of_the_one_that_leads_them() -> None:
    """It takes calls for all hosts of its island, whose schedulers die before what they say has come to all."""
    led = 0
    for seed in range(drawn(60)):
        world = World(seed, replace(Settings.drawn(seed, 0, ""), **DYING))
        assert world.run().violations == [], f"seed {seed}"
        led += any(host.core.early.count for host in world.hosts.values() if host.under_epoch)
    assert led, "no host has taken a call for others"


def test_hosts_hear_from_jax_that_a_machine_of_their_group_is_gone() -> None:
    """Nobody else tells them of one that went before its host had joined: they end, and wait for it as new ones."""
    settings = replace(Settings.drawn(3, 0, ""), islands={0: [0, 1]}, changes=0, moves=0.0, suspends=0.0)
    world = World(3, settings)
    before = world.hosts[1].process
    world.clock.at(1.0, lambda: world.vanish(world.hosts[0].process, math.inf))
    world.run()
    assert not before.alive


@pytest.mark.parametrize("faults", [pytest.param(0, marks=pytest.mark.slow), FAULTS])
def test_a_cancelled_launch_ends_once_and_leaves_nothing(faults: int) -> None:
    """Users cancel what is to come now and then: launches in their own queue, at the controller, in schedulers, with
    hosts. Some end before they began, and what has begun is over for them at once."""
    cancelled: Counter[str] = Counter()
    for seed in range(40):
        world = World(seed, replace(Settings.drawn(seed, faults, ""), cancels=0.2))
        assert world.run().violations == [], f"seed {seed}"
        for client in world.clients:
            cancelled += client.cancelled
    assert cancelled["late"] > 25
    assert cancelled["all"] - cancelled["late"] > 25


def test_who_looks_at_what_a_cancelled_launch_was_to_give_hears_that_it_was_cancelled() -> None:
    """And not that it is lost, as hosts say that have been given nothing: in some of these runs they are the first to
    say something. Nor does anybody wait for what was there, and was dropped since."""
    lost = (341150, 341291, 341336, 341372)
    for seed in (*lost, *range(341000, 341000 + drawn(20))):
        settings = replace(Settings.drawn(seed, 0, ""), cancels=0.2, waits=0.7)
        assert World(seed, settings).run().violations == [], f"seed {seed}"
    settings = replace(Settings.drawn(341160, 5, ""), cancels=0.3, waits=0.5)
    assert World(341160, settings).run().violations == []


def test_a_cancelled_launch_ends_once_though_its_controller_dies() -> None:
    """Its client asks the successor for the sake of what was donated to it, in two of these runs."""
    for seed in (2, 58, *range(344000, 344000 + drawn(20))):
        usual = replace(Settings.drawn(seed, 0, ""), cancels=0.3, controller_deaths=4, deaths=0.1, flaws=0.0)
        settings = replace(usual, eager=True, memory=0, slow=30.0, launches=(10, 30))
        assert World(seed, settings).run().violations == [], f"seed {seed}"


@pytest.mark.parametrize(
    ("islands", "first", "seeds"),
    [
        ({0: [0], 1: [1]}, 0, 15),
        ({0: [0, 1], 1: [2]}, 0, 15),
        pytest.param({0: [0, 1, 2], 1: [3, 4]}, 0, 15, marks=pytest.mark.slow),
        pytest.param({0: [0, 1], 1: [2, 3, 4]}, 15, 485, marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(1500)
def test_hosts_outlive_their_scheduler(
    islands: dict[int, list[int]], first: int, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedulers die, most of them in the middle of what they say to their hosts, and nothing else. No host ends, and
    none misses an array."""
    ended: list[str] = []
    rejoined: list[HostUp] = []
    kill, resumed = World.kill, Hosts.resumed

    def killed(world: World, process: Process, why: str) -> None:
        ended.append(process.name)
        kill(world, process, why)

    def back(hosts: Hosts, island: int, message: HostUp, holds: Holds, waiting: Any) -> list[Send] | None:
        found = resumed(hosts, island, message, holds, waiting)
        lost = [c.message.failure.message for c in found or () if isinstance(c.message, BuffersLost)]
        assert not [text for text in lost if "when that had another scheduler" in text]
        rejoined.append(message)
        return found

    monkeypatch.setattr(World, "kill", killed)
    monkeypatch.setattr(Hosts, "resumed", back)
    for seed in range(first, first + seeds):
        settings = replace(Settings.drawn(seed, 0, ""), islands=islands, changes=0, flaws=0.0)
        settings = replace(settings, scheduler_deaths=1, torn=0.02)
        assert World(seed, settings).run().violations == [], f"seed {seed}"
    assert {name[:4] for name in ended} <= {"sche", "clie"}
    assert sum(bool(message.holds and message.holds.buffers) for message in rejoined) > seeds


@pytest.mark.slow
def test_sessions_outlive_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies twice, and nothing else does. No host and no scheduler ends. Sessions that were at work come back, and
    none misses an array that a launch has not taken."""
    ended: list[str] = []
    lost: list[tuple[int, ...]] = []
    kill, handle = World.kill, ClientCore.handle

    def killed(world: World, process: Process, why: str) -> None:
        ended.append(process.name)
        kill(world, process, why)

    def handled(core: ClientCore, event: Any, now: float) -> Any:
        if isinstance(event, Resumed):
            lost.append(event.reply.lost)
        return handle(core, event, now)

    monkeypatch.setattr(World, "kill", killed)
    monkeypatch.setattr(ClientCore, "handle", handled)
    for seed in range(25):
        settings = replace(Settings.drawn(seed, 0, ""), changes=0, flaws=0.0, moves=0.0, suspends=0.0)
        assert World(seed, replace(settings, controller_deaths=2)).run().violations == [], f"seed {seed}"
    assert {name[:4] for name in ended} <= {"cont", "clie"}
    assert len(lost) > 20
    assert not any(lost)


@pytest.mark.parametrize(("first", "seeds"), [(0, 20), pytest.param(20, 280, marks=pytest.mark.long)])
@pytest.mark.timeout(1500)
def test_sessions_outlive_the_controller_and_the_resource_manager(
    first: int, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both die several times, often at once. Nobody but clients then knows of their slices. Sessions come back."""
    alone: list[Takeover] = []
    begin = Takeover.__init__

    def begun(takeover: Takeover, requests: Requests, found: HeldSlices) -> None:
        begin(takeover, requests, found)
        if takeover.blind:
            alone.append(takeover)

    monkeypatch.setattr(Takeover, "__init__", begun)
    monkeypatch.setattr(faults, "KINDS", {"kill controller": 1, "kill manager": 1})
    back = 0
    for seed in range(first, first + seeds):
        usual = replace(Settings.drawn(seed, 8, ""), flaws=0.0, moves=0.3 * (seed % 2), suspends=0.2 * (seed % 3 == 0))
        world = World(seed, replace(usual, launches=(30, 60), changes=0, outages=0))
        assert world.run().violations == [], f"seed {seed}"
        back += sum(client.way_back.back for client in world.clients)
    assert len(alone) > seeds / 4
    assert back > seeds


@pytest.mark.parametrize(("first", "seeds"), [(0, 15), pytest.param(15, 285, marks=pytest.mark.long)])
@pytest.mark.timeout(1500)
def test_launches_outlive_the_controller(first: int, seeds: int) -> None:
    """It dies five times, over slow devices with much under way. Launches that schedulers know have their outcome, at
    once or when they are over: none that ran ends as lost."""
    answered: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        settings = replace(Settings.drawn(seed, 0, ""), changes=0, flaws=0.0, moves=0.0, suspends=0.0, preempts=0.0)
        settings = replace(settings, window=16, cross_island_window=8, max_in_flight=1024, slow=30.0, launches=(40, 40))
        world = World(seed, replace(settings, controller_deaths=5))
        assert world.run().violations == [], f"seed {seed}"
        for client in world.clients:
            answered += client.way_back.answered
    assert min(answered["value"], answered["later"]) > 10 * seeds


@pytest.mark.parametrize(
    ("first", "seeds"),
    [
        (0, 15),
        pytest.param(15, 485, marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(1500)
def test_processes_die_during_moves_and_changes_of_islands(first: int, seeds: int) -> None:
    """Slices move, sessions are suspended, snapshots taken, islands added, drained and removed; and within moments of
    such a step the controller dies, the resource manager, a scheduler or a host."""
    died = moved = 0
    seeds = drawn(seeds)
    for seed in range(first, first + seeds):
        usual = replace(Settings.drawn(seed, 0, ""), deaths=0.15, flaws=0.0, moves=0.4, snapshots=1.0, slices=3)
        settings = replace(
            usual, changes=4 * (seed % 2), suspends=0.2 * (seed % 3 == 0), preempts=0.3 * (seed % 5 == 0)
        )
        world = World(seed, settings)
        assert world.run().violations == [], f"seed {seed}"
        died += world.faults.struck
        moved += sum(client.mover.moved for client in world.clients)
    assert died > seeds
    assert moved > seeds


def test_no_array_is_lost_when_the_controller_dies_during_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else dies. The successor and the client may know otherwise which devices a slice has."""
    lost: list[tuple[int, ...]] = []
    handle = ClientCore.handle

    def handled(core: ClientCore, event: Any, now: float) -> Any:
        if isinstance(event, Resumed):
            lost.append(event.reply.lost)
        return handle(core, event, now)

    monkeypatch.setattr(ClientCore, "handle", handled)
    monkeypatch.setattr(faults, "DEATHS", {"kill controller": 1})
    for seed in range(20):
        settings = replace(Settings.drawn(seed, 0, ""), deaths=0.12, flaws=0.0, moves=0.8, changes=0, suspends=0.0)
        assert World(seed, replace(settings, preempts=0.0)).run().violations == [], f"seed {seed}"
    assert len(lost) > 10
    assert not any(lost)


def test_arrays_come_back_from_snapshots_after_the_loss_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts die, some within moments of a snapshot. What comes back has the value of what was lost."""
    monkeypatch.setattr(faults, "DEATHS", {"kill host": 1})
    monkeypatch.setattr(faults, "KINDS", {"kill host": 1})
    restored = 0
    for seed in range(24):
        usual = replace(Settings.drawn(seed, 3, ""), deaths=0.02, flaws=0.0, moves=0.0, suspends=0.0, preempts=0.0)
        settings = replace(usual, islands={0: [0], 1: [1], 2: [2, 3]}, slices=3, launches=(30, 60), poison=0.0)
        world = World(seed, replace(settings, snapshots=1.0, changes=0))
        assert world.run().violations == [], f"seed {seed}"
        restored += sum(client.snapshots.restored for client in world.clients)
    assert restored > 3


def test_a_scheduler_whose_stream_is_given_up_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped. After each of its pauses the controller counts silence anew, and the stream breaks before."""
    stop = faults.Fault(2.5, "stop scheduler", "scheduler0", 0.0)
    pauses = [faults.Fault(at, "pause controller", "controller", 5.0) for at in (5.0, 10.1)]
    monkeypatch.setattr(faults, "draw", lambda random, settings: [stop, *pauses])
    disconnected = Islands.disconnected

    def forgotten(islands: Islands, event: IslandDisconnected, now: float) -> Any:
        return disconnected(islands, msgspec.structs.replace(event, silent=False), now)

    for seed in range(4):
        assert World(seed, Settings.drawn(seed, 0, "")).run().violations == [], f"seed {seed}"
        with monkeypatch.context() as patch:
            patch.setattr(Islands, "disconnected", forgotten)
            found = World(seed, Settings.drawn(seed, 0, "")).run().violations
        assert any("scheduler0" in what and "is silent" in what for what in found), f"seed {seed}"


def test_faults_strike_and_launches_fail_of_them() -> None:
    """Runs without anything in them would hold every invariant too."""
    results = [World(seed, Settings.drawn(seed, FAULTS, "")).run() for seed in range(30)]
    assert sum(result.struck for result in results) >= 30 * FAULTS
    assert sum(result.launches for result in results) > 30 * 20
    assert sum(result.failed for result in results) > 0
    assert sum(result.values for result in results) > 1000


@pytest.mark.slow
def test_a_seed_has_one_log_whatever_the_order_of_sets() -> None:
    program = (
        "from pathways_ray.simulation.settings import Settings\nfrom pathways_ray.simulation.world import World\n"
        "print(*(World(seed, Settings.drawn(seed, 8, '')).run().digest for seed in range(12)))"
    )
    logs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=100,
        ).stdout
        for hash_seed in ("0", "1", "4711")
    }
    assert len(logs) == 1
    assert len(set(logs.pop().split())) == 12


def test_a_violation_is_printed_with_a_command_that_shows_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    next(bug for bug in BUGS if bug.name == "a launch completes twice").plant(monkeypatch)
    assert main(["--seeds", "3", "--set", "poison=0.2"]) == 1
    printed = capsys.readouterr().out
    (command, violation) = re.findall(r"python -m pathways_ray.simulation (.*)\n  (.*)\n", printed)[0]
    assert "has a second outcome" in violation
    assert "--set poison=0.2" in command
    assert main(command.split()) == 1
    again = capsys.readouterr().out
    assert violation in again
    assert "Launch(1, 1)" in again


@pytest.mark.parametrize("setting", ["torn", "tron=0.3", "torn=", "torn=a third", "=1"])
def test_a_setting_that_is_none_is_refused(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--seeds", "1", "--set", setting])
    assert ended.value.code == 2
    assert "--set" in capsys.readouterr().err
