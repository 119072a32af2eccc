"""Stops: where the launches of a host stand that are not through. Read from any thread, for the heartbeat."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pathways_ray.executor.run.active_launch import WAITING_FOR_INPUTS, ActiveLaunch
from pathways_ray.executor.run.barriers import InputBarrier
from pathways_ray.executor.run.core import HostCore
from pathways_ray.observe.views import MAX_STOPPED, Stopped


def stopped(core: HostCore) -> tuple[Stopped, ...]:
    """The oldest launches that stand on a host. Tables that change meanwhile give what they had before or after."""
    if not core.active:
        return ()
    try:
        return tuple(islice(_stopped(core), MAX_STOPPED))
    except RuntimeError:  # a table changed while it was read; the next heartbeat says it
        return ()


def _stopped(core: HostCore) -> Iterator[Stopped]:
    for sequence, active in core.active.items():
        if active.phase is WAITING_FOR_INPUTS:
            producers = core.producers.sessions.get(active.launch.session, {})
            there = [producers.get(buffer) for buffer in active.unresolved]  # one look for each: they go meanwhile
            found = [producer.launch.sequence for producer in there if producer is not None]
            yield Stopped(sequence, active.phase.name, tuple(dict.fromkeys(found)))
            continue
        barrier = _next_barrier(active)
        if barrier is None:
            yield Stopped(sequence, active.phase.name)
            continue
        plan = active.plan.plan
        senders = {host for k in barrier.bundles for host in plan.placed(plan.bundles[k].source).hosts}
        arrived = active.arrived == barrier.number
        calls = tuple(plan.labels[node].name for node in barrier.calls)
        yield Stopped(sequence, active.phase.name, (), tuple(sorted(senders - {core.host})), arrived, calls)


def _next_barrier(active: ActiveLaunch) -> InputBarrier | None:
    steps, position = active.route.steps, active.position
    step = steps[position] if position < len(steps) else None
    return step if isinstance(step, InputBarrier) else None
