"""Admission: whether the next launch of a session may go to its islands.

A session's calls are worked off in the order in which it made them, with one exception. A launch whose hosts are away,
or have not compiled its program, or lack an argument that was uploaded, is deferred; what the session called later goes
on where it has nothing to do with it: on other islands, with other buffers. So each island still sees a session's
launches in the order of its calls, and a buffer is freed after the last launch that was called with it.

Launches over several islands need room on each of them (`CrossIslandWindow`). `lifecycle.LAUNCH_LIFE` has the states of
a launch; this file applies those before `IN_FLIGHT`, and `refusals.REFUSALS` is where further rules plug in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from pathways_ray import limits
from pathways_ray.controller import buffers, quotas
from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.dispatch import Dispatch
from pathways_ray.controller.hosts import Hosts
from pathways_ray.controller.lifecycle import LaunchEvent, LaunchState, after
from pathways_ray.controller.memory import Memory
from pathways_ray.controller.outcomes import Outcomes
from pathways_ray.controller.preparation import Preparation
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.refusals import REFUSALS
from pathways_ray.controller.state import Send, Session, Tables
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import Free, Launch, Put

MAX_DEFERRED_CALLS = 64
"""Deferred launches beyond which nothing passes them: they are looked at again with every event."""


MAX_DEFERRED_NUMBERS = 8192
"""Buffers of deferred launches beyond which nothing passes them, for the same reason."""


class WaitingLaunch(msgspec.Struct, eq=False):
    """A launch that has not been admitted; `since` is when it was called."""

    message: Launch
    since: float
    state: LaunchState = LaunchState.WAITING

    def move(self, event: LaunchEvent) -> None:
        self.state = after(self.state, event)


Call: TypeAlias = WaitingLaunch | Put | Free


@dataclass(slots=True)
class Backlog:
    """Calls of a session that wait.

    `waiting` keeps their order behind one that cannot be admitted. `deferred` were called before these and may be
    passed; `islands` and `numbers` (of buffers) are what they lay claim to. When it is `stuck`, the first deferred one
    has to wait, and all behind it; when it is `full`, nothing more is taken from the client until half of it is gone.
    """

    waiting: deque[Call] = field(default_factory=deque)
    deferred: list[WaitingLaunch | Free] = field(default_factory=list)
    islands: set[int] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    stuck: bool = False
    full: bool = False

    def __len__(self) -> int:
        return len(self.waiting) + len(self.deferred)

    def launches(self) -> list[WaitingLaunch]:
        return [call for call in (*self.deferred, *self.waiting) if isinstance(call, WaitingLaunch)]

    @property
    def may_be_passed(self) -> bool:
        """Whether a further call may be looked at: deferred ones are looked at again with every event."""
        return not self.stuck and len(self.deferred) < MAX_DEFERRED_CALLS and len(self.numbers) < MAX_DEFERRED_NUMBERS

    def take_deferred(self) -> deque[Call]:
        """Takes out the deferred calls, to be looked at again."""
        calls: deque[Call] = deque(self.deferred)
        self.deferred = []
        self.stuck = False
        self.islands.clear()
        self.numbers.clear()
        return calls

    def defer(
        self,
        launch: WaitingLaunch,
        islands: Collection[int],
        results: int,
        why: LaunchEvent = LaunchEvent.HOSTS_ABSENT,
    ) -> None:
        """Defers a launch on these islands that makes `results` results."""
        launch.move(why)
        message = launch.message
        self.deferred.append(launch)
        self.islands.update(islands)
        self.numbers.update(message.arguments, range(message.results, message.results + results))

    def claims(self, launch: Launch, islands: Collection[int], results: int) -> bool:
        """Whether a later launch has to do with a deferred one."""
        return not (
            self.islands.isdisjoint(islands)
            and self.numbers.isdisjoint(launch.arguments)
            and self.numbers.isdisjoint(range(launch.results, launch.results + results))
        )

    def may_free(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """The buffers that may be freed at once; the others are freed after the launches that claim them."""
        claimed = tuple(n for n in numbers if n in self.numbers)
        if not claimed:
            return numbers
        self.deferred.append(Free(claimed))
        return tuple(n for n in numbers if n not in self.numbers)


class Admission:
    """The calls of all sessions before they take effect.

    Args:
        max_in_flight: launches of one session without an outcome; further ones wait.
        window: its policy orders launches over several islands.
    """

    def __init__(
        self,
        tables: Tables,
        preparation: Preparation,
        hosts: Hosts,
        dispatch: Dispatch,
        outcomes: Outcomes,
        window: CrossIslandWindow,
        max_in_flight: int,
    ) -> None:
        self.tables = tables
        self.preparation = preparation
        self.hosts = hosts
        self.dispatch = dispatch
        self.outcomes = outcomes
        self.window = window
        self.max_in_flight = max_in_flight
        self.memory = Memory(tables)
        self.backlogs: dict[int, Backlog] = {}
        self.relieved: list[int] = []
        """Sessions whose backlog was full, and is so no more."""

    def open(self, session: int) -> None:
        self.backlogs[session] = Backlog()

    def close(self, session: Session) -> list[Send]:
        """Forgets the calls of a session; those that it held back may go."""
        self.window.queued.pop(session.id, None)
        self.memory.waiting.pop(session.id, None)
        for launch in self.backlogs.pop(session.id).launches():
            launch.move(LaunchEvent.SESSION_CLOSED)
            self.tables.ledger.leave(session.usage)
        return self.memory_freed() + self.release()

    def call(self, session: Session, message: Launch | Put | Free) -> list[Send]:
        """Takes a call of a client; it has its effect now, or when those before it have had theirs."""
        backlog = self.backlogs[session.id]
        call: Call
        if isinstance(message, Launch):
            refused = quotas.launches(session)
            if refused is not None:
                return self.outcomes.refuse(session, message, refused)
            self.tables.ledger.enter(session.usage)
            call = WaitingLaunch(message, self.tables.now)
        else:
            call = message
        if backlog.waiting or not backlog.may_be_passed:
            backlog.waiting.append(call)
            return []
        commands = self._step(session, backlog, call)
        if commands is None:
            backlog.waiting.append(call)
            return []
        return commands

    def cancel(self, session: Session, number: int, failure: Failure) -> list[Send] | None:
        """Ends a launch that waits here; None when there is no such launch."""
        backlog = self.backlogs[session.id]
        for calls in (backlog.deferred, backlog.waiting):
            for call in calls:
                if isinstance(call, WaitingLaunch) and call.message.launch == number:
                    calls.remove(call)
                    commands = self._refuse(session, call, failure)
                    return commands + self.resume((session,))
        return None

    def resume(self, sessions: Iterable[Session]) -> list[Send]:
        """Lets waiting launches go on after an event that may have made room for them, first those in the window."""
        commands = self.release()
        for session in sessions:
            backlog = self.backlogs.get(session.id)
            if backlog:
                commands += self._advance(session, backlog)
        return commands

    def with_deferred(self) -> list[Session]:
        """Sessions that have deferred launches."""
        return [self.tables.sessions[session] for session, backlog in self.backlogs.items() if backlog.deferred]

    def release(self) -> list[Send]:
        """Lets sessions go on whose next launch waited for room on several islands, in the policy's order."""
        commands: list[Send] = []
        while self.window.queued and (number := self.window.next_session(self.tables.now)) is not None:
            commands += self._work_off(self.tables.sessions[number], self.backlogs[number])
        return commands

    def _advance(self, session: Session, backlog: Backlog) -> list[Send]:
        was_queued = session.id in self.window.queued
        commands = self._work_off(session, backlog)
        if was_queued and session.id not in self.window.queued:
            commands += self.release()  # those it held back may go
        return commands

    def _work_off(self, session: Session, backlog: Backlog) -> list[Send]:
        """Takes the calls of a session in order, deferred ones first, until one has to wait."""
        commands: list[Send] = []
        again = backlog.take_deferred() if backlog.deferred else None
        for calls in (again, backlog.waiting):
            while calls and (calls is again or backlog.may_be_passed):
                done = self._step(session, backlog, calls[0])
                if done is None:
                    backlog.deferred += again or ()  # type: ignore[arg-type]
                    backlog.stuck = bool(again)
                    break
                calls.popleft()
                commands += done
            if backlog.stuck:
                break
        if backlog.full and len(backlog.waiting) <= limits.MAX_BACKLOG_CALLS // 2:
            backlog.full = False
            self.relieved.append(session.id)
        return commands

    def _step(self, session: Session, backlog: Backlog, call: Call) -> list[Send] | None:
        """Gives a call its effect, or defers it; None when it has to wait, and all that was called after it."""
        if isinstance(call, WaitingLaunch):
            return self._admit(session, backlog, call)
        if isinstance(call, Put):
            self.memory.changed()
            return buffers.put(self.tables, session, call)
        commands = buffers.free(session, backlog.may_free(call.buffers) if backlog.deferred else call.buffers)
        return commands + self.memory_freed(session.id) if self.memory.waiting else commands

    def memory_freed(self, session: int = 0) -> list[Send]:
        """Lets launches go on that waited for memory, but for those of the session that freed some: its turn comes."""
        waiting = [self.tables.sessions[other] for other in self.memory.waiting if other != session]
        return self.resume(waiting) if waiting else []

    def _admit(self, session: Session, backlog: Backlog, launch: WaitingLaunch) -> list[Send] | None:
        message = launch.message
        program = session.programs.get(message.program)
        if program is None:
            text = f"launch {message.launch} names program {message.program}, never registered"
            return self._refuse(session, launch, Failure("WireError", text))
        # Before it may have to wait for others, so that hosts compile meanwhile.
        asked = self.preparation.asked(program) if program.unsent or not program.is_ready else []
        if backlog.deferred and self._is_blocked(session, backlog, message, program):
            backlog.defer(launch, program.islands, program.result_count)
            return asked
        for refusal in REFUSALS:
            if (failure := refusal(self.tables, session, program, message)) is not None:
                return asked + self._refuse(session, launch, failure)
        if session.arriving and not session.arriving.keys().isdisjoint(message.arguments):
            return asked + self._await_uploads(session, backlog, launch, program)
        if asked or self._is_unprepared(program):
            failure = self.hosts.absence(program)
            if failure is not None:
                return asked + self._refuse(session, launch, failure)
            backlog.defer(launch, program.islands, program.result_count)
            return asked
        if session.in_flight >= self.max_in_flight:
            return None
        room = self.memory.take(session, program)
        if isinstance(room, Failure):
            return self._refuse(session, launch, room)
        if not room:
            launch.move(LaunchEvent.MEMORY_FULL)
            return None
        if program.cross_island and not self.window.may_start(
            session.id, session.usage, tuple(program.islands), self.tables.now
        ):
            launch.move(LaunchEvent.ISLANDS_FULL)
            return None
        record, commands = self.dispatch.start(session, program, message, launch.state)
        if program.cross_island:
            self.window.start(program.islands)
        if not record.pending:
            return self.outcomes.settle([record])[0]
        return commands

    def _await_uploads(
        self, session: Session, backlog: Backlog, launch: WaitingLaunch, program: PlannedProgram
    ) -> list[Send]:
        """Defers a launch until all hosts have what was uploaded for it, up to a limit. That counts from its call: of
        many, each would wait behind the one before."""
        if self.tables.now - launch.since > buffers.UPLOAD_LIMIT_S:
            failure, commands = buffers.overdue(session, launch.message.arguments)
            return commands + self._refuse(session, launch, failure)
        backlog.defer(launch, program.islands, program.result_count, LaunchEvent.ARGUMENTS_ABSENT)
        return []

    def _is_unprepared(self, program: PlannedProgram) -> bool:
        """Whether a program cannot be launched now, and may be later."""
        return (
            not program.is_ready
            or bool(program.unsent)
            or (bool(self.tables.away) and bool(self.hosts.away(program)))
            or self.preparation.must_wait(program)
        )

    def _is_blocked(self, session: Session, backlog: Backlog, launch: Launch, program: PlannedProgram) -> bool:
        """Whether a launch has to do with a deferred one, and has to wait behind it."""
        # A buffer that is not there yet must not be waited for: it might come to be, as another one's.
        known = all(
            n in session.buffers or n in backlog.numbers or session.why_refused(n) is not None for n in launch.arguments
        )
        return known and backlog.claims(launch, program.islands, program.result_count)

    def _refuse(self, session: Session, launch: WaitingLaunch, failure: Failure) -> list[Send]:
        launch.move(LaunchEvent.REFUSED)
        self.window.queued.pop(session.id, None)
        self.tables.ledger.leave(session.usage)
        return self.outcomes.refuse(session, launch.message, failure)
