"""Islands that come and go: the streams of their schedulers, hosts without one, and islands that are ended.

An island is known here by the stream of its scheduler; its hosts are in the tables (`controller.hosts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pathways_ray.controller import events
from pathways_ray.controller.clients import Clients
from pathways_ray.controller.comparing import compared
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.manager_calls import ManagerCalls
from pathways_ray.controller.requests import Requests
from pathways_ray.controller.state import SendIsland
from pathways_ray.controller.status import Report
from pathways_ray.controller.takeover import Takeover
from pathways_ray.controller.watch import Watch
from pathways_ray.story import Entry
from pathways_ray.transport import messages as wire


class Islands:
    """The islands whose schedulers have joined.

    `links` has, by island, the number of its scheduler's stream. `over` are those that the operator has ended: their
    numbers do not come again. `takeover`: another controller was before.
    """

    def __init__(
        self,
        launches: Launches,
        clients: Clients,
        requests: Requests,
        report: Report,
        watch: Watch,
        manager_calls: ManagerCalls,
    ) -> None:
        self.launches = launches
        self.clients = clients
        self.requests = requests
        self.report = report
        self.watch = watch
        self.manager_calls = manager_calls
        self.story = launches.story
        self.links: dict[int, int] = {}
        self.over: set[int] = set()
        self.takeover: Takeover | None = None
        requests.looks.connected = lambda: set(self.links)
        requests.changes.forget_island = self.removed

    # --- schedulers ---------------------------------------------------------------------------------------------------

    def connected(self, event: events.IslandConnected, now: float) -> list[events.Command]:
        """A scheduler has opened its stream. What one sent before its island was ended may come late."""
        island = event.hello.island
        if island in self.over:
            return [events.CloseIsland(event.link)]
        # A new scheduler may be heard of before the end of the old one's stream; it knows nothing of that one's time.
        commands: list[events.Command] = []
        if island in self.links:
            ended = self.ended(island, "its island's scheduler ended")
            commands += [c for c in ended if not (isinstance(c, SendIsland) and c.island == island)]
        self.links[island] = event.link
        self.manager_calls.schedulers[island] = event.hello.address
        if self.takeover is not None:
            self.takeover.island_up(event.hello)
        commands.append(events.CallManager("publish", (f"scheduler-{island}", event.hello.address)))
        self.watch.joined(island, now)
        self.story.note(Entry(now, "scheduler joined", f"island {island} at {event.hello.address}"))
        return commands + self.launches.island_up(island)

    def disconnected(self, event: events.IslandDisconnected, now: float) -> list[events.Command]:
        """A scheduler's stream has ended; another one may have taken its place before."""
        commands: list[events.Command] = []
        if self.links.get(event.island) == event.link:
            asked = self.requests.isolation.is_ending(event.island)
            commands += self.ended(event.island, "its island's scheduler ended", with_hosts=asked)
            if event.silent:  # stopped, it would not start again, and its hosts could not join another one
                commands.append(events.KillScheduler(event.island))
        return [*commands, events.CallManager("withdraw", (f"scheduler-{event.island}", event.address))]

    def ended(self, island: int, reason: str, *, with_hosts: bool = False) -> list[events.Command]:
        """Forgets an island's scheduler; its word for its hosts is worth nothing any more.

        Args:
            with_hosts: whether these are at their end as well.
        """
        del self.links[island], self.manager_calls.schedulers[island]
        self.launches.tables.schedulers.discard(island)
        self.watch.left(island, self.launches.tables.now)
        event = "scheduler ended" if with_hosts else "scheduler lost"  # what was asked for is no loss
        self.story.note(Entry(self.launches.tables.now, event, f"island {island}", reason))
        return self._lose_hosts(island, reason, True) if with_hosts else self._without_scheduler(island, reason)

    def _without_scheduler(self, island: int, reason: str) -> list[events.Command]:
        """An island's hosts have no scheduler, and go on with what they hold; some may have had none before. Where one
        of them was lost already, so is their group, and they start again."""
        hosts = [host for host in self.launches.hosts.values() if host.island == island]
        up = [host for host in hosts if host.down_since is None]
        if all(host.down_since is None or host.orphaned for host in hosts):
            return [*self.launches.scheduler_lost(up, reason)] if up else []
        return self._lose_hosts(island, reason)

    def _lose_hosts(self, island: int, reason: str, asked: bool = False) -> list[events.Command]:
        hosts = [host for host in self.launches.hosts.values() if host.island == island]
        return [c for h in hosts for c in self.launches.host_down(wire.HostDown(h.host, h.epoch, reason), asked)]

    # --- hosts --------------------------------------------------------------------------------------------------------

    def host_up(self, island: int, message: wire.HostUp) -> list[events.Command]:
        """A host has joined, or joins again with what it holds. One that is refused is killed, to start again."""
        launches, holds, takeover = self.launches, message.holds, self.takeover
        displaced = self._displaced(island, message)
        # A scheduler that died with its word may have been the only one to know that a host had started again.
        known = launches.hosts.get(message.host)
        is_new = known is None or known.epoch < message.epoch
        found: Sequence[events.Command] | None
        if takeover is not None and is_new and holds is not None:
            found = takeover.host_up(island, message)
        elif holds is None or is_new:
            found = launches.host_up(island, message)
            if holds is not None:
                unwanted = compared(launches.tables, launches.hosts[message.host], holds).unwanted
                found += [SendIsland(island, one) for one in unwanted]
            if takeover is not None:
                takeover.host_began(message)
        elif self._is_up(message):  # what it answers to a stream of its scheduler that has ended came by the next one
            if takeover is not None:
                takeover.says_again(message)
            return []
        else:
            found = launches.host_back(island, message, holds, self.clients.turns.uploads())
            if takeover is not None and found is not None:
                found = takeover.host_back(message, found)
        if found is None:
            return [*displaced, events.CallManager("kill_host", (message.host, message.epoch))]
        commands = [*displaced, *found]
        if message.info is not None:
            serves = wire.encode(wire.KnownHost(message.info, message.epoch))
            commands.append(events.CallManager("serves", (serves,)))
        return commands + (takeover.look(launches.tables.now) if takeover is not None else [])

    def _displaced(self, island: int, message: wire.HostUp) -> list[events.Command]:
        """Ends sessions with slices on a host that comes to another island than theirs: it has the number of one that
        is gone, and may be another tenant's."""
        host, before = message.host, self.launches.hosts.get(message.host)
        if before is None or before.island == island or before.epoch >= message.epoch:
            return []
        text = f"host {host} of a slice of the session is gone, and its number went to island {island}"
        commands: list[events.Command] = []
        for client in list(self.clients.known.values()):
            slices = self.launches.sessions[client.session].slices.values()
            if any(host in placed.hosts and placed.island != island for placed in slices):
                commands += self.clients.end(client, text)
        return commands

    def _is_up(self, message: wire.HostUp) -> bool:
        known = self.launches.hosts.get(message.host)
        return known is not None and known.epoch == message.epoch and known.down_since is None

    def give_up_hosts(self) -> list[events.Command]:
        """Hosts that have been without a scheduler for too long are lost, with what they hold."""
        commands: list[events.Command] = []
        for host in self.launches.membership.overdue():
            commands += self.launches.membership.lose(host, "it did not join the successor of its scheduler")
            commands.append(events.CallManager("kill_host", (host.host, host.epoch)))
            commands.append(events.CallManager("leave", (host.host, host.epoch)))
        return commands

    # --- islands that are ended ---------------------------------------------------------------------------------------

    def held(self, event: events.IslandsHeld, now: float) -> list[events.Command]:
        """Forgets islands that tenants do not have any more. Sessions that have slices there end, and those of tenants
        whose islands could not start."""
        isolation = self.requests.isolation
        ended = set(isolation.answered(event))
        commands = [command for island in sorted(ended) for command in self.forget(island)]
        for client in list(self.clients.known.values()):
            slices = self.launches.sessions[client.session].slices.values()
            processes = f"the processes of tenant {client.tenant.name!r}"
            if reason := event.failures.get(isolation.islands_of(client), ""):
                commands += self.clients.end(client, f"{processes} could not start: {reason}")
            elif any(placed.island in ended for placed in slices):
                commands += self.clients.end(client, f"{processes} have ended")
        return commands

    def removed(self, island: int) -> list[events.Command]:
        """The operator has ended an island. While sessions have slices there, its hosts are away."""
        self.over.add(island)
        if self.requests.changes.moves.ended(island):
            return self.forget(island)
        commands = self.ended(island, "its island was removed", with_hosts=True) if island in self.links else []
        self.watch.absent.forget(island)
        for host in self.launches.hosts.values():
            if host.island == island:
                host.down_since = -math.inf  # nobody waits for it
        return commands + self.launches.tick(self.launches.tables.now)

    def vacate(self, now: float) -> list[events.Command]:
        """Tells clients which slices have to move, and forgets islands that are gone and have none."""
        told, empty = self.requests.changes.moves.tick(now)
        return [*told, *(command for island in empty for command in self.forget(island))]

    def forget(self, island: int) -> list[events.Command]:
        """An island is no more: nobody waits for its scheduler or its hosts."""
        tables = self.launches.tables
        commands = self.ended(island, "its island was ended", with_hosts=True) if island in self.links else []
        self.watch.absent.forget(island)
        self.report.queued.pop(island, None)
        for host in [host.host for host in tables.hosts.values() if host.island == island]:
            del tables.hosts[host]
            tables.away.discard(host)
            if self.takeover is not None:
                self.takeover.host_lost(host)
        return commands
