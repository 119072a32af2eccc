"""Launches on their way: numbers them in the cluster's sequence and sends them to their islands.

Since a launch only consumes what was produced by launches before it, that linear order respects data dependencies, and
islands keep it for all launches that run on several of them.
"""

from __future__ import annotations

import msgspec

from pathways_ray.controller.donations import Donations
from pathways_ray.controller.lifecycle import LaunchEvent, LaunchState, after
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import Buffer, InFlight, Send, SendIsland, Session, Tables
from pathways_ray.story import Entry
from pathways_ray.transport.messages import Drop, Enqueued, IslandLaunch, Launch


class Dispatch:
    """Sends launches to islands.

    Args:
        parallel: all gangs of a launch at once; otherwise a gang is sent when the one before it is enqueued.
    """

    def __init__(self, tables: Tables, parallel: bool) -> None:
        self.tables = tables
        self.parallel = parallel

    def start(
        self, session: Session, program: PlannedProgram, launch: Launch, state: LaunchState
    ) -> tuple[InFlight, list[Send]]:
        """Puts an admitted launch on its way. One of a program without work has no island to wait for."""
        tables = self.tables
        in_flight, buffers = tables.in_flight, session.buffers
        tables.sequence = sequence = tables.sequence + 1
        producers: tuple[int, ...] = ()
        for number in launch.arguments:
            producer = buffers[number].producer
            if producer and producer in in_flight:
                producers += (producer,)
                in_flight[producer].consumers.append(sequence)
        donated = Donations.take(session, program, launch.arguments) if program.donated else ()
        for number, kind in enumerate(program.results, launch.results):
            session.keep(number, Buffer(kind, sequence))
        record = in_flight[sequence] = InFlight(
            sequence,
            session.id,
            session.usage,
            launch.launch,
            program,
            launch.results,
            launch.arguments,
            set(program.islands),
            producers,
            after(state, LaunchEvent.ADMITTED),
            donated=donated,
        )
        session.in_flight += 1
        program.in_flight += 1
        tables.story.note_launch(Entry(tables.now, "admitted", program.name, "", session.id, sequence))
        if program.cross_island:
            record.estimate = program.device_time.estimate
            tables.ledger.start(session.usage, record.estimate)
        if not self.parallel:
            return record, self._send_gang(record) if program.islands else []
        message = IslandLaunch(sequence, session.id, program.key, launch.arguments, launch.results)
        return record, [SendIsland(island, message) for island in program.islands]

    def enqueued(self, island: int, message: Enqueued) -> list[Send]:
        """Sequential dispatch: the gang is on its device queues, the next one may start its host work."""
        record = self.tables.in_flight.get(message.sequence)
        if record is None or message.first != record.next_gang:
            return []
        record.awaiting.discard(island)
        if record.awaiting or record.next_gang + 1 >= len(record.program.gang_islands):
            return []
        record.next_gang += 1
        return self._send_gang(record)

    def _send_gang(self, record: InFlight) -> list[Send]:
        gang, program = record.next_gang, record.program
        record.awaiting = set(program.gang_islands[gang])
        message = IslandLaunch(record.sequence, record.session, program.key, record.arguments, record.results, gang, 1)
        # The first one goes to every island, so that all take their arguments before the client may drop them.
        islands = program.islands if gang == 0 else program.gang_islands[gang]
        return [SendIsland(island, message) for island in islands]

    def drop_results(self, record: InFlight) -> list[Send]:
        """Takes back what the surviving islands of a failed launch made or will make."""
        commands: list[Send] = []
        numbers = tuple(record.results + k for k in range(len(record.program.results)))
        for island in record.program.islands:
            if not self.parallel and island in record.pending:
                # The gangs that were held back run on failures, so that nothing of the launch stays on the hosts.
                rest = len(record.program.gang_islands) - record.next_gang - 1
                message = IslandLaunch(
                    record.sequence, record.session, record.program.key, record.arguments, record.results
                )
                if rest > 0:
                    message = msgspec.structs.replace(message, first=record.next_gang + 1, gangs=rest)
                    commands.append(SendIsland(island, message))
            commands.append(SendIsland(island, Drop(record.session, numbers)))
        return commands
