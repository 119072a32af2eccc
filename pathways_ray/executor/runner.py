"""Running plans: a prepared program is a list of steps over numbered slots, each of which only enqueues.

Errors are values: a step that fails leaves a `Failure` in its output slots, a step that finds one among its inputs passes
it on. So a launch always runs to its end and always has an outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pathways_ray.errors import Failure
from pathways_ray.executor.compile import Compiler
from pathways_ray.executor.device_transfer import DeviceTransfer
from pathways_ray.executor.edges import Incoming, Outgoing
from pathways_ray.executor.store import BufferStore
from pathways_ray.ir.plan import Execute, IslandPlan, Receive, Reshard, Send, Step
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
    __slots__ = ("compiled", "drops", "gang", "host", "inputs", "label", "outputs", "where")

    def __init__(self, step: Execute, compiled: Any, label: str, where: str, host: int) -> None:
        self.gang, self.inputs, self.outputs, self.drops = step.gang, step.inputs, step.outputs, step.drops
        self.compiled, self.label, self.where, self.host = compiled, label, where, host

    def run(self, active: ActiveRun) -> None:
        values = active.values
        inputs = [values[slot] for slot in self.inputs]
        try:
            outputs = self.compiled(*inputs)
        except Exception as error:
            outputs = [self._failure(inputs, error)] * len(self.outputs)
        for slot, value in zip(self.outputs, outputs, strict=True):
            values[slot] = value
        for slot in self.drops:
            values[slot] = None

    def _failure(self, inputs: list[Any], error: Exception) -> Failure:
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
            compiler.executable(e, plan.placed(e.slice), functions) if compiler.host in plan.placed(e.slice).hosts else None
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

    def _prepare(self, step: Step, executables: list[Any], compiler: Compiler) -> Any:
        plan, host = self.plan, compiler.host
        if isinstance(step, Execute):
            compiled = executables[step.executable]
            label = plan.labels[step.node]
            return _Execute(step, compiled, label.name, label.where, host) if compiled is not None else None
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
