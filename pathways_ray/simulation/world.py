"""One run: a cluster, its clients and its faults, all drawn from a seed, in one thread and without waiting.

The shells of this folder do what the real ones do; whatever is decided, the real pure classes decide: `Launches`,
`SchedulerCore`, `ManagerCore`, `HostCore`, `BufferStore`, the lowering and the planning.
"""

from __future__ import annotations

import hashlib
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pathways_ray.simulation import faults
from pathways_ray.simulation.checker import Checker
from pathways_ray.simulation.client import SimulatedClient
from pathways_ray.simulation.clock import Clock
from pathways_ray.simulation.controller import SimulatedController
from pathways_ray.simulation.devices import Group
from pathways_ray.simulation.faults import Fault
from pathways_ray.simulation.host import SimulatedHost
from pathways_ray.simulation.manager import SimulatedManager
from pathways_ray.simulation.network import RETRANSMIT_LIMIT_S, End, Network, Process, Weather
from pathways_ray.simulation.policies import POLICIES
from pathways_ray.simulation.scheduler import SimulatedScheduler
from pathways_ray.simulation.transfer import Transfer

SLICES_ANYWHERE = True
"""Whether slices may lie on some hosts of an island only. Not yet: a launch that fails there is taken for a
disagreement of its hosts, and a host without a part in a program misses its plan after a restart."""

FAULT_SPAN_S = 8.0
"""Faults come within this time; clients are busy for about as long."""

GROUP_SILENCE_S = 100.0
"""What `jax.distributed` waits for a member of a group (its `heartbeat_timeout_seconds`) before it ends the others."""

LIMIT_S = 400.0
"""A run that has not come to rest by then never will."""


