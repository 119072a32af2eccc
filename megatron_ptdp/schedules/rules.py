"""Rules of a schedule by its name: the sizes it takes, and what all its action lists have in common.

Generators refuse sizes by these rules; the planner asks them which plans are legal and how a schedule places and splits
its work. So a rule stands once, beside the generator that keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from megatron_ptdp.schedules.actions import Action, Schedule, ScheduleError, loop, vee


@dataclass(frozen=True, slots=True)
class Rules:
    """Sizes and traits of a schedule for p devices, m microbatches and v chunks on each device.

    A schedule can be built for more sizes than it was made for: interleaved with one chunk is 1F1B, and a zero-bubble
    schedule that never fills has a bubble. `full_chunks`, `full_groups` and `full_microbatches` say from where on it is
    the schedule of its paper.

    Attributes:
        name: of the schedule
        chunks: the only v; 0 for any
        equal_groups: m must be a multiple of max(1, m // p)
        fills_stages: m must be at least the number of stages, p·v
        full_chunks: fewest v of the full schedule
        full_groups: m is a multiple of p in the full schedule
        full_microbatches: fewest m of the full schedule, in multiples of p
        splits_backward: gradients of inputs and of weights are separate actions
        v_placement: stages lie there and back (`vee`), not round and round (`loop`)
        fuses_last_stage: on the last stage each forward is followed at once by its backward, so that both can be one
            computation
        stale: stages update while microbatches are under way, so gradients are those of older weights (`stale`)
        whole_rounds: m must be a multiple of p, the microbatches of an update
        token_slices: microbatches may be cut along their tokens
    """

    name: str
    chunks: int = 1
    equal_groups: bool = False
    fills_stages: bool = False
    full_chunks: int = 1
    full_groups: bool = False
    full_microbatches: int = 0
    splits_backward: bool = False
    v_placement: bool = False
    fuses_last_stage: bool = False
    stale: bool = False
    whole_rounds: bool = False
    token_slices: bool = False

    def require(self, devices: int, microbatches: int, chunks: int) -> None:
        """Raises `ScheduleError`, with the rule and the numbers, for sizes that cannot be built."""
        if fault := self.fault(devices, microbatches, chunks):
            raise ScheduleError(fault)

    def fault(self, devices: int, microbatches: int, chunks: int) -> str | None:
        """The rule that these sizes break; None where the schedule can be built."""
        name = self.name
        for what, size in (("devices", devices), ("microbatches", microbatches), ("chunks", chunks)):
            if size < 1:
                return f"{name} needs at least 1 of its {what}, but there are {size}"
        if self.chunks and chunks != self.chunks:
            return f"{name} has {self.chunks} chunks on each device, not {chunks}; leave chunks out"
        if self.fills_stages and microbatches < chunks * devices:
            return (
                f"{name} needs at least as many microbatches as stages, but there are {microbatches} microbatches and "
                f"{chunks} × {devices} devices = {chunks * devices} stages"
            )
        if self.whole_rounds and (fault := self.round_fault(microbatches, devices)):
            return fault
        groups = max(1, microbatches // devices)
        if self.equal_groups and microbatches % groups:
            below, above = (microbatches // groups * groups, (microbatches // groups + 1) * groups)
            return (
                f"{name} needs groups of equal size, {microbatches} microbatches // {devices} devices = {groups} of "
                f"them, but {microbatches} is not a multiple of {groups}; {below} and {above} are"
            )
        return None

    def round_fault(self, microbatches: int, every: int) -> str | None:
        """The reason why updates of so many microbatches each do not come out even; None where they do."""
        if every >= 1 and microbatches % every == 0:
            return None
        return (
            f"{self.name} needs microbatches in multiples of those of an update, but {microbatches} is not a multiple "
            f"of {every}"
        )

    def plan_fault(self, devices: int, microbatches: int, chunks: int) -> str | None:
        """The rule that these sizes break; None where they give the full schedule, which the planner plans."""
        if fault := self.fault(devices, microbatches, chunks):
            return fault
        if chunks < self.full_chunks:
            return f"{self.name} needs chunks of {self.full_chunks} or more, not {chunks}"
        if self.full_groups and microbatches % devices:
            return f"{self.name} needs microbatches ({microbatches}) in multiples of pipeline {devices}"
        if microbatches < self.full_microbatches * devices:
            return f"{self.name} needs {self.full_microbatches * devices} microbatches or more, not {microbatches}"
        return None

    def placement(self, devices: int, chunks: int) -> tuple[int, ...]:
        """The device of each stage."""
        return vee(devices) if self.v_placement else loop(devices, chunks)

    @classmethod
    def observed(cls, name: str, schedule: Schedule) -> Rules:
        """The traits of one schedule, with no rule for its sizes."""
        last = schedule.stages - 1
        row = [action for entry in schedule.rows[schedule.placement[last]] for action in entry.parts]
        following = dict(pairwise(row))
        return cls(
            name,
            chunks=0,
            splits_backward=any(part.kind == "I" for row in schedule.rows for entry in row for part in entry.parts),
            v_placement=schedule.chunks == 2 and schedule.placement == vee(schedule.devices),
            fuses_last_stage=all(
                following.get(Action(last, "F", k)) == Action(last, "B", k) for k in range(schedule.microbatches)
            ),
            stale=schedule.updates is not None,
        )
