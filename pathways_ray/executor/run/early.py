"""Early launches on a host: calls that clients hand to it themselves, before their scheduler sends them. Pure.

An early launch is the same launch, begun before it is sent: it is told by its session and its first result, which no
other launch has. The launch that comes from the scheduler finds it taken, computes nothing, and is reported with what
became of the early one (`EarlyReports`). So everything else about it (its number, its place, its tenant's account, its
outcome) is decided where it is for every launch, and a host may refuse any early one: it comes again.

An early launch is taken only if nothing can stand against it: no other tenant has work here, it has been compiled, all
of its arguments are here, and none of its session's launches that were called later has come before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from pathways_ray.executor.run import instructions as do
from pathways_ray.executor.run.active_launch import ActiveLaunch
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.transport.capabilities import tenant_mark
from pathways_ray.transport.messages import IslandLaunch

MAX_TAKEN = 96
"""Early launches of a session that its scheduler has not sent yet. A client sends them within milliseconds, and hands
over no more while 64 have no outcome."""

MAX_UNDER_WAY = 8
"""Launches on the device queues behind which none is taken early: another tenant that comes now waits for them."""

T = TypeVar("T")


class EarlyLaunches:
    """The early launches of a host whose scheduler has not sent them yet.

    `allowed` stands for the tenant whose clients may hand over calls; "" for none.
    """

    def __init__(self) -> None:
        self.allowed = ""
        self.taken: dict[tuple[int, int], IslandLaunch] = {}
        self._newest: dict[int, int] = {}
        self.count = 0
        """All that were taken."""

    def allow(self, tenant: str) -> list[do.Instruction]:
        """The scheduler says whose clients may hand over calls."""
        self.allowed = tenant
        return [do.SayAllowed(tenant)]

    def handed(
        self, handed: do.Handed, programs: Mapping[int, do.Prepared], active: Mapping[int, ActiveLaunch]
    ) -> list[do.Instruction]:
        """A client hands over a call: it is taken, or refused, at once. Nothing stands here, so nothing stops it."""
        prepared = programs.get(handed.message.program)
        if prepared is None or active or not self._may_be(handed, prepared.plan, prepared.tenant):
            return [do.RefuseEarly(handed)]
        return [do.LookAt(handed)]

    def _may_be(self, handed: do.Handed, plan: HostPlan, tenant: str) -> bool:
        """Whether a call may be taken, as far as one can say without a look at its arguments.

        Args:
            tenant: that of its program.
        """
        message = handed.message
        return (
            handed.tenant == self.allowed == tenant_mark(tenant)
            and plan.may_be_early
            and message.results > self._newest.get(handed.session, 0)
            and sum(session == handed.session for session, _ in self.taken) < MAX_TAKEN
        )

    def take(self, looked: do.LookedAt) -> IslandLaunch | None:
        """Takes a call under a number of this host's own, below 0; None where it does not fit."""
        session, message = looked.handed.session, looked.handed.message
        if not looked.fits or looked.under_way > MAX_UNDER_WAY:
            return None
        self.count += 1
        given = message.arguments, message.results
        launch = IslandLaunch(-self.count, session, message.program, *given, inline=message.inline)
        self.taken[session, message.results] = launch
        self._note(launch)
        return launch

    def _note(self, launch: IslandLaunch) -> None:
        if launch.results > self._newest.get(launch.session, 0):
            self._newest[launch.session] = launch.results

    def sent(self, launch: IslandLaunch) -> tuple[int, bool]:
        """A launch has come from the scheduler: the number under which it was taken early, 0 if it was not; and whether
        that is what was sent, or is to be forgotten."""
        self._note(launch)
        early = self.taken.pop((launch.session, launch.results), None) if self.taken else None
        if early is None:
            return 0, False
        same = (early.program, early.arguments) == (launch.program, launch.arguments)
        same &= not launch.inline or launch.inline == early.inline
        return early.sequence, same and launch.cancelled is None

    def dropped(self, session: int, buffers: Iterable[int]) -> list[do.Instruction]:
        """The results of launches are dropped: nobody sends those any more that were taken early."""
        found = [self.taken.pop((session, number), None) for number in buffers] if self.taken else []
        return never_sent(launch.sequence for launch in found if launch is not None)

    def session_ended(self, session: int) -> list[do.Instruction]:
        """The same for all of a session."""
        self._newest.pop(session, None)
        return self.dropped(session, [results for one, results in self.taken if one == session])

    def controller_lost(self) -> list[do.Instruction]:
        """The same for all: clients take what the controller has not told them for failed."""
        found = [launch.sequence for launch in self.taken.values()]
        self.taken.clear()
        return never_sent(found)


def never_sent(numbers: Iterable[int]) -> list[do.Instruction]:
    """Has the host forget what became of early launches."""
    return [do.Confirm(number, 0) for number in numbers]


class EarlyReports(Generic[T]):
    """Joins what became of early launches with the numbers that they are sent under, whichever comes first. For any
    thread: the first puts its word down, and the second finds it, in one step of a dictionary."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, T | None]] = {}

    def __len__(self) -> int:
        return len(self._first)

    def sequence_of(self, number: int) -> int:
        """The number that a launch was sent under; its own while it was not."""
        found = self._first.get(number)
        return found[0] or number if found is not None else number

    def ended(self, number: int, report: T) -> int:
        """An early launch is over: the number to report it under; 0 where it was not sent yet, or never will be."""
        first = self._first.setdefault(number, mine := (0, report))
        if first is mine:
            return 0
        del self._first[number]
        return first[0]

    def sent(self, number: int, sequence: int) -> T | None:
        """An early launch was sent, or, with 0, never will be: what became of it, if it is over."""
        first = self._first.setdefault(number, mine := (sequence, None))
        if first is mine:
            return None
        del self._first[number]
        return first[1]
