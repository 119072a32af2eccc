"""Where a launch stops on its way: in front of gangs that take something from another host, and where hosts meet.

A host by itself opens a gate when what it waits for has arrived. What it enqueues at a time of its own choosing must
not be a gang of several hosts: they would enqueue it between different others, and their collectives would not find
each other. So on an island of several hosts

- a gang on one host that takes something from another one has a gate on that host *alone*;
- before a gang of several hosts all hosts of the island *meet*, if it takes something from another host, or if one of
  them may have stood at a gate alone since they last met;
- they meet at the end, if one may have stood at a gate alone since: a launch ends on all hosts between the same two
  others, and so what waits for its results goes on there too. Only what has no gang of several hosts, and meets the
  others at its own end, need not wait for that end.

Pure: from the plan, each host of an island derives the same meetings.
"""

from __future__ import annotations

from collections.abc import Sequence

from pathways_ray.executor.run.steps import GateStep, ReceiveStep, RunnableStep, gate_before, meeting_before
from pathways_ray.ir.plan import Execute, IslandPlan, Receive, Reshard, Send, Step

Prepared = tuple[Step, RunnableStep | None]
"""A step of the plan, and what this host does for it."""


def with_gates(steps: Sequence[Prepared], plan: IslandPlan, host: int, together: bool) -> list[RunnableStep]:
    """What a host does for a launch, step by step, with the gates.

    Args:
        steps: all of the island's, in the order in which they are to run.
        together: whether the island has several hosts.
    """
    made: list[RunnableStep] = []
    receives: dict[int, tuple[ReceiveStep, ...]] = {}
    for _, mine in steps:
        if isinstance(mine, ReceiveStep):
            receives[mine.gang] = (*receives.get(mine.gang, ()), mine)
    gated: set[int] = set()
    loose = False
    for step, mine in steps:
        hosts = _hosts(step, plan)
        several = together and len(hosts) > 1
        if isinstance(step, Receive):
            if step.gang not in gated and _from_elsewhere(step, plan):
                gated.add(step.gang)
                alone = not several
                if not alone or host in hosts:
                    made.append(GateStep(step.gang, gate_before(step.gang), alone, receives.get(step.gang, ())))
                loose = together and alone
        elif several and loose and not isinstance(step, Send):
            made.append(GateStep(step.gang, meeting_before(step.gang), alone=False))
            loose = False
        if mine is not None:
            made.append(mine)
    if loose:
        last = max(step.gang for step, _ in steps)
        made.append(GateStep(last, gate_before(last + 1), alone=False))
    return made


def is_apart(steps: Sequence[RunnableStep], plan: IslandPlan) -> bool:
    """Whether each host may run its part of a launch whenever it likes, as far as other launches are concerned.

    Args:
        steps: from `with_gates`.
    """
    last = steps[-1] if steps else None
    return (
        isinstance(last, GateStep)
        and not last.alone
        and all(len(_hosts(step, plan)) == 1 for step in plan.steps if not isinstance(step, Send))
    )


def _hosts(step: Step, plan: IslandPlan) -> tuple[int, ...]:
    """The hosts on which a step enqueues something."""
    match step:
        case Execute():
            return plan.placed(plan.executables[step.executable].slice).hosts
        case Receive():
            return plan.placed(plan.edges[step.edge].target.slice).hosts
        case Send() | Reshard():
            return plan.placed(plan.edges[step.edge].source.slice).hosts


def _from_elsewhere(step: Receive, plan: IslandPlan) -> bool:
    edge = plan.edges[step.edge]
    return len({*plan.placed(edge.source.slice).hosts, *plan.placed(edge.target.slice).hosts}) > 1
