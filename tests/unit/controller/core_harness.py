"""A harness around `ControllerCore`: events in at a time of its own, commands out, and a manager that knows all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from pathways_ray.controller.channel import ChannelState
from pathways_ray.controller.clients import Clients
from pathways_ray.controller.core import ControllerCore
from pathways_ray.controller.events import (
    AnswerCall,
    Caller,
    CallManager,
    Command,
    Event,
    IslandConnected,
    IslandMessages,
    ManagerAnswered,
    ManagerKnows,
    PauseReading,
    ReportToManager,
    Requested,
    ResumeReading,
    TakeTurn,
    TellManager,
    Tick,
    Turn,
)
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.state import SendClient, SendIsland
from pathways_ray.controller.tenants import Tenant, TenantBook, TokenOwner, token_digest
from pathways_ray.simulation.tables import check_launches
from pathways_ray.transport.messages import (
    VERSION,
    FromIsland,
    HostUp,
    IslandUp,
    OpenSession,
    Reply,
    Request,
    SliceCreated,
    encode,
)
from tests.unit.controller.harness import ISLAND_OF_HOST, SLICES

TOKEN = "the token of the operator"
C = TypeVar("C", bound=Command)


class CoreHarness:
    """A core whose reports the resource manager answers at once, with islands and hosts where `hosts` asks for them.

    Turns come at once too, while `turning`.
    """

    def __init__(self, hosts: bool = False, parallel: bool = True, expected: tuple[int, ...] = ()) -> None:
        launches = Launches(parallel, 100)
        self.core = ControllerCore(launches, Clients(launches, fusion=True), TOKEN, "data secret", expected)
        self.now = 0.0
        self.calls = 0
        self.answering = True
        self.turning = True
        for host, island in ISLAND_OF_HOST.items() if hosts else ():
            self.connect(island)
            self.from_island(island, HostUp(host, 1, f"transfer-{host}", f"data-{host}", 2, 100 + host))

    def handle(self, event: Event) -> list[Command]:
        """The commands that follow from an event; every one checks the invariants."""
        commands = self.core.handle(event, self.now)
        check_launches(self.core.launches)
        if self.answering and ReportToManager() in commands:
            told = self.core.handle(ManagerKnows("manager 1"), self.now)
            assert all(isinstance(command, TellManager) for command in told)
            commands.remove(ReportToManager())
        if self.turning and TakeTurn() in commands:
            commands.remove(TakeTurn())
            commands += self.handle(Turn())
        return [c for c in commands if not (self.turning and isinstance(c, PauseReading | ResumeReading))]

    def tick(self, now: float) -> list[Command]:
        """Ticks once a second up to a time, as the real clock does; the commands of the last one."""
        commands: list[Command] = []
        while self.now < now:
            self.now = min(self.now + 1.0, now)
            commands = self.handle(Tick())
        return commands

    # --- islands ------------------------------------------------------------------------------------------------------

    def connect(self, island: int, link: int | None = None) -> list[Command]:
        if island in self.core.islands.links and link is None:
            return []
        return self.handle(IslandConnected(island if link is None else link, IslandUp(island, f"scheduler-{island}")))

    def from_island(self, island: int, *messages: FromIsland, link: int | None = None) -> list[Command]:
        return self.handle(IslandMessages(island if link is None else link, island, list(messages)))

    # --- clients ------------------------------------------------------------------------------------------------------

    def shown(self, tenant: Tenant) -> TokenOwner:
        """A tenant with its token; the table has both from then on."""
        requests = self.core.requests
        for known, token in requests.book.entries:
            if known == tenant:
                return TokenOwner(known, token)
        owner = TokenOwner(tenant, token_digest(f"the token of {tenant.name}"))
        requests.book = TenantBook((*requests.book.entries, owner))
        return owner

    def request(self, caller: Caller | Tenant, request: Request, size: int = 10) -> list[Command]:
        self.calls += 1
        if isinstance(caller, Tenant):
            caller = self.shown(caller)
        return self.handle(Requested(self.calls, caller, request, size, f"secret {self.calls}"))

    def answered(self, commands: Sequence[Command], answer: object = None) -> list[Command]:
        """The resource manager answers the call that is among some commands."""
        (call,) = [c for c in commands if isinstance(c, CallManager) and c.call]
        return self.handle(ManagerAnswered(call.call, answer))

    def open_session(self, caller: Caller | Tenant = None, name: str = "") -> list[Command]:
        """Opens the next session; it holds the slices of the harness."""
        commands = self.request(caller, OpenSession(VERSION, name))
        commands += self.answered(commands, ("cpu",))
        return commands

    def hold_slices(self, session: int) -> None:
        for placed in SLICES:
            self.core.launches.add_slice(session, placed)

    def state(self, session: int = 1) -> ChannelState:
        return self.core.clients.known[session].channel.state


def created(index: int) -> bytes:
    """The resource manager's answer to a request for a slice."""
    return encode(SliceCreated(SLICES[index]))


def of(kind: type[C], commands: list[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def reply(commands: list[Command]) -> Reply:
    (answer,) = of(AnswerCall, commands)
    return answer.reply


def sent(commands: list[Command]) -> list[object]:
    """The messages among some commands."""
    return [command.message for command in commands if isinstance(command, SendIsland | SendClient)]
