"""Launches that the controller before has left behind: what becomes of them, as schedulers know it.

Each scheduler says which launches it has, and what the last ones came to (`IslandOutcomes`). A launch has ended in a
value when all its islands say so, and in a failure when one does. Where all its islands have it and it is not over, its
outcome comes with the reports that follow. Where one of them does not know it, it is aborted on the others: it never
came there, and they would wait for it. One that no scheduler knows any more is aborted where hosts may still offer
something for it. Nothing runs again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pathways_ray.controller.state import Send, SendClient, SendIsland, Tables
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import (
    Abort,
    Completed,
    Drop,
    DropProgram,
    IslandOutcome,
    KeptBuffers,
    LaunchFailed,
    Unanswered,
)

NOBODY_KNOWS = "the controller ended before the launch came to all of its islands"


@dataclass(slots=True)
class Fate:
    """A launch from before. It `runs` on some islands, or waits there, and is over on others, with or without a
    failure: on those of `since` it has ended under this controller, and hosts may have said before what they hold.
    `results` are those that its client has handles to; it is `awaited` once the client has come, and has yet
    to hear of it."""

    told: IslandOutcome
    runs: set[int] = field(default_factory=set)
    over: dict[int, Failure | None] = field(default_factory=dict)
    since: set[int] = field(default_factory=set)
    results: tuple[int, ...] = ()
    awaited: bool = False
    aborted: bool = False

    @property
    def failure(self) -> Failure | None:
        return next((failure for failure in self.over.values() if failure is not None), None)

    @property
    def is_done(self) -> bool:
        return len(self.over) == self.told.islands and self.failure is None

    @property
    def fails_elsewhere(self) -> bool:
        """Whether its islands have to hear of a failure on one of them: one of a computation is a value that reaches
        all who wait for it."""
        failure = self.failure
        return failure is not None and not failure.node and self.told.islands > 1

    @property
    def is_known(self) -> bool:
        """Whether all its islands have it, or had it."""
        return len(self.over) + len(self.runs) == self.told.islands and not self.aborted


class Answer(NamedTuple):
    """Launches of a client that has come back: those that ended in a value, those that failed, and those that it hears
    of later."""

    done: list[Unanswered]
    failed: list[tuple[int, Failure]]
    running: list[Unanswered]

    @property
    def there(self) -> list[KeptBuffers]:
        """Results that are on their hosts."""
        return [group for one in self.done for group in one.results]

    @property
    def coming(self) -> list[KeptBuffers]:
        """Results that will be."""
        return [group for one in self.running for group in one.results]


class Inherited:
    """The launches of a controller before: `fates` by number, `named` by session and the client's number."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.fates: dict[int, Fate] = {}
        self.named: dict[tuple[int, int], Fate] = {}
        self.busy: Counter[int] = Counter()
        """Launches that run, by program."""
        self.unwanted: dict[int, list[Send]] = {}
        """By program, messages that have hosts drop it once no launch of it runs: what one offers is taken back by
        it."""
        self.offered: dict[int, dict[tuple[int, int], None]] = {}
        """By island, launches that have something for other hosts, and their programs, as hosts have said."""
        self.over = False

    def told(self, island: int, outcomes: Iterable[IslandOutcome]) -> list[Send]:
        """A scheduler says what it knows. What was aborted before it came is aborted there too."""
        commands: list[Send] = []
        for one in outcomes:
            fate = self.fates.get(one.sequence)
            if fate is None and self.over and not one.runs:
                continue  # nobody comes for it, and nothing would remove it
            if fate is None:
                fate = self.fates[one.sequence] = Fate(one)
                if one.launch and not self.over:
                    self.named[one.session, one.launch] = fate
            if island in fate.over or island in fate.runs:
                continue  # it has said so before its stream ended, or been taken for lost
            if one.runs:
                self.busy[one.program] += not fate.runs
                fate.runs.add(island)
                if fate.aborted:
                    commands.append(SendIsland(island, self._abort_message(fate)))
            else:
                fate.over[island] = one.failure
        return commands

    def abort_unknown(self) -> list[Send]:
        """All have said what they know: aborts launches that some of their islands do not, and those that none does:
        nobody takes what hosts offer for them."""
        commands: list[Send] = []
        for fate in self.fates.values():
            if not fate.aborted and (not fate.is_known or fate.fails_elsewhere):
                commands += self._abort(fate)
        for island, offered in self.offered.items():
            if unknown := tuple(one for one in offered if one[0] not in self.fates):
                commands.append(SendIsland(island, Abort(unknown, Failure("ControllerLost", NOBODY_KNOWS))))
        self.offered.clear()
        idle = [program for program in self.unwanted if not self.busy[program]]
        return [*commands, *(one for program in idle for one in self.unwanted.pop(program))]

    def _abort(self, fate: Fate) -> list[Send]:
        fate.aborted = True
        message = self._abort_message(fate)
        return [SendIsland(island, message) for island in sorted({*fate.runs, *fate.over})]

    def _abort_message(self, fate: Fate) -> Abort:
        failure = fate.failure or Failure("ControllerLost", NOBODY_KNOWS)
        return Abort(((fate.told.sequence, fate.told.program),), msgspec.structs.replace(failure, story=()))

    def abort_again(self, island: int) -> list[Send]:
        """The scheduler of an island has a successor: what it was told last may not have come to its hosts, which offer
        something to others until they hear it."""
        aborted = [fate.told for fate in self.fates.values() if fate.aborted and island in fate.over]
        if not aborted:
            return []
        launches = tuple((one.sequence, one.program) for one in aborted)
        return [SendIsland(island, Abort(launches, Failure("HostLost", "its scheduler ended")))]

    def drop(self, island: int, message: DropProgram) -> None:
        """A host has a program that no client can launch any more."""
        self.unwanted.setdefault(message.program, []).append(SendIsland(island, message))

    def answer(self, session: int, asked: Iterable[Unanswered]) -> Answer:
        """The outcomes of launches that a client has sent, as far as they are known."""
        found = Answer([], [], [])
        for one in asked:
            fate = self.named.get((session, one.launch))
            if fate is None:
                continue
            if (failure := fate.failure) is not None:
                found.failed.append((one.launch, failure))
            elif fate.is_done:
                found.done.append(one)
            elif fate.is_known:
                fate.awaited = True
                fate.results = tuple(number for group in one.results for number in group.numbers)
                found.running.append(one)
        return found

    def drops(self, session: int, asked: Sequence[Unanswered], kept: Iterable[int]) -> list[Send]:
        """Drops, behind launches that are not over, results of theirs that nobody has a handle to."""
        commands: list[Send] = []
        wanted = set(kept)
        for one in asked:
            fate = self.named.get((session, one.launch))
            numbers = tuple(number for number in one.numbers if number not in wanted)
            if fate is not None and numbers:
                commands += [SendIsland(island, Drop(session, numbers)) for island in sorted(fate.runs)]
        return commands

    def made_since(self, session: int, asked: Iterable[Unanswered]) -> dict[int, set[int]]:
        """The results of launches that have ended under this controller, by island: hosts may have them, and not have
        said so."""
        found: dict[int, set[int]] = {}
        for one in asked:
            fate = self.named.get((session, one.launch))
            for island in fate.since if fate is not None else ():
                found.setdefault(island, set()).update(one.numbers)
        return found

    def reported(self, island: int, sequence: int, failure: Failure | None) -> list[Send]:
        """A launch that this controller has not sent is over on an island."""
        fate = self.fates.get(sequence)
        if fate is None or island not in fate.runs:
            return []
        fate.runs.discard(island)
        fate.over[island] = failure
        fate.since.add(island)
        commands = self._settled(fate)
        if fate.fails_elsewhere and not fate.aborted:
            commands += self._abort(fate)
        if not fate.runs:
            program = fate.told.program
            self.busy[program] -= 1
            if not self.busy[program]:
                del self.busy[program]
                commands += self.unwanted.pop(program, [])
            if self.over:
                del self.fates[sequence]
        return commands

    def island_lost(self, island: int, failure_of: Callable[[int, int], Failure]) -> list[Send]:
        """An island reports no more. `failure_of` a launch and its session is what the launch ends with."""
        running = [(n, fate.told.session) for n, fate in self.fates.items() if island in fate.runs]
        return [command for n, session in running for command in self.reported(island, n, failure_of(n, session))]

    def forget(self) -> None:
        """No client comes back any more."""
        self.over = True
        self.fates = {sequence: fate for sequence, fate in self.fates.items() if fate.runs}
        self.named.clear()

    def _settled(self, fate: Fate) -> list[Send]:
        failure = fate.failure
        if not fate.awaited or (failure is None and not fate.is_done):
            return []
        fate.awaited = False
        session, launch = self.tables.sessions.get(fate.told.session), fate.told.launch
        if session is None:
            return []
        if failure is None:
            return [SendClient(session.id, Completed((launch,)))]
        for number in fate.results:
            buffer = session.find(number)
            if buffer is not None:
                session.fail(number, buffer, failure)
        return [SendClient(session.id, LaunchFailed(launch, failure))]


def launches(found: Sequence[Unanswered]) -> tuple[int, ...]:
    return tuple(one.launch for one in found)
