"""Launches on their way: numbers them in the cluster's sequence and sends them to their islands.

Since a launch only consumes what was produced by launches before it, that linear order respects data dependencies, and
islands keep it for all launches that run on several of them.
"""

from __future__ import annotations

from itertools import repeat

from pathways_ray.controller import buffers, quotas
from pathways_ray.controller.donations import Donations
from pathways_ray.controller.lifecycle import LaunchEvent, LaunchState, after
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.sequential import Sequential
from pathways_ray.controller.state import InFlight, Send, SendIsland, Session, Tables
from pathways_ray.transport.messages import Drop, IslandLaunch, Launch, PrioritizedIslandLaunch


class Dispatch:
    """Sends launches to islands.

    Args:
        sequential: sends the gangs of a launch one by one; without it all of them go at once.
    """

    def __init__(self, tables: Tables, sequential: Sequential | None = None) -> None:
        self.tables = tables
        self.sequential = sequential

    def start(
        self, session: Session, program: PlannedProgram, launch: Launch, state: LaunchState
    ) -> tuple[InFlight, list[Send]]:
        """Puts an admitted launch on its way. One of a program without work has no island to wait for."""
        tables, now, known = self.tables, self.tables.now, session.buffers
        in_flight, arguments, inline = tables.in_flight, launch.arguments, launch.inline
        tables.sequence = sequence = tables.sequence + 1
        tables.admitted += 1
        producers: dict[int, None] = {}
        for number in arguments:
            producer = known[number].producer if number else 0
            if producer and producer not in producers and producer in in_flight:
                producers[producer] = None  # once: a launch may name a result of it thousands of times
                in_flight[producer].consumers.append(sequence)
        donated = Donations.take(session, program, arguments) if program.donated else ()
        record = in_flight[sequence] = InFlight(
            sequence,
            session.id,
            session.usage,
            launch.launch,
            program,
            launch.results,
            arguments,
            buffers.make(session, program, launch.results, sequence),
            set(program.islands),
            tuple(producers),
            after(state, LaunchEvent.ADMITTED),
            now,
            donated=donated,
            carried=quotas.carry(session, program, inline) if inline else 0,
        )
        session.in_flight += 1
        program.in_flight += 1
        program.launches += 1
        tables.story.note_launch((now, "admitted", program.name, "", session.id, sequence))
        if program.cross_island:
            record.estimate = program.device_time.estimate
            tables.ledger.start(session.usage, record.estimate)
        if self.sequential is not None:
            return record, self.sequential.start(record, inline) if program.islands else []
        message = IslandLaunch(
            sequence,
            session.id,
            program.key,
            arguments,
            launch.results,
            launch=launch.launch,
            inline=inline,
            covers=launch.covers,
        )
        sent = PrioritizedIslandLaunch(message, launch.priority) if launch.priority else message
        return record, list(map(SendIsland, program.islands, repeat(sent)))

    def drop_results(self, record: InFlight) -> list[Send]:
        """Takes back what the surviving islands of a failed launch made or will make."""
        commands: list[Send] = []
        numbers = tuple(record.results + k for k in range(len(record.program.results)))
        for island in record.program.islands:
            if self.sequential is not None and island in record.pending:
                commands += self.sequential.rest(record, island)
            commands.append(SendIsland(island, Drop(record.session, numbers)))
        return commands
