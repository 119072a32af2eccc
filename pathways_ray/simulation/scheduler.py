"""A simulated scheduler: what `scheduler/actor.py` does, around the real `IslandOrder`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pathways_ray.scheduler.order import IslandOrder
from pathways_ray.scheduler.state import Command, Kill, Refuse, ToController, ToHosts
from pathways_ray.simulation.network import End
from pathways_ray.simulation.policies import POLICIES
from pathways_ray.transport.messages import Heartbeat, HostUp, IslandUp

if TYPE_CHECKING:
    from pathways_ray.simulation.host import SimulatedHost
    from pathways_ray.simulation.world import World

REJOIN_PAUSE_S = 1.0
SILENCE_LIMIT_S = 8.0
WATCH_S = 1.0
"""As in `scheduler/actor.py`."""


class SimulatedScheduler:
    """One incarnation of a scheduler process."""

    def __init__(self, world: World, island: int) -> None:
        self.world = world
        self.island = island
        self.process = world.network.process(f"scheduler{island}", f"scheduler{island}")
        settings = world.settings
        self.order = IslandOrder(
            island, frozenset(settings.islands[island]), settings.window, POLICIES[settings.policy]
        )
        self.address = f"{island}/{self.process.number}"
        self.outboxes: dict[int, End] = {}
        self.heard: dict[int, float] = {}
        self.accepted: dict[int, int] = {}
        self.controller: End | None = None
        self.last_watch = world.clock.now
        world.schedulers[self.address] = self
        world.manager.lookup(self.process, "controller", self._found_controller)

    def _found_controller(self, address: str) -> None:
        self.controller_address = address
        self.controller = End(self.world.network, self.process, self._from_controller, self._controller_gone)
        if not self.world.connect_to_controller(address, self.controller, self.address):
            self._controller_gone()
            return
        self.controller.send(IslandUp(self.island, self.address))
        self.world.manager.publish(self.process, f"scheduler-{self.island}", self.address)
        self._watch()

    def _controller_gone(self) -> None:
        self.world.manager.withdraw(self.process, "controller", self.controller_address)
        self.world.network.after(
            self.process, REJOIN_PAUSE_S, self.world.kill, self.process, "its controller's stream ended"
        )

    def _from_controller(self, batch: list[Any]) -> None:
        for message in batch:
            self._do(self.order.from_controller(message))
        self.world.checker.scheduler_bounded(self)

    # --- hosts --------------------------------------------------------------------------------------------------------

    def host_connects(self, host: SimulatedHost) -> None:
        """A host opens its stream; its first message says who it is."""
        end = End(self.world.network, self.process, lambda batch: self._from_host(end, batch), lambda: None)
        self.world.network.stream(host.end, end)

    def _from_host(self, end: End, batch: list[Any]) -> None:
        hello = batch[0]
        if isinstance(hello, HostUp):
            if not self._host_up(end, hello):
                return
            host, epoch = hello.host, hello.epoch
            end.receive = lambda batch: self._from_known_host(host, epoch, batch)
            end.receive(batch)

    def _from_known_host(self, host: int, epoch: int, batch: list[Any]) -> None:
        self.heard[host] = self.world.clock.now
        for message in batch:
            if not isinstance(message, Heartbeat | HostUp):
                commands = self.order.from_host(host, epoch, message)
                if commands:
                    self.world.checker.heard_from(self, host, epoch)
                    self._do(commands)

    def _host_up(self, end: End, hello: HostUp) -> bool:
        commands = self.order.host_up(hello)
        if any(isinstance(command, Refuse) for command in commands):
            self._do(commands)
            end.close()
            return False
        self.world.checker.host_accepted(self, hello)
        self.accepted[hello.host] = hello.epoch
        self.outboxes[hello.host] = end
        self.heard[hello.host] = self.world.clock.now
        end.ended = lambda: self._lost(hello.host, hello.epoch, "its process ended")
        self._do(commands)
        return True

    def _lost(self, host: int, epoch: int, reason: str, silent: bool = False) -> None:
        commands = self.order.host_lost(host, epoch, reason, silent)
        if commands:
            self.outboxes.clear()
            self._do(commands)

    def _watch(self) -> None:
        now = self.world.clock.now
        self._do(self.order.tick(now))
        if self.controller is not None:
            self.controller.send(self.order.load())
        if now - self.last_watch > SILENCE_LIMIT_S / 2:
            self.heard = dict.fromkeys(self.heard, now)
        self.last_watch = now
        for host, heard in self.heard.items():
            epoch = self.order.epochs.get(host, 0)
            if epoch > 0 and now - heard > SILENCE_LIMIT_S:
                self._lost(host, epoch, f"it did not answer for {SILENCE_LIMIT_S:.0f} s", silent=True)
        self.world.network.after(self.process, WATCH_S, self._watch)

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case ToHosts(message):
                    for outbox in self.outboxes.values():
                        outbox.send(message)
                case ToController(message):
                    if self.controller is not None:
                        self.controller.send(message)
                case Kill(host, epoch):
                    self.world.manager.kill_host(self.process, host, epoch)
                case Refuse():
                    pass
