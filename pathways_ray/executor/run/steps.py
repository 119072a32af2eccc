"""The steps of a launch on a host, over numbered slots. Each step only enqueues; none waits.

Errors are values: a step that fails leaves a `Failure` in its output slots, a step that finds one among its inputs
passes it on. So a launch always runs to its end and always has an outcome.

This file has gangs and what goes between hosts; host functions are in `call_steps.py`, what changes layouts on the same
devices in `layout_steps.py`. Pure: arrays and compiled computations are opaque values, of which `parts.py` says what is
asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pathways_ray.errors import Cancelled, Failure, from_failure, to_failure
from pathways_ray.executor.run.numbered import row_of, taker
from pathways_ray.executor.run.parts import Computation, Incoming, Outgoing, PendingCall, Transfer
from pathways_ray.ir.plan import Execute, NodeLabel, Receive, Send
from pathways_ray.transport.messages import IslandLaunch


class Slots:
    """The values of one launch on this host.

    Args:
        count: slots of its plan.

    `pulled` has, by bundle and sending host, the pieces that were asked for; `local` those that stay on this host;
    `failed_inputs`, by gang, the failure that came in place of what it was to receive; `ends` the ends of gangs, by the
    slots of their first outputs; `consumed` are the slots whose memory a computation has taken. `calls` has, by node,
    the calls of host functions. `asked`: whether its client had asked for all results when they were stored; `later` is
    what the thread that waits for the launch does for that once they are computed, None where it does nothing.
    `results` are those that it gives, by their numbers, once all is enqueued. `aborted` is set once it has ended
    elsewhere: nobody takes what it would send then.
    """

    # What most launches leave as it is: of the class, so that none of them has to set it.
    results: dict[int, Any] | None = None
    aborted: Failure | None = None
    asked = False
    later: list[Callable[[], None]] | None = None
    consumed: tuple[int, ...] = ()

    def __init__(self, launch: IslandLaunch, count: int) -> None:
        self.launch = launch
        self.values: list[Any] = [None] * count
        self.pulled: dict[int, dict[int, Any]] = {}
        self.local: dict[int, Any] = {}
        self.failed_inputs: dict[int, Failure] = {}
        self.ends: dict[int, Any] = {}
        self.calls: dict[int, PendingCall | Failure] = {}

    def abort(self, failure: Failure) -> None:
        """The launch has ended elsewhere."""
        self.aborted = failure
        for call in self.calls.values():
            if not isinstance(call, Failure):
                call.abandon(failure)

    def put(self, targets: Sequence[int], made: Sequence[Any] | Failure) -> None:
        """Puts values into slots, or a failure into all of them."""
        values = [made] * len(targets) if isinstance(made, Failure) else made
        for slot, value in zip(targets, values, strict=True):
            self.values[slot] = value

    def drop(self, slots: Sequence[int]) -> None:
        """Lets go of values that no later step takes."""
        for slot in slots:
            self.values[slot] = None


def failed_in(what: str, error: Exception, host: int) -> Failure:
    """The failure of a step that is no part of a user's function, in place of what it would have made."""
    return Failure("ExecutionError", f"{type(error).__name__}: {error}", what, "", host)


