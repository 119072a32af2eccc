"""The schedules by name, and how to add one.

@register("mine")
def mine(devices: int, microbatches: int, chunks: int = 1) -> Schedule: ...

build("mine", devices=4, microbatches=8)
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Protocol, TypeVar

from megatron_ptdp.schedules.actions import Schedule, ScheduleError
from megatron_ptdp.schedules.check import check
from megatron_ptdp.schedules.classic import gpipe, interleaved, looped_bfs, one_f_one_b
from megatron_ptdp.schedules.dualpipe import dualpipe_v
from megatron_ptdp.schedules.zero_bubble import interleaved_zb, zb_h1, zb_v


class Generator(Protocol):
    """Writes a schedule for sizes: p devices, m microbatches, v chunks on each device, with a default for the last."""

    def __call__(self, devices: int, microbatches: int, chunks: int = ..., /) -> Schedule: ...


_GENERATORS: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "interleaved-zb": interleaved_zb,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}

_G = TypeVar("_G", bound=Generator)

MOST = 20_000_000
"""Actions of a schedule, at most: about a minute and some gigabytes. A step of training has some thousands."""


def register(name: str) -> Callable[[_G], _G]:
    """A decorator that makes a generator known to `build`.

    Raises:
        ScheduleError: there is a schedule of this name.
    """

    def enter(generator: _G) -> _G:
        if name in _GENERATORS:
            raise ScheduleError(f"there is a schedule named {name!r} already")
        _GENERATORS[name] = generator
        return generator

    return enter


def schedule_names() -> tuple[str, ...]:
    """What `build` knows, in the order in which it was registered."""
    return tuple(_GENERATORS)


def build(name: str, devices: int, microbatches: int, chunks: int | None = None, limit: int | None = None) -> Schedule:
    """The named schedule for these sizes, checked.

    Args:
        name: one of `schedule_names()`
        devices: p, the pipeline devices
        microbatches: m, of each step
        chunks: v, the stages on each device; left out, as many as the schedule has by itself
        limit: the most stashes that a device may hold, see `check`

    Raises:
        ScheduleError: there is none of this name, or the sizes break its rule, which the message has with the numbers;
            or the rule fails, or makes a schedule of other sizes.
    """
    if name not in _GENERATORS:
        raise ScheduleError(f"there is no schedule {name!r}; there are {', '.join(_GENERATORS)}")
    sizes = (devices, microbatches) if chunks is None else (devices, microbatches, chunks)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise ScheduleError(f"devices, microbatches and chunks are whole numbers, not {', '.join(map(repr, sizes))}")
    if 2 * prod(sizes) > MOST:
        raise ScheduleError(f"{name} of {' x '.join(map(str, sizes))} would have more than {MOST:,} actions")
    schedule = _made(name, sizes)
    check(schedule, limit)
    if (schedule.devices, schedule.microbatches) != (devices, microbatches):
        raise ScheduleError(
            f"{name} was asked for {devices} devices and {microbatches} microbatches, and made a schedule of "
            f"{schedule.devices} and {schedule.microbatches}"
        )
    if chunks is not None and schedule.stages != devices * chunks:
        raise ScheduleError(
            f"{name} was asked for {chunks} chunks on each of {devices} devices, and made {schedule.stages} stages"
        )
    return schedule


def _made(name: str, sizes: tuple[int, ...]) -> Schedule:
    """What the generator makes; it may be a user's own, and fail with anything."""
    try:
        return _GENERATORS[name](*sizes)
    except ScheduleError:
        raise
    except Exception as error:
        asked = ", ".join(map(str, sizes))
        raise ScheduleError(f"the rule of {name!r} failed for {asked}: {type(error).__name__}: {error}") from error
