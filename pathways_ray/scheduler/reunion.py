"""Reunion: the hosts of an island whose scheduler has died come to one point again, and keep what they hold.

What each of them has heard is the beginning of one sequence (`executor.run.journal`). Once all are here, those that
have heard less get the rest of it from one that has heard the most: so a gang that any host may have entered is entered
by all. What none has heard of died with the scheduler. Nobody waits for these launches: the controller failed them. But
what they hold and enter is the same on all hosts when the next one comes.

Pure: the scheduler's core tells it of hosts, and sends what it finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pathways_ray.scheduler.membership import Membership
from pathways_ray.transport import messages as wire

OF_LAUNCHES = (
    wire.Done,
    wire.IslandLaunchFailed,
    wire.BarrierReached,
    wire.Enqueued,
    wire.Decided,
    wire.Ordered,
)
"""What hosts say of launches; it waits until it is known which there are."""

UNWANTED = (wire.Drop, wire.DropSession, wire.DropProgram, wire.Abort)
"""What a host must not hear before others have heard of launches that need it. The controller says it again once the
hosts have said what they hold."""


class Met(NamedTuple):
    """All hosts are here. `catch_up` has what not all have heard; `launches` by number, in their order, may not be over
    on some hosts."""

    catch_up: wire.CatchUp
    launches: Mapping[int, tuple[wire.IslandLaunch, set[int]]]


class Reunion:
    """Hosts that come to a scheduler with what they have heard from the one before.

    `heard` has it by host. `said` are their reports of launches since, which wait.
    """

    def __init__(self, members: Membership) -> None:
        self.members = members
        self.heard: dict[int, wire.Heard] = {}
        self.said: list[tuple[int, int, wire.FromHost]] = []

    def joined(self, hello: wire.HostUp) -> bool:
        """A host has joined. Returns whether it has to wait for the others before the controller hears of it."""
        if hello.holds is None or hello.holds.heard is None:
            return False
        self.heard[hello.host] = hello.holds.heard
        self.members.part()
        return True

    def clear(self) -> None:
        """The hosts start again."""
        self.heard.clear()
        self.said.clear()
        self.members.unite()

    def meet(self) -> Met | str | None:
        """Says what is to be done now that a host has joined; None while others are missing. A text says why the hosts
        have to start again."""
        members = self.members
        if not members.apart or members.present != members.hosts:
            return None
        nothing = wire.Heard()
        found = {host: self.heard.get(host, nothing) for host in sorted(members.hosts)}
        furthest = max(found.values(), key=lambda heard: heard.count)
        first = min(heard.count for heard in found.values())
        position = furthest.count - sum(not isinstance(one, wire.Program) for one in furthest.last)
        if first < position:
            return f"a host of its island has heard {furthest.count - first} messages less than another one has"
        missing: list[wire.IslandLaunch | wire.BarrierReleased | wire.Abort | wire.Program] = []
        launches: dict[int, tuple[wire.IslandLaunch, set[int]]] = {}
        for host, heard in found.items():
            for launch in heard.active:
                launches.setdefault(launch.sequence, (launch, set()))[1].add(host)
        for one in furthest.last:
            position += not isinstance(one, wire.Program)
            if position > first or (position == first and isinstance(one, wire.Program)):
                missing.append(one)
            if isinstance(one, wire.IslandLaunch) and one.first == 0:
                launches.pop(one.sequence, None)  # those before come first
                launches[one.sequence] = one, set(members.hosts)
        self.heard.clear()
        closed = max(heard.closed for heard in found.values())
        return Met(wire.CatchUp(first, _needed(missing), closed), launches)


def _needed(
    missing: list[wire.IslandLaunch | wire.BarrierReleased | wire.Abort | wire.Program],
) -> tuple[wire.IslandLaunch | wire.BarrierReleased | wire.Abort | wire.Program, ...]:
    """Without the programs that are not launched: hosts may have a part in these, and get them once more. Where one is
    launched all that have a part in it had it compiled."""
    launched = {one.program for one in missing if isinstance(one, wire.IslandLaunch)}
    return tuple(one for one in missing if not isinstance(one, wire.Program) or one.program in launched)
