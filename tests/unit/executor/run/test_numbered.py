"""Values and buffers by their numbers: what is done in one step is what is done with each."""

from __future__ import annotations

import pytest

from pathways_ray.executor.run.numbered import row_of, shifter, taker


@pytest.mark.parametrize("numbers", [(), (0,), (3,), (0, 1, 2), (2, 3), (1, 0), (0, 2), (4, 4)])
def test_all_of_them_are_taken_and_moved(numbers: tuple[int, ...]) -> None:
    values = list("abcde")
    assert list(taker(numbers)(values)) == [values[number] for number in numbers]
    for first in (7, -9, 1 << 62):
        assert list(shifter(numbers)(first)) == [first + number for number in numbers]


@pytest.mark.parametrize("slots", [(), (0,), (3,), (0, 1, 2), (2, 3)])
def test_slots_in_a_row_are_a_slice(slots: tuple[int, ...]) -> None:
    row = row_of(slots)
    assert row is not None
    assert tuple(range(9)[row]) == slots


@pytest.mark.parametrize("slots", [(1, 0), (0, 2), (4, 4), (3, 2, 4)])
def test_others_are_none(slots: tuple[int, ...]) -> None:
    assert row_of(slots) is None
