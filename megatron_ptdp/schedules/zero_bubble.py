"""Schedules whose backward is split: I, which the stage before waits for, and W, which no stage waits for.

W fills what would be a bubble. Source: "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241) for H1 and its interleaved
form ZB1P, "Pipeline Parallelism with Controllable Memory" (arXiv:2405.15362) for the V. The orders are fixed rules, the
same as those of torch 2.13; they are best when F, I and W take equally long.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ptdp.schedules.actions import Action, Kind, Schedule, loop, vee
from megatron_ptdp.schedules.classic import even_group, virtual_steps
from megatron_ptdp.schedules.rules import Rules

ZB_H1 = Rules("zb-h1", full_microbatches=1, splits_backward=True)
INTERLEAVED_ZB = Rules("interleaved-zb", chunks=0, equal_groups=True, full_chunks=2, splits_backward=True)
ZB_V = Rules("zb-v", chunks=2, full_microbatches=1, splits_backward=True, v_placement=True)


def zb_h1(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B with the weights' part put off: device r does it r steps later. A third of the bubble of 1F1B if F = I = W.

    The bubble is (p-1)(F + I - W) if W takes at most F, and at most I, and m is at least p. All devices hold what
    device 0 holds under 1F1B: min(p, m) stashes.
    """
    ZB_H1.require(devices, microbatches, chunks)
    rows = [_put_off(device, devices, microbatches, 1, group=microbatches) for device in range(devices)]
    return Schedule.of("zb-h1", microbatches, loop(devices), rows)


def interleaved_zb(devices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved over v chunks, with half the warm-up of interleaved 1F1B, and W put off by r steps on device r.

    Raises:
        ScheduleError: m is not a multiple of max(1, m // p).
    """
    INTERLEAVED_ZB.require(devices, microbatches, chunks)
    group = even_group(devices, microbatches)
    rows = [_put_off(device, devices, microbatches, chunks, group) for device in range(devices)]
    return Schedule.of("interleaved-zb", microbatches, loop(devices, chunks), rows)


def _put_off(device: int, devices: int, microbatches: int, chunks: int, group: int) -> list[Action]:
    """F and I in turns behind (v-1)·group + (p-1-r) forwards; the W of a step follows r steps behind its I."""
    forwards, backwards = virtual_steps(device, devices, microbatches, chunks, group, "I")
    warmup = min((chunks - 1) * group + devices - 1 - device, len(forwards))
    order = forwards[:warmup]
    for step, backward in enumerate(backwards):
        order += forwards[warmup + step : warmup + step + 1]
        order.append(backward)
        if step >= device:
            order.append(_weights(backwards[step - device]))
    return order + [_weights(backward) for backward in backwards[max(0, len(backwards) - device) :]]


def _weights(backward: Action) -> Action:
    return Action(backward.stage, "W", backward.microbatch)


def zb_v(devices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Two chunks in a V: stage r there and stage 2p-1-r back. 1F1B's memory.

    No bubble but the fill, (p-1)·F of one chunk, if F = I, W takes F/2 to F, and m is at least 2p-1.

    With fewer than 2p-1 microbatches it is the order for 2p-1 of them, less the actions of those that are not there.
    """
    ZB_V.require(devices, microbatches, chunks)
    full = max(microbatches, 2 * devices - 1)
    rows = [
        [action for action in _zb_v_row(device, devices, full) if action.microbatch < microbatches]
        for device in range(devices)
    ]
    return Schedule.of("zb-v", microbatches, vee(devices), rows)


def _zb_v_row(device: int, devices: int, microbatches: int) -> Iterator[Action]:
    """One device. `a` is the chunk on the way there, `b` the one on the way back; W is done at once where it can be."""
    there, back = device, 2 * devices - 1 - device
    done: dict[tuple[int, Kind], int] = {}

    def take(stage: int, *kinds: Kind) -> Iterator[Action]:
        for kind in kinds:
            k = done.get((stage, kind), 0)
            done[stage, kind] = k + 1
            yield Action(stage, kind, k)

    def left(stage: int, kind: Kind) -> int:
        return microbatches - done.get((stage, kind), 0)

    for _ in range(2 * (devices - device) - 1):  # fills the V up to the chunk on the way back
        yield from take(there, "F")
    for _ in range(device):
        yield from take(back, "F")
        yield from take(there, "F")
    for _ in range(devices - device):  # the first gradients come back to this device
        yield from take(back, "F", "I", "W")
    while left(there, "F") or left(back, "F"):
        if left(there, "F"):
            yield from take(there, "F")
        yield from take(there, "I", "W")
        if left(back, "F"):
            yield from take(back, "F", "I", "W")
    for _ in range(device):  # the pipeline empties: gradients that others wait for come first
        yield from take(there, "I")
        yield from take(back, "I")
    for _ in range(devices - device):
        yield from take(there, "I", "W")
    while left(back, "W"):
        yield from take(back, "W")
    while left(there, "W"):
        yield from take(there, "W")