@dataclass(frozen=True)
class Settings:
    """What a run is about. Windows are mostly far smaller than in earnest, so that they matter."""

    islands: dict[int, list[int]]
    devices: int
    clients: int
    parallel: bool
    fusion: bool
    policy: str
    window: int
    crossing_window: int
    max_in_flight: int
    slices: int
    programs: int
    launches: tuple[int, int]
    poison: float
    loops: float
    impatient: float
    anywhere: bool
    faults: int
    apart: float = 0.0

    @classmethod
    def drawn(cls, seed: int, faults: int, policy: str) -> Settings:
        """Args: policy: one of `POLICIES`, or "" to draw it too."""
        random = Random(f"settings {seed}")
        hosts, islands = 0, {}
        for island in range(random.choice([1, 2, 2, 3, 4])):
            count = random.choice([1, 1, 2, 2, 3])
            islands[island] = list(range(hosts, hosts + count))
            hosts += count
        window = random.choice([2, 4, 16, 128])
        looping = random.random() < 0.1
        chosen = random.choice(sorted(POLICIES))
        return cls(
            islands=islands,
            devices=random.choice([1, 2, 2]),
            clients=random.choice([1, 2, 3, 4]),
            parallel=random.random() < 0.8,
            fusion=random.random() < 0.7,
            policy=policy or chosen,
            window=window,
            crossing_window=max(1, window // 2),
            max_in_flight=random.choice([3, 8, 1024]),
            slices=random.choice([1, 2, 3]),
            programs=random.choice([1, 2, 3]),
            launches=(5, 30),
            poison=random.choice([0.0, 0.0, 0.2]),
            loops=1.0 if looping else random.choice([0.0, 0.0, 0.5]),
            impatient=random.choice([0.0, 0.3]),
            anywhere=SLICES_ANYWHERE,
            faults=faults,
        )


@dataclass
class Result:
    """What a run came to. `digest` is that of its log; two runs of one seed have the same."""

    seed: int
    violations: list[str]
    digest: str
    launches: int = 0
    failed: int = 0
    values: int = 0
    struck: int = 0
    events: int = 0
    seconds: float = 0.0
    log: list[str] = field(default_factory=list)


class World:
    """Everything that there is in a run."""

    def __init__(self, seed: int, settings: Settings, logged: bool = False) -> None:
        self.seed, self.settings = seed, settings
        self.logged = logged
        self.log: list[str] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self.random = Random(f"world {seed}")
        self.clock = Clock()
        self.network = Network(self.clock, self.random, self.note)
        self.checker = Checker(self)
        self.island_of = {host: island for island, hosts in settings.islands.items() for host in hosts}
        self.hosts: dict[int, SimulatedHost] = {}
        self.schedulers: dict[str, SimulatedScheduler] = {}
        self.servers: dict[str, tuple[Process, Transfer]] = {}
        self.groups: dict[tuple[int, int], Group] = {}
        self.forming: dict[tuple[int, int], list[SimulatedHost]] = {}
        self.slowness: dict[int, float] = {}
        self.restarts: dict[int, Callable[[], None]] = {}
        self.sessions = 0
        self.losses = self.struck = 0
        self.disturbed_until = self.quiet_since = 0.0
        self.over = 0
        self.manager = SimulatedManager(self)
        self.controller: SimulatedController | None = None
        self._start_controller()
        for island in settings.islands:
            self._start_scheduler(island)
        for host in self.island_of:
            self._start_host(host)
        self.clients = [SimulatedClient(self, number) for number in range(settings.clients)]
        self._plan_faults()
        self.clock.after(0.5, self._look_around)

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        try:
            self.clock.run(LIMIT_S, lambda: self._at_rest)
            self.checker.finish()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.checker.report(f"{type(error).__name__} in {place.name}, line {place.lineno}: {error}")
        checker = self.checker
        return Result(
            self.seed,
            checker.violations,
            self._digest.hexdigest(),
            checker.outcomes,
            checker.failed,
            checker.checked_values,
            self.struck,
            self.clock.events,
            self.clock.now,
            self.log,
        )

    _at_rest = False

    def _look_around(self) -> None:
        """Twice a second: whether the cluster is whole, and whether all is over."""
        if self.clock.now < self.disturbed_until or not self.is_whole():
            self.quiet_since = self.clock.now
        self.checker.check_freed()
        everybody = all(client.over or not client.process.alive for client in self.clients)
        if everybody and self.checker.gone.keys() <= self.checker.freed:
            self._at_rest = True
        if not everybody and self.clock.now - self.quiet_since > 60.0:
            self._at_rest = True  # who waits now waits for ever
        self.clock.after(0.5, self._look_around)

    def note(self, who: str, batch: list[Any]) -> None:
        text = f"{self.clock.now:.6f} {who}: {' '.join(map(_brief, batch))}"
        self._digest.update(text.encode())
        if self.logged:
            self.log.append(text)

    def say(self, text: str) -> None:
        line = f"{self.clock.now:.6f} *** {text}"
        self._digest.update(line.encode())
        if self.logged:
            self.log.append(line)

    def is_whole(self) -> bool:
        """Whether all processes serve and know each other."""
        if self.controller is None or not self.controller.process.alive or self.controller.process.paused:
            return False
        launches = self.controller.launches
        if launches.away or launches.hosts.keys() != self.island_of.keys():
            return False
        return all(
            h.process.alive and not h.process.paused and h.under_epoch and launches.hosts[n].epoch == h.epoch
            for n, h in self.hosts.items()
        )

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start_controller(self) -> None:
        self.controller = SimulatedController(self)
        self.restarts[self.controller.process.number] = self._start_controller

    def _start_scheduler(self, island: int) -> None:
        scheduler = SimulatedScheduler(self, island)
        self.restarts[scheduler.process.number] = lambda: self._start_scheduler(island)

    def _start_host(self, host: int) -> None:
        shell = self.hosts[host] = SimulatedHost(self, host)
        self.restarts[shell.process.number] = lambda: self._start_host(host)

    def kill(self, process: Process, why: str) -> None:
        """A process ends; Ray starts a successor, unless it is a client's."""
        if not process.alive:
            return
        self.say(f"{process} ends: {why}")
        self.network.kill(process)
        restart = self.restarts.pop(process.number, None)
        if restart is None:
            return
        self.losses += 1
        self.clock.after(0.5 + self.random.random(), restart)
        for other, server in self.servers.values():
            if other.alive:
                self.network.post(process, other, server.peer_died, process)
        if process.name.startswith("host"):
            shell = self.hosts[int(process.name[4:])]
            if shell.epoch and len(shell.members) > 1:
                self.clock.after(GROUP_SILENCE_S, self.group_member_gone, shell.island, shell.epoch)
            for client in self.clients:
                if client.process.alive:
                    self.network.post(process, client.process, self._link_broke, client, process)

    def _link_broke(self, client: SimulatedClient, process: Process) -> None:
        host = int(process.name[4:])
        if self.hosts[host].process is process:
            client.link_broke(host)

    def kill_number(self, number: int, why: str) -> None:
        process = self.network.alive.get(number)
        if process is not None:
            self.kill(process, why)

    def client_over(self, client: SimulatedClient) -> None:
        self.say(f"{client.process} is over: {client.ended or 'it left'}")

    def next_session(self) -> int:
        self.sessions += 1
        return self.sessions

    def compile_seconds(self) -> float:
        return float(self.random.choice([0.002, 0.02, 0.1, 0.4]))

    # --- meeting each other -------------------------------------------------------------------------------------------

    def connect_to_scheduler(self, address: str, host: SimulatedHost) -> bool:
        scheduler = self.schedulers.get(address)
        if scheduler is None or not scheduler.process.alive:
            return False
        scheduler.host_connects(host)
        return True

    def connect_to_controller(self, incarnation: str, near: End, address: str) -> bool:
        controller = self.controller
        if controller is None or not controller.process.alive or controller.incarnation != incarnation:
            return False
        controller.island_connects(near, address)
        return True

    def server_at(self, address: str) -> tuple[Process, Transfer] | None:
        found = self.servers.get(address)
        return found if found is not None and found[0].alive else None

    def group_member_gone(self, island: int, epoch: int) -> None:
        """Hosts of a group whose member is gone hear of it from JAX, late (`GROUP_SILENCE_S`), and end."""
        for host in self.settings.islands[island]:
            shell = self.hosts[host]
            if shell.epoch == epoch:
                self.kill(shell.process, "JAX misses a member of its group")

    def form_group(self, island: int, epoch: int, host: SimulatedHost) -> None:
        """A host of an island of several looks for the others of its epoch."""
        members = self.forming.setdefault((island, epoch), [])
        members.append(host)
        if len(members) == len(self.settings.islands[island]) and all(m.process.alive for m in members):
            for member in members:
                self.network.after(member.process, 0.01 * self.random.random(), member.linked)

    def group(self, island: int, epoch: int) -> Group:
        return self.groups.setdefault((island, epoch), Group(self.checker.report))

    # --- faults -------------------------------------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        nodes = {
            "host": [f"host{host}" for host in self.island_of],
            "scheduler": [f"scheduler{island}" for island in self.settings.islands],
            "client": [f"client{number}" for number in range(self.settings.clients)],
            "controller": ["controller"],
            "manager": ["manager"],
        }
        if not self.settings.faults:
            return
        for fault in faults.draw(Random(f"faults {self.seed}"), self.settings.faults, FAULT_SPAN_S, nodes):
            self.clock.at(fault.time, self._strike, fault)
            self.disturbed_until = max(self.disturbed_until, fault.time + fault.seconds)

    def _strike(self, fault: Fault, again: int = 5) -> None:
        what, _, who = fault.kind.partition(" ")
        if what in ("kill", "pause", "stop"):
            process = next((p for p in self.network.alive.values() if p.node == fault.where), None)
            if (process is None or process.paused) and who != "client" and again:
                self.disturbed_until = max(self.disturbed_until, self.clock.now + 1.0 + fault.seconds)
                self.clock.after(1.0, self._strike, fault, again - 1)
                return
            if process is None:
                return
        self.struck += 1
        self.say(str(fault))
        if what == "kill":
            assert process is not None
            self._kill_by_fault(process)
        elif what == "pause":
            assert process is not None
            self.network.pause(process, fault.seconds)
        elif what == "stop":
            assert process is not None
            self.network.pause(process, math.inf)
        elif fault.kind == "slow host":
            host = int(fault.where[4:])
            self.slowness[host] = self.random.choice([20.0, 300.0])
            self.clock.after(fault.seconds, self._fast_again, host)
        else:
            a, _, b = fault.where.partition("|")
            if fault.kind == "part":
                self.network.part(a, b, fault.seconds)
                return
            weather = self.network.weather.setdefault((min(a, b), max(a, b)), Weather())
            weather.until = self.clock.now + fault.seconds
            match fault.kind:
                case "drop":
                    weather.drop = 0.3
                    late = weather.until + 2 * RETRANSMIT_LIMIT_S
                    self.disturbed_until = max(self.disturbed_until, late)
                case "duplicate":
                    weather.duplicate = 0.5
                case "reorder":
                    weather.reorder = 0.5
                case "delay":
                    weather.delay = self.random.choice([0.05, 0.5, 3.0])

    def _fast_again(self, host: int) -> None:
        self.slowness.pop(host, None)

    def _kill_by_fault(self, process: Process) -> None:
        client = next((c for c in self.clients if c.process is process), None)
        self.kill(process, "killed")
        if client is not None:
            self.checker.session_ended(client, "killed")


def _brief(message: Any) -> str:
    """A message in a few letters."""
    if isinstance(message, tuple):
        return f"Register({message[0]})"
    shown = [getattr(message, name) for name in message.__struct_fields__[:3] if name in _SHOWN]
    failure = getattr(message, "failure", None)
    if failure is not None:
        shown.append(f"{failure.kind}: {failure.message}")
    return f"{type(message).__name__}({', '.join(map(str, shown))})"


_SHOWN = {
    "sequence",
    "sequences",
    "session",
    "program",
    "launch",
    "launches",
    "buffer",
    "buffers",
    "host",
    "epoch",
    "island",
    "reason",
    "gang",
}
"""Fields of messages that the log has."""


def simulate(seed: int, faults: int = 5, policy: str = "", logged: bool = False) -> Result:
    """Runs one seed."""
    return World(seed, Settings.drawn(seed, faults, policy), logged).run()
