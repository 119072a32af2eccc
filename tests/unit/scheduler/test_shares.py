"""Shares of device time that no tenant gets around, by connecting again or by slices that overlap."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict

import pytest

from pathways_ray.ir.plan import Device
from pathways_ray.scheduler.events import Command, ToHosts
from pathways_ray.scheduler.policies import MAX_ACCOUNTS, Ledger, share
from pathways_ray.transport.messages import Account, Done, DropSession, HostUp, IslandLaunch, Program
from tests.unit.scheduler.island import Island, devices

SPAN_S = 10.0
WITHIN = 0.05


class Played:
    """One host of eight devices, each of which takes launches in the order in which they come; one that is on several
    starts when it is first on all of them."""

    def __init__(self) -> None:
        self.island = Island((0,), 128, share)
        self.island.host_up(HostUp(0, 1, "t", "d", 8, 1))
        self.numbers = itertools.count(1)
        self.free: dict[Device, float] = defaultdict(float)
        self.running: list[tuple[float, int, int, float]] = []
        self.programs: dict[int, tuple[str, tuple[Device, ...], float]] = {}
        self.sessions: dict[str, int] = {}
        self.used: dict[str, Counter[Device]] = defaultdict(Counter)
        self.now = 0.0

    def connect(self, tenant: str) -> None:
        self.sessions[tenant] = next(self.numbers)
        self.do(self.island.from_controller(Account(self.sessions[tenant], tenant, 1.0, 0)))

    def disconnect(self, tenant: str) -> None:
        self.do(self.island.from_controller(DropSession(self.sessions.pop(tenant))))

    def program(self, tenant: str, seconds: float, *places: str) -> int:
        number = next(self.numbers)
        self.programs[number] = tenant, devices(*places), seconds
        self.do(self.island.from_controller(Program(number, b"", {}, tenant, devices(*places))))
        return number

    def launch(self, program: int) -> None:
        session = self.sessions[self.programs[program][0]]
        self.do(self.island.from_controller(IslandLaunch(next(self.numbers), session, program, (), 0)))

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, ToHosts) and isinstance(command.message, IslandLaunch):
                launch = command.message
                _, places, seconds = self.programs[launch.program]
                start = max([self.now, *(self.free[device] for device in places)])
                self.free.update(dict.fromkeys(places, start + seconds))
                heapq.heappush(self.running, (start + seconds, launch.sequence, launch.program, seconds))

    def step(self) -> int:
        """The next launch ends; returns its program."""
        self.now, sequence, program, seconds = heapq.heappop(self.running)
        tenant, places, _ = self.programs[program]
        self.used[tenant].update(dict.fromkeys(places, seconds))
        self.do(self.island.tick(self.now))
        self.do(self.island.from_host(0, 1, Done((sequence,), (round(seconds * 1e6),))))
        return program

    def part(self, tenant: str, place: str) -> float:
        """Of the time of a device."""
        (device,) = devices(place)
        return self.used[tenant][device] / sum(used[device] for used in self.used.values())


@pytest.mark.parametrize("reconnecting", [False, True])
def test_connecting_again_makes_no_debt_go_away(reconnecting: bool) -> None:
    """The greedy one has one long launch at a time, and a new session for each."""
    played = Played()
    for tenant in ("honest", "greedy"):
        played.connect(tenant)
    small = played.program("honest", 0.002, "0.0")
    big = played.program("greedy", 0.1, "0.0")
    for _ in range(8):
        played.launch(small)
    played.launch(big)
    while played.now < SPAN_S:
        program = played.step()
        if program != small and reconnecting:
            played.disconnect("greedy")
            played.connect("greedy")
        played.launch(program)
    assert played.part("honest", "0.0") == pytest.approx(0.5, abs=WITHIN)


def test_slices_that_overlap_bring_no_more_of_the_devices_that_they_share() -> None:
    """Both tenants use device 0 alone or with others. The greedy one has 64 sets of devices that all have device 0."""
    played = Played()
    for tenant in ("honest", "greedy"):
        played.connect(tenant)
    sets = [["0.0", *(f"0.{bit + 1}" for bit in range(6) if k >> bit & 1)] for k in range(64)]
    greedy = [played.program("greedy", 0.01, *places) for places in sets]
    honest = played.program("honest", 0.01, "0.0")
    for program in [honest] * 8 + greedy * 2:
        played.launch(program)
    while played.now < SPAN_S:
        played.launch(played.step())
    assert played.part("honest", "0.0") >= 0.5 - WITHIN


def test_a_ledger_keeps_so_many_accounts_and_those_in_debt_longest() -> None:
    ledger = Ledger()
    for number in range(1, MAX_ACCOUNTS + 10):
        ledger.open(number, f"tenant {number}")
        usage = ledger.of(number)
        ledger.enter(usage)
        ledger.start(usage, 5.0 if number == 1 else 0.001)
        ledger.leave(usage)
        ledger.close(number)
    assert len(ledger.usages) <= MAX_ACCOUNTS + 1
    assert "tenant 1" in ledger.usages
