"""When launches ran: early ones under the numbers that they were sent under, whichever is known first."""

from __future__ import annotations

from pathways_ray.executor.run.ran import MAX_EARLY, RanLaunches


def ran(**sent: int) -> RanLaunches:
    return RanLaunches(lambda number: sent.get(f"n{-number}", number))


def test_launches_are_noted_as_they_end() -> None:
    found = ran()
    found.ended(7, 1.0, 2.0)
    assert found.records() == [(7, 1.0, 2.0)]


def test_an_early_launch_is_noted_once_it_is_sent() -> None:
    found = ran()
    found.ended(-1, 1.0, 2.0)
    assert found.records() == []
    found.sent((-1,), 8)
    found.sent((-1,), 9)
    assert found.records() == [(8, 1.0, 2.0)]


def test_one_that_was_sent_before_it_was_over_is_noted_as_it_ends() -> None:
    found = ran(n2=5)
    found.sent((-2,), 5)
    found.ended(-2, 1.0, 2.0)
    assert found.records() == [(5, 1.0, 2.0)]


def test_those_that_left_as_one_are_noted_under_its_number() -> None:
    found = ran()
    for number in (-1, -2, -3):
        found.ended(number, 1.0 - number, 2.0 - number)
    found.sent((-1, -2), 8)
    found.sent((-3,), 0)
    assert found.records() == [(8, 2.0, 3.0), (8, 3.0, 4.0)], "the third is never sent"


def test_of_those_that_are_never_sent_few_are_kept() -> None:
    found = ran()
    for number in range(1, MAX_EARLY + 10):
        found.ended(-number, 1.0, 2.0)
    assert len(found._early) == MAX_EARLY