class ExecuteStep:
    """This host's part of a gang: a compiled computation on slots."""

    __slots__ = (
        "compiled",
        "donated",
        "dropped",
        "drops",
        "gang",
        "host",
        "in_a_row",
        "inputs",
        "label",
        "nothing",
        "outputs",
        "row",
        "take",
        "transfer",
        "where",
    )

    def __init__(
        self,
        step: Execute,
        compiled: Computation,
        donated: tuple[int, ...],
        transfer: Transfer,
        label: NodeLabel,
        host: int,
    ) -> None:
        self.gang, self.inputs, self.outputs, self.drops = step.gang, step.inputs, step.outputs, step.drops
        self.take: Callable[[Sequence[Any]], Sequence[Any]] = taker(step.inputs)
        self.compiled, self.donated, self.transfer = compiled, donated, transfer
        self.label, self.where, self.host = label.name, label.where, host
        self.row = row_of(step.outputs)
        self.in_a_row = -1 if self.row is None else len(step.outputs)
        self.dropped, self.nothing = row_of(step.drops), [None] * len(step.drops)

    def run(self, slots: Slots) -> None:
        values = slots.values
        inputs = self.take(values)
        try:
            if slots.launch.cancelled is not None:
                raise from_failure(slots.launch.cancelled)
            if not self.donated:
                outputs = self.compiled(*inputs)
            else:
                inputs = self._owned(inputs)
                outputs = self.compiled(*inputs)
                slots.consumed += tuple(self.inputs[k] for k in self.donated)
        except Exception as error:
            outputs = [self.failure(inputs, error)] * (len(self.outputs) + 1)
            taken = tuple(self.inputs[k] for k in self.donated if self.transfer.is_consumed(values[self.inputs[k]]))
            slots.consumed += taken
        *made, slots.ends[self.outputs[0]] = outputs
        if len(made) == self.in_a_row:
            values[self.row] = made  # type: ignore[index]
        else:
            for slot, value in zip(self.outputs, made, strict=True):
                values[slot] = value
        if self.dropped is not None:
            values[self.dropped] = self.nothing
        else:
            slots.drop(self.drops)

    def _owned(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, with those that may be overwritten in the places of those that will be."""
        made = list(inputs)
        for k in self.donated:
            made[k] = self.transfer.own(made[k])
        return made

    def failure(self, inputs: Sequence[Any], error: Exception) -> Failure:
        for value in inputs:
            if isinstance(value, Failure):
                return value
        if isinstance(error, Cancelled):
            return to_failure(error)
        return Failure("ExecutionError", f"{type(error).__name__}: {error}", self.label, self.where, self.host)


class AgreedStep(ExecuteStep):
    """The same of a computation whose hosts agree in each call on how it is made: they tell it by its place in their
    order."""

    __slots__ = ("at",)

    def __init__(self, at: Callable[[int, int], None], *made: Any) -> None:
        super().__init__(*made)
        self.at = at

    def run(self, slots: Slots) -> None:
        self.at(slots.launch.sequence, self.gang)
        super().run(slots)


class SendStep:
    """Serves slots to the hosts that pull them."""

    __slots__ = ("drops", "gang", "outgoing", "sources", "transfer")

    def __init__(self, step: Send, outgoing: Outgoing, transfer: Any) -> None:
        self.gang, self.sources, self.drops = step.gang, step.sources, step.drops
        self.outgoing, self.transfer = outgoing, transfer

    def run(self, slots: Slots) -> None:
        values = [slots.values[slot] for slot in self.sources]
        try:
            aborted = slots.aborted
            local = aborted or self.outgoing.send(values, slots.launch.sequence, self.transfer)
        except Exception as error:
            failure = failed_in("transfer", error, self.outgoing.host)
            local = self.outgoing.send(failure, slots.launch.sequence, self.transfer)
        slots.local[self.outgoing.number] = local
        slots.drop(self.drops)


class ReceiveStep:
    """Assembles arrays from what a bundle brought."""

    __slots__ = ("gang", "incoming", "targets")

    def __init__(self, step: Receive, incoming: Incoming) -> None:
        self.gang, self.targets, self.incoming = step.gang, step.targets, incoming

    def run(self, slots: Slots) -> None:
        number = self.incoming.number
        pulled, local = slots.pulled.pop(number, {}), slots.local.pop(number, None)
        made: Sequence[Any] | Failure | None = slots.failed_inputs.get(self.gang)
        try:
            if made is None:
                made = self.incoming.assemble(pulled, local)
        except Exception as error:
            made = failed_in("transfer", error, self.incoming.host)
        slots.put(self.targets, made)
