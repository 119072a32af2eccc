"""What a host does for a launch, step by step, over numbered slots. Each step only enqueues; none waits.

Errors are values: a step that fails leaves a `Failure` in its output slots, a step that finds one among its inputs
passes it on. So a launch always runs to its end and always has an outcome.

A gang whose inputs come from another host is enqueued once they have arrived (or failed), never before: a `GateStep`
stands in front of it. A device queue is first in, first out, so a gang that waited in it would hold up every other
tenant; and if its sender died, some devices would get their shards and enter the gang's collective while others got
errors and did not. Pulls are posted when the launch arrives all the same, so the data moves as soon as it is there.

Pure: arrays and compiled computations are opaque values here. The protocols say what is asked of them; `parts.py` has
those of JAX, the simulator its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from pathways_ray.errors import Failure
from pathways_ray.ir.plan import Execute, NodeLabel, Receive, Reshard, Send
from pathways_ray.transport.messages import IslandLaunch

if TYPE_CHECKING:
    from pathways_ray.executor.run.prepared import PreparedProgram

NO_LIMIT = 1 << 60

Computation = Callable[..., Any]
"""A compiled computation: takes arrays, gives a sequence of arrays (a reshard: one array), raises when it cannot be
enqueued, which a `Failure` among its arguments makes sure of."""

Pieces = list[Any]


class Transfer(Protocol):
    """This host's connections to its peers."""

    def own(self, array: Any) -> Any:
        """The array, or a copy of it when a peer may still read its memory: what is returned may be overwritten."""

    def copy(self, array: Any) -> Any:
        """An array with the same values in memory of its own."""


class Outgoing(Protocol):
    """The sending side of an edge on this host."""

    number: int
    host: int

    def send(self, value: Any, launch: int, transfer: Any) -> Pieces | Failure:
        """Serves the pieces other hosts need; returns those that stay on this host."""


class Incoming(Protocol):
    """The receiving side of an edge on this host."""

    number: int
    host: int

    def post(self, launch: int, transfer: Any) -> dict[int, Pieces | Failure]:
        """Posts the pulls, before the producers need to have run; by sending host."""

    def assemble(self, pulled: dict[int, Pieces | Failure], local: Pieces | Failure | None) -> Any:
        """The array in its new layout, or the failure that came in its place."""


class ActiveLaunch:
    """A launch on this host: its slots, how far it is, the pulls that were posted, the pieces that stay here.

    `limit` is the gang it may not reach yet (sequential dispatch raises it step by step). `promised` are arguments that
    a launch before it has yet to store. `opened` is the gate that was passed last, and `closed_by` the failure that
    came in place of what it waited for. Once `announced`, later launches know that its results are to come:
    `waiting` has those that need one, `dropped` the results nobody will need any more. `ended` is what it gives here,
    by buffer, once this host has enqueued all of it and waits for the others.
    """

    __slots__ = (
        "announced",
        "closed_by",
        "dropped",
        "ended",
        "limit",
        "local",
        "opened",
        "position",
        "program",
        "promised",
        "pulled",
        "reported",
        "run",
        "sequence",
        "values",
        "waiting",
    )

    def __init__(self, program: PreparedProgram, run: IslandLaunch) -> None:
        self.program = program
        self.run = run
        self.sequence = run.sequence
        self.values: list[Any] = [None] * len(program.plan.slots)
        self.position = 0
        self.limit = NO_LIMIT
        self.opened = -1
        self.closed_by: Failure | None = None
        self.promised: dict[int, list[int]] = {}
        self.pulled: dict[int, dict[int, Any]] = {}
        self.local: dict[int, Any] = {}
        self.reported = -1
        self.announced = False
        self.waiting: dict[int, list[ActiveLaunch]] = {}
        self.dropped: list[int] = []
        self.ended: dict[int, Any] | None = None


