"""One run: a cluster, its clients and its faults, all drawn from a seed, in one thread and without waiting.

The processes of this folder talk as the real ones do; all decisions are those of the real pure classes: `Launches`,
`SchedulerCore`, `ManagerCore`, `HostCore`, `BufferStore`, the lowering and the planning.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from random import Random

from pathways_ray.resource_manager.islands import KeptIslands
from pathways_ray.simulation import faults
from pathways_ray.simulation.checker import Checker
from pathways_ray.simulation.client import SimulatedClient
from pathways_ray.simulation.clock import Clock
from pathways_ray.simulation.controller import SimulatedController
from pathways_ray.simulation.devices import Group
from pathways_ray.simulation.faults import FaultInjector
from pathways_ray.simulation.host import SimulatedHost
from pathways_ray.simulation.hostile import HostileClient
from pathways_ray.simulation.log import Log
from pathways_ray.simulation.manager import SimulatedManager
from pathways_ray.simulation.network import End, Network, Process
from pathways_ray.simulation.operator import SimulatedOperator
from pathways_ray.simulation.remains import deaf_islands, disagreements
from pathways_ray.simulation.scheduler import SimulatedScheduler
from pathways_ray.simulation.settings import Result, Settings
from pathways_ray.simulation.transfer import Transfer

GROUP_SILENCE_S = 100.0
"""The time that `jax.distributed` waits for a member of a group (its `heartbeat_timeout_seconds`) before it ends the
others."""

LIMIT_S = 400.0
"""A run that has not come to rest by then never will."""


class World:
    """All processes of a run, the network between them, their faults and their checker.

    It is the environment of each process, and the `Cluster` that the checker looks at.
    """

    controller: SimulatedController

    def __init__(self, seed: int, settings: Settings, logged: bool = False) -> None:
        self.seed, self.settings = seed, settings
        self.random = Random(f"world {seed}")
        self.clock = Clock()
        self.log = Log(self.clock, logged)
        self.network = Network(self.clock, self.random, self.log.note)
        self.checker = Checker(self)
        self.hosts: dict[int, SimulatedHost] = {}
        self.schedulers: dict[str, SimulatedScheduler] = {}
        self.servers: dict[str, tuple[Process, Transfer]] = {}
        self.groups: dict[tuple[int, int], Group] = {}
        self.forming: dict[tuple[int, int], list[tuple[Process, Callable[[], None]]]] = {}
        self.slowness: dict[int, float] = {}
        self.crashes: dict[int, str] = {}
        self.machine_slowness = 1.0
        self.restarts: dict[int, Callable[[], None]] = {}
        self.sessions = 0
        self.losses = 0
        self.disturbed_until = self.quiet_since = self.freeing_since = 0.0
        self.kills_lost_until = 0.0
        self.touched: set[str] = set()
        self.islands = {island: list(hosts) for island, hosts in settings.islands.items()}
        self.kept = KeptIslands.first(self.islands)
        self.drained: set[int] = set()
        self.deadlines: dict[int, float] = {}
        self.manager = SimulatedManager(self)
        self.restarts[self.manager.process.number] = self._start_manager
        self._start_controller()
        for island in self.islands:
            self._start_scheduler(island)
        for island, hosts in self.islands.items():
            for host in hosts:
                self._start_host(island, host)
        self.clients = [SimulatedClient(self, number) for number in range(settings.clients)]
        self.operator = SimulatedOperator(self, seed)
        self.hostile = [HostileClient(self, number) for number in range(settings.hostile)]
        if settings.starved_s:
            self.clock.at(1.0, faults.starve, self, 1.0 + settings.starved_s)
        drawn = faults.draw(Random(f"faults {seed}"), settings)
        self.faults = FaultInjector(self, drawn, Random(f"deaths {seed}"))
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
            self.log.digest,
            checker.outcomes,
            checker.failed,
            checker.checked_values,
            self.faults.struck,
            self.clock.events,
            self.clock.now,
            self.log.lines,
        )

    _at_rest = False

    def _look_around(self) -> None:
        """Looks twice a second whether the cluster is whole, and whether all is over."""
        if self.clock.now < self.disturbed_until or not self.is_whole():
            self.quiet_since = self.clock.now
        self.freeing_since = self.clock.now if self.controller.may_resume else max(self.freeing_since, self.quiet_since)
        self.checker.check_freed()
        self.checker.check_over()
        for difference in disagreements(self):
            self.checker.report(difference)
        everybody = all(client.over or not client.process.alive for client in self.clients)
        if everybody and self.checker.gone.keys() <= self.checker.freed and not self.checker.has_doubts:
            self._at_rest = True
        if not everybody and self.clock.now - max(self.quiet_since, self.checker.last_outcome) > 60.0:
            self._at_rest = True  # nothing has ended for a minute: a client that waits now waits for ever
        self.clock.after(0.5, self._look_around)

    def is_whole(self) -> bool:
        """Whether all processes serve and know each other."""
        if not self.controller.process.alive or self.controller.process.paused:
            return False
        if deaf_islands(self):
            return False
        known, gone = self.controller.launches.hosts, self.gone()
        if any(n in known and known[n].down_since is None for n in gone):
            return False
        return all(
            h.process.alive
            and not h.process.paused
            and h.under_epoch
            and n in known
            and known[n].down_since is None
            and known[n].epoch == h.epoch
            for n, h in self.hosts.items()
            if n not in gone
        )

    def gone(self) -> set[int]:
        """The hosts of islands of which a machine has vanished, and is not back."""
        islands = {h.island for h in self.hosts.values() if h.process.vanished}
        return {host for island in islands for host in self.islands[island]}

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start_manager(self) -> None:
        """Starts the resource manager again, with epochs above all earlier ones. Processes that waited for an answer of
        its predecessor end: Ray tells them that it died."""
        if self.controller.process.alive:
            self.controller.manager_died()
        self.manager = SimulatedManager(self, round(1000 * self.clock.now), self.controller.incarnation)
        self.restarts[self.manager.process.number] = self._start_manager
        for process in [h.process for h in self.hosts.values() if not h.under_epoch]:
            self.kill(process, "the resource manager died with its call")

    def _group_hears(self, process: Process) -> None:
        """The other hosts of a group hear of the end of one from JAX, if from nobody else before."""
        shell = self.hosts[int(process.name[4:])]
        if shell.epoch and len(shell.members) > 1:
            self.clock.after(GROUP_SILENCE_S, self.group_member_gone, shell.island, shell.epoch)

    def kill_scheduler(self, island: int) -> None:
        for scheduler in list(self.schedulers.values()):
            if scheduler.island == island:
                self.kill(scheduler.process, "the controller did not hear from it")

    def _start_controller(self, restarted: bool = False) -> None:
        self.controller = SimulatedController(self, restarted)
        self.restarts[self.controller.process.number] = lambda: self._start_controller(restarted=True)

    def _start_scheduler(self, island: int) -> None:
        if island not in self.islands:
            return
        scheduler = SimulatedScheduler(self, island)
        self.schedulers[scheduler.address] = scheduler
        self.restarts[scheduler.process.number] = lambda: self._start_scheduler(island)

    def _start_host(self, island: int, host: int) -> None:
        if island not in self.islands:
            return
        started = self.hosts[host] = SimulatedHost(self, island, host)
        self.restarts[started.process.number] = lambda: self._start_host(island, host)

    def kill(self, process: Process, why: str) -> None:
        """Ends a process; Ray starts a successor, unless it is a client's."""
        if not process.alive:
            return
        self.log.say(f"{process} ends: {why}")
        self.network.kill(process)
        restart = self.restarts.pop(process.number, None)
        if restart is None:
            return
        self.losses += process.name != "manager"  # nothing ends with it
        if self.settings.flaws:
            self.quiet_since = self.disturbed_until = max(self.disturbed_until, self.clock.now)
        if self.settings.starved_s and not self.settings.faults:
            self.checker.report(f"{process} was slow, and was ended: {why}")
        self.clock.after(0.5 + self.random.random(), restart)
        for other, server in self.servers.values():
            if other.alive:
                self.network.post(process, other, server.peer_died, process)
        if process.name.startswith("host"):
            self._group_hears(process)
            for client in self.clients:
                if client.process.alive:
                    self.network.post(process, client.process, self._link_broke, client, process)

    def start_island(self, island: int, hosts: list[int]) -> None:
        self.islands[island] = hosts
        self._start_scheduler(island)
        for host in hosts:
            self._start_host(island, host)

    def end_island(self, island: int, hosts: tuple[int, ...]) -> None:
        """Ends the processes of an island; nothing starts them again, and nothing that anybody uses is lost."""
        losses = self.losses
        processes = [self.hosts[host].process for host in hosts if host in self.hosts]
        processes += [s.process for s in self.schedulers.values() if s.island == island]
        for process in processes:
            self.restarts[process.number] = lambda: None
            self.kill(process, "its island was removed")
        for host in hosts:
            self.hosts.pop(host, None)
        if self.clock.now < self.deadlines.get(island, math.inf):
            self.losses = losses
        self.islands.pop(island, None)

    def vanish(self, process: Process, seconds: float) -> None:
        """A machine loses its power; after `seconds` a successor of the process starts."""
        self.network.vanish(process)
        self.losses += 1
        if process.name.startswith("host"):
            self._group_hears(process)
        restart = self.restarts.pop(process.number)
        if seconds < math.inf:
            self.clock.after(seconds, restart)
            self.clock.after(seconds, self._boot)

    def _boot(self) -> None:
        self.disturbed_until = max(self.disturbed_until, self.clock.now)

    def come_late(self, count: int) -> None:
        self.clients += [SimulatedClient(self, len(self.clients) + k, late=True) for k in range(count)]

    def lose_kills(self, until: float) -> None:
        self.kills_lost_until = until

    def _link_broke(self, client: SimulatedClient, process: Process) -> None:
        host = int(process.name[4:])
        if host in self.hosts and self.hosts[host].process is process:
            client.data.link_broke(host)

    def hosts_told(self, scheduler: Process) -> None:
        self.faults.hosts_told(scheduler)

    def step_begins(self) -> None:
        self.faults.step_begins()

    def kill_number(self, number: int, why: str) -> None:
        process = self.network.alive.get(number)
        if process is not None and self.clock.now >= self.kills_lost_until:
            self.kill(process, why)
        elif process is not None:
            self.losses += process.name != "manager"  # who has it killed counts it as lost, and says so

    def kill_host(self, host: int, why: str) -> None:
        if host in self.hosts:
            self.kill_number(self.hosts[host].process.number, why)

    def watcher(self, process: Process) -> Process | None:
        return self.controller.process if self.controller.watches(process) else None

    def session_of(self, process: Process) -> int:
        return next((client.session for client in self.clients if client.process is process), 0)

    # --- connections --------------------------------------------------------------------------------------------------

    def connect_to_scheduler(self, address: str, near: End) -> bool:
        scheduler = self.schedulers.get(address)
        if scheduler is None or not scheduler.process.alive:
            return False
        scheduler.host_connects(near)
        return True

    def connect_to_controller(self, incarnation: str, near: End, address: str) -> bool:
        controller = self.controller
        if not controller.process.alive or controller.incarnation != incarnation:
            return False
        controller.island_connects(near, address)
        return True

    def server_at(self, address: str) -> tuple[Process, Transfer] | None:
        found = self.servers.get(address)
        return found if found is not None and found[0].alive else None

    def group_member_gone(self, island: int, epoch: int) -> None:
        """Hosts of a group whose member is gone hear of it from JAX, late (`GROUP_SILENCE_S`), and end."""
        for host in self.islands.get(island, ()):
            shell = self.hosts[host]
            if shell.epoch == epoch:
                self.kill(shell.process, "JAX misses a member of its group")

    def form_group(self, island: int, epoch: int, process: Process, formed: Callable[[], None]) -> None:
        members = self.forming.setdefault((island, epoch), [])
        members.append((process, formed))
        if len(members) == len(self.islands[island]) and all(member.alive for member, _ in members):
            for member, linked in members:
                self.network.after(member, 0.01 * self.random.random(), linked)

    def group(self, island: int, epoch: int) -> Group:
        return self.groups.setdefault((island, epoch), Group(self.checker.report))
