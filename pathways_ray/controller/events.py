"""Events and commands of the controller's core: all that it hears, and all that it has done by others.

Events are facts in the past tense, commands are verbs; both are plain values. `launch`, `session` and `island` are the
numbers that messages use; a `call` numbers a question, so that its answer finds the one who waits for it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from pathways_ray.controller.channel import Carrier
from pathways_ray.controller.planning import PlanReply, PlanRequest
from pathways_ray.controller.state import SendClient, SendIsland
from pathways_ray.controller.tenants import TenantBook, TokenOwner
from pathways_ray.transport.messages import FromIsland, Holdings, IslandUp, ReadLog, Reply, Request, ToController

Caller: TypeAlias = int | TokenOwner | None
"""The authenticated origin of a request: a session by its number, a tenant with the token that it has shown, or, None,
the operator."""


class Event(msgspec.Struct, frozen=True):
    """Base of all events."""


# --- islands ----------------------------------------------------------------------------------------------------------


class IslandConnected(Event, frozen=True):
    """A scheduler has opened its stream; `link` numbers it."""

    link: int
    hello: IslandUp


class IslandMessages(Event, frozen=True):
    """A batch has come on a scheduler's stream."""

    link: int
    island: int
    messages: list[FromIsland]


class IslandFull(Event, frozen=True):
    """The link to an island takes no more for the moment."""

    island: int


class IslandRoom(Event, frozen=True):
    """The link to an island takes messages again, or is gone."""

    island: int


class IslandDisconnected(Event, frozen=True):
    """A scheduler's stream has ended; `address` is where it served its hosts. `silent`: it was given up, and nobody
    knows whether its process is there."""

    link: int
    island: int
    address: str
    silent: bool = False


# --- clients ----------------------------------------------------------------------------------------------------------


class StreamOpened(Event, frozen=True):
    session: int


class StreamEnded(Event, frozen=True):
    session: int


class LinkOpened(Event, frozen=True):
    session: int


class LinkEnded(Event, frozen=True):
    session: int


class ClientMessages(Event, frozen=True):
    """A batch of `size` bytes has come from a client."""

    session: int
    carrier: Carrier
    size: int
    messages: list[ToController]


class ClientGarbled(Event, frozen=True):
    """A batch has come from a client that is not of the protocol; `reason` says why."""

    session: int
    reason: str


class Turn(Event, frozen=True):
    """The turn that a `TakeTurn` asked for: what came meanwhile has been handled."""


class Planned(Event, frozen=True):
    """A `Plan` has been carried out, or its process ended; the reply says which."""

    call: int
    reply: PlanReply


class Requested(Event, frozen=True):
    """A request of `size` bytes waits for the reply to `call`. `secret` is a fresh one, for a session that it opens."""

    call: int
    caller: Caller
    request: Request
    size: int
    secret: str


# --- the resource manager, tenants, time ------------------------------------------------------------------------------


class ManagerAnswered(Event, frozen=True):
    """The resource manager has answered a `CallManager`; an exception is how it failed."""

    call: int
    answer: Any


class ManagerKnows(Event, frozen=True):
    """The resource manager has answered a `ReportToManager`; `incarnation` is its own."""

    incarnation: str


class ManagerLost(Event, frozen=True):
    """A `ReportToManager` could not be carried out: the resource manager is gone, or out of reach for now."""

    reason: str


class ManagerMissed(Event, frozen=True):
    """A call did not get through to the resource manager, or it died with the answer."""

    command: CallManager | TellManager


class TenantsRead(Event, frozen=True):
    """The table of tenants is another one than before, or cannot be read (`problem`)."""

    book: TenantBook
    path: str
    problem: str


class IslandsHeld(Event, frozen=True):
    """The answer to `WantIslands`: the islands that tenants have for themselves now, and why others could not start."""

    islands: dict[str, tuple[int, ...]]
    failures: dict[str, str]


class Tick(Event, frozen=True):
    """Time has passed; comes every `core.TICK_S`. `slowness` is that of this machine."""

    slowness: float = 1.0


# --- commands ---------------------------------------------------------------------------------------------------------


class OpenChannel(msgspec.Struct, frozen=True):
    """Keep messages for a new session until its stream comes."""

    session: int


class SwitchToLink(msgspec.Struct, frozen=True):
    """Send `Upgraded` as the last message on the stream; the rest goes by the link, which is read from now on."""

    session: int


class CloseChannel(msgspec.Struct, frozen=True):
    """Hang up after the messages that were sent before: at once, or when the client has had time to do so itself."""

    session: int
    at_once: bool


class TakeTurn(msgspec.Struct, frozen=True):
    """Bring a `Turn` once what is ready by now has been handled."""


class PauseReading(msgspec.Struct, frozen=True):
    """Read nothing more from a client: messages of it wait here."""

    session: int


class ResumeReading(msgspec.Struct, frozen=True):
    """Read from a client again."""

    session: int


class Plan(msgspec.Struct, frozen=True):
    """Check functions, then lower and plan a program, away from the loop; bring a `Planned`. One at a time."""

    call: int
    request: PlanRequest
    functions: dict[str, bytes]


class AnswerCall(msgspec.Struct, frozen=True):
    """The reply to a request."""

    call: int
    reply: Reply


class CloseIsland(msgspec.Struct, frozen=True):
    """Hang up a scheduler's stream."""

    link: int


class KillScheduler(msgspec.Struct, frozen=True):
    """End a scheduler's process; Ray starts it again, and its hosts follow."""

    island: int


class CallManager(msgspec.Struct, frozen=True):
    """Call a method of the resource manager; its result comes back as `ManagerAnswered`, unless `call` is 0.

    `since` is when it was made first, where it did not get through then.
    """

    method: str
    arguments: tuple[Any, ...] = ()
    call: int = 0
    since: float | None = None


class TellManager(msgspec.Struct, frozen=True):
    """Tell the resource manager what this controller knows of the cluster."""

    holdings: Holdings


class WantIslands(msgspec.Struct, frozen=True):
    """Have islands run for these tenants, each for itself, and for no other tenant; answered with `IslandsHeld`."""

    tenants: tuple[str, ...]


class ReportToManager(msgspec.Struct, frozen=True):
    """Tell the resource manager that this controller serves, and where."""


class KillManager(msgspec.Struct, frozen=True):
    """End the resource manager's process; Ray starts it again."""


class AskForLog(msgspec.Struct, frozen=True):
    """Have a process read its log, and answer a call with it."""

    call: int
    request: ReadLog


class ReportFault(msgspec.Struct, frozen=True):
    """Write down an error of the controller's own, as a traceback."""

    text: str


Command: TypeAlias = (
    SendIsland
    | SendClient
    | OpenChannel
    | SwitchToLink
    | CloseChannel
    | TakeTurn
    | PauseReading
    | ResumeReading
    | Plan
    | AnswerCall
    | CloseIsland
    | KillScheduler
    | CallManager
    | TellManager
    | WantIslands
    | ReportToManager
    | KillManager
    | AskForLog
    | ReportFault
)
