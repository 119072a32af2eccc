"""The islands that all share, as they come and go: their numbers, and which of them is to be emptied or removed.

Added islands are numbered on from the last one. Numbers of hosts come back once all have been used, since they are
bounded (`limits.MAX_HOSTS`); the epochs of those that come later are higher.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pathways_ray import limits
from pathways_ray.errors import TooLarge, UsageError
from pathways_ray.resource_manager.allocation import Inventory, IslandState
from pathways_ray.transport.messages import HeldSlice, HeldSlices


class KeptIslands(msgspec.Struct, frozen=True):
    """The list of islands that a resource manager finds after its own restart: the hosts of those that all share, those
    that are to be emptied, the numbers of the next island and host, and what islands are, to who starts them. `drains`
    says until when those may keep what they have, by this process's clock, and why; older lists have none."""

    members: dict[int, tuple[int, ...]]
    draining: tuple[int, ...] = ()
    next_island: int = 0
    next_host: int = 0
    specs: dict[int, bytes] = {}
    drains: dict[int, tuple[float, str]] = {}

    def by_clock(self, later_s: float) -> KeptIslands:
        """The list by a clock that is so many seconds ahead."""
        drains = {island: (until + later_s, reason) for island, (until, reason) in self.drains.items()}
        return msgspec.structs.replace(self, drains=drains)

    @classmethod
    def first(cls, members: Mapping[int, Sequence[int]], specs: Mapping[int, bytes] | None = None) -> KeptIslands:
        """The islands that a runtime begins with."""
        hosts = [host for of_island in members.values() for host in of_island]
        found = {island: tuple(of_island) for island, of_island in members.items()}
        return cls(found, (), max(found, default=-1) + 1, max(hosts, default=-1) + 1, dict(specs or {}))


