"""Running plans: a prepared program is a list of steps over numbered slots, each of which only enqueues.

Errors are values: a step that fails leaves a `Failure` in its output slots, a step that finds one among its inputs
passes it on. So a launch always runs to its end and always has an outcome.
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
    """A launch on this host: its slots, the pulls that were posted, the pieces that stay on this host."""

    __slots__ = ("local", "pulled", "sequence", "values")

    def __init__(self, sequence: int, slots: int) -> None:
        self.sequence = sequence
        self.values: list[Any] = [None] * slots
        self.pulled: dict[int, dict[int, Any]] = {}
        self.local: dict[int, Any] = {}


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


class _Receive:
    __slots__ = ("gang", "incoming", "target")

    def __init__(self, step: Receive, incoming: Incoming) -> None:
        self.gang, self.target, self.incoming = step.gang, step.target, incoming

    def run(self, active: ActiveRun) -> None:
        number = self.incoming.number
        pulled, local = active.pulled.pop(number, {}), active.local.pop(number, None)
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
        self.incoming: list[tuple[int, Incoming]] = []
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
        self.last_gang = max((step.gang for step in self.steps), default=0)
        self.functions = functions
        self.compiler = compiler
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
        match step:
            case Send():
                if host in source.hosts:
                    return _Send(step, Outgoing(edge, step.edge, source, target, host, compiler), self.transfer)
            case Receive():
                if host in target.hosts:
                    incoming = Incoming(edge, step.edge, source, target, host, compiler)
                    self.incoming.append((step.gang, incoming))
                    return _Receive(step, incoming)
            case Reshard():
                if host in source.hosts:
                    ends = ((source, edge.source.spec), (target, edge.target.spec))
                    return _Reshard(step, compiler.reshard(edge.type, *ends), host)
        return None

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
        return len(step.outputs) if plain and ordered and not plan.executables[0].donated else 0

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
        values = self.start(first).values
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

    def start(self, run: Run) -> ActiveRun:
        """Takes the arguments of a launch from the store."""
        active = ActiveRun(run.sequence, self.plan.slots)
        buffers = self.store.of_session(run.session)
        for slot, number in self.plan.arguments:
            value = buffers.get(run.arguments[number])
            if value is None:
                value = Failure("BufferLost", f"buffer {run.arguments[number]} is not on this host (host restarted?)")
            active.values[slot] = value
        return active

    def advance(self, active: ActiveRun, run: Run) -> bool:
        """Enqueues the gangs that `run` names, all pulls first; True when this host's part is enqueued in full.

        Posting a pull costs no device queue anything, so every consumer posts before any producer needs to have run.
        """
        if run.gangs == 0:
            for _, incoming in self.incoming:
                active.pulled[incoming.number] = incoming.post(active.sequence, self.transfer)
            for step in self.steps:
                step.run(active)
            return True
        for gang, incoming in self.incoming:
            if run.first <= gang < run.first + run.gangs:
                active.pulled[incoming.number] = incoming.post(active.sequence, self.transfer)
        for step in self.steps:
            if run.first <= step.gang < run.first + run.gangs:
                step.run(active)
        return run.first + run.gangs > self.last_gang

    def finish(self, active: ActiveRun, run: Run) -> list[Any]:
        """Stores the results; returns the values whose readiness completes the launch here."""
        for slot, number in self.plan.results:
            self.store.put(run.session, run.results + number, active.values[slot])
        return [active.values[slot] for slot in self.plan.awaited]


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
