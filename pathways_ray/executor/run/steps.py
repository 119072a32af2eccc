"""The steps of a launch on a host, over numbered slots. Each step only enqueues; none waits.

Errors are values: a step that fails leaves a `Failure` in its output slots, a step that finds one among its inputs
passes it on. So a launch always runs to its end and always has an outcome.

Pure: arrays and compiled computations are opaque values here. The protocols say what is asked of them; `jax_parts.py`
has those of JAX, the simulator its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pathways_ray.errors import Cancelled, Failure, from_failure, to_failure
from pathways_ray.ir.plan import Call, Execute, NodeLabel, Receive, Regroup, Reshard, Return, Send
from pathways_ray.transport.messages import IslandLaunch

Computation = Callable[..., Any]
"""A compiled computation: takes arrays, gives a sequence of arrays (a regroup: one array), raises when it cannot be
enqueued, which a `Failure` among its arguments makes sure of. What is executed gives a last array, its *end*, which is
no output: it is ready, or fails, when the computation has, and no later one takes its memory."""

Pieces = list[Any]


class Transfer(Protocol):
    """This host's connections to its peers."""

    def own(self, array: Any) -> Any:
        """The array, or a copy of it when a peer may still read its memory: what is returned may be overwritten."""

    def copy(self, array: Any) -> Any:
        """An array with the same values in memory of its own."""

    def is_consumed(self, array: Any) -> bool:
        """Whether a computation has taken the memory of an array."""


class Outgoing(Protocol):
    """The sending side of a bundle on this host."""

    number: int
    host: int

    def send(self, values: Sequence[Any] | Failure, launch: int, transfer: Any) -> Pieces | Failure:
        """Serves the pieces of values, one for each edge, that other hosts need; returns those that stay on this host.
        A failure among them is served in place of all."""

    def take_back(self, launch: int, failure: Failure, transfer: Any) -> None:
        """Offers `failure` in place of the pieces of a launch, which are not needed any more."""


class Incoming(Protocol):
    """The receiving side of a bundle on this host."""

    number: int
    host: int

    def post(self, launch: int, transfer: Any) -> dict[int, Pieces | Failure]:
        """Posts the pulls, before the producers need to have run; by sending host."""

    def assemble(self, pulled: dict[int, Pieces | Failure], local: Pieces | Failure | None) -> Sequence[Any] | Failure:
        """The arrays in their new layouts, one for each edge, or the failure that came in their place."""


def first_failure(values: Sequence[Any] | Failure) -> Failure:
    """The failure in place of values, or the first one among them."""
    return values if isinstance(values, Failure) else next(value for value in values if isinstance(value, Failure))


class PendingCall(Protocol):
    """A call of a host function that is made beside the devices. `failure` is set when it is over and has failed."""

    failure: Failure | None

    def is_ready(self) -> bool:
        """Whether it is over."""

    def block_until_ready(self) -> Any:
        """Waits until it is."""

    def values(self) -> list[Any]:
        """The arrays that it gave; it is over, and has not failed."""

    def abandon(self, failure: Failure) -> None:
        """Has it fail, unless it is over. One that has begun is not stopped by that."""


HostFunction = Callable[[int, NodeLabel, list[Any]], PendingCall]
"""Has this host's part of a host function called, for a session, on arrays that may not be computed yet. Calls of a
session are made one after the other, in the order in which they were asked for."""


