"""Faults of a run: drawn from its seed before it starts, and injected at their times."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from pathways_ray.simulation.environment import Environment, Observer
from pathways_ray.simulation.network import RETRANSMIT_LIMIT_S, Process, Weather
from pathways_ray.simulation.settings import Settings
from pathways_ray.transport.links import SILENCE_S

STARVED_SLOWNESS = 15.0
"""The slowness that processes read while they get little time: 300 runnable threads on two cores."""

STARVED_S = (2.0, 19.0)
"""Lengths of the times for which a process that gets little time does not run at all. They are independent, so that a
watcher may run several times while another process does not."""

FAULT_SPAN_S = 8.0
"""Faults come within this time; clients are busy for about as long."""

NOTICED_LIMIT_S = 30.0
"""A controller has a silent process killed within this time, its own pauses included."""

UNHINDERED_LIMIT_S = 15.0
"""The same where no fault hits the controller: its own watch does it, before the stream is given up after 20 s."""

KINDS = {
    "kill host": 3,
    "kill scheduler": 1,
    "kill client": 1,
    "kill controller": 0.3,
    "kill manager": 0.2,
    "vanish host": 0.5,
    "pause host": 2,
    "pause scheduler": 1,
    "pause client": 1,
    "pause controller": 1,
    "stop host": 0.3,
    "stop controller": 0.2,
    "stop scheduler": 0.5,
    "stop manager": 0.3,
    "lose kill": 0.5,
    "part": 2,
    "drop": 2,
    "duplicate": 1,
    "reorder": 2,
    "delay": 2,
    "slow host": 1,
}
"""Faults and their relative frequencies. A stopped process neither runs nor ends until another one, which watches it,
has it killed; commands to kill are lost meanwhile, if it says so. A host whose machine vanishes resets no connection;
it is gone for good, or boots again minutes later."""


DEATHS = {"kill controller": 3, "kill manager": 2, "kill scheduler": 2, "kill host": 4}
"""Deaths that fall into moves, suspensions and changes of islands, and their relative frequencies."""

DEATH_MAGNITUDES = (-4.0, -1.5)
"""The decimal logarithm of the seconds from the beginning of a step to such a death: a message takes some 100 us."""

MOST_DEATHS = 4
"""Processes that die so in a run."""

MOST_UNDER_WAY_S = 0.0008
"""A message to hosts is with all of them within this time."""

LASTING = ("vanish host", "outage")
"""What may last for good. The rest of the cluster goes on meanwhile."""


@dataclass(frozen=True)
class Fault:
    """At `time`, for `seconds`, to `where` (a node, or two joined by "|")."""

    time: float
    kind: str
    where: str
    seconds: float

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.3f} s" if self.seconds else ""
        return f"{self.kind} {self.where}{lasting}"


def draw(random: Random, settings: Settings) -> list[Fault]:
    """`settings.faults` faults or more, or none."""
    nodes = _nodes(settings)
    faults: list[Fault] = []
    kinds, weights = list(KINDS), list(KINDS.values())
    while len(faults) < settings.faults:
        time = 1.0 + random.random() * FAULT_SPAN_S
        kind = random.choices(kinds, weights)[0]
        what, _, who = kind.partition(" ")
        if what == "stop" and any(fault.kind.startswith("stop") for fault in faults):
            continue  # of two that are stopped at once, one may be the only one that watches the other
        if kind == "vanish host":
            booting = math.inf if random.random() < 0.6 else 30.0 + 90.0 * random.random()
            faults.append(Fault(time, kind, random.choice(nodes["host"]), booting))
        elif kind == "lose kill":
            faults.append(Fault(time, kind, "manager", 5.0 + 15.0 * random.random()))
        elif what in ("kill", "stop"):
            faults.append(Fault(time, kind, random.choice(nodes[who]), 0.0))
        elif what == "pause":
            longest = {"host": 12.0, "scheduler": 12.0, "client": 25.0, "controller": 6.0}[who]
            faults.append(Fault(time, kind, random.choice(nodes[who]), _length(random, longest)))
        elif kind == "slow host":
            faults.append(Fault(time, kind, random.choice(nodes["host"]), 5.0))
        elif kind == "part" and random.random() < 0.2:
            # Many links at once, and they come back one by one.
            for link in dict.fromkeys(_link(random, nodes) for _ in range(6)):
                faults.append(Fault(time + random.random(), kind, link, _length(random, 6.0)))
            faults.sort(key=lambda fault: (fault.time, fault.where))
        else:
            longest = 25.0 if kind == "part" and random.random() < 0.2 else 8.0
            faults.append(Fault(time, kind, _link(random, nodes), _length(random, longest)))
    for _ in range(settings.manager_deaths):
        faults.append(Fault(1.0 + random.random() * FAULT_SPAN_S, "kill manager", "manager", 0.0))
    for _ in range(settings.controller_deaths):
        faults.append(Fault(1.0 + random.random() * FAULT_SPAN_S, "kill controller", "controller", 0.0))
    for _ in range(settings.scheduler_deaths):
        faults.append(
            Fault(1.0 + random.random() * FAULT_SPAN_S, "kill scheduler", random.choice(nodes["scheduler"]), 0.0)
        )
    for _ in range(settings.outages):
        faults.append(Fault(1.0 + random.random() * FAULT_SPAN_S, "outage", random.choice(nodes["host"]), math.inf))
    return sorted(faults, key=lambda fault: (fault.time, fault.kind, fault.where))


def _nodes(settings: Settings) -> dict[str, list[str]]:
    """Names of nodes, by kind of process."""
    return {
        "host": [f"host{host}" for hosts in settings.islands.values() for host in hosts],
        "scheduler": [f"scheduler{island}" for island in settings.islands],
        "client": [f"client{number}" for number in range(settings.clients)],
        "controller": ["controller"],
        "manager": ["manager"],
    }


def _length(random: Random, longest: float) -> float:
    """Short ones more often than long ones."""
    return longest * random.random() ** 3 + 0.01


def _link(random: Random, nodes: dict[str, list[str]]) -> str:
    """Two nodes that talk to each other."""
    kind = random.choice(["client controller", "controller scheduler", "scheduler host", "host host", "client host"])
    first, second = kind.split()
    a, b = random.choice(nodes[first]), random.choice(nodes[second])
    if first == second and a == b:
        a, b = random.choice(nodes["controller"]), random.choice(nodes["scheduler"])
    if random.random() < 0.1:
        a = random.choice(nodes["manager"])
    return f"{a}|{b}"


class FaultObserver(Observer, Protocol):
    """An observer that checks the reaction to a fault too."""

    def silence_noticed(self, process: Process, controller: Process) -> None:
        """A process has been stopped for so long that the controller, which watched it, must have had it killed."""


class FaultEnvironment(Environment, Protocol):
    """The run that faults are injected into.

    `slowness` has the factor of a slow host's device times, `losses` counts processes that were lost,
    `disturbed_until` is the end of the last fault, and `touched` has the nodes that one has hit.
    """

    slowness: dict[int, float]
    losses: int
    disturbed_until: float
    touched: set[str]

    @property
    def checker(self) -> FaultObserver: ...

    def watcher(self, process: Process) -> Process | None:
        """The controller's process, if the controller watches `process`."""

    def session_of(self, process: Process) -> int:
        """The session of a client's process; 0 when it has no session, or is no client's."""

    def vanish(self, process: Process, seconds: float) -> None:
        """A machine loses its power; after `seconds` a successor of the process starts."""

    def come_late(self, count: int) -> None:
        """Some more clients begin, as soon as there is a controller."""

    def lose_kills(self, until: float) -> None:
        """Until then, processes that are to be killed are not."""


