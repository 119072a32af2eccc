"""Schedules by name with their rules, and the way to add one.

@register("mine")
def mine(devices: int, microbatches: int, chunks: int = 1) -> Schedule: ...

build("mine", devices=4, microbatches=8)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Protocol, TypeVar

from megatron_ptdp.schedules.actions import Schedule, ScheduleError
from megatron_ptdp.schedules.check import check
from megatron_ptdp.schedules.classic import (
    GPIPE,
    INTERLEAVED,
    LOOPED_BFS,
    ONE_F_ONE_B,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
)
from megatron_ptdp.schedules.dualpipe import DUALPIPE_V, dualpipe_v
from megatron_ptdp.schedules.rules import Rules
from megatron_ptdp.schedules.stale import PIPEDREAM, PIPEDREAM_2BW, pipedream, pipedream_2bw
from megatron_ptdp.schedules.token_slices import TERAPIPE, check_slices, terapipe
from megatron_ptdp.schedules.zero_bubble import INTERLEAVED_ZB, ZB_H1, ZB_V, interleaved_zb, zb_h1, zb_v


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
    "pipedream": pipedream,
    "pipedream-2bw": pipedream_2bw,
    "terapipe": terapipe,
}

_RULES = {
    rules.name: rules
    for rules in (
        *(GPIPE, ONE_F_ONE_B, INTERLEAVED, LOOPED_BFS, ZB_H1, INTERLEAVED_ZB, ZB_V, DUALPIPE_V),
        *(PIPEDREAM, PIPEDREAM_2BW, TERAPIPE),
    )
}
"""Rules of the generators of this package; those of a user's own are observed, see `rules_of`."""

_G = TypeVar("_G", bound=Generator)

MAX_ACTIONS = 20_000_000
"""The most that a schedule may have: about a minute and some gigabytes. A step of training has some thousands."""

OBSERVED_SIZES = ((2, 4), (2, 8), (4, 8), (4, 16), (3, 9))
"""Devices and microbatches with which an unknown generator is tried, until it takes some."""


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
    """Names that `build` knows, in the order in which they were registered."""
    return tuple(_GENERATORS)


def rules_of(name: str) -> Rules:
    """The rules of a schedule. A generator of a user's own states none: its traits are read off a small schedule that
    it makes, and `build` says which sizes it takes.

    Raises:
        ScheduleError: there is no schedule of this name, or its generator takes none of `OBSERVED_SIZES`.
    """
    if name in _RULES:
        return _RULES[name]
    if name not in _GENERATORS:
        raise _unknown(name)
    return _observed(name)


def states_rules(name: str) -> bool:
    """True where the rules of a schedule say all about its sizes, without building it."""
    return name in _RULES


@lru_cache(maxsize=64)
def _observed(name: str) -> Rules:
    """Raises the last `ScheduleError` where the generator takes no sizes."""
    for devices, microbatches in OBSERVED_SIZES[:-1]:
        try:
            return Rules.observed(name, build(name, devices, microbatches))
        except ScheduleError:
            continue
    return Rules.observed(name, build(name, *OBSERVED_SIZES[-1]))


def _unknown(name: str) -> ScheduleError:
    return ScheduleError(f"there is no schedule {name!r}; there are {', '.join(_GENERATORS)}")


def build(
    name: str,
    devices: int,
    microbatches: int,
    chunks: int | None = None,
    limit: int | None = None,
    slices: int = 1,
) -> Schedule:
    """The named schedule for these sizes, checked.

    Args:
        name: one of `schedule_names()`
        devices: p, the pipeline devices
        microbatches: m, of each step
        chunks: v, the stages on each device; left out, as many as the schedule has by itself
        limit: the most stashes that a device may hold, see `check`
        slices: n, into which each microbatch is cut along its tokens; the schedule then has m·n units

    Raises:
        ScheduleError: there is no schedule of this name, or the sizes break its rule, which the message has with the
            numbers; or the generator fails, or makes a schedule of other sizes.
    """
    if name not in _GENERATORS:
        raise _unknown(name)
    sizes = (devices, microbatches) if chunks is None else (devices, microbatches, chunks)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in (*sizes, slices)):
        raise ScheduleError(f"devices, microbatches and chunks are whole numbers, not {', '.join(map(repr, sizes))}")
    if 2 * prod(sizes) * slices > MAX_ACTIONS:
        raise ScheduleError(f"{name} of {' x '.join(map(str, sizes))} would have more than {MAX_ACTIONS:,} actions")
    if slices != 1 or (name in _RULES and _RULES[name].token_slices):
        return _in_slices(name, sizes, slices, limit)
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


def _in_slices(name: str, sizes: tuple[int, ...], slices: int, limit: int | None) -> Schedule:
    """A schedule over slices of tokens. Raises `ScheduleError` as `build`."""
    if name not in _RULES or not _RULES[name].token_slices:
        able = ", ".join(rules.name for rules in _RULES.values() if rules.token_slices)
        raise ScheduleError(
            f"{name} takes microbatches whole, not in {slices} slices of their tokens; {able} cuts them"
        )
    devices, microbatches, *chunks = sizes
    _RULES[name].require(devices, microbatches, *chunks or [1])
    schedule = _made(name, (devices, microbatches, slices))
    check(schedule, limit)
    check_slices(schedule, slices)
    return schedule


def _made(name: str, sizes: tuple[int, ...]) -> Schedule:
    """The schedule of the generator, which may be a user's own and fail with anything."""
    try:
        return _GENERATORS[name](*sizes)
    except ScheduleError:
        raise
    except Exception as error:
        asked = ", ".join(map(str, sizes))
        raise ScheduleError(f"the rule of {name!r} failed for {asked}: {type(error).__name__}: {error}") from error
