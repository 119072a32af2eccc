"""Decisions: launches of programs with branches and loops, which go to their islands in parts.

Such a program is a script (`ir.script`). Its launch keeps its place among the session's calls as a deferred one until
its last part is on its way; each part is a launch like any other, admitted when its turn comes, whose results are the
session's under numbers that no client can name: they are negative. When a part has made a value by which the script
decides, a host says it (`Decided`), and the launch goes on. Where the first part of a branch may begin early
(`controller.early`), the host of the value is told what that will be, and tells the host of the branch. So later
calls that have to do with the launch wait, all others and other tenants do not, and a client hears of one launch with
one outcome: once all its parts have ended.

A launch that never decides to end is ended by the launch limit, which counts what its parts have taken.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pathways_ray import limits
from pathways_ray.controller import buffers, early
from pathways_ray.controller.backlog import Backlog, WaitingLaunch
from pathways_ray.controller.lifecycle import LaunchEvent
from pathways_ray.controller.part_outcomes import report_of
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.refusals import refusal_of
from pathways_ray.controller.state import InFlight, Send, SendIsland, Session, Tables, Whole
from pathways_ray.errors import Failure
from pathways_ray.ir import script
from pathways_ray.transport.messages import Decided, Drop, Following, IslandLaunch, Launch, launch_of

MAX_AHEAD = 32
"""Parts of a launch that are under way at once: of a long loop, more would only wait in the schedulers."""

MAX_FORESEEN = 8
"""Branches of which hosts are told: one of them is begun early, and the message has all."""

MAX_FORESEEN_ARGUMENTS = 256
"""Arguments of such a branch: their numbers go with each launch that decides, for each branch, and on to its host."""

Started = tuple[list[Send], InFlight | Failure | LaunchEvent | None]
"""What is sent, and the launch on its islands, or why it is not there: a failure, or what it waits for."""


class Decisions:
    """The launches that decide.

    Args:
        start: admits a part, when its hosts, memory and islands have room.
        limit_s: seconds that the parts of a launch may take together, unless its tenant has a limit of its own.
    """

    def __init__(
        self,
        tables: Tables,
        start: Callable[[Session, PlannedProgram, Launch, WaitingLaunch], Started],
        limit_s: float = limits.LAUNCH_LIMIT_S,
    ) -> None:
        self.tables = tables
        self.start = start
        self.limit_s = limit_s

    def step(self, session: Session, backlog: Backlog, launch: WaitingLaunch, program: PlannedProgram) -> list[Send]:
        """Lets a launch go on as far as it can: to its end, or until it has to wait."""
        whole = launch.whole
        if whole is None:
            assert program.script is not None
            course = script.Course(program.script, launch.message.arguments)
            whole = launch.whole = Whole(launch.message.launch, program, course, self.tables.now)
        commands: list[Send] = []
        while whole.failure is None and (part := whole.course.now) is not None:
            if isinstance(part, script.Await) or len(whole.flying) >= MAX_AHEAD:
                return [*commands, *self._wait(session, backlog, launch, program, LaunchEvent.UNDECIDED)]
            sent, came = self._launch(session, launch, program, whole, part)
            commands += sent
            if isinstance(came, Failure):
                return commands + self.abandon(session, launch, came)
            if not isinstance(came, InFlight):
                why = came if came is not None else LaunchEvent.UNDECIDED
                return [*commands, *self._wait(session, backlog, launch, program, why)]
            commands += self._free(session, whole)
        return commands + (self.abandon(session, launch, whole.failure) if whole.failure is not None else [])

    def _launch(
        self, session: Session, launch: WaitingLaunch, program: PlannedProgram, whole: Whole, part: script.Launch
    ) -> Started:
        segment = program.segments[part.segment]
        whole.segment = part.segment
        first = launch.message.results if part.last else self._number(session, whole, part, segment)
        number = whole.launch if part.last else 0
        message = launch_of(number, segment.number, part.arguments, first, launch.message.priority)
        if (failure := refusal_of(self.tables, session, segment, message)) is not None:
            return [], failure
        ledger = self.tables.ledger
        ledger.enter(session.usage)  # each part leaves it, and the launch was entered as it was called
        sent, came = self.start(session, segment, message, launch)
        if part.last or not isinstance(came, InFlight):
            ledger.leave(session.usage)
        if isinstance(came, InFlight):
            if part.last:
                whole.results = range(first, first + len(segment.results))
                whole.islands = segment.islands
                whole.course.launched(())
                whole.closed = True
            else:
                session.usage.parts += came.is_part
                session.own_numbers = min(first, session.own_numbers)
                whole.course.launched(range(first, first + len(segment.results)))
                told = whole.foreseen.pop(part.segment, None)
                if told is not None and told.results != first:
                    sent = [*self._taken_back(session, program, part.segment, told), *sent]
                if whole.course.script.segments[part.segment]:
                    sent = self._foresee(session, program, whole, sent)
        return sent, came

    def _number(self, session: Session, whole: Whole, part: script.Launch, segment: PlannedProgram) -> int:
        """The number of a part's first result: the one that its host was told, where it has begun just this."""
        told = whole.foreseen.get(part.segment)
        if told is not None and (told.program, told.arguments) == (segment.key, part.arguments):
            return told.results
        return session.own_numbers - len(segment.results)

    def _foresee(self, session: Session, program: PlannedProgram, whole: Whole, sent: list[Send]) -> list[Send]:
        """Says with the part that decides what follows by its value, as far as hosts may begin it."""
        whole.foreseen = {}
        choices = whole.course.choices
        if not any(choices) or len(choices) > MAX_FORESEEN:
            return sent
        follows = tuple(self._following(session, program, choice) for choice in choices)
        for choice, following in zip(choices, follows, strict=True):
            if choice is not None and following is not None:
                whole.foreseen[choice.segment] = following
        return [
            SendIsland(one.island, msgspec.structs.replace(one.message, follows=follows))
            if isinstance(one, SendIsland) and isinstance(one.message, IslandLaunch) and not one.message.gangs
            else one
            for one in sent
        ]

    def _following(self, session: Session, program: PlannedProgram, choice: script.Launch | None) -> Following | None:
        if choice is None or len(choice.arguments) > MAX_FORESEEN_ARGUMENTS:
            return None
        segment = program.segments[choice.segment]
        host = early.host_of(self.tables, segment)
        if host == early.NO_HOST or len(early.hosts_of(self.tables, self.tables.hosts[host].island)) > 1:
            return None
        session.own_numbers -= len(segment.results)
        return Following(host, session.id, segment.key, choice.arguments, session.own_numbers)

    def _taken_back(self, session: Session, program: PlannedProgram, segment: int, told: Following) -> list[Send]:
        """Has a host forget what it may have begun, or will yet hear of, and that is launched otherwise or never."""
        numbers = tuple(range(told.results, told.results + len(program.segments[segment].results)))
        host = self.tables.hosts.get(told.host)
        return [SendIsland(host.island, Drop(session.id, numbers))] if host is not None else []

    def _wait(
        self, session: Session, backlog: Backlog, launch: WaitingLaunch, program: PlannedProgram, why: LaunchEvent
    ) -> list[Send]:
        """Defers a launch, unless it has taken too long."""
        whole = launch.whole
        assert whole is not None
        limit_s = session.tenant.launch_limit_s or self.limit_s
        # Its last part may have ended without the value that decides: nothing would end it.
        is_silent = isinstance(whole.course.now, script.Await) and not whole.flying
        silent_s = self.tables.now - whole.at if is_silent else 0.0
        if whole.spent_s + silent_s > limit_s:
            text = f"program {program.name!r} did not come to its end in {limit_s:.0f} s, after {whole.course.rounds}"
            loops = whole.course.loops[::-1]
            node, where = " in ".join(loop.name for loop in loops), ", ".join(loop.where for loop in loops)
            return self.abandon(session, launch, Failure("LaunchTimeout", f"{text} rounds of its loops", node, where))
        backlog.defer(launch, program, why)
        return []

    def _free(self, session: Session, whole: Whole) -> list[Send]:
        freed, whole.course.freed = whole.course.freed, []
        return buffers.free(self.tables, session, freed) if freed else []

    def abandon(self, session: Session, launch: WaitingLaunch, failure: Failure) -> list[Send]:
        """Ends a launch between its parts. Its client hears of it once those under way have ended."""
        whole = launch.whole
        assert whole is not None
        program = whole.program
        if whole.failure is None:  # else it was counted with the part that failed
            self.tables.recorder.failed(failure.kind)
        launch.move(LaunchEvent.REFUSED)
        self.tables.ledger.leave(session.usage)
        whole.failure = failure
        if not whole.closed:
            whole.closed = True
            whole.course.abandon()
            session.refuse(launch.message.results, program.result_count, failure)
        commands = self._free(session, whole)
        for segment, told in whole.foreseen.items():
            commands += self._taken_back(session, program, segment, told)
        whole.foreseen = {}
        return commands + ([] if whole.flying else report_of(self.tables, session, whole))

    def decided(self, message: Decided) -> Session | None:
        """A part of a launch has made the value by which it decides. Returns the session, whose turn it is."""
        record = self.tables.in_flight.get(message.sequence)
        if record is None or record.whole is None:
            return None
        course = record.whole.course
        if course.now is not None:
            course.decide(record.whole.flying[message.sequence], message.values)
        return self.tables.sessions.get(record.session)
