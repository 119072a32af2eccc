"""Outcomes: a launch ends once, with a value or with the failure that caused it.

A launch ends when every island it touches has reported, or at once when a host it needs is lost. A failed launch is not
reported before the launches it consumes from have their outcome, so that the root cause is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.device_time import DeviceTime
from pathways_ray.controller.donations import Donations
from pathways_ray.controller.early import withdrawn
from pathways_ray.controller.inherited import Inherited
from pathways_ray.controller.lifecycle import LaunchEvent, after
from pathways_ray.controller.part_outcomes import kept, report_of
from pathways_ray.controller.preparation import Preparation
from pathways_ray.controller.state import InFlight, Send, SendClient, SendIsland, Session, Tables
from pathways_ray.errors import Failure
from pathways_ray.story import Entry
from pathways_ray.transport.messages import (
    Abort,
    Completed,
    Done,
    IslandLaunchFailed,
    Launch,
    LaunchFailed,
    ServedCalls,
)


class Settled(NamedTuple):
    """Messages about launches that have ended, and the sessions that may have room for further ones."""

    commands: list[Send]
    sessions: list[Session]


class Outcomes:
    """Gives launches in flight their outcome."""

    def __init__(self, tables: Tables, window: CrossIslandWindow, preparation: Preparation) -> None:
        self.tables = tables
        self.window = window
        self.preparation = preparation
        self.donations = Donations(tables)
        self.inherited = Inherited(tables)
        self.device_time = DeviceTime()

    # --- reports of islands -------------------------------------------------------------------------------------------

    def done(self, island: int, message: Done) -> Settled:
        """Launches whose part on an island is complete."""
        in_flight, device_us, taken_us = self.tables.in_flight, message.device_us, self.device_time.taken_us
        ended = []
        decided: list[Send] = []
        busy = 0.0
        for sequence, each_us in zip_longest(message.sequences, device_us[: len(message.sequences)], fillvalue=0):
            record = in_flight.get(sequence)
            if record is None:
                decided += self.donations.reported(island, sequence, None)
                decided += self.inherited.reported(island, sequence, None)
                continue
            pending = record.pending
            if each_us:
                program = record.program
                took = each_us * 1e-6 * len(program.messages[island].devices)
                taken_us[program.key, island] += each_us
                record.device_seconds += took
                busy += took
            if island in pending:
                pending.remove(island)
                if not pending:
                    ended.append(record)
        self.tables.recorder.busy[island] = self.tables.recorder.busy.get(island, 0.0) + busy
        settled = self.settle(ended)
        return Settled(decided + settled.commands, settled.sessions) if decided else settled

    def served(self, island: int, message: ServedCalls) -> None:
        """Calls that a host has served, which were no launches: their tenants are charged for them."""
        tables, recorder = self.tables, self.tables.recorder
        for one in message.served:
            recorder.served += one.calls
            program = tables.programs.get(one.program)
            part = program.messages.get(island) if program is not None else None
            took = one.device_us * 1e-6 * (len(part.devices) if part is not None else 1)
            self.device_time.taken_us[one.program, island] += one.device_us
            recorder.busy[island] = recorder.busy.get(island, 0.0) + took
            tables.ledger.charge(recorder.tenant_of(one.session), took)

    def failed(self, island: int, message: IslandLaunchFailed) -> Settled:
        """A launch whose part on an island failed."""
        record = self.tables.in_flight.get(message.sequence)
        if record is None:
            inherited = self.inherited.reported(island, message.sequence, message.failure)
            return Settled([*self.donations.reported(island, message.sequence, message.consumed), *inherited], [])
        if island not in record.pending:
            return Settled([], [])
        record.pending.remove(island)
        record.failed_on.add(island)
        record.consumed.update(message.consumed)
        failure = message.failure
        if record.failure is None or (failure.node and not record.failure.node):
            record.failure = failure
        return self.settle([] if record.pending else [record])

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def settle(self, records: Iterable[InFlight]) -> Settled:
        """Gives launches that are over their outcome, and those that waited for it theirs.

        The completions of a session go in one message.
        """
        tables = self.tables
        in_flight = tables.in_flight
        over = list(records)
        sessions: dict[int, Session] = {}
        completed: dict[int, tuple[list[int], list[int]]] = {}
        contended: dict[int, bool] = {}
        failed: list[Send] = []
        for record in over:  # to which come those that waited for the outcome of one
            program, failure = record.program, record.failure
            if record.sequence not in in_flight or (failure is not None and self._waits(record)):
                continue
            del in_flight[record.sequence]
            program.in_flight -= 1
            took = self._account(record)
            if failure is not None:
                failed += self._abort(record, failure)
            session = tables.sessions.get(record.session)
            if program.key not in tables.programs:  # its session has ended, or dropped it meanwhile
                failed += self.preparation.drop(program)
            if session is not None:
                sessions[session.id] = session
                session.in_flight -= 1
                if record.carried:
                    session.charged_bytes -= record.carried
                whole = record.whole
                if failure is not None:
                    failed += self._fail(session, record, failure)
                elif record.donated:
                    failed += self.donations.consumed(session, record.donated, over=True)
                if whole is not None and whole.ended(record, tables.now) and whole.failure is not None:
                    failed += report_of(self.tables, session, whole)
                elif failure is None if whole is None else whole.is_over:
                    launches, device_us = completed.setdefault(session.id, ([], []))
                    launches.append(record.launch if whole is None else whole.launch)
                    device_us.append(took if whole is None else whole.device_us)
                    contended[session.id] = len(in_flight) > session.in_flight
            if record.dependents:
                over.extend(in_flight[s] for s in record.dependents if s in in_flight)
        commands: list[Send] = [
            SendClient(s, Completed(tuple(launches), tuple(device_us), contended[s]))
            for s, (launches, device_us) in completed.items()
        ]
        return Settled(commands + failed, list(sessions.values()))

    def _abort(self, record: InFlight, failure: Failure) -> list[Send]:
        """Tells the hosts of a failed launch that waits there may have no end, and that nobody takes what they offer.

        A failure of a computation is a value that reaches everybody who waits for it, so hosts need not hear of it.
        """
        program = record.program
        if (failure.node and failure.kind != "LaunchTimeout") or len(program.hosts) < 2:
            return []
        message = Abort(((record.sequence, program.key),), msgspec.structs.replace(failure, story=()))
        return [SendIsland(island, message) for island in program.islands]

    def _waits(self, record: InFlight) -> bool:
        """Whether a failure has to wait for a producer it may come from; the producer then knows of it."""
        for producer in record.producers:
            if producer in self.tables.in_flight:
                record.state = after(record.state, LaunchEvent.CAUSE_UNKNOWN)
                self.tables.in_flight[producer].dependents.append(record.sequence)
                return True
        return False

    def _account(self, record: InFlight) -> int:
        """Puts the tenant's account right: the time that a launch took, in place of the estimate. Its results are there
        if it succeeded. Returns the microseconds that it took on each of its devices."""
        tables, program, failure = self.tables, record.program, record.failure
        actual, number = record.device_seconds, record.launch
        took = round(1e6 * actual / program.devices)
        if failure is None:
            record.state = after(record.state, LaunchEvent.SUCCEEDED)
            for buffer in record.made:
                buffer.producer = 0
            program.device_time.measure(actual)
            if program.culprit not in tables.circuit_breaker.proven:
                tables.circuit_breaker.succeeded(program.culprit)
        else:
            actual, number = max(actual, record.estimate), -number
            tables.recorder.failed(failure.kind)
            tables.note_failed(record.sequence, program)
        tables.recorder.ring.add(record.sequence, record.session, program.key, record.at, tables.now, number)
        if program.cross_island:
            self.window.end(program.islands)
        elif program.calls:
            self.window.answered(record.session, program.islands)
        tables.ledger.end(record.usage, record.estimate, actual)
        if record.whole is not None:
            record.usage.parts -= record.is_part
        return took

    def _fail(self, session: Session, record: InFlight, failure: Failure) -> list[Send]:
        record.state = after(record.state, LaunchEvent.FAILED)
        for number in record.arguments:
            buffer = session.find(number)
            if buffer is not None and buffer.failure is not None:
                failure = buffer.failure
                break
        failure = record.root or failure
        # The buffer between may be gone by the time a consumer reports, so the cause is handed on by launch.
        for sequence in record.consumers:
            consumer = self.tables.in_flight.get(sequence)
            if consumer is not None and consumer.root is None:
                consumer.root = failure
        for number in range(record.results, record.results + len(record.program.results)):
            buffer = session.find(number)
            if buffer is not None:
                session.fail(number, buffer, failure)
        now = self.tables.now
        self.tables.story.note_launch(Entry(now, "failed", failure.kind, failure.message, session.id, record.sequence))
        commands = self.donations.failed(session, record, failure)
        return commands if record.whole is None else kept(record.whole, commands)

    def refuse(self, session: Session, launch: Launch, failure: Failure) -> list[Send]:
        """Ends a launch that gets no further; what would consume its results fails for the same reason."""
        self.tables.recorder.failed(failure.kind)
        program = session.programs.get(launch.program)
        session.refuse(launch.results, program.result_count if program is not None else 0, failure)
        again = launch.program if program is None or program.again else 0
        report = LaunchFailed(launch.launch, failure, again=again)
        return [SendClient(session.id, report), *withdrawn(session, program, launch)]
