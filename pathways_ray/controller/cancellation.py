"""Cancelling a launch: what has not begun ends at once, what has is only marked.

A launch has begun once a scheduler has sent it to hosts: nothing can be taken off a device queue. One that waits, here
or in a scheduler, ends with `Cancelled`. One over several islands keeps its place on those that have it, since another
one may have begun; its parts run on the failure.
"""

from __future__ import annotations

from pathways_ray.controller.admission import Admission
from pathways_ray.controller.lifecycle import LaunchState
from pathways_ray.controller.state import InFlight, Send, SendClient, SendIsland, Session, Tables, Whole
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import Cancel, CancelLaunch, CancelRefused, Drop

CANCELLED = Failure("Cancelled", "the launch was cancelled before it began")
CANCELLED_LATE = Failure("Cancelled", "the launch was cancelled while it ran")


class Cancellation:
    """The launches that clients cancel."""

    def __init__(self, tables: Tables, admission: Admission) -> None:
        self.tables = tables
        self.admission = admission

    def cancel(self, session: Session, message: Cancel) -> list[Send]:
        """A client cancels a launch; one that is over, or was coalesced with later ones, can no longer be."""
        begun: list[Send] = [SendClient(session.id, CancelRefused(message.launch, CANCELLED_LATE))]
        waiting = self.admission.backlogs[session.id].take_out(message.launch)
        if waiting is not None:
            whole = waiting.whole
            why = CANCELLED if whole is None else CANCELLED_LATE  # some of its parts have run
            commands = self.admission.refuse(session, waiting, why) + self.admission.resume((session,))
            commands += self.admission.memory_freed()  # what its parts had made
            return begun + commands if whole is not None and whole.flying else commands
        record = self._find(session, message.launch)
        if record is None and (whole := self._part_under_way(session, message.launch)) is not None:
            whole.failed(CANCELLED_LATE, (), ())  # that is its outcome, once its other parts are over
            return begun
        if record is None or record.state is not LaunchState.IN_FLIGHT:
            return begun
        return [
            SendIsland(island, CancelLaunch(one.sequence, CANCELLED))
            for one in self._with_consumers(record)
            for island in sorted(one.pending)
        ]

    def _with_consumers(self, record: InFlight) -> list[InFlight]:
        """A launch, and those in flight that take its results, or theirs: they would only wait to fail. Each is found
        once, however often its client cancels it."""
        found = [] if record.cancelled else [record]
        record.cancelled = True
        for one in found:  # grows meanwhile
            for sequence in one.consumers:
                consumer = self.tables.in_flight.get(sequence)
                if consumer is not None and not consumer.cancelled:
                    consumer.cancelled = True
                    found.append(consumer)
        return found

    def begun(self, sequence: int) -> list[Send]:
        """An island has sent a launch to its hosts already: it runs to its end, and leaves nothing."""
        record = self.tables.in_flight.get(sequence)
        session = self.tables.sessions.get(record.session) if record is not None else None
        if record is None or session is None or record.failure is not None:
            return []
        record.failure = CANCELLED_LATE
        numbers = tuple(range(record.results, record.results + len(record.program.results)))
        for number in numbers:
            buffer = session.find(number)
            if buffer is not None and buffer.failure is None:
                session.fail(number, buffer, CANCELLED_LATE)
        drops: list[Send] = [SendIsland(island, Drop(session.id, numbers)) for island in sorted(record.program.islands)]
        return [SendClient(session.id, CancelRefused(record.launch, CANCELLED_LATE)), *drops]

    def _part_under_way(self, session: Session, launch: int) -> Whole | None:
        """A launch that went to its islands in parts, of which the last one is over and others are not."""
        of_session = (r.whole for r in self.tables.in_flight.values() if r.session == session.id)
        return next((whole for whole in of_session if whole is not None and whole.launch == launch), None)

    def _find(self, session: Session, launch: int) -> InFlight | None:
        if not session.in_flight:
            return None
        found = (r for r in self.tables.in_flight.values() if r.session == session.id and r.launch == launch)
        return next(found, None)
