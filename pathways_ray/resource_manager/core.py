"""The resource manager: events in, commands out.

It is where the processes of a cluster meet. Four rules:

*Addresses.* Controller and schedulers publish where they serve; who looks one up waits until it is there.

*Epochs.* The hosts of an island form one JAX group, so they join together: each waits until all have come, and all get
the same epoch, newer than any these hosts had. A host that comes again takes its old group with it. Hosts end with
their scheduler, and join its successor; one that does not in time is stopped, and killed.

*Islands.* Those that the runtime began with are known from the start, others from the hosts that join: tenants may have
islands for themselves, which share the devices of the first ones.

*Slices.* A slice is mapped by `Inventory`. While islands that it could lie on have not joined, the answer is `NotYet`;
the controller asks again, and says when it is to be mapped to what there is.

*Controllers.* A new incarnation of the controller knows of no session: all slices are free, and hosts have to join
again. A controller that falls silent is killed; it may be stopped, and would be restarted only if it died.

No clock, thread or call: time comes with each event, in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pathways_ray.errors import PathwaysError, to_failure
from pathways_ray.liveness import SILENCE_LIMIT_S, Liveness
from pathways_ray.resource_manager import events
from pathways_ray.resource_manager.allocation import HostRecord, Inventory
from pathways_ray.story import Entry, Story
from pathways_ray.transport.messages import JoinReply, NotYet, Refused, SliceCreated

TICK_S = 1.0
"""Time between two looks at the controller and at hosts."""

MAX_REJOIN_S = 30.0
"""Time that hosts have to join, or join again. Then one that has not joined its island's new scheduler is killed, and a
slice that was requested before all islands had joined is mapped to those there are."""

MAX_CONTROLLER_SILENCE_S = 30.0
"""A controller that says nothing for this long is stopped or hangs, and is killed. That is long, since it may be busy
with a big program; clients of one that is stopped have seen it before, by its missing answers to their pings."""


class Joining(NamedTuple):
    """A host that waits for the others of its island, and the scheduler that it will use."""

    request: events.JoinRequested
    scheduler: str


class ManagerCore:
    """The state of a cluster's resource manager.

    Args:
        islands: the ids of the hosts of each island.
        data_secret: given to hosts that join.
        last_epoch: hosts join under higher ones.
        silence_limit_s: the operator's, where it is longer than those of this file.
    """

    def __init__(
        self,
        islands: Mapping[int, Sequence[int]],
        data_secret: str = "",
        last_epoch: int = 0,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self.islands = dict(islands)
        self.shared = frozenset(islands)
        self.data_secret = data_secret
        self.story = Story("resource manager")
        self.inventory = Inventory(last_epoch=last_epoch)
        self.addresses: dict[str, str] = {}
        self.lookups: dict[str, list[events.LookedUp | events.JoinRequested]] = {}
        self.forming: dict[int, dict[int, Joining]] = {}
        self.controller = events.ControllerServes("", "", "")
        self.past_controllers: set[str] = set()
        self.controllers: Liveness[str] = Liveness(max(silence_limit_s, MAX_CONTROLLER_SILENCE_S), TICK_S)
        self.rejoining: Liveness[int] = Liveness(max(silence_limit_s, MAX_REJOIN_S), TICK_S)
        self.schedulers: dict[int, str] = {}

    def handle(self, event: events.Event, now: float) -> list[events.Command]:
        """Takes one event at time `now`, in seconds; returns commands to carry out in their order."""
        match event:
            case events.ControllerServes():
                return self._controller_serves(event, now)
            case events.Published(name, address):
                self._expect_hosts(name, address, now)
                return self._publish(name, address, now)
            case events.Withdrawn(name, address):
                # A successor may have been quicker.
                if self.addresses.get(name) == address:
                    del self.addresses[name]
                    self.story.note(Entry(now, "address withdrawn", f"{name} at {address}"))
                return []
            case events.LookedUp(token, name):
                if (found := self.addresses.get(name)) is not None:
                    return [events.Answer(token, found)]
                self.lookups.setdefault(name, []).append(event)
                return []
            case events.JoinRequested():
                return self._join(event, now)
            case events.IslandRemoved(island):
                return self._remove(island, now)
            case events.HostLeft(host, epoch):
                self.story.note(Entry(now, "host left", f"epoch {epoch}", host=host))
                self.inventory.leave(host, epoch)
                return []
            case events.KillRequested(host, epoch):
                record = self.inventory.hosts.get(host)
                if record is None or record.epoch != epoch:
                    return []
                return [self._kill(record, "its scheduler cannot use it", now)]
            case events.SliceRequested():
                return [events.Answer(event.token, self._slice(event, now))]
            case events.SliceReleased(token, session, slice_id):
                return [events.Answer(token, self.inventory.release(session, slice_id))]
            case events.SessionReleased(token, session):
                return [events.Answer(token, self.inventory.release_session(session))]
            case events.Ticked(slowness):
                return [*self._silent_controller(now, slowness), *self._silent_hosts(now, slowness)]

    # --- controllers and addresses ------------------------------------------------------------------------------------

    def _controller_serves(self, event: events.ControllerServes, now: float) -> list[events.Command]:
        incarnation = event.incarnation
        if incarnation in self.past_controllers:
            return []  # sent before it died
        if incarnation != self.controller.incarnation:
            self.past_controllers.add(self.controller.incarnation)
            self.controllers.forget(self.controller.incarnation)
            self.story.note(Entry(now, "new controller", event.address))
            self.inventory.start_over()
            for name in [name for name in self.addresses if name.startswith("scheduler-")]:
                del self.addresses[name]
        self.controller = event
        self.controllers.hear(incarnation, now)
        if self.addresses.get("controller") != event.address:
            return self._publish("controller", event.address, now)
        return []

    def _silent_controller(self, now: float, slowness: float) -> list[events.Command]:
        """Kills a controller that has been silent for too long, once."""
        commands: list[events.Command] = []
        for incarnation in self.controllers.silent(now, slowness):
            self.controllers.forget(incarnation)
            reason = f"it did not answer for {self.controllers.limit_s:.0f} s"
            self.story.note(Entry(now, "controller killed", reason))
            commands.append(events.KillController(self.controller.actor, reason))
        return commands

    def _silent_hosts(self, now: float, slowness: float) -> list[events.Command]:
        """Kills hosts that have not joined the successor of their scheduler in time, once."""
        commands: list[events.Command] = []
        for host in self.rejoining.silent(now, slowness):
            self.rejoining.forget(host)
            reason = f"it did not join its new scheduler for {self.rejoining.limit_s:.0f} s"
            commands.append(self._kill(self.inventory.hosts[host], reason, now))
        return commands

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
        self.addresses[name] = address
        self.story.note(Entry(now, "address published", f"{name} at {address}"))
        return [command for event in self.lookups.pop(name, ()) for command in self.handle(event, now)]

    # --- hosts --------------------------------------------------------------------------------------------------------

    def _join(self, event: events.JoinRequested, now: float) -> list[events.Command]:
        host = event.host
        self.islands.setdefault(host.island, host.members)
        self.rejoining.forget(host.host)
        name = f"scheduler-{host.island}"
        scheduler = self.addresses.get(name)
        if scheduler is None:
            self.lookups.setdefault(name, []).append(event)
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
        records = [
            HostRecord(h.host, h.island, h.platform, h.devices, h.node, h.pid, tenant=h.tenant, base=h.base)
            for h in hosts
        ]
        epoch = self.inventory.join(records)
        coordinator = hosts[0].coordinator if len(hosts) > 1 else ""
        commands: list[events.Command] = []
        for number, joining in members:
            self.story.note(Entry(now, "host joined", f"epoch {epoch}", host=number))
            reply = JoinReply(epoch, joining.scheduler, self.data_secret, coordinator)
            commands.append(events.Answer(joining.request.token, reply))
        return commands

    def _kill(self, record: HostRecord, reason: str, now: float) -> events.KillProcess:
        self.story.note(Entry(now, "host killed", f"epoch {record.epoch}", reason, host=record.host))
        return events.KillProcess(record.node, record.pid, reason)

    def _remove(self, island: int, now: float) -> list[events.Command]:
        self.story.note(Entry(now, "island removed", f"island {island}"))
        for host in self.inventory.remove(island):
            self.rejoining.forget(host.host)
        for table in (self.islands, self.forming, self.schedulers):
            table.pop(island, None)
        self.addresses.pop(f"scheduler-{island}", None)
        return []

    # --- slices -------------------------------------------------------------------------------------------------------

    def _joined(self, tenant: str) -> bool:
        """Whether all islands of a tenant have joined, or all those that everybody shares."""
        found = self.inventory.islands(tenant)
        return {hosts[0].base if tenant else island for island, hosts in found.items()} >= self.shared

    def _slice(self, event: events.SliceRequested, now: float) -> SliceCreated | Refused | NotYet:
        if not (event.final or self._joined(event.request.tenant)):
            return NotYet()
        try:
            placed = self.inventory.create(event.session, event.request)
        except PathwaysError as error:
            self.story.note(Entry(now, "slice refused", str(error), session=event.session))
            return Refused(to_failure(error))
        self.story.note(Entry(now, "slice created", f"slice {placed.mesh.id}", session=event.session))
        return SliceCreated(placed)
