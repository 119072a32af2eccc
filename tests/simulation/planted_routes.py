"""Bugs planted into edges that leave together, as the pieces of routed rows do; they join the table of `planted`."""

from __future__ import annotations

from typing import Any

from pathways_ray.errors import Failure
from pathways_ray.executor.run.steps import Slots
from tests.simulation.planted import Original, Patch, bug, wrapped

ROUTING: dict[str, Any] = {
    "islands": {0: [0], 1: [1]},
    "clients": 2,
    "slices": 3,
    "programs": 3,
    "poison": 0.0,
    "flaws": 0.0,
    "decisions": 0.0,
    "routes": 1.0,
}
"""Programs that route rows, on two islands of one host."""


@bug(faults=0, **ROUTING)
def parts_change_places(patch: Patch) -> None:
    """Where several parts lie on one slice, they travel in one bundle."""

    def put(original: Original, self: Slots, targets: Any, made: Any) -> None:
        original(self, targets, made if isinstance(made, Failure) else list(made)[::-1])

    wrapped(patch, Slots, "put", put)
