"""The resource manager: events in, commands out.

It is where the processes of a cluster meet. No clock, thread or call: time comes with each event, in seconds.

*Addresses.* Controller and schedulers publish where they serve; who looks one up waits until it is there.

*Epochs.* The hosts of an island form one JAX group, so they join together: each waits until all have come, and all get
the same epoch, newer than any these hosts had. A host that comes again takes its old group with it. Hosts end with
their scheduler, and join its successor; one that does not in time is stopped, and killed.

*Islands.* Those that all share are known from the start, or are added; one that is drained gets no slices any more, and
may be removed once it has none, or its deadline is over (`islands`). Others are known from the hosts that join: tenants
may have islands for themselves, which share the devices of the first ones.

*Slices.* `Inventory` maps them. After the controller's restart hosts join again: for some seconds, and for longer if
nothing that is up can hold the slice, the answer is `NotYet`; the controller asks again, and says when it is final.

*Controllers.* One that follows another asks what there is, and says which sessions have ended; from then on nothing is
answered that one before it asked. A controller that falls silent is killed: it may be stopped.

*Its own death* ends nothing. The successor knows which islands there are. The controller says to each resource manager
that it meets what hosts, schedulers and slices there are; until then, questions about them wait here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pathways_ray import limits
from pathways_ray.errors import PathwaysError, to_failure
from pathways_ray.liveness import SILENCE_LIMIT_S, Liveness
from pathways_ray.resource_manager import events
from pathways_ray.resource_manager.addresses import SCHEDULER, Addresses, of_schedulers
from pathways_ray.resource_manager.allocation import Inventory, IslandState
from pathways_ray.resource_manager.choosing import HostRecord
from pathways_ray.resource_manager.controllers import TICK_S, Controllers
from pathways_ray.resource_manager.islands import KeptIslands, SharedIslands, checked_deadline
from pathways_ray.resource_manager.slice_requests import SliceRequest
from pathways_ray.story import Entry, NotePace, Story
from pathways_ray.transport.messages import Accepted, JoinReply, KnownHost, NotYet, Refused, SliceCreated

MAX_REJOIN_S = 30.0
"""Time that hosts have to join, or join again. Then one that has not joined its island's new scheduler is killed, and a
slice that only an island could hold that has never joined is refused."""

GATHER_S = 5.0
"""Hosts join within about this time of each other. Until then a slice waits for all islands, so that the first one does
not get all of them."""


class Joining(NamedTuple):
    """A host that waits for the others of its island, and the scheduler that it will use."""

    request: events.JoinRequested
    scheduler: str


class ManagerCore:
    """The state of a cluster's resource manager.

    Args:
        islands: the ids of the hosts of each island; or, after a restart, what the process before this one kept.
        data_secret: given to hosts that join.
        last_epoch: hosts join under higher ones.
        silence_limit_s: the operator's, where it is longer than those of this file.
        lost_after_s: seconds without one of its hosts after which an island is lost.
        controller: the name of the controller's actor, if that and the hosts run already: after a restart.
    """

    def __init__(
        self,
        islands: Mapping[int, Sequence[int]] | KeptIslands,
        data_secret: str = "",
        last_epoch: int = 0,
        silence_limit_s: float = SILENCE_LIMIT_S,
        lost_after_s: float = limits.LOST_AFTER_S,
        controller: str = "",
    ) -> None:
        kept = islands if isinstance(islands, KeptIslands) else KeptIslands.first(islands)
        self.islands: dict[int, Sequence[int]] = dict(kept.members)
        self.data_secret = data_secret
        self.story = Story("resource manager", pace=NotePace(str, "session").paced)
        self.inventory = Inventory(self.islands, last_epoch=last_epoch, lost_after_s=lost_after_s)
        self.shared = SharedIslands(kept, self.islands, self.inventory)
        self.states: dict[int, IslandState] = {}
        self.tried: dict[int, float] = {}
        self.gathers_until = 0.0
        self.addresses = Addresses(self.story)
        self.forming: dict[int, dict[int, Joining]] = {}
        self.controllers = Controllers(controller, silence_limit_s, self.story)
        self.awaited = self.uninformed = bool(controller)
        self.postponed: list[events.Question] = []
        self.rejoining: Liveness[int] = Liveness(max(silence_limit_s, MAX_REJOIN_S), TICK_S)
        self.starting: Liveness[int] = Liveness(lost_after_s, TICK_S)
        self.schedulers: dict[int, str] = {}

    def handle(self, event: events.Event, now: float) -> list[events.Command]:
        """Takes one event at time `now`, in seconds; returns commands to carry out in their order."""
        self.inventory.now = now
        if self.awaited:
            self._await_all(now)
        if isinstance(event, events.Question):
            return self._answer(event, now)
        match event:
            case events.ControllerServes():
                return self._controller_serves(event, now)
            case events.ControllerStarts():
                self.controllers.starts(event, now)
            case events.ControllerHolds():
                return self._controller_holds(event, now)
            case events.ControllerAsks(token, started):
                self.controllers.began(started)
                return [events.Answer(token, self.inventory.held_slices())]
            case events.HostServes(known):
                return self._host_known(known, now)
            case events.Published(name, address):
                self._expect_hosts(name, address, now)
                return self._publish(name, address, now)
            case events.Withdrawn(name, address):
                self.addresses.withdraw(name, address, now)
            case events.LookedUp(token, name):
                found = self.addresses.find(name, event)
                return [] if found is None else [events.Answer(token, found)]
            case events.JoinRequested():
                return self._join(event, now)
            case events.HostDescribed():
                self.inventory.describe_host(*event)
            case events.IslandRemoved(island):
                return self._remove(island, now)
            case events.HostLeft(host, epoch):
                self.story.note(Entry(now, "host left", f"epoch {epoch}", host=host))
                if self.inventory.leave(host, epoch):
                    self.starting.forget(host)
            case events.KillRequested(host, epoch):
                if (record := self.inventory.hosts.get(host)) is not None and record.epoch == epoch:
                    return [self._kill(record, "its scheduler cannot use it", now)]
            case events.Ticked(slowness):
                lost = self._look_at_islands(now)
                return [*lost, *self.controllers.silent(now, slowness), *self._silent_hosts(now, slowness)]
        return []

    def _answer(self, event: events.Question, now: float) -> list[events.Command]:
        """Answers at once, or when the controller has said what it holds."""
        if self.uninformed:
            self.postponed.append(event)
            return []
        answer: bool | int = True
        match event:
            case events.SliceRequested():
                return [events.Answer(event.token, self._slice(event, now))]
            case events.SliceReleased(_, session, slice_id):
                answer = self.inventory.release(session, slice_id)
            case events.SlicesExchanged(_, session, pairs, call):
                answer = self.inventory.exchange(session, pairs, call)
            case events.SlicesHeld(_, session, found):
                answer = self.shared.hold(session, found)
            case events.SessionReleased(_, session):
                answer = self.inventory.release_session(session)
            case events.FromController(started, asked):
                over = self.controllers.is_over(started)
                return [events.Answer(asked.token, None)] if over else self._answer(asked, now)
            case events.IslandAdded() | events.DrainRequested() | events.UndrainRequested() | events.RemoveRequested():
                return self._change_islands(event, now)
        return [events.Answer(event.token, answer)]

    def _await_all(self, now: float) -> None:
        """Watches those who have not said a word: they may be stopped, and never be heard of."""
        self.awaited = False
        self.controllers.expect(now)
        for host in itertools.chain.from_iterable(self.islands.values()):
            self.rejoining.hear(host, now)

    # --- controllers and addresses ------------------------------------------------------------------------------------

    def _controller_serves(self, event: events.ControllerServes, now: float) -> list[events.Command]:
        if self.controllers.is_past(event):
            return []
        if self.controllers.serves(event, now):
            self.inventory.new_controller()
            self.gathers_until = now + GATHER_S
            self.addresses.forget_schedulers()
        self.inventory.busy = dict(event.busy)
        known = self.addresses.known.get("controller") == event.address
        return [] if known else self._publish("controller", event.address, now)

    def _controller_holds(self, event: events.ControllerHolds, now: float) -> list[events.Command]:
        """Takes over what the controller knows; slices after a restart only, since later they are mapped here."""
        holdings, commands = event.holdings, list[events.Command]()
        if not self.controllers.hears(event):
            return []
        serving = of_schedulers(holdings.schedulers)
        self.addresses.forget_schedulers(but=serving)
        if self.uninformed:
            self.schedulers.update(holdings.schedulers)
        for name, address in serving.items():
            self._expect_hosts(name, address, now)
        for host in holdings.hosts:
            commands += self._host_known(host, now)
        for name in [name for name, address in serving.items() if self.addresses.known.get(name) != address]:
            commands += self._publish(name, serving[name], now)
        if not self.uninformed:
            return commands
        self.uninformed, self.inventory.next_slice = False, holdings.last_slice
        self.inventory.restore(self.shared.there(holdings.slices))
        self.story.note(Entry(now, "heard what the controller holds", f"{len(self.inventory.slices)} slices"))
        postponed, self.postponed = self.postponed, []
        return commands + [command for question in postponed for command in self._answer_late(question, now)]

    def _answer_late(self, question: events.Question, now: float) -> list[events.Command]:
        asked = question.question if isinstance(question, events.FromController) else question
        if isinstance(asked, events.RemoveRequested) and self.shared.was_removed(asked.island, ""):
            return [events.Answer(asked.token, Accepted())]  # by the process before, which died with its answer
        return self.handle(question, now)

    def _silent_hosts(self, now: float, slowness: float) -> list[events.Command]:
        """Kills hosts that have not joined the successor of their scheduler in time, again and again until they do."""
        commands: list[events.Command] = []
        for host in self.rejoining.silent(now, slowness):
            self.rejoining.hear(host, now)
            reason = f"it did not join its new scheduler for {self.rejoining.limit_s:.0f} s"
            if (record := self.inventory.hosts.get(host)) is not None:
                commands.append(self._kill(record, reason, now))
            else:
                self.story.note(Entry(now, "host killed", "it never joined", reason, host=host))
                commands.append(events.KillHost(host, reason))
        for host in self.starting.silent(now, slowness):
            self.starting.hear(host, now)
            if (record := self.inventory.hosts.get(host)) is not None:
                commands.append(self._kill(record, "it joined its island, and does not serve", now))
        return commands

    def _look_at_islands(self, now: float) -> list[events.Command]:
        """Notes islands that have come or gone. For a lost one everything is tried again, and again after as long:
        hosts that wait for the others are sent away, and start again; the others are killed, since one may have been
        stopped before it joined, when nobody knew its process."""
        commands: list[events.Command] = []
        for island in sorted(self.islands):
            state, before = self.inventory.state_of(island), self.states.get(island)
            self.states[island] = state
            if state is not before and before is not None:
                self.story.note(Entry(now, f"island {state}", f"island {island}"))
            if state is not IslandState.LOST:
                self.tried.pop(island, None)
            elif now - self.tried.get(island, -math.inf) > self.inventory.lost_after_s:
                self.tried[island] = now
                commands += self._try_again(island)
        return commands

    def _try_again(self, island: int) -> list[events.Command]:
        waiting = self.forming.pop(island, {})
        absent = tuple(sorted(self.inventory.missing(island) - waiting.keys()))
        refusal = JoinReply(0, "", "", "", absent)
        away: list[events.Command] = [events.Answer(joining.request.token, refusal) for joining in waiting.values()]
        return away + [events.KillHost(host, f"island {island} is lost without it") for host in absent]

    def _expect_hosts(self, name: str, address: str, now: float) -> None:
        """A scheduler that is new on its island expects the hosts that its predecessor had."""
        kind, _, number = name.partition("-")
        if kind != "scheduler" or self.schedulers.get(island := int(number)) == address:
            return
        self.schedulers[island] = address
        for host in self.inventory.hosts.values():
            if host.island == island and host.host not in self.forming.get(island, {}):
                self.rejoining.hear(host.host, now)

    def _publish(self, name: str, address: str, now: float) -> list[events.Command]:
        return [command for event in self.addresses.publish(name, address, now) for command in self.handle(event, now)]

    # --- hosts --------------------------------------------------------------------------------------------------------

    def _join(self, event: events.JoinRequested, now: float) -> list[events.Command]:
        host = event.host
        if self.shared.was_removed(host.island, host.tenant):
            return [events.Answer(event.token, JoinReply(0, "", "", "", ()))]
        self.islands.setdefault(host.island, host.members)
        self.rejoining.forget(host.host)
        scheduler = self.addresses.find(f"{SCHEDULER}{host.island}", event)
        if scheduler is None:
            return []
        waiting = self.forming.setdefault(host.island, {})
        # A host that comes twice died while it waited: nobody listens to the answer to its first request.
        abandoned = waiting.get(host.host)
        waiting[host.host] = Joining(event, scheduler)
        self.story.note(Entry(now, "host waits for its island", f"island {host.island}", host=host.host))
        commands: list[events.Command] = [] if abandoned is None else [events.Answer(abandoned.request.token, None)]
        commands += [
            self._kill(other, "a member of its group restarted", now)
            for other in self.inventory.left_behind(host.host)
            if other.host not in waiting
        ]
        if waiting.keys() == set(self.islands[host.island]):
            commands += self._form(host.island, now)
        return commands

    def _form(self, island: int, now: float) -> list[events.Command]:
        """All hosts of an island have come: they get a common epoch, and the coordinator that the first one offered."""
        members = sorted(self.forming.pop(island).items())
        hosts = [joining.request.host for _, joining in members]
        epoch = self.inventory.join([HostRecord.of(host) for host in hosts])
        if island not in self.inventory.draining:  # what it was to be drained for was its place before
            self.inventory.drained_for.pop(island, None)
        coordinator = hosts[0].coordinator if len(hosts) > 1 else ""
        commands: list[events.Command] = []
        for number, joining in members:
            self.story.note(Entry(now, "host joined", f"epoch {epoch}", host=number))
            self.starting.hear(number, now)
            reply = JoinReply(epoch, joining.scheduler, self.data_secret, coordinator)
            commands.append(events.Answer(joining.request.token, reply))
        return commands

    def _host_known(self, known: KnownHost, now: float) -> list[events.Command]:
        """A host has come to its scheduler, or is gone again; one that is not known has joined before a restart."""
        info = known.info
        if self.shared.was_removed(info.island, info.tenant):  # and its end was cut short
            return [events.EndIsland(info.island, info.members)]
        self.islands.setdefault(info.island, info.members)
        record = self.inventory.hosts.get(info.host)
        if record is not None and record.epoch > known.epoch:
            return []
        if record is None or record.epoch < known.epoch:
            self.inventory.hosts[info.host] = HostRecord.of(info, known.epoch)
            self.story.note(Entry(now, "host known", f"epoch {known.epoch}", host=info.host))
        self.starting.forget(info.host)
        if known.up:
            self.inventory.hosts[info.host].up = True
            self.rejoining.forget(info.host)
        else:
            self.inventory.leave(info.host, known.epoch)
            if self.uninformed:
                self.rejoining.hear(info.host, now)
        return []

    def _kill(self, record: HostRecord, reason: str, now: float) -> events.KillProcess:
        self.story.note(Entry(now, "host killed", f"epoch {record.epoch}", reason, host=record.host))
        return events.KillProcess(record.node, record.pid, reason, record.host, record.started)

    def _change_islands(self, event: events.IslandChange, now: float) -> list[events.Command]:
        """Adds, drains or removes an island of all; the answer says why it cannot."""
        ended: list[events.Command] = []
        answer: tuple[int, tuple[int, ...]] | Accepted = Accepted()
        try:
            match event:
                case events.IslandAdded(_, hosts, spec):
                    answer = self.shared.add(hosts, spec)
                    self.story.note(Entry(now, "island added", f"island {answer[0]}, hosts {list(answer[1])}"))
                case events.DrainRequested(_, island, deadline_s, reason):
                    self.shared.drain(island, now + checked_deadline(deadline_s), reason)
                    self.story.note(Entry(now, "island drained", f"island {island}, within {deadline_s:.0f} s", reason))
                case events.UndrainRequested(_, island):
                    self.shared.undrain(island)
                    self.story.note(Entry(now, "drain taken back", f"island {island}"))
                case events.RemoveRequested(_, island):
                    members = self.shared.remove(island, now)
                    ended = [events.EndIsland(island, members), *self._remove(island, now, members)]
        except PathwaysError as error:
            return [events.Answer(event.token, Refused(to_failure(error)))]
        return [events.Keep(self.shared.kept()), *ended, events.Answer(event.token, answer)]

    def _remove(self, island: int, now: float, hosts: Sequence[int] = ()) -> list[events.Command]:
        self.story.note(Entry(now, "island removed", f"island {island}"))
        known = island in self.shared.numbers  # one that was added, and did not start
        for host in [*hosts, *self.islands.get(island, ()), *(one.host for one in self.inventory.remove(island))]:
            self.rejoining.forget(host)  # which may have never joined
            self.starting.forget(host)
        self.shared.forget(island)
        for table in (self.forming, self.schedulers, self.states, self.tried, self.inventory.missed):
            table.pop(island, None)
        self.addresses.known.pop(f"{SCHEDULER}{island}", None)
        return [events.Keep(self.shared.kept())] if known else []

    # --- slices -------------------------------------------------------------------------------------------------------

    def _waits(self, request: SliceRequest, now: float) -> bool:
        """Whether an island has yet to come that a slice could go to, and that is better, or the only one."""
        known, state_of = self.inventory.islands(request.tenant), self.inventory.state_of
        wanted = [island for island in self.shared.numbers if request.island in (-1, island)]
        if request.tenant:  # its islands come one by one, beside those that are up
            there = {hosts[0].base for hosts in known.values()}
            return any(island not in there and state_of(island) is IslandState.UP for island in wanted)
        described = all(host.hardware.generation for island in wanted for host in known.get(island, ()))
        if request.is_particular and not described and not self.inventory.fits_now(request):
            return True
        away = [island for island in wanted if state_of(island) is IslandState.AWAY]
        if now < self.gathers_until:
            return bool(away)
        return any(island not in known for island in away) and not self.inventory.fits_now(request)

    def _slice(self, event: events.SliceRequested, now: float) -> SliceCreated | Refused | NotYet:
        try:
            if not event.final and self._waits(event.request, now):
                return NotYet()
            placed = self.inventory.create(event.session, event.request)
        except PathwaysError as error:
            self.story.note(Entry(now, "slice refused", str(error)[:500], session=event.session))
            return Refused(to_failure(error))
        self.story.note(Entry(now, "slice mapped", f"slice {placed.mesh.id}", session=event.session))
        return SliceCreated(placed)
