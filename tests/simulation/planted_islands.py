"""Bugs planted into how islands come and go; they join the table of `planted`."""

from __future__ import annotations

import math
from typing import Any

from pathways_ray.controller.core import ControllerCore
from pathways_ray.resource_manager.islands import SharedIslands
from tests.simulation.planted import Original, Patch, bug, wrapped

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
    patch.setattr(ControllerCore, "_forget", lambda self, island: [])
