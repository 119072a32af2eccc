"""What the numbers of the tenants benchmark mean, on traces made by hand."""

from __future__ import annotations

import pytest

from benchmarks.tenants import interleaving, sharing
from benchmarks.tenants.interleaving import Gang

# a a b . a, a millisecond each but for the last, which takes two.
GANGS = [
    Gang("a", 0.000, 0.001),
    Gang("a", 0.001, 0.002),
    Gang("b", 0.002, 0.003),
    Gang("a", 0.004, 0.006),
]


def test_how_busy_and_how_finely() -> None:
    found = interleaving.describe(GANGS)
    assert found["gangs"] == 4
    assert found["utilisation"] == pytest.approx(5 / 6)
    assert found["switches_per_second"] == pytest.approx(2 / 0.006)
    assert found["turn_ms"]["median"] == pytest.approx(2)
    assert found["away_ms"]["max"] == pytest.approx(2), "a was away while b ran and while nothing did"


def test_a_tenant_alone_is_never_away() -> None:
    assert interleaving.describe(GANGS[:2])["away_ms"] is None
    assert interleaving.describe(GANGS[:1]) == {"gangs": 1}


def test_use_by_tenant() -> None:
    assert interleaving.by_tenant(GANGS) == pytest.approx({"a": 0.004, "b": 0.001})


def test_shares_are_held_against_weights() -> None:
    found = interleaving.shares({"b": 3.0, "a": 1.0}, {"a": 1, "b": 4})
    assert found["achieved"] == {"a": 0.25, "b": 0.75}
    assert found["target"] == {"a": 0.2, "b": 0.8}
    assert found["error"] == pytest.approx(0.25)


def test_who_used_nothing_is_off_by_all_of_it() -> None:
    assert interleaving.shares({"a": 1.0}, {"a": 1, "b": 1})["error"] == 1.0
    assert interleaving.shares({}, {"a": 1})["error"] == 1.0


@pytest.mark.parametrize(("moment", "count"), [(0.0, 0), (1.0, 10), (1.5, 15), (3.0, 20)])
def test_counts_between_two_looks(moment: float, count: float) -> None:
    assert interleaving.count_at([(1.0, 10), (2.0, 20)], moment) == count


def test_a_picture_begins_and_ends_in_the_middle_of_gangs() -> None:
    assert interleaving.sample(GANGS, 3.0) == [
        ["a", 0.0, 0.5],
        ["b", 0.5, 1.5],
        ["a", 2.5, 4.5],
    ]
    assert interleaving.sample([], 3.0) == []


def test_shares_of_each_second_are_held_against_weights() -> None:
    found = sharing.one_by_one(GANGS, {"a": 4, "b": 1}, 2)
    assert found is not None
    assert (found["min"], found["max"]) == (pytest.approx(1.0), pytest.approx(4.0)), "first a alone, then b alone"
    assert sharing.one_by_one(GANGS, {"a": 4, "b": 1}, 1) is None
