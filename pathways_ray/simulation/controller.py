"""The simulated controller: what `controller/actor.py` does, around the real `Launches`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.programs import PlannedProgram, decode_graph, plan_program
from pathways_ray.controller.state import Command, SendIsland
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import PathwaysError, to_failure
from pathways_ray.ir.graph import Graph
from pathways_ray.resource_manager.allocation import SliceRequest
from pathways_ray.simulation.network import End, Process
from pathways_ray.simulation.policies import POLICIES
from pathways_ray.transport.messages import (
    Done,
    Enqueued,
    HostAddress,
    HostDown,
    HostUp,
    IslandLaunchFailed,
    IslandUp,
    Load,
    Ready,
    Refused,
    Register,
    SliceCreated,
)

if TYPE_CHECKING:
    from pathways_ray.simulation.world import World

STREAM_LIMIT_S = 20.0
TICK_S = 1.0


class SimulatedController:
    """One incarnation of the controller process. Session numbers count on over restarts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.process = world.network.process("controller", "controller")
        settings = world.settings
        policy = POLICIES[settings.policy]
        self.launches = Launches(
            settings.parallel, settings.max_in_flight, CrossIslandWindow(policy, settings.crossing_window)
        )
        self.islands: dict[int, End] = {}
        self.clients: dict[int, tuple[End | None, float]] = {}
        self.programs_made = 0
        self.functions: dict[int, dict[str, bytes]] = {}
        self.incarnation = str(self.process.number)
        self._tick()

    def _tick(self) -> None:
        now = self.world.clock.now
        self.world.manager.controller_serves(self.process, self.incarnation)
        self._do(self.launches.tick(now))
        for session, (end, opened) in list(self.clients.items()):
            if end is None and now - opened > STREAM_LIMIT_S:
                self.close(session)
        self.world.network.after(self.process, TICK_S, self._tick)

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, SendIsland):
                end = self.islands.get(command.island)
            else:
                end = self.clients.get(command.session, (None, 0.0))[0]
            if end is not None:
                end.send(command.message)
        self.world.checker.controller_bounded(self)

    # --- islands ------------------------------------------------------------------------------------------------------

    def island_connects(self, near: End, address: str) -> None:
        island = int(address.split("/")[0])
        end = End(
            self.world.network,
            self.process,
            lambda batch: self._from_island(end, island, batch),
            lambda: self._stream_ended(end, island, address),
        )
        self.world.network.stream(near, end)

    def _stream_ended(self, end: End, island: int, address: str) -> None:
        if self.islands.get(island) is end:
            self._island_ended(island)
        self.world.manager.withdraw(self.process, f"scheduler-{island}", address)

    def _island_ended(self, island: int) -> None:
        self.islands.pop(island, None)
        for host in [h for h in self.launches.hosts.values() if h.island == island]:
            self._do(self.launches.host_down(HostDown(host.host, host.epoch, "its island's scheduler ended")))

    def _from_island(self, end: End, island: int, batch: list[Any]) -> None:
        if isinstance(batch[0], IslandUp):
            if island in self.islands:
                self._island_ended(island)
            self.islands[island] = end
            self._do(self.launches.island_up(island))
        elif self.islands.get(island) is not end:
            end.close()
            return
        launches = self.launches
        for message in batch:
            match message:
                case Done():
                    self._do(launches.done(island, message))
                case IslandLaunchFailed():
                    self._do(launches.run_failed(island, message))
                case Enqueued():
                    self._do(launches.enqueued(island, message))
                case Ready():
                    self._do(launches.ready(message))
                case HostUp():
                    self.world.checker.host_known(self, message)
                    self._do(launches.host_up(island, message))
                case HostDown():
                    self._do(launches.host_down(message))
                    self.world.manager.leave(self.process, message.host, message.epoch)
                case Load():
                    launches.load(message)

    # --- clients ------------------------------------------------------------------------------------------------------

    def open(self, caller: Process, tenant: Tenant, answer: Callable[..., None]) -> None:
        """A client's first call; answers with the session's number and the hosts that are up."""
        session = self.world.next_session()
        self.clients[session] = (None, self.world.clock.now)
        self._do(self.launches.open_session(session, tenant))
        hosts = [h for h in self.launches.hosts.values() if h.down_since is None]
        addresses = [HostAddress(h.host, h.epoch, h.data_address) for h in hosts]
        self.world.network.post(self.process, caller, answer, session, addresses, self)

    def client_connects(self, session: int, near: End) -> bool:
        if session not in self.clients:
            return False
        end = End(
            self.world.network,
            self.process,
            lambda batch: self._from_client(session, batch),
            lambda: self.close(session),
        )
        self.clients[session] = (end, 0.0)
        self.world.network.stream(near, end)
        return True

    def _from_client(self, session: int, batch: list[Any]) -> None:
        for message in batch:
            if session not in self.launches.sessions:
                return
            if isinstance(message, tuple):
                self._register(session, *message)
            elif isinstance(message, Register):
                self._register(
                    session, message.program, decode_graph(message.graph), message.functions, message.repeats
                )
            else:
                self._do(self.launches.from_client(session, message))

    def _register(
        self, session: int, number: int, graph: Graph, functions: dict[str, bytes], repeats: int = -1
    ) -> None:
        self.programs_made += 1
        functions = self.functions.setdefault(session, {}) | functions
        self.functions[session] = functions
        slices = self.launches.sessions[session].places
        try:
            program = plan_program(self.programs_made, session, graph, functions, slices, self.world.settings.fusion)
        except PathwaysError as error:
            program = PlannedProgram(self.programs_made, session, "", failure=to_failure(error))
        self._do(self.launches.register(session, number, program, repeats))

    def create_slice(
        self, caller: Process, session: int, wish: SliceRequest, answer: Callable[[SliceCreated | Refused], None]
    ) -> None:
        def created(reply: SliceCreated | Refused) -> None:
            if isinstance(reply, SliceCreated) and session in self.launches.sessions:
                self.launches.add_slice(session, reply.placed)
            self.world.network.post(self.process, caller, answer, reply)

        if session in self.clients:
            self.world.manager.create_slice(self.process, session, wish, created)

    def close(self, session: int) -> None:
        if self.clients.pop(session, None) is not None:
            self._do(self.launches.close_session(session))
            self.world.manager.release_session(self.process, session)
