"""Running plans: a prepared program is a list of steps over numbered slots, each of which only enqueues.

Errors are values: a step that fails leaves a `Failure` in its output slots, a step that finds one among its inputs
passes it on. So a launch always runs to its end and always has an outcome.

A gang whose inputs come from another host is enqueued once they have arrived (or failed), never before: a `Gate` stands
in front of it. A device queue is first in, first out, so a gang that waited in it would hold up every other tenant; and
if its sender died, some devices would get their shards and enter the gang's collective while others got errors and did
not. Pulls are posted when the launch arrives all the same, so the data moves as soon as it is there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import msgspec

from pathways_ray.errors import Failure, PathwaysError
from pathways_ray.executor.chains import Chain, Feeds
from pathways_ray.executor.compile import Compiler
from pathways_ray.executor.device_transfer import DeviceTransfer
from pathways_ray.executor.edges import Incoming, Outgoing
from pathways_ray.executor.store import BufferStore
from pathways_ray.ir.graph import Part, Recipe, Ref
from pathways_ray.ir.plan import Executable, Execute, IslandPlan, NodeLabel, Receive, Reshard, Send, Step
from pathways_ray.transport.messages import Run


class ActiveRun:
    """A launch on this host: its slots, how far it is, the pulls that were posted, the pieces that stay here.

    `limit` is the gang it may not reach yet (sequential dispatch raises it step by step). `promised` are arguments that
    a launch before it has yet to store. `opened` is the gang whose inputs are known to have arrived, and `closed_by`
    the failure that came in their place. Once `announced`, later launches know that its results are to come:
    `waiting` has those that need one, `dropped` the results nobody will need any more.
    """

    __slots__ = (
        "announced",
        "closed_by",
        "dropped",
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

    def __init__(self, program: PreparedProgram, run: Run) -> None:
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
        self.waiting: dict[int, list[ActiveRun]] = {}
        self.dropped: list[int] = []


NO_LIMIT = 1 << 60


class _Execute:
    __slots__ = ("compiled", "donated", "drops", "gang", "host", "inputs", "label", "outputs", "transfer", "where")

    def __init__(
        self,
        step: Execute,
        compiled: Any,
        donated: tuple[int, ...],
        transfer: DeviceTransfer,
        label: NodeLabel,
        host: int,
    ) -> None:
        self.gang, self.inputs, self.outputs, self.drops = step.gang, step.inputs, step.outputs, step.drops
        self.compiled, self.donated, self.transfer = compiled, donated, transfer
        self.label, self.where, self.host = label.name, label.where, host

    def run(self, active: ActiveRun) -> None:
        values = active.values
        inputs = [values[slot] for slot in self.inputs]
        try:
            for k in self.donated:
                if self.transfer.is_lent(inputs[k]):
                    inputs[k] = jax.numpy.copy(inputs[k])
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


class _Send:
    __slots__ = ("drops", "gang", "outgoing", "source", "transfer")

    def __init__(self, step: Send, outgoing: Outgoing, transfer: DeviceTransfer) -> None:
        self.gang, self.source, self.drops = step.gang, step.source, step.drops
        self.outgoing, self.transfer = outgoing, transfer

    def run(self, active: ActiveRun) -> None:
        value = active.values[self.source]
        try:
            local = self.outgoing.send(value, active.sequence, self.transfer)
        except Exception as error:
            failure = Failure("ExecutionError", f"{type(error).__name__}: {error}", "transfer", "", self.outgoing.host)
            local = self.outgoing.send(failure, active.sequence, self.transfer)
        active.local[self.outgoing.number] = local
        for slot in self.drops:
            active.values[slot] = None


class _Gate:
    """Stands in front of a gang that waits for other hosts. `PreparedProgram.advance` stops at it until it is open."""

    __slots__ = ("gang",)

    def __init__(self, gang: int) -> None:
        self.gang = gang

    def run(self, active: ActiveRun) -> None:
        """Nothing to do: it is open."""


class _Receive:
    __slots__ = ("gang", "incoming", "target")

    def __init__(self, step: Receive, incoming: Incoming) -> None:
        self.gang, self.target, self.incoming = step.gang, step.target, incoming

    def run(self, active: ActiveRun) -> None:
        number = self.incoming.number
        pulled, local = active.pulled.pop(number, {}), active.local.pop(number, None)
        if active.closed_by is not None and active.opened == self.gang:
            active.values[self.target] = active.closed_by
            return
        try:
            active.values[self.target] = self.incoming.assemble(pulled, local)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            active.values[self.target] = Failure("ExecutionError", text, "transfer", "", self.incoming.host)


class _Reshard:
    __slots__ = ("compiled", "drops", "gang", "host", "source", "target")

    def __init__(self, step: Reshard, compiled: Any, host: int) -> None:
        self.gang, self.source, self.target, self.drops = step.gang, step.source, step.target, step.drops
        self.compiled, self.host = compiled, host

    def run(self, active: ActiveRun) -> None:
        value = active.values[self.source]
        try:
            active.values[self.target] = value if isinstance(value, Failure) else self.compiled(value)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            active.values[self.target] = Failure("ExecutionError", text, "reshard", "", self.host)
        for slot in self.drops:
            active.values[slot] = None


CHAIN_LENGTHS = (16, 8, 4)
"""Lengths for which a chain of launches is compiled as one computation, longest first."""

CHAIN_SIGHTINGS = 4
"""A length is compiled, in the background, once that many chains could have used it."""

CHAIN_LIMIT_S = 0.005
"""A chain may take this long on the devices: another tenant waits for it."""


class PreparedProgram:
    """A plan with everything compiled that this host runs of it.

    Raises:
        CompileError: from the constructor.
    """

    def __init__(
        self,
        plan: IslandPlan,
        functions: Mapping[str, bytes],
        compiler: Compiler,
        store: BufferStore,
        transfer: DeviceTransfer,
    ) -> None:
        self.plan = plan
        self.store = store
        self.transfer = transfer
        self.temporary_bytes = 0
        self.incoming: list[Incoming] = []
        self.gates: set[int] = set()
        self.steps: list[Any] = []
        executables = [
            compiler.executable(e, plan.placed(e.slice), functions)
            if compiler.host in plan.placed(e.slice).hosts
            else None
            for e in plan.executables
        ]
        for compiled in executables:
            analysis = compiled.memory_analysis() if compiled is not None else None
            self.temporary_bytes = max(self.temporary_bytes, getattr(analysis, "temp_size_in_bytes", 0) or 0)
        for step in plan.steps:
            prepared = self._prepare(step, executables, compiler)
            if prepared is not None:
                self.steps.append(prepared)
        self.steps_by_gang = sorted(self.steps, key=lambda step: step.gang)
        self.devices = tuple(sorted({d for s in plan.slices if s.island == plan.island for d in s.devices}))
        self.functions = functions
        self.compiler = compiler
        mine = [compiler.host in plan.placed(slice_id).hosts for slice_id in plan.slots]
        self.arguments = [(slot, number) for slot, number in plan.arguments if mine[slot]]
        self.results = [(slot, number) for slot, number in plan.results if mine[slot]]
        self.awaited = [slot for slot in plan.awaited if mine[slot]]
        self.seconds = 0.0
        self._chains: dict[tuple[int, Feeds], Any] = {}
        self._sightings: dict[tuple[int, Feeds], int] = {}

    def _prepare(self, step: Step, executables: list[Any], compiler: Compiler) -> Any:
        plan, host = self.plan, compiler.host
        if isinstance(step, Execute):
            compiled = executables[step.executable]
            if compiled is None:
                return None
            donated = plan.executables[step.executable].donated
            return _Execute(step, compiled, donated, self.transfer, plan.labels[step.node], host)
        edge = plan.edges[step.edge]
        source, target = plan.placed(edge.source.slice), plan.placed(edge.target.slice)
        if isinstance(step, Receive) and len({*source.hosts, *target.hosts}) > 1 and step.gang not in self.gates:
            # Every host of the island has the gate, also one that receives nothing: they open it together.
            self.gates.add(step.gang)
            self.steps.append(_Gate(step.gang))
        match step:
            case Send():
                if host in source.hosts:
                    return _Send(step, Outgoing(edge, step.edge, source, target, host, compiler), self.transfer)
            case Receive():
                if host in target.hosts:
                    incoming = Incoming(edge, step.edge, source, target, host, compiler)
                    self.incoming.append(incoming)
                    return _Receive(step, incoming)
            case Reshard():
                if host in source.hosts:
                    ends = ((source, edge.source.spec), (target, edge.target.spec))
                    return _Reshard(step, compiler.reshard(edge.type, *ends), host)
        return None

    def blamed(self, failure: Failure) -> Failure:
        """A failure with the computations it can have come from. One that happens on a device shows when results are
        awaited, without a name; one that a peer's data brought is left to the peer to name."""
        if failure.node or failure.kind != "ExecutionError" or "Error while transferring" in failure.message:
            return failure
        labels = [self.plan.labels[step.node] for step in self.plan.steps if isinstance(step, Execute)]
        names = list(dict.fromkeys(label.name for label in labels))
        node = " or ".join(names if len(names) < 5 else [*names[:4], f"{len(names) - 4} more"])
        where = ", ".join(list(dict.fromkeys(label.where for label in labels if label.where))[:4])
        return msgspec.structs.replace(failure, node=node, where=where)

    # --- chains of launches -------------------------------------------------------------------------------------------

    @functools.cached_property
    def chain_outputs(self) -> int:
        """How many outputs a launch has if launches of this program may be chained, else 0.

        They may when a launch is one computation of one slice that donates nothing and whose results are its outputs.
        """
        plan = self.plan
        if len(plan.steps) != 1 or not isinstance(plan.steps[0], Execute) or len(self.steps) != 1:
            return 0
        step = plan.steps[0]
        plain = tuple(plan.results) == tuple((slot, k) for k, slot in enumerate(step.outputs))
        ordered = tuple(plan.arguments) == tuple((slot, k) for k, slot in enumerate(step.inputs))
        executable = plan.executables[0]
        single = executable.donated or any(part.alone for part in executable.recipe.parts)
        return len(step.outputs) if plain and ordered and not single else 0

    def chain_for(
        self, length: int, feeds: Feeds, compile_later: Callable[[Callable[[], None]], Any]
    ) -> tuple[int, Any]:
        """The longest compiled chain of at most `length` launches, (0, None) while there is none.

        Args:
            compile_later: runs a function on the compiling thread.
        """
        for size in CHAIN_LENGTHS:
            if size > length or not 0 < self.seconds * size <= CHAIN_LIMIT_S:
                continue
            key = (size, feeds)
            compiled = self._chains.get(key)
            if compiled is not None:
                return size, compiled
            seen = self._sightings[key] = self._sightings.get(key, 0) + 1
            if seen == CHAIN_SIGHTINGS:
                compile_later(lambda key=key: self._compile_chain(*key))  # type: ignore[misc]
        return 0, None

    def _compile_chain(self, size: int, feeds: Feeds) -> None:
        base = self.plan.executables[0]
        if any(base.input_layouts[i].spec != base.output_layouts[k].spec for i, k in feeds):
            return
        # A chain is only an economy: when it cannot be compiled, launches go on one by one.
        with contextlib.suppress(PathwaysError):
            executable = _repeated(base, size, dict(feeds))
            self._chains[size, feeds] = self.compiler.executable(
                executable, self.plan.placed(base.slice), self.functions
            )

    def run_chain(self, chain: Chain, compiled: Any) -> list[Any]:
        """Enqueues the launches of a chain as one; stores what the last one results in."""
        first, last = chain.runs[0], chain.runs[-1]
        values = self.start(first, {}).values
        step = self.steps[0]
        inputs = [values[slot] for slot in step.inputs]
        try:
            outputs = list(compiled(*inputs))
        except Exception as error:
            outputs = [step.failure(inputs, error)] * len(step.outputs)
        for k, value in enumerate(outputs):
            self.store.put(last.session, last.results + k, value)
        return outputs

    # --- launches -----------------------------------------------------------------------------------------------------

    def start(self, run: Run, promised: Mapping[int, ActiveRun]) -> ActiveRun:
        """Takes the arguments of a launch from the store and posts its pulls.

        Args:
            promised: buffers of the session that launches before this one have yet to store.
        """
        active = ActiveRun(self, run)
        buffers = self.store.of_session(run.session)
        for slot, number in self.arguments:
            buffer = run.arguments[number]
            if buffer in promised:
                if buffer not in active.promised:
                    promised[buffer].waiting.setdefault(buffer, []).append(active)
                active.promised.setdefault(buffer, []).append(slot)
                continue
            value = buffers.get(buffer)
            if value is None:
                value = Failure("BufferLost", f"buffer {buffer} is not on this host (host restarted?)")
            active.values[slot] = value
        for incoming in self.incoming:
            active.pulled[incoming.number] = incoming.post(active.sequence, self.transfer)
        return active

    def advance(self, active: ActiveRun) -> int:
        """Enqueues steps until the end, the launch's limit, or a gate; returns the gate's gang, or -1."""
        steps = self.steps_by_gang if active.run.gangs else self.steps
        position = active.position
        while position < len(steps):
            step = steps[position]
            if step.gang >= active.limit:
                break
            if type(step) is _Gate and active.opened != step.gang:
                active.position = position
                return step.gang
            step.run(active)
            position += 1
        active.position = position
        return -1

    def is_complete(self, active: ActiveRun) -> bool:
        return active.position == len(self.steps)

    def awaited_at(self, active: ActiveRun, gang: int) -> list[Any]:
        """What has to arrive on this host before a gate opens: arrays, or failures in their place."""
        return [
            piece
            for step in self.steps
            if type(step) is _Receive and step.gang == gang
            for pieces in active.pulled.get(step.incoming.number, {}).values()
            for piece in ([pieces] if isinstance(pieces, Failure) else pieces)
        ]

    def finish(self, active: ActiveRun) -> list[Any]:
        """Stores the results; returns the values whose readiness completes the launch here."""
        run = active.run
        for slot, number in self.results:
            self.store.put(run.session, run.results + number, active.values[slot])
        return [active.values[slot] for slot in self.awaited]


def _repeated(base: Executable, size: int, feeds: dict[int, int]) -> Executable:
    """`base` applied `size` times, its outputs fed back into its inputs as `feeds` says."""
    parts: list[Part] = []
    previous: tuple[Ref, ...] = ()
    for _ in range(size):
        start = len(parts)
        for part in base.recipe.parts:
            inputs = tuple(
                (previous[feeds[r.output]] if previous and r.output in feeds else r)
                if r.node == -1
                else Ref(r.node + start, r.output)
                for r in part.inputs
            )
            parts.append(Part(part.name, part.function, inputs))
        previous = tuple(Ref(r.node + start, r.output) for r in base.recipe.outputs)
    return msgspec.structs.replace(base, recipe=Recipe(tuple(parts), previous))
