"""Bugs planted into the rule by which launches pass others of their session; they join the table of `planted`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pathways_ray.controller.backlog import Backlog
from pathways_ray.scheduler import priorities
from pathways_ray.scheduler.priorities import Accesses, Fixed
from pathways_ray.scheduler.queues import Queues
from tests.simulation.planted import Original, Patch, bug, wrapped

PASSING: dict[str, Any] = {
    "islands": {0: [0]},
    "clients": 2,
    "window": 2,
    "max_in_flight": 1024,
    "slices": 1,
    "programs": 4,
    "launches": (40, 40),
    "poison": 0.0,
    "flaws": 0.0,
    "priorities": 0.5,
    "moves": 0.0,
    "suspends": 0.0,
    "loops": 0.0,
}
"""Launches that wait for each other, on one host."""

ACROSS: dict[str, Any] = PASSING | {"islands": {0: [0], 1: [1]}, "slices": 3, "cross_island_window": 2}
"""The same on two islands."""


@bug(faults=0, **PASSING)
def a_launch_passes_what_makes_its_arguments(patch: Patch) -> None:
    def passing(later: Accesses) -> Callable[[Accesses], bool]:
        donated = {later.arguments[k] for k in later.donated}
        return lambda ahead: later.rank < ahead.rank and donated.isdisjoint(ahead.arguments)

    patch.setattr(priorities, "passing", passing)


@bug(faults=0, shown=7, **PASSING)
def a_launch_that_donates_passes_what_reads_its_arguments(patch: Patch) -> None:
    wrapped(patch, priorities, "passing", lambda original, later: original(later._replace(donated=())))


@bug(faults=0, **ACROSS)
def islands_have_cross_island_launches_in_orders_of_their_own(patch: Patch) -> None:
    """They pass others where they wait, and the sequence with them."""

    def put(original: Original, self: Queues, launch: Any, now: float, priority: int = 0) -> None:
        queue = self.sessions.get(launch.session)
        if not self.program_of(launch).cross_island or not priority or queue is None or not queue.items:
            return original(self, launch, now, priority)
        self.cross_island.appendleft((launch.sequence, launch.session))
        return self._pass(queue, launch, priorities.rank_of(now, priority))

    wrapped(patch, Queues, "put", put)


@bug(faults=0, **ACROSS | {"max_in_flight": 3})
def a_launch_passes_an_upload_that_it_takes(patch: Patch) -> None:
    """At the controller, where calls wait that it has no room for."""

    def enter(original: Original, self: Backlog, call: Any, programs: Any) -> None:
        from pathways_ray.controller import backlog
        from pathways_ray.transport.messages import Put

        real = backlog._accesses_of
        patched: Any = lambda programs, one: Fixed.FOLLOWS if isinstance(one, Put) else real(programs, one)  # noqa: E731
        backlog._accesses_of = patched
        try:
            original(self, call, programs)
        finally:
            backlog._accesses_of = real

    wrapped(patch, Backlog, "enter", enter)
