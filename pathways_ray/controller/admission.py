"""Admission: whether the next launch of a session may go to its islands.

A session's calls are worked off in the order in which it made them, but for those that pass a deferred one, and
launches that pass others by their priority (`Backlog`). So each island sees the other launches of a session in the
order of its calls.

Launches over several islands need room on each of them (`CrossIslandWindow`). `lifecycle.LAUNCH_LIFE` has the states of
a launch; this file applies those before `IN_FLIGHT`, and `refusals.refusal_of` is where further rules plug in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from pathways_ray import limits
from pathways_ray.controller import buffers, quotas
from pathways_ray.controller.backlog import Backlog, Call, WaitingLaunch, programs_of
from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.decisions import Decisions, Started
from pathways_ray.controller.dispatch import Dispatch
from pathways_ray.controller.hosts import Hosts
from pathways_ray.controller.lifecycle import LaunchEvent
from pathways_ray.controller.memory import Memory
from pathways_ray.controller.outcomes import Outcomes
from pathways_ray.controller.preparation import Preparation
from pathways_ray.controller.programs import BufferType, PlannedProgram
from pathways_ray.controller.refusals import failed_argument, refusal_of
from pathways_ray.controller.state import InFlight, Send, Session, Tables
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import Free, Launch, Put, Unregister


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
        launch_limit_s: float = limits.LAUNCH_LIMIT_S,
    ) -> None:
        self.tables = tables
        self.preparation = preparation
        self.hosts = hosts
        self.dispatch = dispatch
        self.outcomes = outcomes
        self.window = window
        self.max_in_flight = max_in_flight
        self.memory = Memory(tables)
        self.decisions = Decisions(tables, self._start, launch_limit_s)
        self.backlogs: dict[int, Backlog] = {}
        self.relieved: list[int] = []
        """Sessions whose backlog was full, and is so no more."""
        self.asked: list[Send] = []
        """Programs for hosts that have started again, asked for by launches that wait for something else."""

    def open(self, session: int) -> None:
        self.backlogs[session] = Backlog()

    def close(self, session: Session) -> list[Send]:
        """Forgets the calls of a session; those that it held back may go."""
        self.memory.closed(session.id)
        for launch in self.backlogs.pop(session.id).launches():
            self._waits_no_more(session, launch)
            launch.move(LaunchEvent.SESSION_CLOSED)
            self.tables.ledger.leave(session.usage)
        return self.memory_freed() + self.release()

    def call(self, session: Session, message: Launch | Put | Free | Unregister) -> list[Send]:
        """Takes a call of a client; it has its effect now, or when those before it have had theirs."""
        backlog = self.backlogs[session.id]
        if type(message) is Free and not (backlog.waiting or backlog.deferred or self.memory.waiting):
            return buffers.free(self.tables, session, message.buffers)  # nearly always
        call: Call
        if isinstance(message, Launch):
            refused = quotas.launches(session) if session.tenant.quota.launches is not None else None
            if refused is None and message.inline:
                refused = quotas.carried(message)
            if refused is not None:
                return self.outcomes.refuse(session, message, refused)
            self.tables.ledger.enter(session.usage)
            call = WaitingLaunch(message, self.tables.now, self.tables.counted)
        else:
            call = message
        if backlog.waiting or (backlog.deferred and not backlog.may_be_passed):
            backlog.enter(call, session.programs, self._is_short(session, backlog, call))
            return []
        commands = self._step(session, backlog, call)
        if commands is None:
            backlog.append(call)
            return self._take_asked()
        return commands

    def put(self, session: Session, message: Put, alike: dict[BufferType, Mapping[int, int]]) -> list[Send]:
        """The same for an upload of several that came together, of which `buffers.put` notes which are `alike`."""
        backlog = self.backlogs[session.id]
        waits = backlog.waiting or (backlog.deferred and not backlog.may_be_passed)
        if waits or session.tenant.quota.device_bytes is not None:
            return self.call(session, message)
        self.memory.changed()
        return buffers.put(self.tables, session, message, None, alike) or []

    def resume(self, sessions: Iterable[Session]) -> list[Send]:
        """Lets waiting launches go on after an event that may have made room for them, first those in the window."""
        commands = self.release() if self.window.queued else []
        for session in sessions:
            backlog = self.backlogs.get(session.id)
            if backlog is not None and (backlog.waiting or backlog.deferred):
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
        left = self.window.left
        commands = self._work_off(session, backlog)
        if self.window.left > left:
            commands += self.release()  # those it held back may go
        return commands

    def _work_off(self, session: Session, backlog: Backlog) -> list[Send]:
        """Takes the calls of a session in order, deferred ones first, until one has to wait."""
        commands: list[Send] = []
        # What its calls free is for others once it is through with them: their turn may be its own again.
        self.memory.working = True
        try:
            again = backlog.take_deferred() if backlog.deferred else None
            for calls in (again, backlog.waiting):
                while calls and (calls is again or backlog.may_be_passed):
                    done = self._step(session, backlog, calls[0])
                    if done is None:
                        backlog.deferred += again or ()  # type: ignore[arg-type]
                        backlog.stuck = bool(again)
                        break
                    left = calls.popleft()
                    if calls is backlog.waiting:
                        backlog.left(left)
                    commands += done
        finally:
            self.memory.working = False
        commands += self._take_asked()
        if backlog.full and not backlog.is_over(2):
            backlog.full = False
            self.relieved.append(session.id)
        return commands + self.memory_freed() if self.memory.owed else commands

    def _step(self, session: Session, backlog: Backlog, call: Call) -> list[Send] | None:
        """Gives a call its effect, or defers it; None when it has to wait, and all that was called after it."""
        if isinstance(call, WaitingLaunch):
            return self._admit(session, backlog, call)
        if isinstance(call, Free):
            now = backlog.may_free(call.buffers) if backlog.deferred else call.buffers
            commands = buffers.free(self.tables, session, now)
            return commands + self.memory_freed() if now and self.memory.waiting else commands
        if isinstance(call, Put):
            self.memory.changed()
            has_quota = session.tenant.quota.device_bytes is not None
            return buffers.put(self.tables, session, call, backlog.coming(session.programs) if has_quota else None)
        return self.preparation.unregistered(session, call.program) if backlog.may_unregister(call) else []

    def _is_short(self, session: Session, backlog: Backlog, call: Call) -> bool:
        """Whether a call that may pass others would leave these no room."""
        if not isinstance(call, WaitingLaunch) or (program := session.programs.get(call.message.program)) is None:
            return False
        looked_at = list(islice(reversed(backlog.waiting), backlog.looks(call.message)))
        if not any(isinstance(ahead, Free) for ahead in looked_at):
            return False
        return session.id in self.memory.waiting or not self.memory.leaves_room(
            session, program, programs_of(looked_at, session.programs)
        )

    def memory_freed(self) -> list[Send]:
        """Lets launches go on that waited for memory."""
        return [command for waiting in self.memory.freed() for command in self.resume(waiting)]

    def _admit(self, session: Session, backlog: Backlog, launch: WaitingLaunch) -> list[Send] | None:
        message = launch.message
        program = session.programs.get(message.program)
        if (whole := launch.whole) is not None:
            if program is whole.program:
                return self._go_on(session, backlog, launch, whole.program)
            text = f"program {message.program} was registered again while launch {message.launch} of it was under way"
            return self.refuse(session, launch, Failure("WireError", text))
        if program is None:
            text = f"launch {message.launch} names program {message.program}, never registered"
            return self.refuse(session, launch, quotas.programs(session) or Failure("WireError", text))
        # Before it may have to wait for others, so that hosts compile meanwhile.
        asked = self.preparation.asked(program, launch.since) if program.unsent or program.unready else []
        if backlog.deferred and (
            backlog.blocks(session, launch, program)
            or not self.memory.leaves_room(session, program, programs_of(backlog.deferred, session.programs))
        ):
            if (failure := failed_argument(session, message)) is not None:
                return asked + self.refuse(session, launch, failure)
            self._waits_no_more(session, launch)
            backlog.defer(launch, program)
            return asked
        if (failure := refusal_of(self.tables, session, program, message)) is not None:
            return asked + self.refuse(session, launch, failure)
        if session.arriving and not session.arriving.keys().isdisjoint(message.arguments):
            # Since its call: of many, each would wait behind the one before.
            if (late := buffers.overdue(self.tables, session, message.arguments, launch.counted)) is not None:
                return [*asked, *late.commands, *self.refuse(session, launch, late.failure)]
            backlog.defer(launch, program, LaunchEvent.ARGUMENTS_ABSENT)
            return asked
        if program.script is not None:
            return self._go_on(session, backlog, launch, program)
        sent, came = self._start(session, program, message, launch)
        if isinstance(came, InFlight):
            return asked + sent
        match came:
            case Failure():
                return asked + sent + self.refuse(session, launch, came)
            case LaunchEvent.HOSTS_ABSENT:
                backlog.defer(launch, program)
                return asked + sent
            case LaunchEvent():
                launch.move(came)
        self.asked += asked  # all that compile it have, and a host is new that only has to know it
        return None

    def _take_asked(self) -> list[Send]:
        asked, self.asked = self.asked, []
        return asked

    def _go_on(self, session: Session, backlog: Backlog, launch: WaitingLaunch, program: PlannedProgram) -> list[Send]:
        """Lets a launch that decides go on."""
        commands = self.decisions.step(session, backlog, launch, program)
        if launch.whole is not None and launch.whole.failure is not None:
            self._waits_no_more(session, launch)
        return commands

    def _waits_no_more(self, session: Session, launch: WaitingLaunch) -> None:
        """A launch that may have waited for room has ended instead, and holds back nobody."""
        self.memory.waits_no_more(session.id, launch.message.launch)
        self.window.queued.pop((session.id, launch.message.launch), None)

    def _start(self, session: Session, program: PlannedProgram, message: Launch, launch: WaitingLaunch) -> Started:
        """Sends a launch, or a part of one, to its islands if they have room for it."""
        if not self.hosts.are_ready(program):
            asked = self.preparation.asked(program, launch.since) if program.unsent or program.unready else []
            self.memory.waits_no_more(session.id, launch.message.launch)
            return asked, self.hosts.absence(program) or LaunchEvent.HOSTS_ABSENT
        if session.in_flight >= self.max_in_flight:
            if launch.whole is not None:  # which is deferred, for no room any more
                self.memory.waits_no_more(session.id, launch.message.launch)
            return [], None
        room = self.memory.take(session, program, launch.message.launch)
        if room is not True:
            return [], room or LaunchEvent.MEMORY_FULL
        if program.cross_island and (
            self.window.is_behind_calls(session.id, program.islands)
            or not self.window.may_start(
                session.id, launch.message.launch, session.usage, tuple(program.islands), self.tables.now
            )
        ):
            return [], LaunchEvent.ISLANDS_FULL
        record, commands = self.dispatch.start(session, program, message, launch.state)
        if launch.whole is not None:
            launch.whole.begun(record)
        if program.cross_island:
            self.window.start(program.islands)
        elif program.calls:
            self.window.calls(session.id, program.islands)
        return (commands if record.pending else self.outcomes.settle([record])[0]), record

    def refuse(self, session: Session, launch: WaitingLaunch, failure: Failure) -> list[Send]:
        """Ends a launch that waited here."""
        self._waits_no_more(session, launch)
        if launch.whole is not None:
            return self.decisions.abandon(session, launch, failure)
        launch.move(LaunchEvent.REFUSED)
        self.tables.ledger.leave(session.usage)
        return self.outcomes.refuse(session, launch.message, failure)
