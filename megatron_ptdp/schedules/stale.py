"""Schedules without a flush: stages update their weights while microbatches are under way, and keep older versions.

All other schedules update once, at the end, when the pipeline is empty. These have the actions of 1F1B over a whole
stream of microbatches, which fills once and drains once, and updates between them:

| name            | a stage updates       | a microbatch sees                                     | versions kept    |
|-----------------|-----------------------|-------------------------------------------------------|------------------|
| `pipedream`     | after each backward   | on each stage the newest weights there at its forward | p - s on stage s |
| `pipedream-2bw` | every n ≥ p backwards | on all stages the weights of one update before        | 2                |

A backward takes the version that its forward saw (weight stashing). So a gradient is that of the model at these
versions, and what such a schedule computes is a rule of its own, whatever the timing: with w(s, t) the weights of stage
s after t updates,

    pipedream:      w(s, k+1) = w(s, k) - η ∂/∂w(s) f_k( w(0, k-p+1), w(1, k-p+2), ..., w(p-1, k) )
    pipedream-2bw:  w(t+1) = w(t) - η ∇ f_t( w(t-1) )

with w(0) in place of versions before it. Sources: PipeDream (SOSP 2019), PipeDream-2BW (arXiv:2006.09503).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from megatron_ptdp.schedules.actions import Schedule, ScheduleError, Updates
from megatron_ptdp.schedules.classic import one_f_one_b
from megatron_ptdp.schedules.rules import Rules

PIPEDREAM = Rules("pipedream", fuses_last_stage=True, stale=True)
PIPEDREAM_2BW = Rules("pipedream-2bw", fuses_last_stage=True, stale=True, whole_rounds=True)


def pipedream(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B in which each stage updates after each backward, and stashes the weights that forwards saw."""
    PIPEDREAM.require(devices, microbatches, chunks)
    return replace(one_f_one_b(devices, microbatches), name="pipedream", updates=Updates(1))


def pipedream_2bw(devices: int, microbatches: int, chunks: int = 1, every: int | None = None) -> Schedule:
    """1F1B with two versions: gradients of `every` microbatches, p if left out, are those of one update before.

    Raises:
        ScheduleError: a stage would have to see weights that it does not have yet, or the microbatches do not divide.
    """
    replace(PIPEDREAM_2BW, whole_rounds=every is None).require(devices, microbatches, chunks)
    every = devices if every is None else every
    if fault := PIPEDREAM_2BW.round_fault(microbatches, every):
        raise ScheduleError(fault)
    made = replace(one_f_one_b(devices, microbatches), name="pipedream-2bw", updates=Updates(every, behind=1))
    versions(made)
    return made


def versions(schedule: Schedule) -> dict[tuple[int, int], int]:
    """The version of its weights that each stage uses for each microbatch: the number of updates before it.

    Raises:
        ScheduleError: the schedule has no updates before its end; or a version is not there yet at a forward.
    """
    updates = _updates(schedule)
    ended: dict[int, int] = defaultdict(int)
    found: dict[tuple[int, int], int] = {}
    for row in schedule.rows:
        for stage, kind, k in (part for entry in row for part in entry.parts):
            newest = ended[stage] // updates.every
            if kind == "F":
                wanted = newest if updates.behind is None else max(0, k // updates.every - updates.behind)
                if wanted > newest:
                    raise ScheduleError(
                        f"{stage}F{k} of {schedule.name} needs version {wanted} of its weights, and there are {newest} "
                        f"updates before it; make updates of more microbatches than {updates.every}, or let it be more "
                        f"than {updates.behind} behind"
                    )
                found[stage, k] = wanted
            elif kind in "BW":
                ended[stage] += 1
    return found


def kept_versions(schedule: Schedule) -> tuple[int, ...]:
    """The most versions of its weights that each stage holds: the newest, and those that backwards still need.

    Raises:
        ScheduleError: as `versions` does.
    """
    updates, used = _updates(schedule), versions(schedule)
    most = [1] * schedule.stages
    for row in schedule.rows:
        flying: dict[int, list[int]] = defaultdict(list)
        ended: dict[int, int] = defaultdict(int)
        for stage, kind, k in (part for entry in row for part in entry.parts):
            if kind == "F":
                flying[stage].append(used[stage, k])
            elif kind in "BW":
                flying[stage].remove(used[stage, k])
                ended[stage] += 1
            most[stage] = max(most[stage], len({ended[stage] // updates.every, *flying[stage]}))
    return tuple(most)


def _updates(schedule: Schedule) -> Updates:
    if schedule.updates is None:
        raise ScheduleError(f"{schedule.name} updates once, when all microbatches are through: it has one version")
    return schedule.updates
