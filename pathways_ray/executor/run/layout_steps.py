"""Steps that change how arrays lie on devices that hold them already."""

from __future__ import annotations

from pathways_ray.errors import Failure
from pathways_ray.executor.run.parts import Computation
from pathways_ray.executor.run.steps import Slots, failed_in
from pathways_ray.ir.plan import Regroup, Reshard


class ReshardStep:
    """Changes the layouts of slots on the same devices."""

    __slots__ = ("compiled", "drops", "gang", "host", "sources", "targets")

    def __init__(self, step: Reshard, compiled: Computation, host: int) -> None:
        self.gang, self.sources, self.targets, self.drops = step.gang, step.sources, step.targets, step.drops
        self.compiled, self.host = compiled, host

    def run(self, slots: Slots) -> None:
        values = [slots.values[slot] for slot in self.sources]
        try:
            made = next((v for v in values if isinstance(v, Failure)), None) or self.compiled(*values)
        except Exception as error:
            made = failed_in("reshard", error, self.host)
        slots.put(self.targets, made)
        slots.drop(self.drops)


class RegroupStep:
    """Makes a slot of shards of others, which stay where they are."""

    __slots__ = ("drops", "gang", "host", "made", "sources", "target")

    def __init__(self, step: Regroup, made: Computation, host: int) -> None:
        self.gang, self.sources, self.target, self.drops = step.gang, step.sources, step.target, step.drops
        self.made, self.host = made, host

    def run(self, slots: Slots) -> None:
        values = [slots.values[slot] for slot in self.sources]
        failed = next((value for value in values if isinstance(value, Failure)), None)
        try:
            slots.values[self.target] = failed if failed is not None else self.made(*values)
        except Exception as error:
            slots.values[self.target] = failed_in("regroup", error, self.host)
        slots.drop(self.drops)
