"""A simulated scheduler: `SchedulerCore` on simulated links."""

from __future__ import annotations

import math
from typing import Any, Protocol

from pathways_ray.scheduler import events
from pathways_ray.scheduler.controller_absence import REJOIN_PAUSE_S
from pathways_ray.scheduler.core import TICK_S, SchedulerCore
from pathways_ray.simulation.environment import Environment
from pathways_ray.simulation.manager import SimulatedManager
from pathways_ray.simulation.network import End
from pathways_ray.simulation.policies import POLICIES
from pathways_ray.transport.messages import HostDown, HostUp

LOOK_S = 0.5
"""Time between two looks for the controller."""


class SchedulerEnvironment(Environment, Protocol):
    """The environment of a scheduler. `losses` counts the processes that were lost."""

    losses: int
    manager: SimulatedManager
    islands: dict[int, list[int]]

    def connect_to_controller(self, incarnation: str, near: End, address: str) -> bool:
        """Opens a stream to an incarnation of the controller; false when it is gone."""


class SimulatedScheduler:
    """One incarnation of a scheduler process."""

    def __init__(self, world: SchedulerEnvironment, island: int) -> None:
        self.world = world
        self.island = island
        self.process = world.network.process(f"scheduler{island}", f"scheduler{island}")
        settings = world.settings
        self.core = SchedulerCore(
            island,
            world.islands[island],
            settings.window,
            POLICIES[settings.policy],
            settings.launch_limit_s if settings.flaws else math.inf,  # without flaws nothing may stand still
            settings.compile_limit_s if settings.flaws else math.inf,
        )
        if settings.eager:
            self.core.order.early.alone_s = 0.0
        self.address = f"{island}/{self.process.number}"
        self.hosts: dict[int, End] = {}
        self.accepted: dict[int, int] = {}
        self.links: dict[tuple[int, int], End] = {}
        self.controller: End | None = None
        self._look_for_controller()
        self._tick()

    def _look_for_controller(self) -> None:
        if self.controller is None:
            self.world.manager.lookup(self.process, "controller", self._found_controller)
            self.world.network.after(self.process, LOOK_S, self._look_for_controller)

    def _found_controller(self, address: str) -> None:
        if self.controller is not None:
            return
        end = End(self.world.network, self.process, self._from_controller, lambda: self._controller_gone(address))
        if self.world.connect_to_controller(address, end, self.address):
            self.controller = end
            self._handle(events.ControllerConnected(self.address))

    def _controller_gone(self, address: str) -> None:
        self.controller = None
        self._handle(events.ControllerDisconnected(address))
        self._look_for_controller()

    def _from_controller(self, batch: list[Any]) -> None:
        for message in batch:
            self._handle(events.ControllerMessage(message))
        self.world.checker.scheduler_bounded(self.core)

    def _tick(self) -> None:
        self._handle(events.Ticked(self.world.machine_slowness))
        self.world.network.after(self.process, TICK_S, self._tick)

    def host_connects(self, near: End) -> None:
        """A host opens its link; its first message says which one it is."""
        end = End(self.world.network, self.process, lambda batch: self._from_host(end, batch), lambda: None)
        self.world.network.stream(near, end)

    def _from_host(self, end: End, batch: list[Any]) -> None:
        hello = batch.pop(0)
        if isinstance(hello, HostUp):
            host, epoch = hello.host, hello.epoch
            end.receive = lambda batch: self._from_known_host(host, epoch, batch)
            end.ended = lambda: self._handle(events.HostDisconnected(host, epoch))
            self._handle(events.HostConnected(hello), end)
            if end.open:
                end.receive(batch)

    def _from_known_host(self, host: int, epoch: int, batch: list[Any]) -> None:
        for message in batch:
            self._handle(events.HostMessage(host, epoch, message))

    def _handle(self, event: events.Event, end: End | None = None) -> None:
        """Takes an event to the core, and carries out its commands.

        Args:
            end: of a host's link that has just been opened.
        """
        commands = self.core.handle(event, self.world.clock.now)
        if commands and isinstance(event, events.HostMessage):
            self.world.checker.heard_from(self.core, event.host, event.epoch)
        for command in commands:
            if isinstance(command, events.ToController) and isinstance(command.message, HostDown):
                self.world.checker.island_restarts(self.island, command.message)
            match command:
                case events.ToHosts(message):
                    for outbox in self.hosts.values():
                        outbox.send(message)
                    self.world.hosts_told(self.process)
                case events.ToController(message):
                    if self.controller is not None:
                        self.controller.send(message)
                case events.Accept(host, epoch):
                    assert end is not None
                    self.world.checker.host_accepted(self.island, host, epoch, self.accepted.get(host, 0))
                    self.hosts[host] = self.links[host, epoch] = end
                    self.accepted[host] = epoch
                case events.Refuse():
                    assert end is not None
                    end.close()
                case events.ForgetHosts():
                    self.hosts.clear()
                case events.Kill(host, epoch):
                    self.world.manager.kill_host(self.process, host, epoch)
                    if (host, epoch) in self.links:
                        self.world.losses += 1  # its kill may take its time, and the controller hears of it now
                        self.links.pop((host, epoch)).close()
                case events.Withdraw(name, address):
                    self.world.manager.withdraw(self.process, name, address)
                case events.Exit(reason):
                    self.world.network.after(self.process, REJOIN_PAUSE_S, self.world.kill, self.process, reason)
