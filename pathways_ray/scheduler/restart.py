"""Restart of an island whose group is broken.

Survivors of a lost host may sit in a collective that never ends. So every other host's process is killed, and joins
again under the next epoch; the controller fails every launch that it has on the island, and hears what may have ended
the host. A kill is repeated, ever more seldom, until a successor joins.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pathways_ray.liveness import Liveness
from pathways_ray.scheduler import events
from pathways_ray.scheduler.deadlines import Deadlines, first_in_line
from pathways_ray.scheduler.membership import Membership
from pathways_ray.scheduler.order import IslandOrder
from pathways_ray.scheduler.rendezvous import OrderCheck
from pathways_ray.scheduler.reunion import Reunion
from pathways_ray.scheduler.state import RestartIsland
from pathways_ray.story import Entry, Story
from pathways_ray.transport import messages as wire

KILL_PERIOD_S = 1.0
"""A process that is to be killed is killed again after this time, and ever more seldom, until a successor joins: the
call may be lost, or its machine out of reach."""


@dataclass(slots=True)
class Condemned:
    """A host's process under an epoch, to be killed since a time, and again at another one."""

    epoch: int
    since: float
    again: float


@dataclass(slots=True)
class Restart:
    """Restarts an island.

    `order`, `check`, `deadlines`, `liveness` and `reunion` forget the hosts that are lost, and all that these had.
    `condemned` has the processes that are to be killed, by host.
    """

    members: Membership
    order: IslandOrder
    check: OrderCheck
    deadlines: Deadlines
    liveness: Liveness[int]
    reunion: Reunion
    story: Story
    condemned: dict[int, Condemned] = field(default_factory=dict)

    def lose_host(
        self, host: int, epoch: int, reason: str, *, kill: bool = False, decided: RestartIsland | None = None
    ) -> list[events.Command]:
        """A host is gone, and with it the island's group.

        Args:
            kill: whether this host's process is to be killed too.
            decided: why its end was decided here; then nothing else can have ended it.
        """
        if not self.members.is_current(host, epoch):
            return []
        now = self.order.now
        kind = decided.kind if decided is not None else "HostLost"
        launch = decided.launch if decided is not None else 0
        candidates, compiling = self._causes(host, decided)
        first = launch or (candidates[0] if candidates else 0)
        story = self.story.lines(now, launch=first, hosts=self.members.hosts)
        names = decided is not None and bool(decided.launch or decided.program)
        self.story.note(Entry(now, "island restarts", reason, kind, launch=launch, host=host, private=names))
        commands: list[events.Command] = [events.ForgetHosts()]
        # The cause first: the controller knows the launches that it names until it has heard of the first loss.
        for member in sorted(self.members.lose(epoch), key=lambda member: member != host):
            self.liveness.forget(member)
            why = reason if member == host else f"host {host} of its island was lost: {reason}"
            down = wire.HostDown(member, epoch, why, kind, candidates, story, compiling, names, first)
            commands.append(events.ToController(down))
            candidates = compiling = ()
            if member != host or kill:
                commands.append(events.Kill(member, epoch))
                self.condemn(member, epoch, now)
        self.order.clear({decided.launch: decided.seconds} if decided is not None else {})
        self.deadlines.clear()
        self.check.clear()
        self.reunion.clear()
        return commands

    def _causes(self, host: int, decided: RestartIsland | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Launches and programs that may have ended a host. Where it was decided to end it, only who is over a
        limit."""
        if decided is None:
            compiling = [program for member, program in self.deadlines.compiling if member == host]
            return first_in_line(self.order.outstanding, host), tuple(compiling)
        launch = (decided.launch,) if decided.kind == "LaunchTimeout" else ()
        return launch, (decided.program,) if decided.program else ()

    def condemn(self, host: int, epoch: int, now: float) -> None:
        """Notes that a process was killed."""
        self.condemned[host] = Condemned(epoch, now, now + KILL_PERIOD_S)

    def repeated_kills(self, now: float) -> list[events.Command]:
        """The processes that are to be killed once more."""
        commands: list[events.Command] = []
        for host, one in self.condemned.items():
            if now >= one.again:
                one.again = now + KILL_PERIOD_S + 0.1 * (now - one.since)
                commands.append(events.Kill(host, one.epoch))
        return commands
