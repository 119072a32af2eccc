"""Checks a schedule before it runs: nothing missing, no deadlock, no device with too many stashes."""

from __future__ import annotations

from megatron_ptdp.schedules.actions import Schedule, ScheduleError
from megatron_ptdp.schedules.flow import Flow


def check(schedule: Schedule, limit: int | None = None) -> None:
    """Makes sure that every device comes to the end of its list.

    Each stage has each microbatch once: one F, and then either one B, or one I and then one W. All stand on the device
    of the stage. No devices wait for each other in a circle.

    Args:
        schedule: to be checked
        limit: the most stashes that a device may hold: microbatches in flight, counted on each of its stages.

    Raises:
        ScheduleError: with what is wrong, and where.
    """
    Flow.of(schedule).order()
    if limit is None:
        return
    for device, peak in enumerate(in_flight(schedule)):
        if peak > limit:
            raise ScheduleError(f"device {device} holds {peak} microbatches at its peak, but {limit} is the limit")


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most stashes that each device holds: an F makes one, its B or W ends it. All chunks of a device count."""
    return tuple(int(peak) for peak in peak_memory(schedule, (1.0,) * schedule.stages, (1.0,) * schedule.stages))


def peak_memory(schedule: Schedule, stash: tuple[float, ...], kept: tuple[float, ...]) -> tuple[float, ...]:
    """The most bytes of stashes that each device holds.

    A forward takes its stash when it starts. A B, or a W, gives it back when it ends. In a pair the forward takes
    before the backward gives.

    Args:
        schedule: in whose order the devices take and give
        stash: for each stage, the bytes that the backward of a microbatch needs
        kept: for each stage, the bytes of it that are still there between I and W
    """
    change = {
        "F": stash,
        "B": tuple(-size for size in stash),
        "I": tuple(after - before for before, after in zip(stash, kept, strict=True)),
        "W": tuple(-size for size in kept),
    }
    peaks = []
    for row in schedule.rows:
        stashed = peak = 0.0
        for entry in row:
            for stage, kind, _ in entry.parts:
                stashed += change[kind][stage]
                peak = max(peak, stashed)
        peaks.append(peak)
    return tuple(peaks)
