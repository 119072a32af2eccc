"""The moving average that scheduler and controller expect launches to take."""

from __future__ import annotations

import pytest

from pathways_ray.scheduler.estimates import UNMEASURED_S, WEIGHT, MovingAverage


def test_a_program_takes_what_its_first_launch_took_until_others_take_something_else() -> None:
    average = MovingAverage()
    assert (average.seconds, average.estimate) == (0.0, UNMEASURED_S)
    average.measure(2.0)
    assert average.estimate == 2.0
    average.measure(1.0)
    assert average.estimate == pytest.approx(2.0 - WEIGHT)


def test_after_ten_launches_two_thirds_of_a_change_are_in_the_estimate() -> None:
    average = MovingAverage(1.0)
    for _ in range(10):
        average.measure(2.0)
    assert average.estimate == pytest.approx(1.65, abs=0.01)