class Slots:
    """The values of one launch on this host.

    Args:
        count: slots of its plan.

    `pulled` has, by bundle and sending host, the pieces that were asked for; `local` those that stay on this host;
    `failed_inputs`, by gang, the failure that came in place of what it was to receive; `ends` the ends of gangs, by the
    slots of their first outputs; `consumed` are the slots whose memory a computation has taken. `calls` has, by node,
    the calls of host functions. `asked`: whether its client had asked for all results when they were stored. `aborted`
    is set once the launch has ended elsewhere: nobody takes what it would send.
    """

    __slots__ = (
        *("aborted", "asked", "calls", "consumed", "ends"),
        *("failed_inputs", "launch", "local", "pulled", "values"),
    )

    def __init__(self, launch: IslandLaunch, count: int) -> None:
        self.launch = launch
        self.values: list[Any] = [None] * count
        self.pulled: dict[int, dict[int, Any]] = {}
        self.local: dict[int, Any] = {}
        self.failed_inputs: dict[int, Failure] = {}
        self.aborted: Failure | None = None
        self.asked = False
        self.consumed: tuple[int, ...] = ()
        self.ends: dict[int, Any] = {}
        self.calls: dict[int, PendingCall | Failure] = {}

    def abort(self, failure: Failure) -> None:
        """The launch has ended elsewhere."""
        self.aborted = failure
        for call in self.calls.values():
            if not isinstance(call, Failure):
                call.abandon(failure)


class ExecuteStep:
    """This host's part of a gang: a compiled computation on slots."""

    __slots__ = (
        "compiled",
        "donated",
        "drops",
        "gang",
        "host",
        "inputs",
        "label",
        "outputs",
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
        self.compiled, self.donated, self.transfer = compiled, donated, transfer
        self.label, self.where, self.host = label.name, label.where, host

    def run(self, slots: Slots) -> None:
        values = slots.values
        inputs = [values[slot] for slot in self.inputs]
        try:
            if slots.launch.cancelled is not None:
                raise from_failure(slots.launch.cancelled)
            for k in self.donated:
                inputs[k] = self.transfer.own(inputs[k])
            outputs = self.compiled(*inputs)
            if self.donated:
                slots.consumed += tuple(self.inputs[k] for k in self.donated)
        except Exception as error:
            outputs = [self.failure(inputs, error)] * (len(self.outputs) + 1)
            taken = tuple(self.inputs[k] for k in self.donated if self.transfer.is_consumed(values[self.inputs[k]]))
            slots.consumed += taken
        *made, slots.ends[self.outputs[0]] = outputs
        for slot, value in zip(self.outputs, made, strict=True):
            values[slot] = value
        for slot in self.drops:
            values[slot] = None

    def failure(self, inputs: list[Any], error: Exception) -> Failure:
        for value in inputs:
            if isinstance(value, Failure):
                return value
        if isinstance(error, Cancelled):
            return to_failure(error)
        return Failure("ExecutionError", f"{type(error).__name__}: {error}", self.label, self.where, self.host)


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
        values = [failure] * len(self.outputs) if failure is not None else call.values()  # type: ignore[union-attr]
        for slot, value in zip(self.outputs, values, strict=True):
            slots.values[slot] = value
        for slot in self.drops:
            slots.values[slot] = None


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
            failure = Failure("ExecutionError", f"{type(error).__name__}: {error}", "transfer", "", self.outgoing.host)
            local = self.outgoing.send(failure, slots.launch.sequence, self.transfer)
        slots.local[self.outgoing.number] = local
        for slot in self.drops:
            slots.values[slot] = None


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
            text = f"{type(error).__name__}: {error}"
            made = Failure("ExecutionError", text, "transfer", "", self.incoming.host)
        _put(slots, self.targets, made)


def _put(slots: Slots, targets: Sequence[int], made: Sequence[Any] | Failure) -> None:
    """Puts values into slots, or a failure into all of them."""
    values = [made] * len(targets) if isinstance(made, Failure) else made
    for slot, value in zip(targets, values, strict=True):
        slots.values[slot] = value


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
            text = f"{type(error).__name__}: {error}"
            made = Failure("ExecutionError", text, "reshard", "", self.host)
        _put(slots, self.targets, made)
        for slot in self.drops:
            slots.values[slot] = None


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
            text = f"{type(error).__name__}: {error}"
            slots.values[self.target] = Failure("ExecutionError", text, "regroup", "", self.host)
        for slot in self.drops:
            slots.values[slot] = None


RunnableStep = ExecuteStep | CallStep | ReturnStep | SendStep | ReceiveStep | ReshardStep | RegroupStep