class SharedIslands:
    """The islands that there are for all, apart from those that tenants have for themselves.

    Args:
        kept: those that there are.
        members: the hosts of all islands; is changed here.
        inventory: its islands that are to be emptied are changed here.
    """

    def __init__(self, kept: KeptIslands, members: dict[int, Sequence[int]], inventory: Inventory) -> None:
        self.numbers = set(kept.members)
        self.members = members
        self.inventory = inventory
        self.next_island, self.next_host = kept.next_island, kept.next_host
        self.specs = dict(kept.specs)
        for island in kept.draining:
            inventory.draining[island], inventory.drained_for[island] = kept.drains.get(island, (math.inf, ""))

    def kept(self) -> KeptIslands:
        """The list for the successor of this resource manager."""
        members = {island: tuple(self.members[island]) for island in sorted(self.numbers)}
        draining = dict(sorted(self.inventory.draining.items()))
        drains = {island: (until, self.inventory.drained_for.get(island, "")) for island, until in draining.items()}
        return KeptIslands(members, tuple(draining), self.next_island, self.next_host, dict(self.specs), drains)

    def add(self, hosts: int, spec: bytes = b"") -> tuple[int, tuple[int, ...]]:
        """Another island; its number, and those of its hosts. A `spec` is kept for who starts islands.

        Raises:
            UsageError: no island has so many hosts.
            TooLarge: the runtime has no numbers left for them.
        """
        if not 1 <= hosts <= limits.MAX_ISLAND_HOSTS:
            raise UsageError(f"an island has 1 to {limits.MAX_ISLAND_HOSTS} hosts, not {hosts}")
        island, first = self.next_island, self._free_hosts(hosts)
        while island in self.members:  # a tenant's
            island += 1
        self.next_island, self.next_host = island + 1, first + hosts
        numbers = tuple(range(first, first + hosts))
        self.members[island] = numbers
        self.numbers.add(island)
        if spec:
            self.specs[island] = spec
        return island, numbers

    def _free_hosts(self, count: int) -> int:
        """The first of so many consecutive numbers that no host has: behind all that were used, while there are any."""
        taken = {host for members in self.members.values() for host in members}
        for first in (*range(self.next_host, limits.MAX_HOSTS - count + 1), *range(limits.MAX_HOSTS - count + 1)):
            if taken.isdisjoint(range(first, first + count)):
                return first
        raise TooLarge(
            f"the runtime has {len(taken)} hosts; {count} more would be over the {limits.MAX_HOSTS} it can have"
        )

    def drain(self, island: int, until: float, reason: str = "") -> None:
        """The island gets no slices from now on. Those that are there at time `until` do not keep it from being
        removed.

        Args:
            reason: for who looks at the status, also where the island cannot be drained.

        Raises:
            UsageError: there is no such island, or no other one that takes slices.
        """
        if island in self.numbers and reason:
            self.inventory.drained_for[island] = reason
        self._check(island, "drained")
        self.inventory.draining[island] = until
        self.inventory.drained_for[island] = reason

    def undrain(self, island: int) -> None:
        """The island gets slices again.

        Raises:
            UsageError: it is not draining.
        """
        if island not in self.inventory.draining:
            raise UsageError(f"island {island} is not draining; there is nothing to take back")
        del self.inventory.draining[island]
        self.inventory.drained_for.pop(island, None)

    def remove(self, island: int, now: float) -> tuple[int, ...]:
        """The island is no more; its hosts, whose processes are to be ended. One that was removed may be again: the
        resource manager may have died before its answer came.

        Raises:
            UsageError: there was no such island; it is the last one; or it has slices, and time to give them up.
        """
        if self.was_removed(island, "") and island not in self.members:
            return ()
        self._check(island, "removed")
        held = [r for r in self.inventory.slices.values() if r.placed.island == island and not r.within]
        if held and now < self.inventory.draining.get(island, math.inf):
            names = ", ".join(f"{r.name or r.placed.mesh.id} of session {r.session}" for r in held[:4])
            more = f" and {len(held) - 4} more" if len(held) > 4 else ""
            raise UsageError(
                f"island {island} still has {len(held)} slice(s): {names}{more}; drain it, and remove it when they are "
                "gone, or when the deadline of the drain is over"
            )
        hosts = tuple(self.members[island])
        self.forget(island)
        return hosts

    def was_removed(self, island: int, tenant: str) -> bool:
        """Whether an island is one that there was for all, and is no more."""
        return not tenant and island not in self.numbers and island < self.next_island

    def there(self, slices: Iterable[HeldSlice]) -> list[HeldSlice]:
        """Those of some slices whose islands were not removed. A tenant's island may have yet to come."""
        return [one for one in slices if not self.was_removed(one.placed.island, "")]

    def hold(self, session: int, found: HeldSlices) -> bool:
        """A session has come back with some slices, and has those whose islands were not removed."""
        return self.inventory.hold(session, self.there(found.slices), found.last_slice)

    def forget(self, island: int) -> None:
        """An island has ended, perhaps a tenant's."""
        self.numbers.discard(island)
        self.members.pop(island, None)
        self.specs.pop(island, None)
        self.inventory.draining.pop(island, None)
        self.inventory.drained_for.pop(island, None)

    def _check(self, island: int, change: str) -> None:
        if island not in self.numbers:
            there = ", ".join(map(str, sorted(self.numbers)))
            raise UsageError(f"there is no island {island} that could be {change}; there are islands {there}")
        joined = self.inventory.islands()  # one that has only been added may never start
        others = [
            other
            for other in (self.numbers - {island}) & joined.keys()
            if self.inventory.state_of(other) in (IslandState.UP, IslandState.AWAY)
        ]
        if not others:
            raise UsageError(
                f"island {island} is the last one that takes slices, and cannot be {change}; add another one first"
            )


def checked_deadline(seconds: float) -> float:
    """Raises `UsageError` unless this is a time to drain an island in: not negative, perhaps without end."""
    if not seconds >= 0.0:
        raise UsageError(f"the deadline of a drain is a number of seconds from now, not {seconds!r}")
    return seconds
