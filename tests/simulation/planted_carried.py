"""Bugs planted into arguments that go with their launches; they join the table of `planted`."""

from __future__ import annotations

from typing import Any

import msgspec

from pathways_ray.executor.run.carried import Carried
from pathways_ray.executor.run.early import EarlyLaunches
from pathways_ray.transport.messages import IslandLaunch
from tests.simulation.planted import Original, Patch, bug, wrapped
from tests.simulation.planted_early import ALONE

CARRYING: dict[str, Any] = {"inline": 1.0, "clients": 2, "flaws": 0.0, "moves": 0.0, "suspends": 0.0, "changes": 0}


@bug(faults=0, **CARRYING)
def a_host_keeps_what_a_launch_carried_for_the_next_one(patch: Patch) -> None:
    def take(original: Original, self: Carried, launch: IslandLaunch, place: int) -> Any:
        made = self.__dict__.setdefault("kept", {})
        if place not in made:
            made[place] = original(self, launch, place)
        return made[place]

    wrapped(patch, Carried, "take", take)


@bug(faults=0, **ALONE | {"inline": 1.0})
def what_an_early_launch_carried_gets_lost(patch: Patch) -> None:
    def take(original: Original, self: EarlyLaunches, looked: Any, plan: Any) -> Any:
        launch = original(self, looked, plan)
        return launch and msgspec.structs.replace(launch, inline=())

    wrapped(patch, EarlyLaunches, "take", take)
