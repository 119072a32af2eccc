"""The simulated resource manager: what `resource_manager/actor.py` does, around the real `Inventory`.

It is called as Ray calls: a message there, a message back, no order between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pathways_ray.errors import PathwaysError, to_failure
from pathways_ray.resource_manager.allocation import HostRecord, Inventory, SliceRequest
from pathways_ray.simulation.network import Process
from pathways_ray.transport.messages import Refused, SliceCreated

if TYPE_CHECKING:
    from pathways_ray.simulation.host import SimulatedHost
    from pathways_ray.simulation.world import World


class SimulatedManager:
    """Its process is not killed here: without it nothing starts, and nothing else depends on it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.process = world.network.process("manager", "manager")
        self.inventory = Inventory()
        self.controller = ""
        self.past_controllers: set[str] = set()
        self.forming: dict[int, dict[int, SimulatedHost]] = {}
        self.addresses: dict[str, str] = {}
        self.lookups: list[tuple[str, Callable[[str], None]]] = []

    def _post(self, caller: Process, act: Callable[[], None], twice: bool = False) -> None:
        self.world.network.post(caller, self.process, act, twice=twice, in_order=True)

    # --- addresses ----------------------------------------------------------------------------------------------------

    def controller_serves(self, caller: Process, incarnation: str) -> None:
        self._post(caller, lambda: self._controller_serves(incarnation))

    def _controller_serves(self, incarnation: str) -> None:
        if incarnation in self.past_controllers:
            return  # sent before it died
        if incarnation != self.controller:
            self.past_controllers.add(self.controller)
            self.controller = incarnation
            self.inventory.start_over()
            for name in [name for name in self.addresses if name.startswith("scheduler-")]:
                del self.addresses[name]
        if self.addresses.get("controller") != incarnation:
            self._publish("controller", incarnation)

    def publish(self, caller: Process, name: str, address: str) -> None:
        self._post(caller, lambda: self._publish(name, address), twice=True)

    def _publish(self, name: str, address: str) -> None:
        self.addresses[name] = address
        lookups, self.lookups = self.lookups, []
        for wanted, answer in lookups:
            self._look_up(wanted, answer)

    def withdraw(self, caller: Process, name: str, address: str) -> None:
        def act() -> None:
            if self.addresses.get(name) == address:
                del self.addresses[name]

        self._post(caller, act, twice=True)

    def lookup(self, caller: Process, name: str, answer: Callable[[str], None]) -> None:
        """Answers once `name` has published its address."""
        self._post(
            caller,
            lambda: self._look_up(name, lambda a: self.world.network.post(self.process, caller, answer, a)),
        )

    def _look_up(self, name: str, answer: Callable[[str], None]) -> None:
        found = self.addresses.get(name)
        if found is None:
            self.lookups.append((name, answer))
        else:
            answer(found)

    # --- hosts --------------------------------------------------------------------------------------------------------

    def join(self, host: SimulatedHost) -> None:
        self._post(
            host.process,
            lambda: self._look_up(f"scheduler-{host.island}", lambda scheduler: self._join(host, scheduler)),
        )

    def _join(self, host: SimulatedHost, scheduler: str) -> None:
        host.scheduler = scheduler
        waiting = self.forming.setdefault(host.island, {})
        waiting[host.host] = host
        for other in self.inventory.left_behind(host.host):
            if other.host not in waiting:
                self.world.kill_number(other.pid, "a member of its group came anew")
        if set(waiting) != set(self.world.settings.islands[host.island]):
            return
        members = [waiting[number] for number in sorted(waiting)]
        devices = self.world.settings.devices
        records = [HostRecord(m.host, m.island, "cpu", devices, "node", m.process.number) for m in members]
        epoch = self.inventory.join(records)
        waiting.clear()
        for member in members:
            self.world.network.post(self.process, member.process, member.joined, epoch, member.scheduler)

    def leave(self, caller: Process, host: int, epoch: int) -> None:
        self._post(caller, lambda: self.inventory.leave(host, epoch), twice=True)

    def kill_host(self, caller: Process, host: int, epoch: int) -> None:
        def act() -> None:
            record = self.inventory.hosts.get(host)
            if record is not None and record.epoch == epoch:
                self.world.kill_number(record.pid, "the resource manager was asked to")

        self._post(caller, act, twice=True)

    # --- slices -------------------------------------------------------------------------------------------------------

    def create_slice(
        self, caller: Process, session: int, wish: SliceRequest, answer: Callable[[SliceCreated | Refused], None]
    ) -> None:
        def act() -> None:
            reply: SliceCreated | Refused
            try:
                reply = SliceCreated(self.inventory.create(session, wish))
            except PathwaysError as error:
                reply = Refused(to_failure(error))
            self.world.network.post(self.process, caller, answer, reply)

        self._post(caller, act)

    def release_session(self, caller: Process, session: int) -> None:
        self._post(caller, lambda: self._release(session))

    def _release(self, session: int) -> None:
        self.inventory.release_session(session)
