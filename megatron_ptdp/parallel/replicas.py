"""One group of replicas and all of them: each has the same bits, so that a copy of one is enough."""

from __future__ import annotations

import jax

import pathways_ray as pw
from megatron_ptdp.parallel.step_state import State, StatefulStep


def of_first_group(state: State) -> State:
    """The state of the first group of replicas alone."""
    return State(state.params[:1], state.slots[:1])


def for_all_groups(step: StatefulStep, state: State) -> State:
    """The state of all groups from that of the first, from device to device."""
    params, slots = list(state.params[:1]), list(state.slots[:1])
    for row in step.parts[1:]:
        params.append(
            tuple(
                pw.reshard(part, nodes.slice, nodes.part.master_specs)
                for part, nodes in zip(params[0], row, strict=True)
            )
        )
        slots.append(
            tuple(
                pw.reshard(part, nodes.slice, nodes.update.slot_specs) if jax.tree.leaves(part) else part
                for part, nodes in zip(slots[0], row, strict=True)
            )
        )
    return State(tuple(params), tuple(slots))
