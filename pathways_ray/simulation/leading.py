"""The log of a simulated host that leads its island, on links to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pathways_ray.executor.run.core import HostCore
from pathways_ray.executor.run.driver import HostDriver
from pathways_ray.executor.run.leading import FAREWELL_S
from pathways_ray.simulation.environment import Environment
from pathways_ray.simulation.network import End, Process
from pathways_ray.transport.messages import FromLeader, Peer


class Linked(Protocol):
    """A simulated host, as its links to the others need it."""

    host: int
    members: list[int]
    epoch: int
    under_epoch: bool
    process: Process
    core: HostCore
    driver: HostDriver
    log: LogLinks


class LogLinks:
    """The links between a host that leads and those that follow it.

    Args:
        host_of: gives the last process of each host.
    """

    def __init__(self, world: Environment, host: Linked, host_of: Callable[[int], Linked]) -> None:
        self._world, self._host, self._host_of = world, host, host_of
        self._ends: list[End] = []

    @property
    def leads(self) -> bool:
        """Whether the host says that it leads: where users are eager, also where that does not pay."""
        leader = self._host.core.leader
        return leader is not None and (leader.linked if self._world.settings.eager else leader.leads)

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Links a leader to its followers, once all of them are up."""
        host, leader = self._host, self._host.core.leader
        up = {(peer.host, peer.epoch) for peer in peers}
        if leader is None or self._ends or any((member, host.epoch) not in up for member in host.members):
            return
        found = [self._host_of(member) for member in host.members if member != host.host]
        if any(one.epoch != host.epoch or not one.under_epoch or not one.process.alive for one in found):
            return
        for follower in found:
            near = End(self._world.network, host.process, lambda batch: None, self.ended)
            far = End(self._world.network, follower.process, follower.log.received, follower.log.ended)
            self._world.network.stream(near, far)
            self._ends.append(near)
        leader.linked = True

    def tell(self, entry: FromLeader) -> None:
        """Sends an entry to all followers."""
        for end in self._ends:
            end.send(entry)

    def received(self, batch: list[Any]) -> None:
        """Takes entries of the leader."""
        self._host.driver.handle_batch(batch, self._world.clock.now)

    def ended(self) -> None:
        """Takes the end of a link. Nobody knows what the other end did: the island starts again, if it does not
        already."""
        host = self._host
        self._world.network.after(host.process, FAREWELL_S, self._world.kill, host.process, "its log ended")
