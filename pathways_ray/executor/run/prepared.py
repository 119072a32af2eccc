"""A plan made ready for one host: which of its steps are the host's, where gates stand, how a launch goes through them.

Pure: what is compiled, and what touches devices or peers, comes through `Parts`. `CompiledParts` has those of JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from pathways_ray.errors import Failure
from pathways_ray.executor.run.barriers import is_apart, with_gates
from pathways_ray.executor.run.steps import (
    ActiveLaunch,
    Computation,
    ExecuteStep,
    GateStep,
    Incoming,
    Outgoing,
    ReceiveStep,
    ReshardStep,
    RunnableStep,
    SendStep,
)
from pathways_ray.ir.plan import Execute, IslandPlan, Receive, Reshard, Send, Step
from pathways_ray.transport.messages import Gang, IslandLaunch


class Parts(Protocol):
    """What a host has of a program beside its plan: everything that is compiled or knows of devices.

    All of it is made before the first launch. Methods raise `CompileError`.
    """

    temporary_bytes: int

    def executable(self, number: int) -> Computation | None:
        """Executable `number` of the plan, or None when this host has no part in its slice."""

    def reshard(self, edge: int) -> Computation: ...

    def outgoing(self, edge: int) -> Outgoing: ...

    def incoming(self, edge: int) -> Incoming: ...


class Store(Protocol):
    """The buffers of this host."""

    def of_session(self, session: int) -> dict[int, Any]: ...

    def put(self, session: int, buffer: int, value: Any) -> None: ...

    def drop(self, session: int, buffers: tuple[int, ...]) -> None: ...

    def drop_session(self, session: int) -> None: ...


def has_part(plan: IslandPlan, host: int) -> bool:
    """Whether anything of a plan happens on a host. One without a part gets the launches too, and only ends them."""
    return any(host in placed.hosts for placed in plan.slices)


class PreparedProgram:
    """A plan with everything compiled that host `host` runs of it.

    Args:
        together: whether the island has other hosts.
    """

    def __init__(
        self, plan: IslandPlan, host: int, parts: Parts, store: Store, transfer: Any, together: bool = False
    ) -> None:
        self.plan = plan
        self.host = host
        self.has_part = has_part(plan, host)
        self.parts = parts
        self.store = store
        self.transfer = transfer
        self.temporary_bytes = parts.temporary_bytes
        self.together = together
        prepared = [(step, self._prepare(step)) for step in plan.steps]
        self.incoming = [mine.incoming for _, mine in prepared if isinstance(mine, ReceiveStep)]
        self.steps = with_gates(prepared, plan, host, together)
        prepared.sort(key=lambda both: both[0].gang)
        self.steps_by_gang = with_gates(prepared, plan, host, together)
        self.is_apart = is_apart(self.steps, plan)
        self.devices = tuple(sorted({d for s in plan.slices if s.island == plan.island for d in s.devices}))
        self.mine = tuple(device for device in self.devices if device.host == host)
        mine = [host in plan.placed(slice_id).hosts for slice_id in plan.slots]
        # Also those that lie on other hosts of the island: all its hosts wait for the same launches at the same points.
        # Otherwise they would enqueue what comes behind in different orders.
        self.arguments = [(slot, number, mine[slot]) for slot, number in plan.arguments]
        self.results = [(slot, number) for slot, number in plan.results if mine[slot]]
        self.awaited = [slot for slot in plan.awaited if mine[slot]]
        given = {slot for slot, _ in plan.arguments}
        executed = [step for step in self.steps if isinstance(step, ExecuteStep)]
        self.overwritten = sorted({step.inputs[k] for step in executed for k in step.donated} & given)
        self.last_gang = max((step.gang for step in plan.steps), default=0)

    def _prepare(self, step: Step) -> RunnableStep | None:
        plan, host, parts = self.plan, self.host, self.parts
        if isinstance(step, Execute):
            compiled = parts.executable(step.executable)
            if compiled is None:
                return None
            executable = plan.executables[step.executable]
            hosts = plan.placed(executable.slice).hosts
            return ExecuteStep(step, compiled, executable.donated, self.transfer, plan.labels[step.node], host, hosts)
        edge = plan.edges[step.edge]
        source, target = plan.placed(edge.source.slice), plan.placed(edge.target.slice)
        match step:
            case Send():
                if host in source.hosts:
                    return SendStep(step, parts.outgoing(step.edge), self.transfer)
            case Receive():
                if host in target.hosts:
                    return ReceiveStep(step, parts.incoming(step.edge))
            case Reshard():
                if host in source.hosts:
                    return ReshardStep(step, parts.reshard(step.edge), host, source.hosts)
        return None

    def sharing(self, k: int) -> tuple[int, ...]:
        """The hosts that hold shards of value number k of those that `finish` returns."""
        return self.plan.placed(self.plan.slots[self.awaited[k]]).hosts

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

    # --- launches -----------------------------------------------------------------------------------------------------

    def start(self, run: IslandLaunch, promised: Mapping[int, ActiveLaunch]) -> ActiveLaunch:
        """Takes the arguments of a launch from the store and posts its pulls.

        Args:
            promised: buffers of the session that launches before this one have yet to store.
        """
        active = ActiveLaunch(self, run)
        buffers = self.store.of_session(run.session)
        for slot, number, here in self.arguments:
            buffer = run.arguments[number]
            if buffer in promised:
                if self.may_go_early(active):
                    if not here:
                        continue
                    if (ended := promised[buffer].ended) is not None:
                        active.values[slot] = ended[buffer]
                        continue
                if buffer not in active.promised:
                    promised[buffer].waiting.setdefault(buffer, []).append(active)
                active.promised.setdefault(buffer, []).append(slot)
                continue
            if not here:
                continue
            value = buffers.get(buffer)
            if value is None:
                value = Failure("BufferLost", f"buffer {buffer} is not on this host (host restarted?)")
            active.values[slot] = value
        for incoming in self.incoming:
            active.pulled[incoming.number] = incoming.post(active.sequence, self.transfer)
        return active

    @staticmethod
    def may_go_early(active: ActiveLaunch) -> bool:
        """Whether a launch may go on with results that are there on this host, of one that has not ended on all."""
        return active.program.is_apart and not active.run.gangs

    def steps_of(self, active: ActiveLaunch) -> list[RunnableStep]:
        """In the order of a launch: one gang after another where they are dispatched so."""
        return self.steps_by_gang if active.run.gangs else self.steps

    def advance(self, active: ActiveLaunch) -> GateStep | None:
        """Enqueues steps until the end, the launch's limit, or a gate that is not open, which it returns."""
        steps = self.steps_of(active)
        position = active.position
        while position < len(steps):
            step = steps[position]
            if step.gang >= active.limit:
                break
            if type(step) is GateStep and active.opened != step.number:
                active.position = position
                return step
            step.run(active)
            position += 1
        active.position = position
        return None

    def gangs_between(self, active: ActiveLaunch, before: int, members: tuple[int, ...]) -> tuple[Gang, ...]:
        """What a launch enqueued from step `before` to where it is."""
        return tuple(
            Gang(active.sequence, step.gang, sum(1 << members.index(host) for host in step.hosts))
            for step in self.steps_of(active)[before : active.position]
            if isinstance(step, ExecuteStep | ReshardStep)
        )

    def enqueued_between(self, active: ActiveLaunch, before: int) -> list[Any] | None:
        """Values that are ready once everything is that a launch enqueued from step `before` to where it is; None when
        that was nothing, or nothing of it is held any more."""
        for step in reversed(self.steps_of(active)[before : active.position]):
            if isinstance(step, ExecuteStep):
                values = [active.values[slot] for slot in step.outputs if active.values[slot] is not None]
                return values or None
        return None

    def is_complete(self, active: ActiveLaunch) -> bool:
        """Whether a launch is through on the island: all of its hosts agree at which message that is, also those that
        have nothing to do in the last gangs."""
        return active.position == len(self.steps_of(active)) and active.limit > self.last_gang

    def results_of(self, active: ActiveLaunch) -> dict[int, Any]:
        """What a launch gives on this host, by buffer, when all of it is enqueued."""
        return {active.run.results + number: active.values[slot] for slot, number in self.results}

    def finish(self, active: ActiveLaunch) -> list[Any]:
        """Stores the results; returns the values whose readiness completes the launch here."""
        run = active.run
        for slot, number in self.results:
            self.store.put(run.session, run.results + number, active.values[slot])
        return [active.values[slot] for slot in self.awaited]
