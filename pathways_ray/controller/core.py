"""The controller's core: every decision of the controller, as `handle(event, now) -> commands`.

It has no clock, socket or randomness. Its drivers are the Ray actor (`controller.actor`, with
`controller.client_service`) and the simulator's controller; both deliver `events` and carry out the commands in order.

`launches` has the life of launches, `clients` sessions and their channels, `requests` the calls with a reply, `islands`
the islands that come and go. `watch` says whether those it depends on are alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, assert_never, cast

from pathways_ray.controller import events, status
from pathways_ray.controller.clients import Clients
from pathways_ray.controller.intake import Intake
from pathways_ray.controller.islands import Islands
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.manager_calls import QUESTION_LIMIT_S, ManagerCalls
from pathways_ray.controller.requests import Requests
from pathways_ray.controller.takeover import Takeover
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
        self.watch = Watch(self.story, expected, silence_limit_s)
        self.manager_calls = ManagerCalls(launches.tables, self.requests.changing, self.requests.slicing)
        self.islands = Islands(launches, clients, self.requests, self.report, self.watch, self.manager_calls)
        self.unseen = dict(islands or {})
        self.takeover: Takeover | None = None
        self._handlers: dict[type[events.Event], Callable[[Any, float], list[events.Command]]] = {
            events.ClientMessages: self.intake.messages,
            events.Turn: self.intake.turn,
            events.Planned: clients.registrar.plans.ended,
            events.IslandFull: clients.registrar.island_full,
            events.IslandRoom: clients.registrar.island_full,
            events.IslandMessages: self._island_messages,
            events.IslandConnected: self.islands.connected,
            events.IslandDisconnected: self.islands.disconnected,
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
            events.IslandsHeld: self.islands.held,
            events.TenantsRead: self._tenants_read,
            events.Tick: self._tick,
        }

    def expect(self, islands: Mapping[int, Sequence[int]]) -> None:
        """The islands are these, and not those that the runtime began with; called before the first event."""
        self.unseen = dict(islands)
        self.watch.expected = tuple(islands)

    def take_over(self, found: wire.HeldSlices, islands: Mapping[int, Sequence[int]] | None = None) -> None:
        """There was another controller before, under which these slices were made; called before the first event.

        Args:
            islands: as in `expect`, where they are known.
        """
        if islands is not None:
            self.expect(islands)
        self.takeover = self.islands.takeover = Takeover(self.requests, found)
        self.requests.resume = self.takeover.received

    def handle(self, event: events.Event, now: float) -> list[events.Command]:
        """The commands that follow from an event at time `now`, in seconds of a monotonic clock."""
        tables = self.launches.tables
        tables.now = now
        if self.unseen:
            self.launches.membership.expect(self.unseen)
            self.unseen = {}
        commands = self._handlers[type(event)](event, now)
        if tables.changed or type(event) is events.Tick:
            explanations = self.requests.explanations
            if explanations.waiting:
                some = tables.changed if type(event) is not events.Tick else list(explanations.waiting)
                commands += explanations.programs_changed(some, now)
            tables.changed.clear()
        if self.clients.turns.order or self.launches.admission.relieved:
            commands += self.intake.after()
        return commands

    # --- islands ------------------------------------------------------------------------------------------------------

    def _island_messages(self, event: events.IslandMessages, now: float) -> list[events.Command]:
        island = event.island
        if self.islands.links.get(island) != event.link:
            # Another scheduler took its place; it starts again when its stream ends.
            return [events.CloseIsland(event.link)]
        said = event.messages[-1] if event.messages else None
        self.watch.schedulers.hear(island, now, said.slowness if type(said) is wire.Load else None)
        if len(event.messages) > 1 and set(map(type, event.messages)) == {wire.Stored}:
            return self._stored(cast("list[wire.Stored]", event.messages))
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
                    commands += self._stored([message])
                case wire.ServedCalls():
                    launches.outcomes.served(island, message)
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
                    commands += self.islands.host_up(island, message)
                case wire.HostDown():
                    if self.takeover is not None:
                        self.takeover.host_lost(message.host)
                    commands += launches.host_down(message, self.requests.isolation.is_ending(island))
                    commands.append(events.CallManager("leave", (message.host, message.epoch)))
                case wire.IslandOutcomes():
                    if self.takeover is not None:
                        commands += self.takeover.outcomes(island, message)
                case wire.IslandUp():
                    pass
                case _:
                    assert_never(message)
        return commands

    def _stored(self, messages: list[wire.Stored]) -> list[events.Command]:
        if self.takeover is not None:
            for message in messages:
                self.takeover.stored(message)
        return list(self.launches.stored(*messages))

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
        self.launches.tables.uncounted_s += self.watch.uncounted_s(now, event.slowness)
        commands: list[events.Command] = []
        for island, reason in self.watch.silent_schedulers(now, event.slowness):
            commands += [*self.islands.ended(island, reason), events.KillScheduler(island)]
        commands += self.watch.absent_schedulers(now, event.slowness)
        commands += self.islands.give_up_hosts()
        commands += self.takeover.look(now) if self.takeover is not None else []
        commands += self.launches.tick(now)
        late, self.launches.preemption.late = self.launches.preemption.late, {}
        for client in [self.clients.known[number] for number in late if number in self.clients.known]:
            commands += self.clients.end(client, late[client.session])
        commands += self.clients.expire(now)
        commands += self._give_up_questions(now)
        commands += self.requests.ask_again(now)
        commands += self.requests.looks.tick(now)
        commands += self.islands.vacate(now)
        commands += self.requests.isolation.tick(self.clients.known.values(), now)
        return commands + self.watch.tick(now, event.slowness)
