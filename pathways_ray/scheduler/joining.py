"""Joining: a host comes to its scheduler, and those that had another one come to one point first (`reunion`)."""

from __future__ import annotations

from typing import NamedTuple

from pathways_ray.errors import Failure
from pathways_ray.scheduler import events
from pathways_ray.scheduler.handover import adopt
from pathways_ray.scheduler.restart import Restart
from pathways_ray.story import Entry
from pathways_ray.transport import messages as wire


class Joined(NamedTuple):
    """Commands, and what hosts have said of launches meanwhile: host, its epoch, and the message."""

    commands: list[events.Command]
    said: list[tuple[int, int, wire.FromHost]]


class Joining:
    """Takes hosts into an island.

    Args:
        beats: the last heartbeat of each host.
    """

    def __init__(self, restart: Restart, beats: dict[int, wire.Heartbeat]) -> None:
        self.restart = restart
        self.beats = beats

    def join(self, hello: wire.HostUp, now: float) -> Joined:
        """A host joins, unless its epoch is over. A newer epoch ends the group of the one before."""
        host, epoch, restart = hello.host, hello.epoch, self.restart
        members = restart.members
        if refusal := members.refusal(hello):
            restart.story.note(Entry(now, "host refused", f"epoch {epoch}", host=host))
            if any(isinstance(command, events.Kill) for command in refusal):
                restart.condemn(host, epoch, now)
            return Joined(list(refusal), [])
        commands: list[events.Command] = []
        for member, before in members.superseded(hello):
            commands += restart.lose_host(member, before, "a successor joined")
        members.join(hello)
        self.beats.pop(host, None)
        restart.condemned.pop(host, None)
        restart.liveness.hear(host, now)
        restart.story.note(Entry(now, "host joined", f"epoch {epoch}", host=host))
        commands.append(events.Accept(host, epoch))
        if not restart.reunion.joined(hello):
            commands.append(events.ToController(hello))
        met = self._meet(host, now)
        return Joined(commands + met.commands, met.said)

    def _meet(self, host: int, now: float) -> Joined:
        """Brings the hosts to one point, once the last one has come that lost the scheduler before."""
        restart = self.restart
        order, reunion = restart.order, restart.reunion
        met = reunion.meet()
        if met is None:
            return Joined([], [])
        if isinstance(met, str):
            return Joined(restart.lose_host(host, restart.members.epochs[host], met, kill=True), [])
        said = list(reunion.said)
        reunion.clear()
        missing = f"{len(met.catch_up.messages)} messages were missing"
        restart.story.note(Entry(now, "hosts are at one point", missing))
        adopt(order, met.launches)
        restart.check.since = order.last_sequence
        commands: list[events.Command] = [events.ToHosts(met.catch_up)]
        if met.launches:
            ended = tuple((sequence, launch.program) for sequence, (launch, _) in met.launches.items())
            commands.append(events.ToHosts(wire.Abort(ended, Failure("HostLost", "its island's scheduler ended"))))
        return Joined(commands, said)
