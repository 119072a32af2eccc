"""Steps of host functions: one has the function called beside the devices, the other takes what it gave."""

from __future__ import annotations

from pathways_ray.errors import Failure
from pathways_ray.executor.run.parts import HostFunction
from pathways_ray.executor.run.steps import Slots
from pathways_ray.ir.plan import Call, NodeLabel, Return


class CallStep:
    """Has a host function called on slots."""

    __slots__ = ("function", "gang", "inputs", "label", "node")

    def __init__(self, step: Call, function: HostFunction, label: NodeLabel) -> None:
        self.gang, self.node, self.inputs = step.gang, step.node, step.inputs
        self.function, self.label = function, label

    def run(self, slots: Slots) -> None:
        inputs = [slots.values[slot] for slot in self.inputs]
        ended = slots.launch.cancelled or slots.aborted
        failed = next((value for value in inputs if isinstance(value, Failure)), ended)
        slots.calls[self.node] = failed or self.function(slots.launch.session, self.label, inputs)


class ReturnStep:
    """Puts what a host function gave into slots."""

    __slots__ = ("drops", "gang", "node", "outputs")

    def __init__(self, step: Return) -> None:
        self.gang, self.node, self.outputs, self.drops = step.gang, step.node, step.outputs, step.drops

    def run(self, slots: Slots) -> None:
        call = slots.calls.pop(self.node)
        failure = slots.failed_inputs.get(self.gang) or (call if isinstance(call, Failure) else call.failure)
        slots.put(self.outputs, failure if failure is not None else call.values())  # type: ignore[union-attr]
        slots.drop(self.drops)
