"""Donated arguments: arrays whose memory a launch may take.

A launch that is admitted takes them out of its session. When it succeeds they are gone; when it fails, those whose
memory no host has taken come back, with their values: all, where its program, or part of one, takes the memory of none.
A launch that fails with a lost host has its outcome at once: what lies on other islands is *undecided* until these have
reported.
"""

from __future__ import annotations

from collections.abc import Collection

from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import Buffer, InFlight, Send, SendClient, SendIsland, Session, Tables
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import DonationsDecided, Drop, LaunchFailed


class Donations:
    """The donated arguments of launches in flight, and of those that have failed and are undecided."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.undecided: dict[int, tuple[int, dict[int, int]]] = {}
        """By launch, its session, and the island of each of its undecided buffers."""

    @staticmethod
    def take(session: Session, program: PlannedProgram, arguments: tuple[int, ...]) -> tuple[int, ...]:
        """Takes what an admitted launch may take out of its session; returns the numbers."""
        taken = tuple(arguments[k] for k in program.donated)
        for number in taken:
            buffer = session.forget(number)
            if buffer is not None:
                session.donated[number] = buffer
        return taken

    def consumed(self, session: Session, numbers: Collection[int], over: bool = False) -> list[Send]:
        """Lets go of buffers that are gone. Where the launch that they were given to has succeeded (`over`), those that
        were called before are over as well, and hosts need not wait for any."""
        dropped: dict[int, list[int]] = {}
        for number in numbers:
            buffer = session.donated.pop(number, None)
            if buffer is not None:
                dropped.setdefault(_island(session, buffer), []).append(number)
        return [SendIsland(island, Drop(session.id, tuple(found), over)) for island, found in dropped.items()]

    def failed(self, session: Session, record: InFlight, failure: Failure) -> list[Send]:
        """Decides about the donated arguments of a launch that has failed, as far as its islands have reported; the
        client hears of both."""
        consumed: list[int] = []
        undecided: dict[int, int] = {}
        back: list[Send] = []
        for number in record.donated:
            buffer = session.donated.get(number)
            if buffer is None:
                continue
            island = _island(session, buffer)
            if not record.program.takes_memory:
                back += self._give_back(session, number)
            elif island in record.pending and not self._is_away(session, buffer):
                undecided[number] = island
            elif island not in record.pending and (island not in record.failed_on or number in record.consumed):
                consumed.append(number)
            else:
                back += self._give_back(session, number)
        if undecided:
            self.undecided[record.sequence] = session.id, undecided
        report = LaunchFailed(record.launch, failure, tuple(consumed), tuple(undecided))
        return [SendClient(session.id, report), *self.consumed(session, consumed), *back]

    def reported(self, island: int, sequence: int, consumed: Collection[int] | None) -> list[Send]:
        """An island has ended its part of a launch that had failed before.

        Args:
            consumed: the arguments that it took there; None when that is all.
        """
        entry = self.undecided.get(sequence)
        if entry is None:
            return []
        number_of, islands = entry
        numbers = [number for number, where in islands.items() if where == island]
        for number in numbers:
            del islands[number]
        if not islands:
            del self.undecided[sequence]
        session = self.tables.sessions.get(number_of)
        if session is None or not numbers:
            return []
        gone = tuple(number for number in numbers if consumed is None or number in consumed)
        back = [send for number in numbers if number not in gone for send in self._give_back(session, number)]
        report = SendClient(session.id, DonationsDecided(tuple(numbers), gone))
        return [report, *self.consumed(session, gone), *back]

    def island_lost(self, island: int) -> list[Send]:
        """An island reports no more. What is undecided there comes back, to be lost with the rest."""
        return [send for sequence in list(self.undecided) for send in self.reported(island, sequence, ())]

    def session_closed(self, session: int) -> None:
        """Forgets the launches of a session."""
        self.undecided = {s: entry for s, entry in self.undecided.items() if entry[0] != session}

    def _give_back(self, session: Session, number: int) -> list[Send]:
        """Enters a buffer again, unless its client, whose call was interrupted, has freed it meanwhile."""
        if session.donated[number].freed:
            return self.consumed(session, (number,))
        buffer = session.donated.pop(number)
        if buffer.producer not in self.tables.in_flight:
            buffer.producer = 0
        session.keep(number, buffer)
        return []

    def _is_away(self, session: Session, buffer: Buffer) -> bool:
        return not self.tables.away.isdisjoint(session.places[buffer.type.slice].hosts)


def _island(session: Session, buffer: Buffer) -> int:
    return session.places[buffer.type.slice].island
