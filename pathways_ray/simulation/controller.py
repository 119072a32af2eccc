"""The simulated controller: `ControllerCore` on simulated streams and calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from pathways_ray.controller import events, planning
from pathways_ray.controller.changes import IslandChange
from pathways_ray.controller.channel import Carrier
from pathways_ray.controller.clients import Clients
from pathways_ray.controller.core import ControllerCore
from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.late_drops import with_drops_joined
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.manager_calls import FENCED_CALLS, NEWS
from pathways_ray.controller.state import SendClient, SendIsland
from pathways_ray.controller.tenants import Tenant, TenantBook, TokenOwner, token_digest
from pathways_ray.controller.watch import TICK_S
from pathways_ray.errors import Failure
from pathways_ray.resource_manager.islands import KeptIslands
from pathways_ray.resource_manager.slice_requests import SliceRequest
from pathways_ray.simulation.environment import Environment
from pathways_ray.simulation.manager import SimulatedManager
from pathways_ray.simulation.network import End, Process
from pathways_ray.simulation.policies import POLICIES
from pathways_ray.transport import messages as wire

PLANNING_S = (0.001, 0.05, 1.0)
"""Times that the planner takes for a program."""

MISSED_S = 0.001
"""Seconds after which Ray says that a call went to a process that is gone."""

PLANNER_DIES = 0.02
PLANNER_DIED = "the planner died of the program"


class ControllerEnvironment(Environment, Protocol):
    """The environment of the controller. `sessions` counts those opened so far, over restarts, `losses` the processes
    that were lost."""

    losses: int
    kept: KeptIslands
    manager: SimulatedManager
    sessions: int

    def kill_scheduler(self, island: int) -> None:
        """Ends the schedulers of an island, because the controller did not hear from it."""


class SimulatedController:
    """One incarnation of the controller process; one that was `restarted` follows another one. Session numbers count on
    over restarts."""

    def __init__(self, world: ControllerEnvironment, restarted: bool = False) -> None:
        self.world = world
        self.process = world.network.process("controller", "controller")
        settings = world.settings
        window = CrossIslandWindow(POLICIES[settings.policy], settings.cross_island_window)
        self.incarnation = str(self.process.number)
        self.launches = Launches(
            settings.parallel, settings.max_in_flight, window, settings.compile_limit_s, settings.launch_limit_s
        )
        if settings.preempts or settings.memory:
            self.launches.preemption.enable()
        world.sessions += restarted  # the clock has gone on
        # Functions are names here, without content; sessions of different incarnations have different numbers.
        clients = Clients(self.launches, settings.fusion, world.sessions, check=lambda functions: None)
        if not settings.keeps:
            clients.registrar.kept_bytes = 0
        if world.random.random() < 0.5:
            clients.registrar.plan_if_cheap = lambda request: None
        islands = world.kept.members
        self.core = ControllerCore(self.launches, clients, expected=islands, islands=islands)
        self.core.requests.changes.moves.lost_after_s = settings.lost_after_s
        if restarted:
            manager = world.manager
            answers = manager.process.alive and not manager.process.paused
            self.core.take_over(manager.slices(self.process.number) if answers else wire.HeldSlices())
        self.islands: dict[int, tuple[int, End]] = {}
        self.links: dict[int, End] = {}
        self.clients: dict[int, End] = {}
        self.unsent: dict[int, list[Any]] = {}
        """Messages for sessions whose stream has not come."""
        self.calls: dict[int, Callable[[wire.Reply], None]] = {}
        self.calling: dict[int, events.CallManager | events.TellManager] = {}
        self.numbers = itertools.count(1)
        world.network.after(self.process, 0.0, self._tick)

    def _tick(self) -> None:
        self.handle(events.Tick(self.world.machine_slowness))
        settings, random = self.world.settings, self.world.random
        if settings.preempts and random.random() < settings.preempts:
            able = [one for one in self.launches.sessions.values() if not one.suspended and not one.vacates]
            if len(able) > 1 and not self.launches.preemption.giving:
                one, other = random.sample(able, 2)
                self._do(self.launches.preemption.ask(one, other, self.world.clock.now))
        self.world.network.after(self.process, TICK_S, self._tick)

    def handle(self, event: events.Event) -> None:
        self._do(self.core.handle(event, self.world.clock.now))
        self.world.checker.controller_bounded(self.launches)

    def _do(self, commands: Sequence[events.Command]) -> None:
        for command in commands:
            match command:
                case SendIsland(island, message):
                    if island in self.islands:
                        self.islands[island][1].send(message)
                case SendClient(session, message):
                    if session in self.clients:
                        self.clients[session].send(message)
                    elif session in self.unsent:
                        self.unsent[session].append(message)
                case events.OpenChannel(session):
                    self.unsent[session] = []
                case events.AnswerCall(call, reply):
                    self.calls.pop(call)(reply)
                case events.CloseChannel(session):
                    self.unsent.pop(session, None)
                    if session in self.clients:
                        self.clients.pop(session).close()
                case events.TakeTurn():
                    self.world.network.after(self.process, 0.0, self.handle, events.Turn())
                case events.PauseReading() | events.ResumeReading():
                    pass  # what comes meanwhile waits in the core
                case events.Plan():
                    self._plan(command)
                case events.CloseIsland(link):
                    self.links[link].close()
                case events.CallManager() | events.TellManager():
                    self._call_manager(command)
                case events.ReportToManager():
                    self._report_to_manager()
                case events.KillScheduler(island):
                    self.world.kill_scheduler(island)
                case events.KillManager():
                    self.world.kill(self.world.manager.process, "the controller was not answered")
                case events.ReportFault(text):
                    raise AssertionError(text)

    @property
    def may_resume(self) -> bool:
        """Whether sessions of the controller before may come back, which keeps what they hold."""
        takeover = self.core.takeover
        return takeover is not None and not takeover.over

    def watches(self, process: Process) -> bool:
        """Whether a process is one that the controller has to have killed when it says nothing."""
        joined = {end.peer.owner for _, end in self.islands.values() if end.open}
        return self.process.alive and (process is self.world.manager.process or process in joined)

    def _plan(self, command: events.Plan) -> None:
        """The planner takes its time, and may die of a program; then its successor takes the next one."""
        random = self.world.random
        reply = planning.answer(command.request)
        if self.world.settings.faults and random.random() < PLANNER_DIES:
            self.world.losses += 1
            reply = planning.PlanReply(failure=Failure("ProgramRefused", PLANNER_DIED))
        delay = random.choice(PLANNING_S)
        self.world.network.after(self.process, delay, self.handle, events.Planned(command.call, reply))

    # --- the resource manager -----------------------------------------------------------------------------------------

    def _call_manager(self, command: events.CallManager | events.TellManager) -> None:
        """Calls the resource manager, and says to the core what became of it. As Ray does: a call to a process that is
        gone, or dies with it, fails once that is known."""
        manager = self.world.manager
        if isinstance(command, events.CallManager) and command.method in ("platforms", "status"):
            known = ("cpu",) if command.method == "platforms" else '{"islands": [], "slices": []}'
            return self.handle(events.ManagerAnswered(command.call, known))
        number = next(self.numbers)
        self.calling[number] = command
        if not manager.process.alive:
            return self.world.network.after(self.process, MISSED_S, self._missed, number)
        answered = partial(self._manager_answered, number)
        method, arguments = "controller_holds", tuple[Any, ...]()
        if isinstance(command, events.TellManager):
            arguments = (self.incarnation, command.holdings)
        else:
            method, arguments = command.method, command.arguments
        if method == "create_slice":
            session, *wanted, final = arguments
            arguments = (session, SliceRequest(*wanted), final)
        if method in FENCED_CALLS:
            arguments = (self.process.number, *arguments)
        call: Callable[..., None] = getattr(manager, method)
        if isinstance(command, events.CallManager) and method not in NEWS:
            return call(self.process, *arguments, answered)
        call(self.process, *arguments)
        post = self.world.network.post
        post(self.process, manager.process, lambda: post(manager.process, self.process, answered, None), in_order=True)

    def _manager_answered(self, number: int, answer: Any) -> None:
        command = self.calling.pop(number, None)
        if isinstance(command, events.CallManager) and command.call:
            found = wire.encode(answer) if isinstance(answer, wire.Message) else answer
            self.handle(events.ManagerAnswered(command.call, found))

    def _missed(self, number: int) -> None:
        if (command := self.calling.pop(number, None)) is not None:
            self.handle(events.ManagerMissed(command))

    def manager_died(self) -> None:
        """Ray says of the calls that the resource manager had that it died."""
        for number in list(self.calling):
            self._missed(number)

    def _report_to_manager(self) -> None:
        """There and back, as a call of Ray's goes."""
        manager, post = self.world.manager, self.world.network.post
        if not manager.process.alive:
            self.handle(events.ManagerLost("its process ended"))
            return
        manager.controller_serves(self.process, self.incarnation, self.launches.device_shares())
        knows = partial(self.handle, events.ManagerKnows(str(manager.process.number)))
        post(self.process, manager.process, lambda: post(manager.process, self.process, knows))

    # --- islands ------------------------------------------------------------------------------------------------------

    def island_connects(self, near: End, address: str) -> None:
        island, link = int(address.split("/")[0]), next(self.numbers)
        end = End(
            self.world.network,
            self.process,
            lambda batch: self._from_island(link, island, batch),
            lambda: self.handle(events.IslandDisconnected(link, island, address, end.given_up)),
            with_drops_joined,
        )
        self.links[link] = end
        self.world.network.stream(near, end)

    def _from_island(self, link: int, island: int, batch: list[Any]) -> None:
        if isinstance(batch[0], wire.IslandUp):
            self.islands[island] = (link, self.links[link])
            self.handle(events.IslandConnected(link, batch[0]))
        if self.islands[island][0] == link:
            for message in batch:
                if isinstance(message, wire.HostUp):
                    self.world.checker.host_known(self.launches, message)
                elif isinstance(message, wire.HostDown):
                    self.world.checker.blamed(self.launches, message)
        self.handle(events.IslandMessages(link, island, batch))

    # --- clients ------------------------------------------------------------------------------------------------------

    def open(self, caller: Process, tenant: Tenant, answer: Callable[..., None]) -> None:
        """A client's first call; answers with the session's number and the hosts that are up."""

        def opened(reply: wire.Reply) -> None:
            assert isinstance(reply, wire.SessionOpened)
            self.world.network.post(self.process, caller, answer, reply, self)

        self._request(tenant, wire.OpenSession(wire.VERSION, ""), opened)
        self.world.sessions = self.core.clients.sessions_made

    def resume(self, caller: Process, tenant: Tenant, request: wire.ResumeSession, answer: Callable[..., None]) -> None:
        """The call of a client that has lost the controller before."""
        post = self.world.network.post
        self._request(tenant, request, lambda reply: post(self.process, caller, answer, reply, self))

    def create_slice(
        self,
        caller: Process,
        session: int,
        wanted: SliceRequest,
        answer: Callable[[wire.SliceCreated | wire.Refused], None],
    ) -> None:
        request = wire.CreateSlice(session, wanted.shape, wanted.axes, wanted.island, wanted.platform, wanted.name)
        self._request(session, request, lambda reply: self.world.network.post(self.process, caller, answer, reply))

    def ask(self, session: int, request: wire.CreateSlice | wire.Status) -> None:
        """A call whose reply nobody looks at."""
        self._request(session, request, lambda reply: None)

    def of_operator(self, caller: Process, request: IslandChange, answer: Callable[[wire.Reply], None]) -> None:
        """A call of the operator."""
        self._request(None, request, lambda reply: self.world.network.post(self.process, caller, answer, reply))

    def call(self, caller: Process, session: int, request: Any, answer: Callable[[wire.Reply], None]) -> None:
        """Any other call of a session."""
        self._request(session, request, lambda reply: self.world.network.post(self.process, caller, answer, reply))

    def close(self, session: int) -> None:
        self._request(session, wire.CloseSession(session), lambda reply: None)

    def _request(self, caller: int | Tenant | None, request: Any, answer: Callable[[wire.Reply], None]) -> None:
        origin = self._shown(caller) if isinstance(caller, Tenant) else caller
        call = next(self.numbers)
        self.calls[call] = answer
        self.handle(events.Requested(call, origin, request, 0, f"secret {call}"))

    def _shown(self, tenant: Tenant) -> TokenOwner:
        """A tenant with a token of its own, which the table has from then on."""
        owner, requests = TokenOwner(tenant, token_digest(repr(tenant))), self.core.requests
        if owner not in requests.book.entries:
            requests.book = TenantBook((*requests.book.entries, owner))
        return owner

    def client_connects(self, session: int, near: End) -> bool:
        if session not in self.core.clients.known:
            return False
        end = End(
            self.world.network,
            self.process,
            lambda batch: self._from_client(session, batch),
            lambda: self.handle(events.StreamEnded(session)),
        )
        self.clients[session] = end
        self.world.network.stream(near, end)
        for message in self.unsent.pop(session, ()):
            end.send(message)
        self.handle(events.StreamOpened(session))
        return True

    def _from_client(self, session: int, batch: list[Any]) -> None:
        self.handle(events.ClientMessages(session, Carrier.STREAM, 0, batch))