def starve(world: FaultEnvironment, until: float) -> None:
    """Has every process of the runtime run for moments only, up to a time: nothing of it is lost."""
    if world.clock.now >= until:
        world.machine_slowness = 1.0
        return
    world.machine_slowness = STARVED_SLOWNESS
    world.disturbed_until = max(world.disturbed_until, until)
    for process in list(world.network.alive.values()):
        if not process.paused and not process.name.startswith("client") and world.random.random() < 0.02:
            world.network.pause(process, min(until - world.clock.now, world.random.uniform(*STARVED_S)))
    world.clock.after(0.25, starve, world, until)


class FaultInjector:
    """Injects faults at their times, and into changes. `struck` counts those that hit a process or a link.

    Args:
        random: draws those that fall into changes.
    """

    def __init__(self, world: FaultEnvironment, faults: Iterable[Fault], random: Random) -> None:
        self.world, self.random = world, random
        self.struck = 0
        self.deaths_left = self.torn_left = MOST_DEATHS
        for fault in faults:
            world.clock.at(fault.time, self._strike, fault)
            self._disturb(fault.time + (SILENCE_S if fault.kind in LASTING else fault.seconds))

    def step_begins(self) -> None:
        """A step of a change begins: now and then, a process dies within moments."""
        world, chance = self.world, self.world.settings.deaths
        if not chance or not self.deaths_left or self.random.random() >= chance:
            return
        self.deaths_left -= 1
        kind = self.random.choices(list(DEATHS), list(DEATHS.values()))[0]
        who = kind.partition(" ")[2]
        nodes = sorted({process.node for process in world.network.alive.values() if process.node.startswith(who)})
        if nodes:
            at = world.clock.now + 10.0 ** self.random.uniform(*DEATH_MAGNITUDES)
            world.clock.at(at, self._strike, Fault(at, kind, self.random.choice(nodes), 0.0))
            self._disturb(at)

    def hosts_told(self, scheduler: Process) -> None:
        """A scheduler sends something to all its hosts: now and then, it dies before that has come to each of them."""
        world, chance = self.world, self.world.settings.torn
        if chance and self.torn_left and world.clock.now > 1.0 and self.random.random() < chance:
            self.torn_left -= 1
            at = world.clock.now + MOST_UNDER_WAY_S * self.random.random()
            world.clock.at(at, self._strike, Fault(at, "kill scheduler", scheduler.node, 0.0))
            self._disturb(at)

    def _disturb(self, until: float) -> None:
        self.world.disturbed_until = max(self.world.disturbed_until, until)

    def _strike(self, fault: Fault, again: int = 5) -> None:
        what, _, who = fault.kind.partition(" ")
        if what in ("kill", "pause", "stop", "vanish"):
            process = next((p for p in self.world.network.alive.values() if p.node == fault.where), None)
            if (process is None or process.paused) and who != "client" and again:
                self._disturb(self.world.clock.now + 1.0 + min(fault.seconds, SILENCE_S))
                self.world.clock.after(1.0, self._strike, fault, again - 1)
            elif process is not None:
                self._note(fault)
                self._strike_process(fault, process)
            return
        self._note(fault)
        if fault.kind == "outage":
            self._lose_power(fault)
        elif fault.kind == "lose kill":
            self.world.lose_kills(self.world.clock.now + fault.seconds)
        elif fault.kind == "slow host":
            host = int(fault.where[4:])
            self.world.slowness[host] = self.world.random.choice([20.0, 300.0])
            self.world.clock.after(fault.seconds, self._end_slowness, host)
        else:
            self._strike_link(fault)

    def _lose_power(self, fault: Fault) -> None:
        """Hosts and the controller end at once. One host's machine stays dark, and the new controller never hears of
        it; new clients come, and do not wait until all is well."""
        world = self.world
        for process in list(world.network.alive.values()):
            if process.node.startswith("host") or process.node == "controller":
                world.touched.add(process.node)
                if process.node == fault.where and not process.paused:
                    world.vanish(process, fault.seconds)
                else:
                    world.kill(process, "its machine lost its power")
        world.come_late(2)

    def _end_slowness(self, host: int) -> None:
        self.world.slowness.pop(host, None)

    def _note(self, fault: Fault) -> None:
        self.struck += 1
        self.world.touched.update(fault.where.split("|"))
        self.world.log.say(str(fault))

    def _strike_process(self, fault: Fault, process: Process) -> None:
        world = self.world
        if fault.kind.startswith("kill"):
            session = world.session_of(process)
            world.kill(process, "killed")
            world.checker.session_ended(session)
        elif fault.kind.startswith("pause"):
            world.network.pause(process, fault.seconds)
        elif fault.kind.startswith("vanish"):
            world.vanish(process, fault.seconds)
        else:
            world.network.pause(process, math.inf)
            world.losses += process.name != "manager"  # it is as good as lost before it is killed
            self._disturb(world.clock.now + NOTICED_LIMIT_S)
            watcher = world.watcher(process)
            if watcher is not None:
                world.clock.after(UNHINDERED_LIMIT_S, self._look_at_stopped, process, watcher)
                world.clock.after(NOTICED_LIMIT_S, world.checker.silence_noticed, process, watcher)

    def _look_at_stopped(self, process: Process, watcher: Process) -> None:
        if watcher.node not in self.world.touched:
            self.world.checker.silence_noticed(process, watcher)

    def _strike_link(self, fault: Fault) -> None:
        network, now = self.world.network, self.world.clock.now
        a, _, b = fault.where.partition("|")
        if fault.kind == "part":
            network.part(a, b, fault.seconds)
            return
        weather = network.weather.setdefault((min(a, b), max(a, b)), Weather())
        weather.until = now + fault.seconds
        match fault.kind:
            case "drop":
                weather.drop = 0.3
                self._disturb(weather.until + 2 * RETRANSMIT_LIMIT_S)
            case "duplicate":
                weather.duplicate = 0.5
            case "reorder":
                weather.reorder = 0.5
            case "delay":
                weather.delay = self.world.random.choice([0.05, 0.5, 3.0])
