"""The controller's core: every decision of the controller, as `handle(event, now) -> commands`.

It has no clock, socket or randomness. Its drivers are the Ray actor (`controller.actor`, with
`controller.client_service`) and the simulator's controller; both deliver `events` and carry out the commands in order.

`launches` has the life of launches, `clients` sessions and their channels, `requests` the calls with a reply. This file
has the islands. `watch` says whether those it depends on are alive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pathways_ray.controller import events, status
from pathways_ray.controller.clients import Clients
from pathways_ray.controller.intake import Intake
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.manager_calls import QUESTION_LIMIT_S, ManagerCalls
from pathways_ray.controller.requests import Requests
from pathways_ray.controller.state import SendIsland
from pathways_ray.controller.tenants import difference
from pathways_ray.controller.watch import Watch
from pathways_ray.liveness import SILENCE_LIMIT_S
from pathways_ray.story import Entry
from pathways_ray.transport import messages as wire


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
        self.intake = Intake(clients)
        self.report = status.Report()
        self.requests = Requests(launches, clients, self.report, token, data_secret)
        self.story = launches.story
        self.islands: dict[int, int] = {}
        self.requests.looks.connected = lambda: set(self.islands)
        self.requests.changes.forget_island = self._island_removed
        self.watch = Watch(self.story, expected, silence_limit_s)
        self.manager_calls = ManagerCalls(launches.tables)
        self.unseen = dict(islands or {})
        self._handlers: dict[type[events.Event], Callable[[Any, float], list[events.Command]]] = {
            events.ClientMessages: self.intake.messages,
            events.Turn: self.intake.turn,
            events.Planned: clients.registrar.plans.ended,
            events.IslandFull: clients.registrar.island_full,
            events.IslandRoom: clients.registrar.island_full,
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
            events.ManagerLost: self.watch.manager_lost,
            events.ManagerMissed: self._manager_missed,
            events.IslandsHeld: self._islands_held,
            events.TenantsRead: self._tenants_read,
            events.Tick: self._tick,
        }

    def expect(self, islands: Mapping[int, Sequence[int]]) -> None:
        """The islands are these, and not those that the runtime began with; called before the first event."""
        self.unseen = dict(islands)
        self.watch.expected = tuple(islands)

    def handle(self, event: events.Event, now: float) -> list[events.Command]:
        """The commands that follow from an event at time `now`, in seconds of a monotonic clock."""
        self.launches.tables.now = now
        if self.unseen:
            self.launches.membership.expect(self.unseen)
            self.unseen = {}
        commands = self._handlers[type(event)](event, now)
        if self.requests.explanations.waiting:
            commands += self.requests.explanations.programs_changed(now)
        if self.clients.turns.order or self.launches.admission.relieved:
            commands += self.intake.after()
        return commands

    # --- islands ------------------------------------------------------------------------------------------------------

    def _island_connected(self, event: events.IslandConnected, now: float) -> list[events.Command]:
        island = event.hello.island
        # A new scheduler may be heard of before the end of the old one's stream; it knows nothing of that one's time.
        commands: list[events.Command] = []
        if island in self.islands:
            ended = self._island_ended(island, "its island's scheduler ended")
            commands += [c for c in ended if not (isinstance(c, SendIsland) and c.island == island)]
        self.islands[island] = event.link
        self.manager_calls.schedulers[island] = event.hello.address
        commands.append(events.CallManager("publish", (f"scheduler-{island}", event.hello.address)))
        self.watch.joined(island, now)
        self.story.note(Entry(now, "scheduler joined", f"island {island} at {event.hello.address}"))
        return commands + self.launches.island_up(island)

    def _island_disconnected(self, event: events.IslandDisconnected, now: float) -> list[events.Command]:
        commands: list[events.Command] = []
        if self.islands.get(event.island) == event.link:
            commands += self._island_ended(event.island, "its island's scheduler ended")
            if event.silent:  # stopped, it would not start again, and its hosts could not join another one
                commands.append(events.KillScheduler(event.island))
        return [*commands, events.CallManager("withdraw", (f"scheduler-{event.island}", event.address))]

    def _island_ended(self, island: int, reason: str, *, with_hosts: bool = False) -> list[events.Command]:
        """Forgets an island's scheduler; its word for its hosts is worth nothing any more.

        Args:
            with_hosts: whether these are at their end as well.
        """
        del self.islands[island], self.manager_calls.schedulers[island]
        self.launches.tables.schedulers.discard(island)
        self.watch.left(island, self.launches.tables.now)
        self.story.note(Entry(self.launches.tables.now, "scheduler lost", f"island {island}", reason))
        if not with_hosts:
            return self._without_scheduler(island, reason)
        hosts = [host for host in self.launches.hosts.values() if host.island == island]
        return [c for h in hosts for c in self.launches.host_down(wire.HostDown(h.host, h.epoch, reason))]

    def _island_messages(self, event: events.IslandMessages, now: float) -> list[events.Command]:
        island = event.island
        if self.islands.get(island) != event.link:
            return [
                events.CloseIsland(event.link)
            ]  # another scheduler took its place; it starts again when its stream ends
        said = event.messages[-1] if event.messages else None
        self.watch.schedulers.hear(island, now, said.slowness if type(said) is wire.Load else None)
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
                case wire.Decided():
                    commands += launches.decided(message)
                case wire.Load():
                    self.report.load(message)
                case wire.Inspected():
                    commands += self.requests.looks.inspected(message)
                case wire.Examined():
                    commands += self.requests.looks.examinations.examined(message)
                case wire.Begun():
                    commands += launches.cancellation.begun(message.sequence)
                case wire.Ready():
                    commands += launches.ready(message)
                case wire.HostUp():
                    commands += self._host_up(island, message)
                case wire.HostDown():
                    commands += launches.host_down(message)
                    commands.append(events.CallManager("leave", (message.host, message.epoch)))
                case wire.IslandUp():
                    pass
        return commands

    def _host_up(self, island: int, message: wire.HostUp) -> list[events.Command]:
        launches, holds = self.launches, message.holds
        found = launches.host_up(island, message) if holds is None else launches.host_back(island, message, holds)
        if found is None:
            return [events.CallManager("kill_host", (message.host, message.epoch))]
        if message.info is None:
            return [*found]
        known = wire.encode(wire.KnownHost(message.info, message.epoch))
        return [*found, events.CallManager("serves", (known,))]

    def _without_scheduler(self, island: int, reason: str) -> list[events.Command]:
        """An island's hosts have no scheduler. One host by itself goes on with what it holds; of several each may have
        heard of other launches, and those enter collectives together: they start again."""
        hosts = [host for host in self.launches.hosts.values() if host.island == island]
        if len(hosts) == 1 and hosts[0].down_since is None:
            return [*self.launches.scheduler_lost(hosts[0], reason)]
        return [c for h in hosts for c in self.launches.host_down(wire.HostDown(h.host, h.epoch, reason))]

    def _give_up_hosts(self) -> list[events.Command]:
        """Hosts that have been without a scheduler for too long are lost, with what they hold."""
        commands: list[events.Command] = []
        for host in self.launches.membership.overdue():
            commands += self.launches.membership.lose(host, "it did not join the successor of its scheduler")
            commands.append(events.CallManager("kill_host", (host.host, host.epoch)))
            commands.append(events.CallManager("leave", (host.host, host.epoch)))
        return commands

    def _islands_held(self, event: events.IslandsHeld, now: float) -> list[events.Command]:
        """Forgets islands that tenants do not have any more. Sessions that have slices there end, and those of tenants
        whose islands could not start."""
        isolation = self.requests.isolation
        ended = set(isolation.answered(event))
        commands = [command for island in sorted(ended) for command in self._forget(island)]
        for client in list(self.clients.known.values()):
            slices = self.launches.sessions[client.session].slices.values()
            processes = f"the processes of tenant {client.tenant.name!r}"
            if reason := event.failures.get(isolation.islands_of(client), ""):
                commands += self.clients.end(client, f"{processes} could not start: {reason}")
            elif any(placed.island in ended for placed in slices):
                commands += self.clients.end(client, f"{processes} have ended")
        return commands

    def _island_removed(self, island: int) -> list[events.Command]:
        """The operator has ended an island. While sessions have slices there, its hosts are away."""
        if self.requests.changes.moves.ended(island):
            return self._forget(island)
        commands = (
            self._island_ended(island, "its island was removed", with_hosts=True) if island in self.islands else []
        )
        self.watch.absent.forget(island)
        for host in self.launches.hosts.values():
            if host.island == island:
                host.down_since = -math.inf  # nobody waits for it
        return commands + self.launches.tick(self.launches.tables.now)

    def _vacate(self, now: float) -> list[events.Command]:
        told, empty = self.requests.changes.moves.tick(now)
        return [*told, *(command for island in empty for command in self._forget(island))]

    def _forget(self, island: int) -> list[events.Command]:
        """An island is no more: nobody waits for its scheduler or its hosts."""
        tables = self.launches.tables
        commands = self._island_ended(island, "its island was ended", with_hosts=True) if island in self.islands else []
        self.watch.absent.forget(island)
        self.report.queued.pop(island, None)
        for host in [host.host for host in tables.hosts.values() if host.island == island]:
            del tables.hosts[host]
            tables.away.discard(host)
        return commands

    # --- the resource manager -----------------------------------------------------------------------------------------

    def _manager_knows(self, event: events.ManagerKnows, now: float) -> list[events.Command]:
        self.watch.manager_knows(now)
        return self.manager_calls.knows(event)

    def _manager_missed(self, event: events.ManagerMissed, now: float) -> list[events.Command]:
        self.manager_calls.missed(event, now)
        return []

    def _give_up_questions(self, now: float) -> list[events.Command]:
        gone = ConnectionError(f"it could not be reached for {QUESTION_LIMIT_S:.0f} s")
        over = self.manager_calls.overdue(now)
        return [c for call in over if call.call for c in self.requests.manager_answered(call.call, gone)]

    # --- tenants and time ---------------------------------------------------------------------------------------------

    def _tenants_read(self, event: events.TenantsRead, now: float) -> list[events.Command]:
        if changes := difference(self.requests.book, event.book) or event.problem:
            self.story.note(Entry(now, "tenants read", changes))
        self.requests.book = event.book
        if event.path:
            self.requests.about["tenants_file"] = {"path": event.path, "problem": event.problem}
        return self.clients.tenants_read(event.book)

    def _tick(self, event: events.Tick, now: float) -> list[events.Command]:
        self.report.note(now, self.launches.ledger.usages.values())
        self.report.note_usage(now, self.launches.ledger.device_seconds(), self.story)
        commands: list[events.Command] = []
        for island, reason in self.watch.silent_schedulers(now, event.slowness):
            commands += [*self._island_ended(island, reason), events.KillScheduler(island)]
        commands += self.watch.absent_schedulers(now, event.slowness)
        commands += self._give_up_hosts()
        commands += self.launches.tick(now)
        commands += self.clients.expire(now)
        commands += self._give_up_questions(now)
        commands += self.requests.ask_again(now)
        commands += self.requests.looks.tick(now)
        commands += self._vacate(now)
        commands += self.requests.isolation.tick(self.clients.known.values(), now)
        return commands + self.watch.tick(now, event.slowness)
