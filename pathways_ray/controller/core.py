"""The controller's core: every decision of the controller, as `handle(event, now) -> commands`.

It has no clock, socket or randomness. Its drivers are the Ray actor (`controller.actor`, with
`controller.client_service`) and the simulator's controller; both deliver `events` and carry out the commands in order.

`launches` has the life of launches, `clients` sessions and their channels, `requests` the calls with a reply. This file
has the islands, and whether those it depends on are alive: a scheduler that is silent is treated as lost and killed,
and so is a resource manager that twice does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pathways_ray.controller import events, status
from pathways_ray.controller.clients import Clients
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.requests import Requests
from pathways_ray.controller.state import SendIsland
from pathways_ray.liveness import SILENCE_LIMIT_S, Liveness
from pathways_ray.story import Entry
from pathways_ray.transport import messages as wire

TICK_S = 1.0
"""A `Tick` comes once in this time."""

SCHEDULER_ABSENCE_LIMIT_S = 60.0
"""A scheduler that does not join for this long is killed: one that was stopped when the controller before this one died
is on no stream that could break. That is long, since Ray may take its time to start one on a busy machine."""

_MANAGER = "resource manager"


class ControllerCore:
    """The controller without its process.

    Args:
        launches: the tables of launches, with the policy and the windows.
        clients: the clients of `launches`.
        token: the operator's.
        data_secret: signs what clients show to hosts.
        expected: islands whose schedulers run when the controller starts, and have to join.
        silence_limit_s: a scheduler that is silent for this long is treated as lost: it reports every second how much
            waits there. So is a resource manager that twice does not answer for half as long, or cannot be called for
            this long: some errors of Ray's calls pass.
        islands: the hosts of each island. They are away until they join.
    """

    def __init__(
        self,
        launches: Launches,
        clients: Clients,
        token: str = "",
        data_secret: str = "",
        expected: Iterable[int] = (),
        silence_limit_s: float = SILENCE_LIMIT_S,
        islands: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.launches = launches
        self.clients = clients
        self.report = status.Report()
        self.requests = Requests(launches, clients, self.report, token, data_secret)
        self.story = launches.story
        self.islands: dict[int, int] = {}
        self.schedulers: Liveness[int] = Liveness(silence_limit_s, TICK_S)
        self.expected = tuple(expected)
        self.unseen = dict(islands or {})
        self.absent: Liveness[int] = Liveness(max(silence_limit_s, SCHEDULER_ABSENCE_LIMIT_S), TICK_S)
        self.manager: Liveness[str] = Liveness(silence_limit_s / 2, TICK_S)
        self.manager_incarnation = ""
        self.manager_missed = 0
        self.manager_gone_since: float | None = None
        self._handlers: dict[type[events.Event], Callable[[Any, float], list[events.Command]]] = {
            events.ClientMessages: clients.messages,
            events.Turn: clients.turn,
            events.Planned: clients.plans.ended,
            events.IslandFull: clients.island_full,
            events.IslandRoom: clients.island_full,
            events.IslandMessages: self._island_messages,
            events.IslandConnected: self._island_connected,
            events.IslandDisconnected: self._island_disconnected,
            events.StreamOpened: clients.connection_changed,
            events.StreamEnded: clients.connection_changed,
            events.LinkOpened: clients.connection_changed,
            events.LinkEnded: clients.connection_changed,
            events.ClientGarbled: clients.garbled,
            events.Requested: self.requests.received,
            events.ManagerAnswered: lambda event, now: self.requests.manager_answered(event.call, event.answer),
            events.ManagerKnows: self._manager_knows,
            events.ManagerLost: self._manager_lost,
            events.IslandsHeld: self._islands_held,
            events.TenantsRead: self._tenants_read,
            events.Tick: self._tick,
        }

    def handle(self, event: events.Event, now: float) -> list[events.Command]:
        """The commands that follow from an event at time `now`, in seconds of a monotonic clock."""
        self.launches.tables.now = now
        if self.unseen:
            self.launches.membership.expect(self.unseen)
            self.unseen = {}
        commands = self._handlers[type(event)](event, now)
        if self.requests.explaining:
            commands += self.requests.programs_changed(now)
        if self.clients.turns.order or self.launches.admission.relieved:
            commands += self.clients.after()
        return commands

    def last_events(self, now: float, count: int = 50) -> list[str]:
        """The last lifecycle events as lines of text, oldest first."""
        return [entry.text(now) for entry in list(self.story.lifecycle)[-count:]]

    # --- islands ------------------------------------------------------------------------------------------------------

    def _island_connected(self, event: events.IslandConnected, now: float) -> list[events.Command]:
        island = event.hello.island
        # A new scheduler may be heard of before the end of the old one's stream; it knows nothing of that one's time.
        commands: list[events.Command] = []
        if island in self.islands:
            ended = self._island_ended(island, "its island's scheduler ended")
            commands += [c for c in ended if not (isinstance(c, SendIsland) and c.island == island)]
        self.islands[island] = event.link
        self.schedulers.hear(island, now)
        self.absent.forget(island)
        self.story.note(Entry(now, "scheduler joined", f"island {island} at {event.hello.address}"))
        return commands + self.launches.island_up(island)

    def _island_disconnected(self, event: events.IslandDisconnected, now: float) -> list[events.Command]:
        commands: list[events.Command] = []
        if self.islands.get(event.island) == event.link:
            commands += self._island_ended(event.island, "its island's scheduler ended")
        return [*commands, events.CallManager("withdraw", (f"scheduler-{event.island}", event.address))]

    def _island_ended(self, island: int, reason: str) -> list[events.Command]:
        """Forgets an island's scheduler; its word for its hosts is worth nothing any more."""
        del self.islands[island]
        self.schedulers.forget(island)
        self.absent.hear(island, self.launches.tables.now)
        self.story.note(Entry(self.launches.tables.now, "scheduler lost", f"island {island}", reason))
        commands: list[events.Command] = []
        for host in [h for h in self.launches.hosts.values() if h.island == island]:
            commands += self.launches.host_down(wire.HostDown(host.host, host.epoch, reason))
        return commands

    def _island_messages(self, event: events.IslandMessages, now: float) -> list[events.Command]:
        island = event.island
        if self.islands.get(island) != event.link:
            return [
                events.CloseIsland(event.link)
            ]  # another scheduler took its place; it starts again when its stream ends
        said = event.messages[-1] if event.messages else None
        self.schedulers.hear(island, now, said.slowness if type(said) is wire.Load else None)
        commands: list[events.Command] = []
        launches = self.launches
        for message in event.messages:
            match message:
                case wire.Done():
                    commands += launches.done(island, message)
                case wire.IslandLaunchFailed():
                    commands += launches.run_failed(island, message)
                case wire.Enqueued():
                    commands += launches.enqueued(island, message)
                case wire.Stored():
                    commands += launches.stored(message)
                case wire.Load():
                    self.report.load(message)
                case wire.Begun():
                    commands += launches.cancellation.begun(message.sequence)
                case wire.Ready():
                    commands += launches.ready(message)
                case wire.HostUp():
                    commands += launches.host_up(island, message)
                    commands.append(events.CallManager("serves", (message.host,)))
                case wire.HostDown():
                    commands += launches.host_down(message)
                    commands.append(events.CallManager("leave", (message.host, message.epoch)))
                case wire.IslandUp():
                    pass
        return commands

    def _islands_held(self, event: events.IslandsHeld, now: float) -> list[events.Command]:
        """Forgets islands that tenants do not have any more. Sessions that have slices there end, and those of tenants
        whose islands could not start."""
        isolation, tables = self.requests.isolation, self.launches.tables
        ended = set(isolation.answered(event))
        commands: list[events.Command] = []
        for island in ended:
            if island in self.islands:
                commands += self._island_ended(island, "its island was ended")
            self.absent.forget(island)
            self.report.queued.pop(island, None)
            for host in [host.host for host in tables.hosts.values() if host.island == island]:
                del tables.hosts[host]
                tables.away.discard(host)
        for client in list(self.clients.known.values()):
            slices = self.launches.sessions[client.session].slices.values()
            processes = f"the processes of tenant {client.tenant.name!r}"
            if reason := event.failures.get(isolation.islands_of(client), ""):
                commands += self.clients.end(client, f"{processes} could not start: {reason}")
            elif any(placed.island in ended for placed in slices):
                commands += self.clients.end(client, f"{processes} have ended")
        return commands

    def _watch_schedulers(self, now: float, slowness: float) -> list[events.Command]:
        """Has schedulers killed that say nothing, or do not join. Ray starts them again; their hosts end with their
        streams and follow."""
        for island in self.expected:
            self.absent.hear(island, now)
        self.expected = ()
        commands: list[events.Command] = []
        for island in self.schedulers.silent(now, slowness):
            reason = f"its island's scheduler did not answer for {self.schedulers.limit_s:.0f} s"
            commands += [*self._island_ended(island, reason), events.KillScheduler(island)]
        for island in self.absent.silent(now, slowness):
            self.absent.hear(island, now)
            reason = f"it did not join for {self.absent.limit_s:.0f} s"
            self.story.note(Entry(now, "scheduler absent", f"island {island}", reason))
            commands.append(events.KillScheduler(island))
        return commands

    # --- the resource manager -----------------------------------------------------------------------------------------

    def _manager_knows(self, event: events.ManagerKnows, now: float) -> list[events.Command]:
        self.manager.forget(_MANAGER)
        self.manager_missed = 0
        self.manager_gone_since = None
        known, self.manager_incarnation = self.manager_incarnation, event.incarnation
        if known and known != event.incarnation:
            return self._exit(now, "a new resource manager, which knows of no slice: starting again")
        return []

    def _manager_lost(self, event: events.ManagerLost, now: float) -> list[events.Command]:
        """Its successor, or an answer to the next report, may be there within seconds."""
        if self.manager_gone_since is None:
            self.manager_gone_since = now
        self.manager.forget(_MANAGER)
        if now - self.manager_gone_since <= 2 * self.manager.limit_s:
            return []
        return self._exit(now, f"the resource manager is gone: {event.reason}")

    def _exit(self, now: float, reason: str) -> list[events.Command]:
        self.story.note(Entry(now, "exit", cause=reason))
        return [events.Exit(reason)]

    def _watch_manager(self, now: float, slowness: float) -> list[events.Command]:
        """Reports once a second; asks again where no answer came in time, and has the resource manager killed where
        none came to that either. Twice: after a pause of this process the time may be over before an answer that is
        there is seen."""
        if _MANAGER not in self.manager:
            self.manager.silent(now, slowness)
            self.manager.hear(_MANAGER, now)
            return [events.ReportToManager()]
        if not self.manager.silent(now, slowness):
            return []
        self.manager_missed += 1
        if self.manager_missed < 2:
            self.manager.hear(_MANAGER, now)
            return [events.ReportToManager()]
        reason = f"the resource manager did not answer for {2 * self.manager.limit_s:.0f} s"
        return [events.KillManager(), *self._exit(now, reason)]

    # --- tenants and time ---------------------------------------------------------------------------------------------

    def _tenants_read(self, event: events.TenantsRead, now: float) -> list[events.Command]:
        self.requests.book = event.book
        if event.path:
            self.requests.about["tenants_file"] = {"path": event.path, "problem": event.problem}
        return self.clients.tenants_read(event.book)

    def _tick(self, event: events.Tick, now: float) -> list[events.Command]:
        self.report.note(now, self.launches.ledger.usages.values())
        commands = self._watch_schedulers(now, event.slowness)
        commands += self.launches.tick(now)
        commands += self.clients.expire(now)
        commands += self.requests.ask_again(now)
        commands += self.requests.isolation.tick(self.clients.known.values(), now)
        return commands + self._watch_manager(now, event.slowness)
