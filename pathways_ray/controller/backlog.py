"""The calls of a session that wait at the controller, in the order in which it made them.

A launch whose hosts are away, or have not compiled its program, or lack an argument that was uploaded, is *deferred*:
what the session called later may pass it where it has nothing to do with it, on other islands, with other buffers. A
launch of a higher priority passes those that wait (`scheduler.priorities`), and deferred ones on its islands too. A
buffer is freed after the last launch that was called with it.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from pathways_ray import limits
from pathways_ray.controller import quotas
from pathways_ray.controller.lifecycle import LaunchEvent, LaunchState, after
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import Session, Whole
from pathways_ray.scheduler.priorities import MAX_PASSED, Accesses, Fixed, passing, place_of, rank_of
from pathways_ray.transport.messages import (
    Free,
    Launch,
    Put,
    Unregister,
    inline_bytes,
)

MAX_DEFERRED_CALLS = 64
"""Deferred launches beyond which nothing passes them: they are looked at again with every event."""


MAX_DEFERRED_NUMBERS = 8192
"""Buffers that deferred launches name, each as often as it is named, beyond which nothing passes them, for the same
reason."""


class WaitingLaunch(msgspec.Struct, eq=False):
    """A launch that has not been admitted; `since` is when it was called, `counted` the same by `Tables.counted`.
    `whole` is set once it goes in parts."""

    message: Launch
    since: float
    counted: float
    state: LaunchState = LaunchState.WAITING
    whole: Whole | None = None

    def move(self, event: LaunchEvent) -> None:
        self.state = after(self.state, event)

    @property
    def rank(self) -> float:
        """The time at which it counts as called."""
        return rank_of(self.since, self.message.priority)


Call: TypeAlias = WaitingLaunch | Put | Free | Unregister


def programs_of(calls: Iterable[Call], programs: Mapping[int, PlannedProgram]) -> list[PlannedProgram]:
    """The programs of launches among calls."""
    found = [programs.get(call.message.program) for call in calls if isinstance(call, WaitingLaunch)]
    return [program for program in found if program is not None]


@dataclass(slots=True)
class Backlog:
    """Calls of a session that wait.

    `waiting` keeps their order behind one that cannot be admitted. `deferred` were called before these and may be
    passed; `islands` and `numbers` (of buffers) are what they lay claim to, and `named` counts each number as often as
    they name it. When it is `stuck`, the first deferred one has to wait, and all behind it; when it is `full`, nothing
    more is taken from the client until half of it is gone. Some of those that wait may be `prioritized`. `carried` are
    the bytes of arguments that those that wait carry.
    """

    waiting: deque[Call] = field(default_factory=deque)
    deferred: list[WaitingLaunch | Free | Unregister] = field(default_factory=list)
    islands: set[int] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    named: int = 0
    stuck: bool = False
    full: bool = False
    prioritized: bool = False
    carried: int = 0

    @property
    def size(self) -> int:
        """The calls that wait."""
        return len(self.waiting) + len(self.deferred)

    def launches(self) -> list[WaitingLaunch]:
        return [call for call in (*self.deferred, *self.waiting) if isinstance(call, WaitingLaunch)]

    def uploads(self) -> set[int]:
        """The buffers that are being uploaded, and not entered yet."""
        return {call.buffer for call in self.waiting if isinstance(call, Put)}

    def coming(self, programs: Mapping[int, PlannedProgram]) -> int | None:
        """The bytes that deferred launches will take, as they count against a quota; None without such."""
        messages = [call.message for call in self.deferred if isinstance(call, WaitingLaunch)]
        found = [(programs.get(message.program), message) for message in messages]
        return sum(quotas.taken_bytes(program, message) for program, message in found if program) if found else None

    def first(self) -> WaitingLaunch | None:
        """The launch that was called first."""
        return next((call for call in (*self.deferred, *self.waiting) if isinstance(call, WaitingLaunch)), None)

    def enter(self, call: Call, programs: Mapping[int, PlannedProgram], short: bool = False) -> None:
        """Has a call wait: behind the others, or, with its priority, before those that it passes. Nothing passes what
        gives memory back where that is `short`: there would be no room for what it passes."""
        self.prioritized = bool(self.waiting) and self.prioritized
        self._count(call)
        if isinstance(call, WaitingLaunch) and (self.prioritized or call.message.priority):
            self.prioritized = True
            own = _accesses_of(programs, call)
            if isinstance(own, Accesses):
                place = place_of(own, self.waiting, functools.partial(_accesses_of, programs, short=short))
                return self.waiting.insert(place, call)
        return self.waiting.append(call)

    def append(self, call: Call) -> None:
        """Has a call wait that has been looked at, and cannot be admitted."""
        self._count(call)
        self.waiting.append(call)

    def _count(self, call: Call) -> None:
        if isinstance(call, WaitingLaunch):
            self.carried += inline_bytes(call.message)

    def left(self, call: Call) -> None:
        """A call was taken out of `waiting`."""
        if isinstance(call, WaitingLaunch):
            self.carried -= inline_bytes(call.message)

    def is_over(self, part: int = 1) -> bool:
        """Whether more wait than a session may have wait here, or than one part in `part` of that."""
        calls = len(self.waiting) >= limits.MAX_BACKLOG_CALLS // part + (part > 1)
        return calls or self.carried > limits.MAX_BACKLOG_BYTES // part

    def looks(self, launch: Launch) -> int:
        """The calls at most that a launch looks at to find its place here."""
        return min(len(self.waiting), MAX_PASSED) if self.prioritized or launch.priority else 0

    @property
    def may_be_passed(self) -> bool:
        """Whether a further call may be looked at: deferred ones are looked at again with every event."""
        return not self.stuck and len(self.deferred) < MAX_DEFERRED_CALLS and self.named < MAX_DEFERRED_NUMBERS

    def take_out(self, number: int) -> WaitingLaunch | None:
        """Takes out a launch that is cancelled."""
        for call in self.launches():
            if call.message.launch == number:
                if call in self.deferred:
                    self.deferred.remove(call)
                    if not self.deferred:
                        self.take_deferred()  # nothing is left that keeps others from passing
                else:
                    self.waiting.remove(call)
                    self.left(call)
                return call
        return None

    def take_deferred(self) -> deque[Call]:
        """Takes out the deferred calls, to be looked at again."""
        calls: deque[Call] = deque(self.deferred)
        self.deferred = []
        self.stuck = False
        self.islands.clear()
        self.numbers.clear()
        self.named = 0
        return calls

    def defer(
        self, launch: WaitingLaunch, program: PlannedProgram, why: LaunchEvent = LaunchEvent.HOSTS_ABSENT
    ) -> None:
        """Defers a launch of a program."""
        launch.move(why)
        message = launch.message
        self.deferred.append(launch)
        self.islands.update(program.islands)
        self.numbers.update(message.arguments, range(message.results, message.results + program.result_count))
        self.numbers.discard(0)  # stands for what it carries
        self.named += len(message.arguments) + program.result_count

    def claims(self, launch: Launch, islands: Collection[int], results: int) -> bool:
        """Whether a later launch has to do with a deferred one."""
        return not (
            self.islands.isdisjoint(islands)
            and self.numbers.isdisjoint(launch.arguments)
            and self.numbers.isdisjoint(range(launch.results, launch.results + results))
        )

    def blocks(self, session: Session, waiting: WaitingLaunch, program: PlannedProgram) -> bool:
        """Whether a launch has to do with a deferred one, and has to wait behind it."""
        launch = waiting.message
        # A buffer that is not there yet must not be waited for: it might come to be, as another one's.
        known = all(
            n in session.buffers or n in self.numbers or not n or session.why_refused(n) is not None
            for n in launch.arguments
        )
        if known and launch.priority:
            passes = passing(_accesses(waiting, program))
            ahead = [one for one in self.deferred if isinstance(one, WaitingLaunch)]
            programs = [session.programs.get(one.message.program) for one in ahead]
            return not all(p and passes(_accesses(one, p)) for one, p in zip(ahead, programs, strict=True))
        return known and self.claims(launch, program.islands, program.result_count)

    def may_free(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """The buffers that may be freed at once; the others are freed after the launches that claim them."""
        claimed = tuple(n for n in numbers if n in self.numbers)
        if not claimed:
            return numbers
        self.deferred.append(Free(claimed))
        self.named += len(claimed)
        return tuple(n for n in numbers if n not in self.numbers)

    def may_unregister(self, message: Unregister) -> bool:
        """Whether a program may be forgotten at once; else it is after the deferred launches of it."""
        if message.program not in [one.message.program for one in self.deferred if isinstance(one, WaitingLaunch)]:
            return True
        self.deferred.append(message)
        return False


def _accesses_of(programs: Mapping[int, PlannedProgram], call: Call, short: bool = False) -> Accesses | Fixed:
    """The accesses of a call, which decide its place. Nothing passes one that is queued already for room elsewhere."""
    match call:
        case Free() if short:
            return Fixed.BARRIER
        case Free() | Unregister():
            return Fixed.FOLLOWS
        case Put():
            return Accesses(math.inf, (), range(call.buffer, call.buffer + 1))
    program = programs.get(call.message.program)
    if program is None or call.whole is not None or call.state is not LaunchState.WAITING:
        return Fixed.BARRIER
    return _accesses(call, program)


def _accesses(call: WaitingLaunch, program: PlannedProgram) -> Accesses:
    message = call.message
    results = range(message.results, message.results + program.result_count)
    return Accesses(call.rank, message.arguments, results, program.donated)
