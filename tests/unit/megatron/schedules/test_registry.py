"""Schedules of a user's own: what `build` refuses of them, whatever the rule makes or does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_ptdp.schedules import Action, Schedule, ScheduleError, build, check, loop, register
from megatron_ptdp.schedules.registry import _GENERATORS


def rows(devices: int, microbatches: int) -> list[list[Action]]:
    return [[Action(stage, kind, k) for kind in "FB" for k in range(microbatches)] for stage in range(devices)]  # type: ignore[arg-type]


def of(devices: int, microbatches: int) -> Schedule:
    return Schedule.of("own", microbatches, loop(devices), rows(devices, microbatches))


@pytest.fixture
def own() -> Iterator[Callable[[Any], None]]:
    """Registers a rule as `own`, for one test."""

    def enter(rule: Any) -> None:
        register("own")(rule)

    yield enter
    _GENERATORS.pop("own", None)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda p, m, v=1: None, "a schedule is a Schedule, as Schedule.of makes it, not NoneType"),
        (lambda p, m, v=1: rows(p, m), "a schedule is a Schedule, as Schedule.of makes it, not list"),
        (lambda p, m, v=1: 1 // 0, "the rule of 'own' failed for 2, 4: ZeroDivisionError"),
        (lambda p: of(p, 1), "the rule of 'own' failed for 2, 4: TypeError"),
        (lambda p, m, v=1: of(p, m - 1), "own was asked for 2 devices and 4 microbatches, and made a .* of 2 and 3"),
        (lambda p, m, v=1: of(p + 1, m), "own was asked for 2 devices and 4 microbatches, and made a .* of 3 and 4"),
        (
            lambda p, m, v=1: Schedule("own", m, (0, 1), rows(p, m)),  # type: ignore[arg-type]
            "of device 0 are a tuple, not list: use Schedule.of",
        ),
        (lambda p, m, v=1: Schedule.of("own", 4.0, (0, 1), rows(p, m)), r"whole numbers, not 4.0 and \(0, 1\)"),  # type: ignore[arg-type]
        (lambda p, m, v=1: Schedule.of("own", m, (0, 1), [[(0, "F", 0)], []]), r"\(0, 'F', 0\) on device 0 is no act"),  # type: ignore[list-item]
    ],
)
def test_what_is_no_schedule_of_these_sizes_is_refused(own: Callable[[Any], None], rule: Any, message: str) -> None:
    own(rule)
    with pytest.raises(ScheduleError, match=message):
        build("own", devices=2, microbatches=4)


def test_chunks_that_a_rule_does_not_make_are_refused(own: Callable[[Any], None]) -> None:
    own(lambda p, m, v=1: of(p, m))
    assert build("own", 2, 4) == of(2, 4)
    with pytest.raises(ScheduleError, match="own was asked for 2 chunks on each of 2 devices, and made 2 stages"):
        build("own", 2, 4, chunks=2)


@pytest.mark.parametrize("wrong", [(2, 2.5), ("2", 4), (2, True), (2, None)])
def test_sizes_that_are_no_whole_numbers_are_refused(wrong: tuple[Any, Any]) -> None:
    with pytest.raises(ScheduleError, match="devices, microbatches and chunks are whole numbers, not"):
        build("1f1b", *wrong)


def test_sizes_that_were_never_meant_are_refused_at_once() -> None:
    with pytest.raises(ScheduleError, match="1f1b of 10000000 x 10000000 would have more than 20,000,000 actions"):
        build("1f1b", 10**7, 10**7)


def test_a_schedule_that_was_made_otherwise_is_looked_at_too() -> None:
    check(of(2, 4))
    with pytest.raises(ScheduleError, match="the actions of device 0 are a tuple, not list"):
        check(Schedule("own", 4, (0, 1), rows(2, 4)))  # type: ignore[arg-type]
