"""Membership of an island: which process speaks for each host, and whether all of them form one group.

The hosts of an island join one JAX group under a common *epoch*, which the resource manager hands out and raises with
every restart. A host that is lost takes the group with it, since the others may sit in a collective with it: all of
them restart, and messages of the old epoch are void.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pathways_ray.scheduler.events import Kill, Refuse
from pathways_ray.transport.messages import HostUp, Peer


@dataclass
class Membership:
    """The hosts of an island and their epochs.

    `epochs` has the newest epoch of each host that was accepted, `present` the hosts that are up under it, `listed` the
    epochs of the last list that the controller sent. `complete` says whether all hosts are up; `agreed` whether the
    controller knows them as they are, since it hears of losses a little later. Hosts that are `apart` have come from a
    scheduler that died, and have not all heard the same: they are not complete.
    """

    hosts: frozenset[int]
    epochs: dict[int, int] = field(default_factory=dict)
    present: set[int] = field(default_factory=set)
    listed: dict[int, int] = field(default_factory=dict)
    complete: bool = False
    agreed: bool = True
    apart: bool = False

    def is_current(self, host: int, epoch: int) -> bool:
        """Whether a host is up under this epoch."""
        return self.epochs.get(host) == epoch and host in self.present

    def refusal(self, hello: HostUp) -> list[Refuse | Kill]:
        """Commands that turn a host away; empty when it may join."""
        host, epoch = hello.host, hello.epoch
        if host not in self.hosts or epoch <= self.epochs.get(host, 0):
            return [Refuse(host, epoch)]
        for member, newest in self.epochs.items():
            if newest > epoch or (newest == epoch and member not in self.present):
                # Its group broke before it came. It has to restart, so that it meets the others under the next epoch.
                return [Refuse(host, epoch), Kill(host, epoch)]
        return []

    def superseded(self, hello: HostUp) -> list[tuple[int, int]]:
        """Hosts that are up under epochs before this one, with these: their group has ended."""
        return [(m, self.epochs[m]) for m in sorted(self.present) if self.epochs[m] < hello.epoch]

    def join(self, hello: HostUp) -> None:
        """A host that is not refused is up."""
        self.epochs[hello.host] = hello.epoch
        self.present.add(hello.host)
        self._compare()

    def lose(self, epoch: int) -> list[int]:
        """The group of an epoch has ended; returns the hosts that were up in it."""
        lost = [host for host in sorted(self.present) if self.epochs[host] == epoch]
        self.present.difference_update(lost)
        self._compare()
        return lost

    def part(self) -> None:
        """Hosts have not all heard the same."""
        self.apart = True
        self._compare()

    def unite(self) -> None:
        """They have."""
        self.apart = False
        self._compare()

    def list_peers(self, peers: Iterable[Peer]) -> None:
        """The controller's list of the cluster's hosts."""
        self.listed = {peer.host: peer.epoch for peer in peers if peer.host in self.hosts}
        self._compare()

    def _compare(self) -> None:
        self.complete = self.present == self.hosts and not self.apart
        self.agreed = not self.listed or (self.listed == self.epochs and len(self.present) == len(self.epochs))
