"""Input barriers: the places at which a launch stops on its way through a host.

A gang whose inputs come from another host is enqueued once they have arrived (or failed), never before. A device queue
is first in, first out, so a gang that waited in it would hold up every other tenant; and if its sender died, some
devices would get their shards and enter the gang's collective while others got errors and did not. Pulls are posted
when the launch arrives all the same, so the data moves as soon as it exists. What a host function gives comes from
another process, so its return has a barrier as well, whatever the host.

A host passes a barrier by itself once the inputs have arrived. What it enqueues at a time of its own choosing must not
be a gang of several hosts: they would enqueue it between different other gangs, and their collectives would not find
each other. So on an island of several hosts

- a gang on one host that takes something from another host has a barrier which only that host observes;
- before a gang of several hosts there is a *rendezvous* of all hosts of the island, if the gang takes something from
  another host, or if one of them may have waited by itself since the last rendezvous (it is *unsynchronized*);
- there is a rendezvous at the end, if a host may be unsynchronized by then: a launch ends on all hosts between the same
  two others, and so the launches that wait for its results go on there too. Only an *independent* program, which has no
  gang of several hosts and a rendezvous at its own end, need not wait for that end.

Pure: from the plan, each host of an island derives the same rendezvous.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pathways_ray.ir.plan import Call, Execute, IslandPlan, Receive, Regroup, Reshard, Return, Send, Step


class InputBarrier(NamedTuple):
    """A place at which a launch stops until it is released.

    Args:
        gang: the gang in front of which it stands.
        number: identifies it within its launch, on all hosts alike.
        rendezvous: the scheduler releases it when all hosts of the island have reached it with their inputs;
            otherwise this host passes it by itself.
        bundles: what has to arrive on this host first.
        calls: the nodes of host functions that have to be over on this host first.
    """

    gang: int
    number: int
    rendezvous: bool
    bundles: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()


HostStep = Step | InputBarrier


def input_barrier_of(gang: int) -> int:
    """The number of the barrier at which the inputs of a gang are waited for."""
    return 2 * gang


def rendezvous_of(count: int) -> int:
    """The number of a rendezvous before a step of several hosts whose inputs are there, behind `count` others. Two of
    them may stand before steps of one gang: a layout of an argument that the gang takes is made further ahead."""
    return 2 * count + 1


def results_barrier_of(gang: int, plan: IslandPlan) -> int:
    """The number of the barrier at which results are waited for that a gang has made in another layout."""
    return input_barrier_of(plan.gangs + 1 + gang)


def with_barriers(steps: Sequence[Step], plan: IslandPlan, host: int, multi_host: bool) -> tuple[HostStep, ...]:
    """The steps of one host, with its barriers.

    Args:
        steps: those of the whole island, in the order in which they are to run.
        multi_host: whether the island has several hosts.
    """
    made: list[HostStep] = []
    late = _late(steps)
    received: dict[tuple[int, bool], tuple[int, ...]] = {}
    for place, step in enumerate(steps):
        if isinstance(step, Receive) and host in hosts_of(step, plan):
            stand = step.gang, place in late
            received[stand] = (*received.get(stand, ()), step.bundle)
    guarded: set[tuple[int, bool]] = set()
    unsynchronized, rendezvous = False, 0
    for place, step in enumerate(steps):
        hosts = hosts_of(step, plan)
        several = multi_host and len(hosts) > 1
        if isinstance(step, Receive | Return):
            stand = step.gang, place in late
            if stand not in guarded and _comes_from_elsewhere(step, plan):
                guarded.add(stand)
                if several or host in hosts:
                    number = results_barrier_of(step.gang, plan) if stand[1] else input_barrier_of(step.gang)
                    calls = (step.node,) if isinstance(step, Return) and host in hosts else ()
                    made.append(InputBarrier(step.gang, number, several, received.get(stand, ()), calls))
                unsynchronized = multi_host and not several
        elif several and unsynchronized and not isinstance(step, Send | Regroup | Call):
            made.append(InputBarrier(step.gang, rendezvous_of(rendezvous), rendezvous=True))
            unsynchronized, rendezvous = False, rendezvous + 1
        if host in hosts:
            made.append(step)
    if unsynchronized:
        last = max(step.gang for step in steps)
        made.append(InputBarrier(last, input_barrier_of(last + 1), rendezvous=True))
    return tuple(made)


def _late(steps: Sequence[Step]) -> set[int]:
    """The places of the steps that receive what their own gang has made, in another layout: results that stand behind
    it. Its inputs must not wait for them."""
    ran: set[int] = set()
    found: set[int] = set()
    for place, step in enumerate(steps):
        if isinstance(step, Execute | Return):
            ran.add(step.gang)
        elif isinstance(step, Receive) and step.gang in ran:
            found.add(place)
    return found


def is_independent(steps: Sequence[HostStep], plan: IslandPlan) -> bool:
    """Whether each host may run its part of a launch at any time, as far as other launches are concerned.

    Args:
        steps: from `with_barriers`.
    """
    last = steps[-1] if steps else None
    return isinstance(last, InputBarrier) and last.rendezvous and not _have_several_hosts(plan.steps, plan)


def _have_several_hosts(steps: Iterable[Step], plan: IslandPlan) -> bool:
    return any(len(hosts_of(step, plan)) > 1 for step in steps if not isinstance(step, Send | Regroup))


def hosts_of(step: Step, plan: IslandPlan) -> tuple[int, ...]:
    """The hosts on which a step enqueues something."""
    match step:
        case Execute() | Call() | Return():
            return plan.placed(plan.executables[step.executable].slice).hosts
        case Regroup():
            return plan.placed(step.layout.slice).hosts
        case Receive():
            return plan.placed(plan.bundles[step.bundle].target).hosts
        case Send() | Reshard():
            return plan.placed(plan.bundles[step.bundle].source).hosts


def _comes_from_elsewhere(step: Receive | Return, plan: IslandPlan) -> bool:
    """Whether a value comes from another host, or from another process of this one."""
    if isinstance(step, Return):
        return True
    bundle = plan.bundles[step.bundle]
    return len({*plan.placed(bundle.source).hosts, *plan.placed(bundle.target).hosts}) > 1
