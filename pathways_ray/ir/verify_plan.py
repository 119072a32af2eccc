"""The verifier of plans: always on, where a plan is made and where a host takes it.

A plan that breaks one of these rules would end as a missing value on a host, or as memory that is never freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from pathways_ray.errors import GraphError
from pathways_ray.ir.graph import host_part
from pathways_ray.ir.plan import Call, Execute, IslandPlan, Receive, Regroup, Reshard, Return, Send, Step


def verify_plan(plan: IslandPlan) -> IslandPlan:
    """Checks `plan` and returns it.

    Raises:
        GraphError: a step uses a slot that holds no value (not made yet, or dropped), a slot is made twice or dropped
            though it is a result, a step names an executable, a bundle, a slice or a label that the plan does not have,
            or gangs do not run once each and in order.
    """
    _Check(plan).run()
    return plan


class _Check:
    """One walk over the steps, with the slots that hold a value."""

    def __init__(self, plan: IslandPlan) -> None:
        self.plan = plan
        self.island_slices = {placed.mesh.id for placed in plan.slices if placed.island == plan.island}
        self.full: set[int] = set()
        self.made: set[int] = set()
        self.gang = -1
        self.called: dict[int, Call] = {}

    def fail(self, what: str) -> NoReturn:
        raise GraphError(f"the plan of program {self.plan.name!r} for island {self.plan.island} is broken: {what}")

    def run(self) -> None:
        plan = self.plan
        for slot, _ in plan.arguments:
            self.make("an argument", slot)
        lying = [layout.slice for _, layout in plan.argument_types]
        if lying and lying != [plan.slots[slot] for slot, _ in plan.arguments]:
            self.fail(f"its arguments are said to lie on slices {lying}")
        for number, executable in enumerate(plan.executables):
            if executable.slice not in self.island_slices:
                self.fail(f"executable {number} runs on slice {executable.slice}, which is not on this island")
        for number, step in enumerate(plan.steps):
            self.step(f"step {number}", step)
        for slot in [*(slot for slot, _ in plan.results), *plan.awaited]:
            if slot not in self.full:
                self.fail(f"slot {slot} is a result or awaited, but holds no value at the end")
        if self.called:
            self.fail(f"calls of nodes {sorted(self.called)} never return")
        if not set(plan.decides) <= set(plan.awaited):
            self.fail(f"it says the values of slots {plan.decides}, and awaits {plan.awaited}")
        numbers = [number for _, number in plan.results]
        if len(set(numbers)) != len(numbers):
            self.fail(f"its results are numbered {numbers}")

    def step(self, label: str, step: Step) -> None:
        if not 0 <= step.gang < max(self.plan.gangs, 1):
            self.fail(f"{label} belongs to gang {step.gang}; there are {self.plan.gangs}")
        if isinstance(step, Execute | Call | Return):
            self.execute(label, step)
        elif isinstance(step, Regroup):
            for slot in step.sources:
                self.use(label, slot)
            self.make(label, step.target)
        else:
            self.moving(label, step)
        if not isinstance(step, Receive | Call):
            for slot in step.drops:
                self.use(label, slot)
                self.full.discard(slot)

    def moving(self, label: str, step: Send | Receive | Reshard) -> None:
        plan = self.plan
        if not 0 <= step.bundle < len(plan.bundles):
            self.fail(f"{label} is about bundle {step.bundle}; there are {len(plan.bundles)}")
        edges = len(plan.bundles[step.bundle].edges)
        for slots, act in _moved(step, self.use, self.make):
            if len(slots) != edges:
                self.fail(f"{label} names {len(slots)} slots for the {edges} edges of its bundle")
            for slot in slots:
                act(label, slot)

    def execute(self, label: str, step: Execute | Call | Return) -> None:
        plan = self.plan
        if isinstance(step, Return):  # where its values are needed, behind the call
            call = self.called.pop(step.node, None)
            if call is None or (call.gang + 1, call.executable, call.inputs) != (
                step.gang,
                step.executable,
                step.inputs,
            ):
                self.fail(f"{label} returns what was not called so")
        elif step.gang <= self.gang:
            self.fail(f"{label} runs gang {step.gang} after gang {self.gang}")
        else:
            self.gang = step.gang
        if not 0 <= step.executable < len(plan.executables):
            self.fail(f"{label} runs executable {step.executable}; there are {len(plan.executables)}")
        if not 0 <= step.node < len(plan.labels):
            self.fail(f"{label} is labelled as node {step.node}; there are {len(plan.labels)}")
        executable = plan.executables[step.executable]
        if (host_part(executable.recipe) is None) != isinstance(step, Execute):
            self.fail(f"{label} takes a host function for a computation, or the other way round")
        made = [(step.outputs, executable.output_layouts, self.make)] if not isinstance(step, Call) else []
        if isinstance(step, Call):
            self.called[step.node] = step
        for slots, layouts, act in ((step.inputs, executable.input_layouts, self.use), *made):
            if len(slots) != len(layouts):
                self.fail(f"{label} names {len(slots)} slots for the {len(layouts)} values of its executable")
            for slot, layout in zip(slots, layouts, strict=True):
                act(label, slot)
                if plan.slots[slot] != layout.slice:
                    self.fail(f"{label} uses slot {slot} on slice {layout.slice}; it lies on slice {plan.slots[slot]}")

    def use(self, label: str, slot: int) -> None:
        if slot not in self.full:
            why = "was dropped before" if slot in self.made else "holds no value yet"
            self.fail(f"{label} uses slot {slot}, which {why}")

    def make(self, label: str, slot: int) -> None:
        if not 0 <= slot < len(self.plan.slots):
            self.fail(f"{label} makes slot {slot}; there are {len(self.plan.slots)}")
        if slot in self.made:
            self.fail(f"{label} makes slot {slot} a second time")
        self.made.add(slot)
        self.full.add(slot)


Act = Callable[[str, int], None]


def _moved(step: Send | Receive | Reshard, use: Act, make: Act) -> list[tuple[tuple[int, ...], Act]]:
    """The slots that a step takes and makes, each with the check of them."""
    match step:
        case Send():
            return [(step.sources, use)]
        case Receive():
            return [(step.targets, make)]
        case Reshard():
            return [(step.sources, use), (step.targets, make)]
