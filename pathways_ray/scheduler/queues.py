"""The queues of an island's scheduler: what waits there for its place in the order, by session.

A queue has the launches of a session and the drops behind them, in the order of the calls. Its head is always a launch:
messages before one are sent as soon as they come to the head.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping

from pathways_ray.scheduler.events import Command, ToHosts
from pathways_ray.scheduler.policies import Candidate, Ledger
from pathways_ray.scheduler.priorities import Accesses, Fixed, place_of, rank_of
from pathways_ray.scheduler.state import Outstanding, ProgramState, SessionQueue
from pathways_ray.transport import messages as wire

MAX_CALLING = 8
"""Launches of a session that call host functions and may be with the hosts at once. They hold no device while they
wait, but each has a place among the launches of the island, which a function without end would keep from others."""


class Queues:
    """The queues of all sessions.

    Args:
        outstanding: launches with the hosts.

    `waiting` are the queues that have a launch. `cross_island` are the cross-island launches among all, with their
    sessions, in the controller's sequence.
    """

    def __init__(self, outstanding: Mapping[int, Outstanding]) -> None:
        self.outstanding = outstanding
        self.ledger = Ledger()
        self.programs: dict[int, ProgramState] = {}
        self.sessions: dict[int, SessionQueue] = {}
        self.waiting: dict[int, SessionQueue] = {}
        self.cross_island: deque[tuple[int, int]] = deque()

    def program_of(self, launch: wire.IslandLaunch) -> ProgramState:
        program = self.programs.get(launch.program)
        if program is None:
            program = self.programs[launch.program] = ProgramState()
        return program

    def launches(self) -> Iterator[wire.IslandLaunch]:
        """The launches that wait."""
        for queue in self.waiting.values():
            yield from (item for item in queue.items if isinstance(item, wire.IslandLaunch) and item.first == 0)

    def calls_enough(self, session: int, program: ProgramState) -> bool:
        """Whether a launch of a program calls host functions, and `MAX_CALLING` others of its session do already.
        Cross-island ones are bounded by the controller."""
        if not program.waits_for_calls:
            return False
        mine = (one for one in self.outstanding.values() if one.launch.session == session)
        return sum(one.program.waits_for_calls for one in mine) >= MAX_CALLING

    def waiting_for(self, program: int) -> SessionQueue | None:
        """The queue in which a launch of a program waits."""
        for queue in self.waiting.values():
            if any(isinstance(item, wire.IslandLaunch) and item.program == program for item in queue.items):
                return queue
        return None

    def open(self, session: int) -> SessionQueue:
        """The queue of a session that has none yet."""
        usage = self.ledger.of(session)
        queue = self.sessions[session] = SessionQueue(session, usage, Candidate(usage, 0, 0.0))
        return queue

    def put(self, launch: wire.IslandLaunch, now: float, priority: int = 0) -> None:
        """Queues a launch, which is in its tenant's account already. A further gang of one goes behind those that wait;
        without any, the launch is over here."""
        if launch.first != 0:
            if (before := self.sessions.get(launch.session)) is not None:
                _insert_gang(before, launch)
            return
        queue = self.sessions[launch.session]
        cross_island = self.program_of(launch).cross_island
        if cross_island:
            self.cross_island.append((launch.sequence, launch.session))
        if not queue.items:
            queue.items.append(launch)
            queue.lead(launch, now)
            self.waiting[launch.session] = queue
            queue.ranks[launch.sequence], queue.prioritized = rank_of(now, priority), priority != 0
        elif (priority or queue.prioritized) and not cross_island:
            self._pass(queue, launch, rank_of(now, priority))
        else:
            queue.items.append(launch)
            queue.ranks[launch.sequence] = now

    def _pass(self, queue: SessionQueue, launch: wire.IslandLaunch, rank: float) -> None:
        """Queues a launch before those that it passes. As the head it has the place of the one before it, which the
        session has waited for."""
        queue.prioritized = True
        place = place_of(self._accesses(launch, rank), queue.items, functools.partial(self._accesses_of, queue))
        queue.items.insert(place, launch)
        queue.ranks[launch.sequence] = rank

    def _accesses_of(
        self, queue: SessionQueue, item: wire.IslandLaunch | wire.Drop | wire.DropProgram
    ) -> Accesses | Fixed:
        if not isinstance(item, wire.IslandLaunch) or item.first:
            return Fixed.FOLLOWS
        if self.program_of(item).cross_island:
            return Fixed.BARRIER
        return self._accesses(item, queue.ranks[item.sequence])

    def _accesses(self, launch: wire.IslandLaunch, rank: float) -> Accesses:
        program = self.program_of(launch)
        results = range(launch.results, launch.results + program.results)
        return Accesses(rank, launch.arguments, results, program.donated)

    def flush(self, queue: SessionQueue, commands: list[Command], now: float) -> None:
        """Sends the messages before the next launch of a session."""
        items = queue.items
        while items:
            head = items[0]
            if isinstance(head, wire.IslandLaunch):
                if head.first == 0:
                    queue.lead(head, now)
                    return
                if head.sequence in self.outstanding:
                    commands.append(ToHosts(head))
            else:
                if isinstance(head, wire.DropProgram):
                    self.programs.pop(head.program, None)
                commands.append(ToHosts(head))
            items.popleft()
        del self.waiting[queue.session]
        queue.ranks.clear()
        queue.prioritized = False
        if queue.ended:
            self.forget(queue.session)

    def forget(self, session: int) -> None:
        """Forgets a session, of which nothing waits."""
        self.sessions.pop(session, None)
        self.ledger.close(session)

    def clear(self) -> None:
        """Forgets all launches that wait. Drops are moot: the hosts start empty, or say to another controller what they
        hold."""
        for queue in self.waiting.values():
            for item in queue.items:
                if isinstance(item, wire.IslandLaunch) and item.first == 0:
                    self.ledger.leave(queue.usage)
                elif isinstance(item, wire.DropProgram):
                    self.programs.pop(item.program, None)
            queue.items.clear()
            queue.ranks.clear()
            queue.prioritized = False
        for number in [number for number, queue in self.sessions.items() if queue.ended]:
            self.forget(number)
        self.waiting.clear()
        self.cross_island.clear()

    def lengths(self) -> dict[str, int]:
        """Launches that wait, by tenant."""
        found: dict[str, int] = {}
        for queue in self.waiting.values():
            name = queue.usage.tenant
            launches = sum(isinstance(item, wire.IslandLaunch) and item.first == 0 for item in queue.items)
            found[name] = found.get(name, 0) + launches
        return found


def _insert_gang(queue: SessionQueue, launch: wire.IslandLaunch) -> None:
    for k in range(len(queue.items) - 1, -1, -1):
        item = queue.items[k]
        if isinstance(item, wire.IslandLaunch) and item.sequence == launch.sequence:
            queue.items.insert(k + 1, launch)
            return
