"""Rules that concern all hosts of an island at once: barriers, agreement on outcomes, and the order check.

*Input barrier.* A gang of several hosts enters its collective on all of them or on none: each host reports when the
gang's inputs have arrived there, or failed, and the scheduler releases the barrier for all at the same place of their
order.

*Agreement.* Hosts on which a launch succeeded while it failed on others have run a gang that those have not: the values
that their collectives exchange from then on are worthless.

*Order check*, a debugging aid. Each host reports its gangs in the order in which it enqueued them. A gang that is first
on all its hosts is right and forgotten. Two hosts that each have a common gang first, but not the same one, have seen
the two in different orders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pathways_ray.scheduler.state import Decision, InputBarrier, Outstanding, PartialFailure, RestartIsland
from pathways_ray.transport.messages import BarrierReached, BarrierReleased, Gang, IslandLaunchFailed, Ordered


def reach_barrier(record: Outstanding, message: BarrierReached, hosts: frozenset[int]) -> BarrierReleased | None:
    """Notes that a host has reached an input barrier; returns the release once all `hosts` have."""
    barrier = record.barriers.get(message.barrier)
    if barrier is None:
        barrier = record.barriers[message.barrier] = InputBarrier()
    barrier.reached.add(message.host)
    if barrier.failure is None:
        barrier.failure = message.failure
    if barrier.reached != hosts:
        return None
    del record.barriers[message.barrier]
    return BarrierReleased(message.sequence, message.barrier, barrier.failure)


def disagree(record: Outstanding) -> bool:
    """Whether a launch that failed on some hosts succeeded on one that must have failed with them."""
    failed = record.failed
    return failed is not None and record.succeeded and not failed.affected <= record.hosts | failed.hosts


def disagreement(host: int, failed: PartialFailure) -> RestartIsland:
    """The restart that follows from the report of a host that disagrees."""
    reason = f"the hosts disagree on a launch: {failed.report.failure.message}"
    return RestartIsland(host, reason, launch=failed.report.sequence)


def report_of(record: Outstanding) -> IslandLaunchFailed:
    """The report of a launch that is over everywhere, and failed on some hosts. One on which it succeeded has consumed
    what it was to; that may be any argument, as far as is known here."""
    assert record.failed is not None
    report = record.failed.report
    return msgspec.structs.replace(report, consumed=record.launch.arguments) if record.succeeded else report


class HostGang(NamedTuple):
    """A gang that a host, by its place in the island, has next."""

    host: int
    gang: Gang


@dataclass
class OrderCheck:
    """Gangs that not all of their hosts have reported yet, by host (its place among those of the island). Those of
    launches up to number `since` may have been reported to another scheduler."""

    island: int = 0
    unmatched: dict[int, deque[Gang]] = field(default_factory=dict)
    since: int = -1

    def clear(self) -> None:
        """The hosts start again."""
        self.unmatched.clear()

    def compare(
        self, outstanding: Mapping[int, Outstanding], hosts: frozenset[int], host: int, message: Ordered
    ) -> list[Decision]:
        """The restart that follows when one of the island's `hosts` enqueued gangs in another order than others: these
        have corrupted each other's results already."""
        members = sorted(hosts)
        clash = self.add(members.index(host), message.gangs)
        if clash is None:
            return []
        records = [outstanding.get(gang.sequence) for _, gang in clash]
        tenants = {record.usage.tenant if record is not None else "" for record in records}
        launch = clash[0].gang.sequence if len(tenants) == 1 and "" not in tenants else 0
        # Programs are named where their tenant alone is told. Numbers of launches all may know.
        one, other = (
            f"host {members[place]} had {_gang_text(gang, record if launch else None)}"
            for (place, gang), record in zip(clash, records, strict=True)
        )
        reason = f"hosts of island {self.island} enqueued gangs in different orders: {one} where {other}"
        return [RestartIsland(host, reason, "OrderMismatch", launch)]

    def add(self, host: int, gangs: Iterable[Gang]) -> tuple[HostGang, HostGang] | None:
        """Notes the gangs that a host enqueued next, by its place in the island. Returns two gangs that two hosts have
        in different orders, if there are such."""
        self.unmatched.setdefault(host, deque()).extend(gang for gang in gangs if gang.sequence > self.since)
        moved = True
        while moved:
            moved = False
            for mine in self.unmatched.values():
                while mine and (members := self._first_of(mine[0])) is not None:
                    for queue in members:
                        queue.popleft()
                    moved = True
        return self._clash()

    def _first_of(self, gang: Gang) -> list[deque[Gang]] | None:
        """The queues of a gang's hosts if it is first in all of them."""
        members = [self.unmatched.get(host) for host in _hosts(gang)]
        return [q for q in members if q] if all(q and q[0] == gang for q in members) else None

    def _clash(self) -> tuple[HostGang, HostGang] | None:
        for host, mine in self.unmatched.items():
            if not mine:
                continue
            for other in _hosts(mine[0]):
                theirs = self.unmatched.get(other)
                if theirs and theirs[0] != mine[0] and host in _hosts(theirs[0]):
                    return HostGang(host, mine[0]), HostGang(other, theirs[0])
        return None


def _gang_text(gang: Gang, record: Outstanding | None) -> str:
    program = f" of program {record.program.name!r}" if record is not None else ""
    return f"gang {gang.gang} of launch {gang.sequence}{program}"


def _hosts(gang: Gang) -> list[int]:
    return [k for k in range(gang.hosts.bit_length()) if gang.hosts >> k & 1]
