"""Schedules with a full backward: GPipe, 1F1B, interleaved 1F1B, looped breadth-first.

p devices, m microbatches, v chunks on each device; device r has the stages c·p + r, c = 0..v-1. Sources: GPipe
(arXiv:1811.06965), 1F1B as PipeDream-Flush (arXiv:2006.09503), interleaved 1F1B (arXiv:2104.04473, section 2.2), looped
breadth-first (arXiv:2211.05953).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_ptdp.schedules.actions import Action, Kind, Schedule, ScheduleError, loop
from megatron_ptdp.schedules.rules import Rules

GPIPE = Rules("gpipe")
ONE_F_ONE_B = Rules("1f1b", fuses_last_stage=True)
LOOPED_BFS = Rules("looped-bfs", chunks=0, full_chunks=2)
INTERLEAVED = Rules("interleaved", chunks=0, equal_groups=True, full_chunks=2, full_groups=True, fuses_last_stage=True)


def gpipe(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards, both in the order of the microbatches. Holds m stashes."""
    GPIPE.require(devices, microbatches, chunks)
    rows = [
        [Action(stage, kind, k) for kind in _kinds("F", "B") for k in range(microbatches)] for stage in range(devices)
    ]
    return Schedule.of("gpipe", microbatches, loop(devices), rows)


def one_f_one_b(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Device r runs min(p-1-r, m) forwards ahead, then one forward and one backward in turns.

    It holds min(p-r, m) stashes. Fewer microbatches than devices are allowed; the pipeline then never fills.
    """
    ONE_F_ONE_B.require(devices, microbatches, chunks)
    rows = []
    for stage in range(devices):
        forwards = [Action(stage, "F", k) for k in range(microbatches)]
        backwards = [Action(stage, "B", k) for k in range(microbatches)]
        rows.append(alternate(forwards, backwards, warmup=min(devices - 1 - stage, microbatches)))
    return Schedule.of("1f1b", microbatches, loop(devices), rows)


def looped_bfs(devices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """All microbatches through the first chunk, then all through the next; backwards in exactly the opposite order.

    Holds m·v stashes. The gradients of a stage are complete early, which leaves time to reduce them.
    """
    LOOPED_BFS.require(devices, microbatches, chunks)
    rows = []
    for device in range(devices):
        forwards = [Action(c * devices + device, "F", k) for c in range(chunks) for k in range(microbatches)]
        rows.append([*forwards, *(Action(stage, "B", k) for stage, _, k in reversed(forwards))])
    return Schedule.of("looped-bfs", microbatches, loop(devices, chunks), rows)


def interleaved(devices: int, microbatches: int, chunks: int = 2, group: int | None = None) -> Schedule:
    """1F1B over v chunks. Device r runs min(2(p-1-r) + (v-1)·group, m·v) forwards ahead. Bubble (p-1)/(m·v).

    Args:
        devices: p
        microbatches: m
        chunks: v
        group: the microbatches that go through one chunk before the next one is served. Left out, m must be a multiple
            of max(1, m // p), the number of groups, as in torch; with m a multiple of p a group is p microbatches, as
            in the paper. Given, Megatron-Core's rule holds (`--microbatch-group-size-per-virtual-pipeline-stage`):
            p <= group <= m, and what is left for the last group is 0 or at least p.

    Raises:
        ScheduleError: the microbatches do not fit.
    """
    if group is None:
        INTERLEAVED.require(devices, microbatches, chunks)
        group = even_group(devices, microbatches)
    else:
        replace(INTERLEAVED, equal_groups=False).require(devices, microbatches, chunks)
        _require_group(devices, microbatches, group)
    rows = []
    for device in range(devices):
        warmup = 2 * (devices - 1 - device) + (chunks - 1) * group
        forwards, backwards = virtual_steps(device, devices, microbatches, chunks, group, "B")
        rows.append(alternate(forwards, backwards, min(warmup, microbatches * chunks)))
    return Schedule.of("interleaved", microbatches, loop(devices, chunks), rows)


def even_group(devices: int, microbatches: int) -> int:
    """The size of a group where all are equal and there are as many as have p microbatches, at least one."""
    return microbatches // max(1, microbatches // devices)


def _require_group(devices: int, microbatches: int, group: int) -> None:
    if not devices <= group <= microbatches:
        raise ScheduleError(
            f"interleaved needs devices <= group <= microbatches, but {devices} <= {group} <= {microbatches} is false"
        )
    rest = microbatches % group
    if 0 < rest < devices:
        raise ScheduleError(
            f"interleaved needs microbatches % group to be 0 or at least the number of devices, "
            f"but {microbatches} % {group} = {rest} and there are {devices} devices"
        )


def virtual_steps(
    device: int, devices: int, microbatches: int, chunks: int, group: int, backward: Kind
) -> tuple[list[Action], list[Action]]:
    """All forwards of a device in their order, and all backwards in theirs: group by group, in each chunk by chunk.

    Backwards take the chunks from the last to the first.
    """
    forwards: list[Action] = []
    backwards: list[Action] = []
    for start in range(0, microbatches, group):
        served = range(start, min(start + group, microbatches))
        for chunk in range(chunks):
            stage, back = chunk * devices + device, (chunks - 1 - chunk) * devices + device
            forwards += [Action(stage, "F", k) for k in served]
            backwards += [Action(back, backward, k) for k in served]
    return forwards, backwards


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turns, then the backwards that are left."""
    order = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += (forward, backward)
    return order + list(backwards[len(forwards) - warmup :])


def _kinds(*kinds: Kind) -> tuple[Kind, ...]:
    return kinds
