"""Seconds of one iteration's microbatches in the pipeline, by closed forms.

Two ways. `bounded` is a closed form, exact for 1F1B and GPipe with even stages and messages that block them, and near
for the others where messages are short beside the work (docs/planner.md says how near); a search over thousands of
plans uses it. `megatron_ptdp.planner.simulated` runs the schedule's real action lists through the event simulator; it
is used for the few plans that are shown.

Closed forms, w work of the busiest device per microbatch, f i w' forward, inputs, weights of one chunk of a device:

    GPipe               m max F + m max B + the other devices once (PTD-P section 2.2)
    1F1B, interleaved   m w + (sum of the other devices' work)/v            bubble (p-1)/(v m)
    looped              the same, and (sum of all devices' work - m w) (v-1)/v where m < p: until its first microbatch
                        has been round, a device waits
    ZB-H1               m w + sum of the others' (F + I) - W of the busiest  (Qi et al. 2023; DualPipe README)
    ZB-V                m w + sum of the others' 3 max(f, i, w') - w              zero when f = i = w'
    DualPipe-V          m w + sum of the others' (f + 2 i - w'), less what they lack of w   (DualPipe README)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.schedules import rules_of

CLOSED_FORMS = frozenset({"gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v"})
"""Schedules whose time (here) and memory (`memory`) have formulas. A search goes through these; any other registered
schedule is planned where it is asked for by name, from its action lists (`simulated`)."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """Seconds a stage occupies its device for one microbatch, blocking communication included."""

    forward: float
    inputs: float
    weights: float

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a pipeline: for each stage its seconds and its device.

    Attributes:
        stages: in the order of the model.
        placement: the device of each stage.
        transfer: seconds an activation is on its way beside what is in the work (hidden messages).
    """

    stages: tuple[StageWork, ...]
    placement: tuple[int, ...]
    transfer: float

    def per_device(self) -> list[StageWork]:
        count = max(self.placement) + 1
        sums = [[0.0, 0.0, 0.0] for _ in range(count)]
        for stage, device in zip(self.stages, self.placement, strict=True):
            row = sums[device]
            row[0] += stage.forward
            row[1] += stage.inputs
            row[2] += stage.weights
        return [StageWork(*row) for row in sums]


def placement(plan: Plan) -> tuple[int, ...]:
    """The device of each stage."""
    return rules_of(plan.schedule).placement(plan.pipeline, plan.chunks)


def has_closed_form(plan: Plan) -> bool:
    """True where time and memory of the plan's schedule are known without its action lists."""
    return plan.schedule in CLOSED_FORMS


def bounded(plan: Plan, work: Work) -> float:
    """Seconds of all microbatches by the closed form of the plan's schedule."""
    return max(_devices_seconds(plan, work), links_seconds(plan, work))


def links_seconds(plan: Plan, work: Work) -> float:
    """Seconds in which a device sends all its messages: for each microbatch and chunk an activation to the next stage
    and a gradient to the one before, of which the first and the last device have one."""
    return min(2, plan.pipeline - 1) * plan.units * plan.chunks * work.transfer


def _devices_seconds(plan: Plan, work: Work) -> float:
    devices, m = work.per_device(), plan.microbatches
    hops = 2 * (len(devices) - 1) * work.transfer
    if plan.schedule == "gpipe":
        forwards = [device.forward for device in devices]
        backwards = [device.inputs + device.weights for device in devices]
        return sum(forwards) + sum(backwards) + (m - 1) * (max(forwards) + max(backwards)) + hops
    if plan.schedule == "zb-h1":  # which device sets the pace depends on its W too; no work that shrinks may cost time
        return max(m * device.total + fill(plan, devices, device) for device in devices) + hops
    busiest = max(devices, key=lambda device: device.total)
    pace = busiest.total
    if plan.schedule == "1f1b":  # two neighbours wait for one another: forward, message, both there, message, backward
        for device, following in pairwise(devices):
            pace = max(pace, (device.total + following.total) / 2 + work.transfer)
    steady = max(0, m - len(devices) + 1)
    return m * busiest.total + steady * (pace - busiest.total) + fill(plan, devices, busiest) + hops


def fill(plan: Plan, devices: list[StageWork], busiest: StageWork) -> float:
    """Seconds in which the busiest device waits for the pipeline to fill and to drain."""
    if len(devices) == 1:
        return 0.0
    if plan.schedule == "zb-h1":
        each = [device.forward + device.inputs - busiest.weights for device in devices]
    elif plan.schedule == "zb-v":
        each = [(3 * max(device.forward, device.inputs, device.weights) - busiest.total) / 2 for device in devices]
    elif plan.schedule == "dualpipe-v":
        lacking = [busiest.total - device.total for device in devices]
        each = [
            (device.forward + 2 * device.inputs - device.weights) / 2 - less
            for device, less in zip(devices, lacking, strict=True)
        ]
    else:
        once = sum(device.total for device in devices)
        # Only a looped schedule may have fewer microbatches than devices and several chunks.
        waits = max(0.0, once - plan.microbatches * busiest.total) * (plan.chunks - 1)
        return (once - busiest.total + waits) / plan.chunks
    return sum(max(0.0, one) for one in each) * (len(devices) - 1) / len(devices)
