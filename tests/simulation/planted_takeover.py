"""Bugs planted into how a controller follows another one; they join the table of `planted`."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pathways_ray.client import suspending
from pathways_ray.client.core import ClientCore
from pathways_ray.client.ending import Ending
from pathways_ray.client.renewals import Renewals
from pathways_ray.client.suspension import Suspension
from pathways_ray.controller import takeover
from pathways_ray.controller.takeover import Takeover
from pathways_ray.scheduler.order import IslandOrder
from pathways_ray.transport.messages import HostUp
from tests.simulation.planted import Original, Patch, bug, wrapped

DYING: dict[str, Any] = {
    "controller_deaths": 2,
    "flaws": 0.0,
    "poison": 0.0,
    "changes": 0,
    "moves": 0.0,
    "suspends": 0.0,
}
"""Controllers die under the work of clients, and nothing else does."""


@bug(faults=0, **DYING)
def a_resumed_session_does_not_register_its_programs_again(patch: Patch) -> None:
    patch.setattr(Renewals, "controller_lost", lambda self: None)


@bug(faults=0, **DYING)
def launches_that_were_sent_are_forgotten_with_the_controller(patch: Patch) -> None:
    patch.setattr(ClientCore, "_fail_sent", lambda self, now: None)


@bug(faults=0, **DYING)
def a_controller_numbers_its_launches_as_the_one_before(patch: Patch) -> None:
    def host_up(original: Original, self: Takeover, island: int, message: HostUp) -> Any:
        assert message.holds is not None
        return original(self, island, replace(message, holds=replace(message.holds, sequence=0)))

    patch.setattr(takeover, "NUMBERS_APART", 0)
    patch.setattr(Takeover, "island_up", lambda self, hello: None)
    wrapped(patch, Takeover, "host_up", host_up)


@bug(faults=0, shown=11, **DYING | {"clients": 4, "launches": (40, 40)})
def what_hosts_hold_without_a_handle_stays_there(patch: Patch) -> None:
    def enter(original: Original, self: Takeover, session: Any, request: Any) -> Any:
        return [c for c in original(self, session, request) if type(c.message).__name__ != "Drop"]

    wrapped(patch, Takeover, "_enter", enter)


@bug(faults=0, **DYING)
def sessions_that_do_not_come_back_keep_what_they_hold(patch: Patch) -> None:
    def end(self: Takeover, now: float) -> list[Any]:
        self.over_since = now
        return []

    patch.setattr(Takeover, "_end", end)


@bug(faults=0, **DYING)
def launches_wait_for_other_islands_after_the_controller_died(patch: Patch) -> None:
    wrapped(patch, IslandOrder, "let_go", lambda original, self, failure: original(self, failure) and [])


@bug(faults=0, **DYING | {"controller_deaths": 1})
def what_was_called_while_the_controller_was_away_is_not_sent(patch: Patch) -> None:
    def request(original: Original, self: ClientCore, *arguments: Any) -> Any:
        found = original(self, *arguments)
        self.queue.clear()
        return found

    wrapped(patch, Ending, "resume_request", request)


SUSPENDED = DYING | {"controller_deaths": 0, "suspends": 0.5, "deaths": 0.2}
"""Users suspend their sessions, and processes die in moments of that."""


@bug(faults=0, shown=10, **SUSPENDED)
def what_a_suspended_session_has_saved_is_taken_for_lost(patch: Patch) -> None:
    def request(original: Original, self: ClientCore, name: str, slices: Any, now: float, saved: Any) -> Any:
        return original(self, name, slices, now, saved and Suspension(saved.slices, {}))

    wrapped(patch, Ending, "resume_request", request)


@bug(faults=0, shown=13, **SUSPENDED)
def slices_of_the_controller_before_are_taken_for_those_of_its_successor(patch: Patch) -> None:
    patch.setattr(suspending, "_check_same", lambda core, losses: None)


@bug(faults=0, shown=26, **SUSPENDED)
def a_suspension_that_nobody_has_answered_did_not_take_place(patch: Patch) -> None:
    class Never(Exception):
        pass

    patch.setattr(suspending, "ControllerLost", Never)
