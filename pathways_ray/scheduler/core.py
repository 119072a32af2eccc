"""The scheduler of one island: events in, commands out.

It joins `Membership`, which knows the hosts' epochs, `IslandOrder`, which decides which launch goes next, and three
that watch: `Deadlines` finds what takes too long, `OrderCheck` compares what hosts enqueued, `Liveness` finds hosts
that have fallen silent. Whenever one of them sees that the island's group is broken, `Restart` has the whole island
start again.

No clock, thread or link: time comes with each event, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import assert_never, cast

from pathways_ray import limits
from pathways_ray.liveness import SILENCE_LIMIT_S, Liveness
from pathways_ray.observe.views import encode
from pathways_ray.scheduler import events
from pathways_ray.scheduler.controller_absence import ControllerAbsence
from pathways_ray.scheduler.deadlines import Deadlines
from pathways_ray.scheduler.inspection import island_view
from pathways_ray.scheduler.joining import Joining
from pathways_ray.scheduler.membership import Membership
from pathways_ray.scheduler.order import IslandOrder
from pathways_ray.scheduler.policies import Policy, fifo
from pathways_ray.scheduler.rendezvous import OrderCheck
from pathways_ray.scheduler.restart import Restart
from pathways_ray.scheduler.reunion import OF_LAUNCHES, UNWANTED, Reunion
from pathways_ray.scheduler.state import Decision, RestartIsland
from pathways_ray.story import Story
from pathways_ray.transport import messages as wire

TICK_S = 0.1
"""Time between two looks at the hosts and at launches that do not end: a second would be much of the ten in which
launches on a lost host have to end. Policies see the time in these steps as well."""

LOAD_PERIOD_S = 1.0
"""Time between two reports of waiting launches to the controller, which takes them as this scheduler's heartbeat."""

BESIDE_ORDER = (wire.Peers, wire.Inspect, wire.Examine, wire.FunctionsAhead)
"""Messages of the controller that the order has nothing to do with."""

PASSED_ON = frozenset((wire.Stored, wire.Decided, wire.Examined, wire.ServedCalls))
"""Messages of hosts that go to the controller as they are, and change nothing here."""

Take = Callable[[wire.ToIsland], list[events.Command]]