class ExecuteStep:
    """One gang, as far as it is this host's: a compiled computation on slots."""

    __slots__ = (
        "compiled",
        "donated",
        "drops",
        "gang",
        "host",
        "hosts",
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
        hosts: tuple[int, ...],
    ) -> None:
        self.gang, self.inputs, self.outputs, self.drops = step.gang, step.inputs, step.outputs, step.drops
        self.compiled, self.donated, self.transfer = compiled, donated, transfer
        self.label, self.where, self.host, self.hosts = label.name, label.where, host, hosts

    def run(self, active: ActiveLaunch) -> None:
        values = active.values
        inputs = [values[slot] for slot in self.inputs]
        try:
            for k in self.donated:
                inputs[k] = self.transfer.own(inputs[k])
            outputs = self.compiled(*inputs)
        except Exception as error:
            outputs = [self.failure(inputs, error)] * len(self.outputs)
        for slot, value in zip(self.outputs, outputs, strict=True):
            values[slot] = value
        for slot in self.drops:
            values[slot] = None

    def failure(self, inputs: list[Any], error: Exception) -> Failure:
        for value in inputs:
            if isinstance(value, Failure):
                return value
        return Failure("ExecutionError", f"{type(error).__name__}: {error}", self.label, self.where, self.host)


class SendStep:
    """Serves a slot to the hosts that pull it."""

    __slots__ = ("drops", "gang", "outgoing", "source", "transfer")

    def __init__(self, step: Send, outgoing: Outgoing, transfer: Any) -> None:
        self.gang, self.source, self.drops = step.gang, step.source, step.drops
        self.outgoing, self.transfer = outgoing, transfer

    def run(self, active: ActiveLaunch) -> None:
        value = active.values[self.source]
        try:
            local = self.outgoing.send(value, active.sequence, self.transfer)
        except Exception as error:
            failure = Failure("ExecutionError", f"{type(error).__name__}: {error}", "transfer", "", self.outgoing.host)
            local = self.outgoing.send(failure, active.sequence, self.transfer)
        active.local[self.outgoing.number] = local
        for slot in self.drops:
            active.values[slot] = None


class GateStep:
    """A place at which `PreparedProgram.advance` stops until it is open: in front of a gang that takes something from
    another host, and where the hosts of an island have to meet.

    Args:
        number: of the gate, in its launch.
        alone: this host opens it when `receives` have arrived here. Otherwise all hosts of the island stop at it, and
            the scheduler opens it when all have come.
    """

    __slots__ = ("alone", "gang", "number", "receives")

    def __init__(self, gang: int, number: int, alone: bool, receives: tuple[ReceiveStep, ...] = ()) -> None:
        self.gang, self.number, self.alone, self.receives = gang, number, alone, receives

    def run(self, active: ActiveLaunch) -> None:
        """Nothing to do: it is open."""

    def awaited(self, active: ActiveLaunch) -> list[Any]:
        """What has to arrive on this host before the gate opens: arrays, or failures in their place."""
        return [
            piece
            for step in self.receives
            for pieces in active.pulled.get(step.incoming.number, {}).values()
            for piece in ([pieces] if isinstance(pieces, Failure) else pieces)
        ]


def gate_before(gang: int) -> int:
    """The number of the gate at which what a gang receives is waited for."""
    return 2 * gang


def meeting_before(gang: int) -> int:
    """The number of the gate at which hosts meet before a gang of several of them."""
    return 2 * gang + 1


class ReceiveStep:
    """Puts together what an edge brought."""

    __slots__ = ("gang", "incoming", "target")

    def __init__(self, step: Receive, incoming: Incoming) -> None:
        self.gang, self.target, self.incoming = step.gang, step.target, incoming

    def run(self, active: ActiveLaunch) -> None:
        number = self.incoming.number
        pulled, local = active.pulled.pop(number, {}), active.local.pop(number, None)
        if active.closed_by is not None and active.opened == gate_before(self.gang):
            active.values[self.target] = active.closed_by
            return
        try:
            active.values[self.target] = self.incoming.assemble(pulled, local)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            active.values[self.target] = Failure("ExecutionError", text, "transfer", "", self.incoming.host)


class ReshardStep:
    """Changes the layout of a slot on the same devices."""

    __slots__ = ("compiled", "drops", "gang", "host", "hosts", "source", "target")

    def __init__(self, step: Reshard, compiled: Computation, host: int, hosts: tuple[int, ...]) -> None:
        self.gang, self.source, self.target, self.drops = step.gang, step.source, step.target, step.drops
        self.compiled, self.host, self.hosts = compiled, host, hosts

    def run(self, active: ActiveLaunch) -> None:
        value = active.values[self.source]
        try:
            active.values[self.target] = value if isinstance(value, Failure) else self.compiled(value)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            active.values[self.target] = Failure("ExecutionError", text, "reshard", "", self.host)
        for slot in self.drops:
            active.values[slot] = None


RunnableStep = ExecuteStep | SendStep | GateStep | ReceiveStep | ReshardStep
