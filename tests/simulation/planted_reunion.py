"""Bugs planted into how the hosts of an island come to one point after the death of their scheduler."""

from __future__ import annotations

from typing import Any

import msgspec

from pathways_ray.executor.run.instructions import Send
from pathways_ray.executor.run.journal import Said
from pathways_ray.executor.run.rejoining import Rejoining
from pathways_ray.scheduler.reunion import Met, Reunion
from pathways_ray.transport.messages import BarrierReached, CatchUp, Compiling, Holds
from tests.simulation.planted import SINGLES, Original, Patch, bug, wrapped

DYING: dict[str, Any] = {
    "islands": {0: [0, 1], 1: [2, 3, 4]},
    "torn": 0.03,
    "clients": 4,
    "launches": (40, 40),
    "window": 16,
    "flaws": 0.0,
    "poison": 0.0,
    "changes": 0,
    "moves": 0.0,
    "suspends": 0.0,
}
"""Schedulers of several hosts die before what they say has come to all of them, and nothing else does."""


@bug(faults=0, **DYING)
def hosts_do_not_get_what_others_have_heard(patch: Patch) -> None:
    def meet(original: Original, self: Reunion) -> Any:
        met = original(self)
        return Met(CatchUp(met.catch_up.first, ()), met.launches) if isinstance(met, Met) else met

    wrapped(patch, Reunion, "meet", meet)


@bug(faults=0, **DYING)
def hosts_take_once_more_what_they_have_heard(patch: Patch) -> None:
    def catch_up(original: Original, self: Rejoining, message: CatchUp, *others: Any) -> Any:
        return original(self, msgspec.structs.replace(message, first=self.journal.count), *others)

    wrapped(patch, Rejoining, "catch_up", catch_up)


@bug(faults=0, **DYING)
def hosts_at_barriers_do_not_say_so_again(patch: Patch) -> None:
    def found(original: Original, self: Rejoining, now: float) -> Any:
        made = original(self, now)
        return [one for one in made if not (isinstance(one, Send) and isinstance(one.message, BarrierReached))]

    wrapped(patch, Rejoining, "scheduler_found", found)


@bug(faults=0, **DYING)
def reports_that_died_with_a_scheduler_are_not_made_again(patch: Patch) -> None:
    patch.setattr(Said, "note", lambda self, message: None)


@bug(faults=0, shown=9, **SINGLES, scheduler_deaths=4, flaws=0.3, changes=0, moves=0.0, suspends=0.0)
def what_hosts_compile_is_not_said_to_the_next_scheduler(patch: Patch) -> None:
    def again(original: Original, self: Said, holds: Holds) -> Any:
        return [message for message in original(self, holds) if not isinstance(message, Compiling)]

    wrapped(patch, Said, "again", again)


@bug(faults=0, seeds=150, shown=102, **DYING)
def a_launch_that_waited_on_one_host_enters_where_it_failed_on_another(patch: Patch) -> None:
    def found(original: Original, self: Rejoining, now: float) -> Any:
        for active in self.active.values():
            active.brought = None
        return original(self, now)

    wrapped(patch, Rejoining, "scheduler_found", found)