class SchedulerCore:
    """The state of one island's scheduler.

    Args:
        hosts: the ids of the island's hosts. Until all are up, and from the loss of one until its successor joins,
            launches are not dispatched.
        window: launches with the hosts at once.
        limit_s: seconds that a launch may keep its devices; then the island restarts.
        compile_limit_s: the same for a host that compiles a program.
        silence_limit_s: a host that says nothing for this long is lost; hosts send a heartbeat every second.
    """

    def __init__(
        self,
        island: int,
        hosts: Iterable[int],
        window: int,
        policy: Policy = fifo,
        limit_s: float = math.inf,
        compile_limit_s: float = limits.COMPILE_LIMIT_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self.island = island
        self.story = Story(f"scheduler {island}")
        self.members = Membership(frozenset(hosts))
        self.order = IslandOrder(self.members, window, policy, self.story)
        self.deadlines = Deadlines(limit_s, compile_limit_s)
        self.check = OrderCheck(island)
        self.liveness: Liveness[int] = Liveness(silence_limit_s, TICK_S)
        self.reunion = Reunion(self.members)
        self.restart = Restart(
            self.members, self.order, self.check, self.deadlines, self.liveness, self.reunion, self.story
        )
        self.next_load = -math.inf
        self.absence = ControllerAbsence(self.order, self.members, self.story)
        self.beats: dict[int, wire.Heartbeat] = {}
        self.joining = Joining(self.restart, self.beats)

    def handle(self, event: events.Event, now: float) -> list[events.Command]:
        """Takes one event at time `now`, in seconds; returns commands to carry out in their order."""
        self.order.now = now
        match event:
            case events.ControllerMessage():
                return self._from_controller(event.message)
            case events.HostMessage():
                return self._from_host(event.host, event.epoch, event.message)
            case events.Ticked():
                return self._tick(now, event.slowness)
            case events.HostConnected(hello):
                return self._join(hello, now)
            case events.HostDisconnected(host, epoch):
                # Or its link was given up: a process that was stopped keeps its devices until somebody ends it.
                return self.restart.lose_host(host, epoch, "its process ended", kill=True)
            case events.ControllerConnected(address):
                return self.absence.over(self.island, address, now)
            case events.ControllerDisconnected(address):
                return self.absence.begin(address, now)

    # --- batches of a link: each message is taken when the commands for those before it are carried out ---------------

    def controller_batch(self, messages: list[wire.ToIsland], now: float) -> Iterable[events.Command]:
        """The same as `handle` for each message, a `ControllerMessage`."""
        self.order.now = now
        all_for_order = not self.members.apart and set(map(type, messages)).isdisjoint(BESIDE_ORDER)
        take = cast("Take", self.order.from_controller) if all_for_order else self._from_controller
        return chain.from_iterable(map(take, messages))

    def host_batch(self, host: int, epoch: int, messages: list[wire.FromHost], now: float) -> Iterable[events.Command]:
        """The same for each message, a `HostMessage`."""
        self.order.now = now
        return chain.from_iterable(map(self._from_host, repeat(host), repeat(epoch), messages))

    def passes_on(self, host: int, epoch: int, messages: list[wire.FromHost], now: float) -> bool:
        """Whether a batch of several goes to the controller as it is, which is then all that `host_batch` would do."""
        self.order.now = now
        if self.members.apart or not PASSED_ON.issuperset(map(type, messages)):
            return False
        if is_current := self.members.is_current(host, epoch):
            self.liveness.hear(host, now)
        return is_current

    # --- the controller -----------------------------------------------------------------------------------------------

    def load(self, slowness: float = 1.0) -> wire.Load:
        """Launches that wait here, by tenant."""
        return wire.Load(self.island, self.order.queues.lengths(), slowness)

    def _from_controller(self, message: wire.ToIsland) -> list[events.Command]:
        if not isinstance(message, BESIDE_ORDER):
            commands = self.order.from_controller(message)
            if not self.members.apart:
                return commands
            return [c for c in commands if not (isinstance(c, events.ToHosts) and isinstance(c.message, UNWANTED))]
        if isinstance(message, wire.Inspect):
            view = island_view(self.island, self.order, self.deadlines, self.beats, self.story, message.launches)
            return [events.ToController(wire.Inspected(message.look, self.island, encode(view)))]
        if isinstance(message, wire.Peers):
            self.members.list_peers(message.peers)
        return [events.ToHosts(message)]

    def _from_host(self, host: int, epoch: int, message: wire.FromHost) -> list[events.Command]:
        if not self.members.is_current(host, epoch):
            return []  # of an older epoch: its launches have failed already
        slowness = message.slowness if type(message) is wire.Heartbeat else None
        self.liveness.hear(host, self.order.now, slowness)
        return self._said(host, message)

    def _said(self, host: int, message: wire.FromHost) -> list[events.Command]:
        if self.members.apart and isinstance(message, OF_LAUNCHES):
            self.reunion.said.append((host, self.members.epochs[host], message))
            return []
        match message:
            case wire.Done():
                return self._carry_out(self.order.done(host, message))
            case wire.BarrierReached():
                return list(self.order.reached(message))
            case wire.IslandLaunchFailed():
                return self._carry_out(self.order.failed(host, message))
            case wire.Compiling():
                self.deadlines.compiling.setdefault((host, message.program), 0.0)  # it may say so again
                return []
            case wire.Ready():
                self.deadlines.compiling.pop((host, message.program), None)
                self.order.ready(host, message)
                return [events.ToController(message)]
            case wire.Enqueued():
                return list(self.order.enqueued(host, message))
            case wire.Stored() | wire.Decided() | wire.Examined() | wire.ServedCalls():  # those `PASSED_ON`
                return [events.ToController(message)]
            case wire.Ordered():
                return self._carry_out(self.check.compare(self.order.outstanding, self.members.hosts, host, message))
            case wire.Heartbeat():
                self.deadlines.heard(host, message, self.order.now)
                self.beats[host] = message
                return list(self.order.tick(self._leads())) if len(self.members.hosts) > 1 else []
            case wire.HostUp():  # it has joined, and says what it holds to another controller
                said_again = message.holds is not None and message.holds.heard is not None
                return [] if said_again else [events.ToController(message)]
            case _:
                assert_never(message)

    def _tick(self, now: float, slowness: float) -> list[events.Command]:
        order = self.order
        commands: list[events.Command] = []
        if present := frozenset(self.members.present):
            overdue = self.deadlines.overdue(order, present, now)
            commands += self._carry_out([overdue]) if overdue is not None else []
        for host in self.liveness.silent(now, slowness):
            reason = f"it did not answer for {self.liveness.limit_s:.0f} s"
            commands += self.restart.lose_host(host, self.members.epochs[host], reason, kill=True)
        commands += self.restart.repeated_kills(now)
        commands += self.absence.limit(now)
        commands += order.tick(self._leads())
        if now >= self.next_load:
            self.next_load = now + LOAD_PERIOD_S
            commands.append(events.ToController(self.load(slowness)))
        return commands

    def _leads(self) -> bool:
        """Whether a host takes launches that are handed to it: the only one, or the first of several that says so."""
        hosts = self.members.hosts
        beat = self.beats.get(min(hosts))
        return len(hosts) == 1 or (beat is not None and beat.leads)

    def _join(self, hello: wire.HostUp, now: float) -> list[events.Command]:
        commands, said = self.joining.join(hello, now)
        for host, epoch, message in said:
            if self.members.is_current(host, epoch):
                commands += self._said(host, message)
        return commands + self.order.advance()

    def _carry_out(self, decisions: list[Decision]) -> list[events.Command]:
        """Commands for the order's decisions, of which the last one may be to restart the island."""
        if decisions and isinstance(restart := decisions[-1], RestartIsland):
            host, epoch = restart.host, self.members.epochs[restart.host]
            return [
                *(d for d in decisions[:-1] if not isinstance(d, RestartIsland)),
                *self.restart.lose_host(host, epoch, restart.reason, kill=True, decided=restart),
            ]
        return cast("list[events.Command]", decisions)
