"""Copies of arguments that a launch overwrites while an earlier one still needs them."""

from __future__ import annotations

from collections.abc import Iterable

from pathways_ray.executor.run import instructions as do
from pathways_ray.executor.run.active_launch import ActiveLaunch


def copies_for(active: ActiveLaunch, launches: Iterable[ActiveLaunch], multi_host: bool) -> list[do.Instruction]:
    """An earlier launch may stand at a barrier and need an argument that this one overwrites: it gets a copy.

    Where hosts share the array all of them copy, also one on which the other launch is past its use; on a host by
    itself the slots of the other launches say who still needs it.
    """
    launch, plan = active.launch, active.plan
    if not multi_host:
        return [do.Copy(launch.sequence, plan.overwritten, if_shared=True)]
    used = {
        buffer
        for other in launches
        if other is not active and other.launch.session == launch.session
        for buffer in other.launch.arguments
    }
    given = {slot: launch.arguments[number] for slot, number, _ in plan.arguments}
    slots = tuple(slot for slot in plan.overwritten if given[slot] in used)
    return [do.Copy(launch.sequence, slots, if_shared=False)] if slots else []
