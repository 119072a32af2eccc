"""Statistics of benchmarks."""

from __future__ import annotations

from benchmarks import measure


def test_the_median_lies_between_values_of_equal_rank_from_both_ends() -> None:
    """Of 30 values the 10th and the 21st hold it with 95 %; of three no two do, and of one there is nothing else."""
    assert measure.median_within(list(range(30, 0, -1))) == (10, 21)
    assert measure.median_within([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert measure.median_within([4.0]) == (4.0, 4.0)


def test_99_in_100_do_not_exceed_the_99th_percentile() -> None:
    assert measure.p99(list(range(100, 0, -1))) == 99
    assert measure.p99(list(range(1, 151))) == 149
    assert measure.p99([4.0]) == 4.0


def test_nobody_is_always_first_or_always_behind_the_same_one() -> None:
    assert [measure.in_turn("ab", number) for number in range(4)] == [["a", "b"], ["b", "a"], ["b", "a"], ["a", "b"]]
    rounds = [measure.in_turn("abc", number) for number in range(6)]
    assert sorted(map("".join, rounds)) == ["abc", "acb", "bac", "bca", "cab", "cba"]
    assert measure.in_turn((), 3) == []
