"""Bugs planted into how islands come and go; they join the table of `planted`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from pathways_ray.client import moving, suspending
from pathways_ray.client.coalesce import Coalescer
from pathways_ray.client.renewals import Renewals
from pathways_ray.controller import hosts, manager_calls, moves
from pathways_ray.controller.islands import Islands
from pathways_ray.controller.manager_calls import ManagerCalls
from pathways_ray.controller.moves import Moves
from pathways_ray.executor.run.core import HostCore
from pathways_ray.ir.plan import Device
from pathways_ray.resource_manager import choosing
from pathways_ray.resource_manager.choosing import HostRecord
from pathways_ray.resource_manager.core import ManagerCore
from pathways_ray.resource_manager.islands import SharedIslands
from pathways_ray.simulation import mover
from pathways_ray.transport.messages import Abort, Drop, DropSession
from tests.simulation.planted import SINGLES, Original, Patch, bug, wrapped

CHANGING: dict[str, Any] = {"islands": {0: [0], 1: [1], 2: [2]}, "clients": 4, "changes": 8, "flaws": 0.0}
"""Many islands come and go under clients that come and go."""


@bug(faults=0, **CHANGING)
def a_drained_island_gets_slices(patch: Patch) -> None:
    patch.setattr(SharedIslands, "drain", lambda self, island, until: None)


@bug(faults=0, **CHANGING)
def an_island_is_removed_with_the_slices_that_it_has(patch: Patch) -> None:
    def remove(original: Original, self: SharedIslands, island: int, now: float) -> Any:
        return original(self, island, math.inf)

    wrapped(patch, SharedIslands, "remove", remove)


@bug(faults=0, **CHANGING)
def the_controller_waits_for_the_hosts_of_an_island_that_is_gone(patch: Patch) -> None:
    patch.setattr(Islands, "forget", lambda self, island: [])


MOVING: dict[str, Any] = {"islands": {0: [0], 1: [1], 2: [2, 3]}, "moves": 0.5, "poison": 0.0, "flaws": 0.0}
"""Users move their slices while they work."""


@bug(faults=0, **MOVING)
def arrays_are_left_behind_when_their_slice_moves(patch: Patch) -> None:
    """The controller takes them for those of the slice that was there."""
    patch.setattr(moves, "rename", lambda buffer, slices: None)


@bug(faults=0, **MOVING)
def programs_are_not_registered_again_after_a_move(patch: Patch) -> None:
    patch.setattr(Renewals, "moved", lambda self, slices: None)


@bug(faults=0, shown=7, **MOVING)
def a_composed_program_outlives_the_move_of_its_slice(patch: Patch) -> None:
    patch.setattr(Coalescer, "moved", lambda self, slices: None)


@bug(faults=0, **MOVING)
def copies_are_made_while_launches_are_under_way(patch: Patch) -> None:
    patch.setattr(moving, "is_quiet", lambda core: True)
    patch.setattr(mover, "is_quiet", lambda core: True)
    patch.setattr(Moves, "refusal", lambda self, session, pairs: None)


@bug(faults=0, **MOVING)
def handles_go_on_with_the_array_on_the_old_devices(patch: Patch) -> None:
    wrapped(patch, moving, "renumbered", _forgotten)


def _forgotten(original: Original, core: Any, copied: Any, slices: Any) -> Any:
    return original(core, (), slices)


SUSPENDING = MOVING | {"moves": 0.0, "suspends": 0.5}
"""Users suspend their sessions while they work, and resume them."""


@bug(faults=0, **SUSPENDING)
def what_a_suspended_session_holds_stays_on_its_devices(patch: Patch) -> None:
    wrapped(patch, Moves, "suspend", lambda original, self, session: original(self, session) and [])


@bug(faults=0, **SUSPENDING)
def handles_of_a_resumed_session_name_what_was_freed(patch: Patch) -> None:
    wrapped(patch, suspending, "renumbered", _forgotten)


@bug(faults=0, **SUSPENDING)
def a_session_is_suspended_while_launches_are_under_way(patch: Patch) -> None:
    patch.setattr(mover, "is_quiet", lambda core: True)
    patch.setattr(Moves, "busy", lambda self, session: None)


@bug(faults=0, islands={0: [0, 1, 2]}, rings=True, flaws=0.0)
def slices_are_made_of_devices_here_and_there(patch: Patch) -> None:
    """The resource manager forgets where devices are."""
    patch.setattr(choosing, "is_grid", lambda links: False)
    patch.setattr(choosing, "_free", lambda host, load, busiest: _every_other(host))


def _every_other(host: HostRecord) -> list[Device]:
    return sorted((Device(host.host, k) for k in range(host.devices)), key=lambda device: device.index % 2)


DYING: dict[str, Any] = {
    "islands": {0: [0], 1: [1, 2]},
    "clients": 4,
    "manager_deaths": 3,
    "flaws": 0.0,
    "suspends": 0.3,
}
"""Nothing but the resource manager dies, again and again, while sessions come and go."""


@bug(faults=0, shown=1, **DYING)
def a_new_resource_manager_hears_of_no_slice(patch: Patch) -> None:
    def without(original: Original, *known: Any) -> Any:
        return msgspec.structs.replace(original(*known), slices=())

    wrapped(patch, manager_calls, "holdings", without)


@bug(faults=0, seeds=300, shown=129, **DYING)
def a_new_resource_manager_maps_slices_before_it_knows_the_others(patch: Patch) -> None:
    def holds(original: Original, self: ManagerCore, event: Any, now: float) -> Any:
        hosts = msgspec.structs.replace(event.holdings, slices=())
        commands = original(self, event._replace(holdings=hosts), now)
        self.inventory.restore(self.shared.there(event.holdings.slices))
        return commands

    wrapped(patch, ManagerCore, "_controller_holds", holds)


@bug(faults=0, **DYING)
def a_new_resource_manager_does_not_know_the_hosts_that_serve(patch: Patch) -> None:
    def known(original: Original, self: ManagerCore, host: Any, now: float) -> Any:
        return [] if self.uninformed else original(self, host, now)

    wrapped(patch, ManagerCore, "_host_known", known)


@bug(faults=0, **DYING)
def what_the_resource_manager_died_with_is_not_asked_again(patch: Patch) -> None:
    patch.setattr(ManagerCalls, "missed", lambda self, event, now: None)


ORPHANING: dict[str, Any] = {"islands": {0: [0], 1: [1], 2: [2, 3]}, "scheduler_deaths": 3, "changes": 0, "flaws": 0.0}
"""Nothing but schedulers die; hosts by themselves go on with what they hold."""


def _without(what: type) -> Callable[..., Any]:
    def changed(original: Original, *known: Any) -> Any:
        found = original(*known)
        return found._replace(unwanted=[message for message in found.unwanted if type(message) is not what])

    return changed


@bug(faults=0, seeds=300, shown=171, **ORPHANING)
def a_host_keeps_buffers_that_nobody_wants(patch: Patch) -> None:
    wrapped(patch, hosts, "compared", _without(Drop))


@bug(faults=0, shown=17, **ORPHANING)
def a_host_keeps_what_an_ended_session_had(patch: Patch) -> None:
    wrapped(patch, hosts, "compared", _without(DropSession))


WIDE: dict[str, Any] = SINGLES | {"clients": 4, "slices": 3, "launches": (40, 40), "scheduler_deaths": 6}
"""Launches over many islands, each of a host that outlives its scheduler: some wait for what the others lost."""


@bug(faults=0, shown=2, **ORPHANING | WIDE | {"parallel": False})
def launches_go_on_that_failed_with_a_scheduler(patch: Patch) -> None:
    """Neither the host ends them by itself, nor does the controller."""
    wrapped(patch, hosts, "compared", _without(Abort))
    patch.setattr(HostCore, "_scheduler_found", lambda self, event: self.rejoining.scheduler_found(self._now))


@bug(faults=0, seeds=150, shown=68, **ORPHANING | WIDE | {"parallel": False, "controller_deaths": 3})
def what_waits_goes_on_where_a_scheduler_and_the_controller_die(patch: Patch) -> None:
    """Nobody is left who knows that it failed."""
    patch.setattr(HostCore, "_scheduler_found", lambda self, event: self.rejoining.scheduler_found(self._now))
