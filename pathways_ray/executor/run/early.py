"""Early launches on a host: calls that clients hand to it themselves, before their scheduler sends them. Pure.

An early launch is the same launch, begun before it is sent: it is told by its session and its first result, which no
other launch has. The launch that comes from the scheduler finds it taken, computes nothing, and is reported with what
became of the early one (`EarlyReports`). So everything else about it (its number, its place, its tenant's account, its
outcome) is decided where it is for every launch, and a host may refuse any early one: it comes again.

An early launch is taken only if nothing can stand against it: no other tenant has work here, it has been compiled, all
of its arguments are here, and none of its session's launches that were called later has come before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import repeat
from typing import Any, Generic, NamedTuple, TypeVar

from pathways_ray.executor.run import instructions as do
from pathways_ray.executor.run.active_launch import ActiveLaunch
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.transport.capabilities import tenant_mark
from pathways_ray.transport.messages import Following, IslandLaunch

MAX_ENDED = 4096
"""Sessions that have ended and are remembered."""

MAX_TAKEN = 96
"""Early launches of a session that its scheduler has not sent yet. A client sends them within milliseconds, and hands
over no more while 64 have no outcome."""

MAX_UNDER_WAY = 8
"""Launches on the device queues behind which none is taken early: another tenant that comes now waits for them."""

MAX_PASSED = 256
"""Launches between a decision and what follows it, as far as the host of that sees them."""

T = TypeVar("T")


class Passed:
    """The launches of the controller's own numbers that were sent, or will not be, by their first results. These are
    negative, and fall, but what was numbered before may be sent later. Of many, those before the last ones count as
    well."""

    def __init__(self) -> None:
        self._last: dict[int, None] = {}
        self._all_from = 0

    def __contains__(self, number: int) -> bool:
        return number >= self._all_from or number in self._last

    def add(self, number: int) -> bool:
        """Adds a number, and returns whether it is a new one."""
        if number in self:
            return False
        self._last[number] = None
        if len(self._last) > MAX_PASSED:
            first = next(iter(self._last))
            del self._last[first]
            self._all_from = min(self._all_from, first)
        return True


class Taken(NamedTuple):
    """An early launch, with the plan of its program."""

    launch: IslandLaunch
    plan: HostPlan

    @property
    def made(self) -> tuple[int, ...]:
        """The buffers that it has made here. Its scheduler knows of those that a launch makes which it sends, of no
        others: when this one is forgotten, they go."""
        return tuple([self.launch.results + number for _, number in self.plan.results])

    def forget(self) -> list[do.Instruction]:
        """Has the host forget what became of it, and free what it made."""
        return [do.Confirm(self.launch.sequence, 0), do.Free(self.launch.session, self.made)]


class EarlyLaunches:
    """The early launches of a host whose scheduler has not sent them yet.

    `allowed` stands for the tenant whose clients may hand over calls; "" for none.
    """

    def __init__(self) -> None:
        self.allowed = ""
        self.taken: dict[tuple[int, int], Taken] = {}
        self.following: dict[int, tuple[Following | None, ...]] = {}
        """What follows launches that are under way by the values that they make."""
        self._newest: dict[int, int] = {}
        self._passed: dict[int, Passed] = {}
        self._ended: dict[int, None] = {}
        """Sessions that have ended; launches of theirs over several islands yet come, cancelled."""
        self.count = self.calls = 0
        """All that were taken, and calls that were to be served, which are numbered together; and the latter."""

    def allow(self, tenant: str) -> list[do.Instruction]:
        """The scheduler says whose clients may hand over calls."""
        self.allowed = tenant
        return [do.SayAllowed(tenant)]

    def called(
        self, called: do.Called, programs: Mapping[int, do.Prepared], active: Mapping[int, ActiveLaunch]
    ) -> list[do.Instruction]:
        """A client asks for the values of a call: it is served, under the same conditions, or has to be launched."""
        prepared = programs.get(called.message.program)
        allowed = called.tenant == self.allowed and called.session not in self._ended
        if prepared is None or active or not allowed:
            return [do.LeaveCall(called)]
        if self.allowed != tenant_mark(prepared.tenant) or not prepared.plan.may_be_early:
            return [do.LeaveCall(called)]
        self.count += 1
        self.calls += 1
        return [do.Serve(called, -self.count)]

    def _has_room(self, session: int) -> bool:
        return sum(other == session for other, _ in self.taken) < MAX_TAKEN

    def take(self, looked: do.LookedAt, prepared: do.Prepared) -> IslandLaunch | None:
        """Takes a call of a program under a number of this host's own, below 0; None where it may not be taken."""
        handed, plan = looked.handed, prepared.plan
        session, message = handed.session, handed.message
        results = message.results
        if not (
            looked.fits
            and looked.under_way <= MAX_UNDER_WAY
            and (handed.tenant == self.allowed or results < 0)  # hosts say that only of what is their tenant's
            and self.allowed == tenant_mark(prepared.tenant)
            and plan.may_be_early
            and (len(self.taken) < MAX_TAKEN or self._has_room(session))
            and self._claim(session, results)
        ):
            return None
        self.count += 1
        launch = IslandLaunch(-self.count, session, message.program, message.arguments, results, inline=message.inline)
        self.taken[session, results] = Taken(launch, plan)
        return launch

    def follow(self, launch: IslandLaunch, plan: HostPlan) -> None:
        """Takes a call as the host that leads the island has, under its number."""
        self.count = -launch.sequence
        self.taken[launch.session, launch.results] = Taken(launch, plan)
        self._note(launch.session, launch.results)

    def _claim(self, session: int, results: int) -> bool:
        """Claims a number: true for who is first. Of a client nothing that it called before can be claimed any more."""
        if session in self._ended:
            return False
        if results < 0:
            return self._passed.setdefault(session, Passed()).add(results)
        if results <= self._newest.get(session, 0):
            return False
        self._newest[session] = results
        return True

    def _note(self, session: int, results: int) -> None:
        """Notes a number that is used, whether that is known or not."""
        self._claim(session, results)

    def sent(self, launch: IslandLaunch, programs: Mapping[int, do.Prepared]) -> tuple[list[do.Instruction], bool]:
        """A launch has come from the scheduler: what becomes of that as which it was taken early, and whether this is
        what was sent. Else it is forgotten, and the launch has yet to begin."""
        session, results, covers, inline = launch.session, launch.results, launch.covers, launch.inline
        early = self.taken.pop((session, results), None) if self.taken and not covers else None
        if early is None or results < 0:  # else it was noted as it was taken
            self._note(session, max(results, *covers) if covers else results)
        if early is None:
            return self._sent_as_one(launch, programs) if covers and self.taken else ([], False)
        begun = early.launch
        same = begun.program == launch.program and begun.arguments == launch.arguments
        if not same or (inline and inline != begun.inline) or launch.cancelled is not None:
            return early.forget(), False
        return [do.Confirm(begun.sequence, launch.sequence)], True

    def _sent_as_one(
        self, launch: IslandLaunch, programs: Mapping[int, do.Prepared]
    ) -> tuple[list[do.Instruction], bool]:
        """Several early launches have come as one, which gives what the last of them made, and nothing else of theirs.

        That they are the same is the client's word: what it gets is its own. But this has to be of the types that the
        controller knows, which counts its bytes and compares later launches with them; and no other island may wait for
        what the program does besides.
        """
        found = [self.taken.pop((launch.session, number), None) for number in launch.covers]
        begun = [early for early in found if early is not None]
        program = programs.get(launch.program)
        if program is None or launch.cancelled is not None or len(begun) < len(found):
            return [one for early in begun for one in early.forget()], False
        given = _types(launch, program.plan)
        made = dict[int, Any]()
        for early in begun:
            made |= _types(early.launch, early.plan)
        known = program.plan.computes and len(given) == len(program.plan.plan.results)
        if not known or not given.items() <= made.items():
            return [one for early in begun for one in early.forget()], False
        *others, last = sorted((early.launch.sequence for early in begun), reverse=True)  # they fall
        gone = tuple([number for early in begun for number in early.made if number not in given])
        return [do.Confirm(last, launch.sequence, tuple(others)), do.Free(launch.session, gone)], True

    def dropped(self, session: int, buffers: Collection[int]) -> list[do.Instruction]:
        """The results of launches are dropped: nobody sends those any more that were taken early, or will yet be handed
        over, as by a client that has cancelled one meanwhile."""
        if (first := min(buffers, default=0)) < 0:
            self._note(session, first)
        if (last := max(buffers, default=0)) < 0 or last > self._newest.get(session, 0):
            self._note(session, last)
        made: list[do.Instruction] = []
        if not self.taken or self.taken.keys().isdisjoint(zip(repeat(session), buffers)):
            return made  # most are results of launches that were sent
        for number in buffers:
            if (early := self.taken.pop((session, number), None)) is not None:
                made += early.forget()
        return made

    def session_ended(self, session: int) -> list[do.Instruction]:
        """The same for all of a session, of which nothing is kept."""
        self._newest.pop(session, None)
        self._passed.pop(session, None)
        self._ended[session] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        found = [self.taken.pop(key) for key in list(self.taken) if key[0] == session]
        return [one for early in found for one in early.forget()]

    def controller_lost(self, waiting: Collection[tuple[int, int]]) -> list[do.Instruction]:
        """Nobody sends them any more, but for those that are `waiting` with the scheduler: clients take what the
        controller has not told them for failed. What they made stays until its successor has heard of it, and drops
        it. Its own numbers may come again."""
        found = [early.launch.sequence for key, early in self.taken.items() if key not in waiting]
        self.taken = {key: early for key, early in self.taken.items() if key in waiting}
        self.following.clear()
        self._passed.clear()
        return [do.Confirm(number, 0) for number in found]

    # --- what follows a value -----------------------------------------------------------------------------------------

    def decided(self, sequence: int, value: int) -> Following | None:
        """A launch has made the value by which its program decides: what follows, where a host may begin it. For any
        thread."""
        follows = self.following.pop(sequence, ())
        return follows[min(max(value, 0), len(follows) - 1)] if follows else None

    def undecided(self, sequence: int) -> None:
        """A launch has failed, and makes no value. For any thread."""
        self.following.pop(sequence, None)


def _types(launch: IslandLaunch, plan: HostPlan) -> dict[int, tuple[ArrayType, Layout]]:
    """The types of the buffers that a launch makes, on all hosts of the island."""
    return {launch.results + number: kind for number, kind in plan.result_types.items()}


def refusal(handed: do.Handed) -> list[do.Instruction]:
    """Tells a client that its call is left to the scheduler; a host that handed it over need not know."""
    return [] if handed.message.results < 0 else [do.RefuseEarly(handed)]


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

    def sent_with(self, numbers: Iterable[int]) -> list[T]:
        """Early launches were sent as one with another, under whose number they are reported: what became of those that
        are over."""
        return [report for number in numbers if (report := self.sent(number, 0)) is not None]
