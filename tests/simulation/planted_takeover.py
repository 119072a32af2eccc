"""Bugs planted into how a controller follows another one; they join the table of `planted`."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pathways_ray.client import suspending
from pathways_ray.client.core import ClientCore
from pathways_ray.client.ending import Ending
from pathways_ray.client.renewals import Renewals
from pathways_ray.client.suspension import Suspension
from pathways_ray.controller import returning, takeover
from pathways_ray.controller.inherited import Answer, Fate, Inherited
from pathways_ray.controller.takeover import Takeover
from pathways_ray.resource_manager.allocation import Inventory
from pathways_ray.resource_manager.controllers import Controllers
from pathways_ray.scheduler.controller_absence import ControllerAbsence
from pathways_ray.scheduler.queues import Queues
from pathways_ray.transport.messages import HostUp, IslandOutcomes
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


BUSY: dict[str, Any] = DYING | {
    "controller_deaths": 5,
    "islands": {0: [0], 1: [1, 2]},
    "clients": 4,
    "launches": (40, 40),
    "window": 16,
    "cross_island_window": 8,
    "max_in_flight": 1024,
    "slow": 30.0,
}
"""The same, with much under way."""


@bug(faults=0, shown=7, **DYING)
def a_resumed_session_does_not_register_its_programs_again(patch: Patch) -> None:
    patch.setattr(Renewals, "controller_lost", lambda self: None)


@bug(faults=0, shown=8, **DYING)
def launches_that_were_sent_are_forgotten_with_the_controller(patch: Patch) -> None:
    patch.setattr(ClientCore, "_note_sent", lambda self, now: None)


@bug(faults=0, **BUSY)
def schedulers_do_not_say_what_launches_came_to(patch: Patch) -> None:
    wrapped(
        patch,
        ControllerAbsence,
        "over",
        lambda original, self, *a: [
            c for c in original(self, *a) if not isinstance(getattr(c, "message", None), IslandOutcomes)
        ],
    )


@bug(faults=0, **BUSY)
def clients_do_not_name_what_they_have_sent(patch: Patch) -> None:
    def request(original: Original, self: ClientCore, *arguments: Any) -> Any:
        return replace(original(self, *arguments), unanswered=())

    wrapped(patch, Ending, "resume_request", request)


@bug(faults=0, shown=11, **BUSY)
def outcomes_that_come_later_are_not_passed_on(patch: Patch) -> None:
    patch.setattr(Inherited, "reported", lambda self, island, sequence, failure: [])


@bug(faults=0, **BUSY)
def programs_of_launches_that_wait_are_dropped(patch: Patch) -> None:
    def told(original: Original, self: Inherited, island: int, outcomes: Any) -> None:
        original(self, island, outcomes)
        self.busy.clear()

    patch.setattr(Queues, "waiting_for", lambda self, program: None)
    wrapped(patch, Inherited, "told", told)


@bug(faults=0, **BUSY | {"poison": 0.3})
def a_launch_that_failed_counts_as_done(patch: Patch) -> None:
    patch.setattr(Fate, "failure", None)


@bug(faults=0, shown=2, **BUSY)
def results_of_launches_that_ran_are_dropped(patch: Patch) -> None:
    patch.setattr(Answer, "there", [])


@bug(faults=0, shown=7, **DYING)
def a_controller_numbers_its_launches_as_the_one_before(patch: Patch) -> None:
    def host_up(original: Original, self: Takeover, island: int, message: HostUp) -> Any:
        assert message.holds is not None
        return original(self, island, replace(message, holds=replace(message.holds, sequence=0)))

    patch.setattr(takeover, "NUMBERS_APART", 0)
    patch.setattr(Takeover, "island_up", lambda self, hello: None)
    wrapped(patch, Takeover, "host_up", host_up)


@bug(faults=0, shown=15, **DYING | {"clients": 4, "launches": (40, 40)})
def what_hosts_hold_without_a_handle_stays_there(patch: Patch) -> None:
    def enter(original: Original, self: Takeover, *arguments: Any) -> Any:
        return [c for c in original(self, *arguments) if type(c.message).__name__ != "Drop"]

    wrapped(patch, Takeover, "_enter", enter)


@bug(faults=0, shown=24, **DYING)
def sessions_that_do_not_come_back_keep_what_they_hold(patch: Patch) -> None:
    def end(self: Takeover, now: float) -> list[Any]:
        self.over_since = now
        return []

    patch.setattr(Takeover, "_end", end)


@bug(faults=0, **BUSY)
def launches_wait_for_islands_that_they_never_came_to(patch: Patch) -> None:
    patch.setattr(Inherited, "abort_unknown", lambda self: [])


@bug(faults=0, shown=11, **DYING | {"controller_deaths": 1})
def what_was_called_while_the_controller_was_away_is_not_sent(patch: Patch) -> None:
    def request(original: Original, self: ClientCore, *arguments: Any) -> Any:
        found = original(self, *arguments)
        self.queue.clear()
        return found

    wrapped(patch, Ending, "resume_request", request)


@bug(faults=0, shown=7, **DYING | {"controller_deaths": 4, "manager_deaths": 4, "launches": (40, 60)})
def slices_that_the_resource_manager_has_forgotten_stay_so(patch: Patch) -> None:
    def slices_of(original: Original, *arguments: Any) -> Any:
        known = arguments[-1]
        return [one for one in original(*arguments) if one.placed.mesh.id in known]

    wrapped(patch, returning, "slices_of", slices_of)


@bug(faults=0, **DYING | {"controller_deaths": 4, "manager_deaths": 4, "launches": (40, 60)})
def a_resource_manager_that_has_forgotten_slices_is_not_told(patch: Patch) -> None:
    patch.setattr(Inventory, "hold", lambda self, session, slices, last_slice: True)


SUSPENDED = DYING | {"controller_deaths": 0, "suspends": 0.5, "deaths": 0.2}
"""Users suspend their sessions, and processes die in moments of that."""


@bug(faults=0, shown=10, **SUSPENDED)
def what_a_suspended_session_has_saved_is_taken_for_lost(patch: Patch) -> None:
    def request(original: Original, self: ClientCore, name: str, slices: Any, now: float, saved: Any) -> Any:
        return original(self, name, slices, now, saved and Suspension(saved.slices, {}))

    wrapped(patch, Ending, "resume_request", request)


@bug(faults=0, shown=55, **SUSPENDED)
def slices_of_the_controller_before_are_taken_for_those_of_its_successor(patch: Patch) -> None:
    patch.setattr(suspending, "_check_same", lambda core, losses: None)


@bug(
    faults=16,
    seeds=600,
    shown=120,
    controller_deaths=8,
    moves=0.8,
    suspends=0.5,
    clients=4,
    flaws=0.0,
    poison=0.0,
)
def a_controller_that_is_gone_still_changes_slices(patch: Patch) -> None:
    patch.setattr(Controllers, "is_over", lambda self, started: False)


TWICE: dict[str, Any] = {
    "islands": {0: [0], 1: [1]},
    "controller_deaths": 3,
    "scheduler_deaths": 9,
    "torn": 1.0,
    "clients": 4,
    "flaws": 0.0,
    "poison": 0.0,
    "launches": (40, 60),
    "moves": 0.5,
}
"""Schedulers and controllers die again and again before others have heard of it."""


@bug(faults=0, shown=2, **TWICE)
def what_sessions_have_goes_with_a_scheduler_that_dies_before_they_come_back(patch: Patch) -> None:
    patch.setattr(Takeover, "host_back", lambda self, message, commands: list(commands))
