"""Sequential dispatch: the gangs of a launch go to their islands one by one.

A gang is sent when the one before it is on its device queues (`Enqueued`), as a client would do it that had to wait for
each of its computations. It is there to be compared with parallel dispatch, which sends all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from pathways_ray.controller.state import InFlight, Send, SendIsland
from pathways_ray.transport.messages import Enqueued, InlineArgument, IslandLaunch


class Sequential:
    """Sends gangs of launches in flight."""

    def __init__(self, in_flight: Mapping[int, InFlight]) -> None:
        self.in_flight = in_flight

    def start(self, record: InFlight, inline: tuple[InlineArgument, ...] = ()) -> list[Send]:
        """Sends the first gang, with the arguments that the launch carries. It goes to every island, so that all take
        their arguments before the client may drop them."""
        return self._send(record, record.program.islands, inline)

    def enqueued(self, island: int, message: Enqueued) -> list[Send]:
        """A gang is on its device queues: the next one may start its host work."""
        record = self.in_flight.get(message.sequence)
        if record is None or message.first != record.next_gang:
            return []
        record.awaiting.discard(island)
        if record.awaiting or record.next_gang + 1 >= len(record.program.gang_islands):
            return []
        record.next_gang += 1
        return self._send(record, record.program.gang_islands[record.next_gang])

    def _send(self, record: InFlight, islands: Iterable[int], inline: tuple[InlineArgument, ...] = ()) -> list[Send]:
        record.awaiting = set(record.program.gang_islands[record.next_gang])
        message = msgspec.structs.replace(_launch_of(record), first=record.next_gang, gangs=1, inline=inline)
        return [SendIsland(island, message) for island in islands]

    def rest(self, record: InFlight, island: int) -> list[Send]:
        """Sends a failed launch's gangs that were held back. They run on failures, so that nothing of the launch stays
        on the hosts."""
        rest = len(record.program.gang_islands) - record.next_gang - 1
        if rest <= 0:
            return []
        message = msgspec.structs.replace(_launch_of(record), first=record.next_gang + 1, gangs=rest)
        return [SendIsland(island, message)]


def _launch_of(record: InFlight) -> IslandLaunch:
    what = record.program.key, record.arguments, record.results
    return IslandLaunch(record.sequence, record.session, *what, launch=record.launch)
