"""The simulated operator, who adds islands, drains them and removes them while clients work."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any, Protocol

from pathways_ray.controller.changes import IslandChange
from pathways_ray.simulation.controller import SimulatedController
from pathways_ray.simulation.environment import Environment
from pathways_ray.simulation.faults import FAULT_SPAN_S
from pathways_ray.simulation.manager import SimulatedManager
from pathways_ray.transport import messages as wire

DEADLINES_S = (0.0, 3.0, 60.0)
"""Times that the slices of a drained island may stay."""

CHANGED_MIND = 0.3
"""The chance that the operator takes a drain back."""

AGAIN_S, TRIES = 1.0, 30
"""A drained island is removed again and again until it is gone, by an operator with some patience."""


class OperatorEnvironment(Environment, Protocol):
    """The environment of the operator. `islands` has the hosts of each island that was started and not removed,
    `drained` those that get no slices, and `deadlines` until when one that is to be drained may keep what it has."""

    controller: SimulatedController
    manager: SimulatedManager
    islands: dict[int, list[int]]
    drained: set[int]
    deadlines: dict[int, float]

    def start_island(self, island: int, hosts: list[int]) -> None:
        """Starts the processes of an island."""

    def come_late(self, count: int) -> None:
        """Some more clients begin, as soon as there is a controller."""


class SimulatedOperator:
    """Makes `settings.changes` changes of the islands, drawn from the seed."""

    def __init__(self, world: OperatorEnvironment, seed: int) -> None:
        self.world = world
        self.random = Random(f"operator {seed}")
        self.undrains: Counter[int] = Counter()
        self.undrained: Counter[int] = Counter()
        """By island: drains that were to be taken back, and those of them that have an answer. A drain that was under
        way meanwhile may have come before or after: the order of the answers does not say."""
        self.drains: Counter[int] = Counter()
        self.drains_answered: Counter[int] = Counter()
        """By island: all drains that were asked for, and those of them that have an answer."""
        self.process = world.network.process("operator", "operator")
        for _ in range(world.settings.changes):
            change = self.random.choice([self._add, self._drain, self._drain])
            world.network.after(self.process, 1.0 + FAULT_SPAN_S * self.random.random(), change)

    def _add(self) -> None:
        self.world.step_begins()
        self.world.manager.add_island(self.process, self.random.choice([1, 1, 2]), self._added)

    def _added(self, found: tuple[int, tuple[int, ...]] | wire.Refused) -> None:
        if not isinstance(found, wire.Refused):
            self.world.start_island(found[0], list(found[1]))
            self.world.come_late(1)

    def _drain(self) -> None:
        island = self.random.choice(sorted(self.world.islands))
        deadline_s = self.random.choice(DEADLINES_S)
        until = self.world.clock.now + deadline_s
        self.world.deadlines[island] = min(until, self.world.deadlines.get(island, until))
        undrains, undrained = self.undrains[island], self.undrained[island]
        self.drains[island] += 1

        def answered(reply: wire.Reply) -> None:
            self.drains_answered[island] += 1
            if isinstance(reply, wire.Accepted):
                if self.undrains[island] == undrains == undrained:
                    self.world.drained.add(island)
                self.world.deadlines.setdefault(island, until)  # one that was taken back may have been answered since
                self.world.come_late(1)
                if self.random.random() < CHANGED_MIND:
                    self.world.network.after(self.process, deadline_s / 2, self._undrain, island)
                else:
                    self._remove(island)

        self._ask(wire.DrainIsland(0, island, deadline_s), answered)

    def _undrain(self, island: int) -> None:
        drains, drained = self.drains[island], self.drains_answered[island]

        def answered(reply: wire.Reply) -> None:
            self.undrained[island] += 1
            if isinstance(reply, wire.Accepted):
                if self.drains[island] == drains == drained:  # else one may have come behind it
                    self.world.deadlines.pop(island, None)
                self.world.drained.discard(island)  # another drain may have been answered meanwhile

        if self.world.controller.process.alive and island in self.world.islands:
            self.undrains[island] += 1
            self.world.drained.discard(island)  # it may get slices as soon as the resource manager knows
            self._ask(wire.UndrainIsland(0, island), answered)

    def _remove(self, island: int, again: int = TRIES) -> None:
        if again and island in self.world.islands:
            self._ask(wire.RemoveIsland(0, island), lambda reply: None)
            self.world.network.after(self.process, AGAIN_S, self._remove, island, again - 1)

    def _ask(self, request: IslandChange, answered: Any) -> None:
        self.world.step_begins()
        if self.world.controller.process.alive:
            self.world.controller.of_operator(self.process, request, answered)
