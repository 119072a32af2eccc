"""The order check of a host: it reports the order in which it enqueues gangs, and schedulers compare. For debugging."""

from __future__ import annotations

from collections.abc import Callable

from pathways_ray.executor.run.prepared import PreparedProgram
from pathways_ray.transport.messages import IslandLaunch, Message, Ordered


class OrderReporter:
    """An observer that sends `Ordered` for the gangs of every launch, before anything else is sent of it.

    Args:
        members: the hosts of the island.
        send: puts a message on the stream to the scheduler.
    """

    def __init__(self, host: int, members: tuple[int, ...], send: Callable[[Message], None]) -> None:
        self.host = host
        self.members = members
        self.send = send

    def started(self, launch: IslandLaunch) -> None:
        """Nothing is enqueued yet."""

    def enqueued(self, launch: IslandLaunch, program: PreparedProgram, first: int, last: int) -> None:
        gangs = program.plan.gangs_between(launch, first, last, self.members)
        if gangs:
            self.send(Ordered(self.host, gangs))

    def ran(self, sequence: int, start: float, end: float, part: bool) -> None:
        """Devices keep the order of their queues."""
