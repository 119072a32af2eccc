"""Which small results come along with a question, and when they are left alone."""

from __future__ import annotations

from types import SimpleNamespace

from pathways_ray import limits
from pathways_ray.client.siblings import MAX_SIBLING_BYTES, Results, Siblings


def results(first: int, *sizes: int, program: int = 1) -> Results:
    return Results(program, first, [SimpleNamespace(array=SimpleNamespace(nbytes=size)) for size in sizes])


def test_small_results_of_the_launch_come_along() -> None:
    made = results(10, 4, MAX_SIBLING_BYTES + 1, 8, 4)
    siblings = Siblings()
    assert siblings.of(made, 12) == [10, 13]
    assert siblings.of(made, 11) == ()  # a big one: small ones would wait for it
    assert siblings.of(None, 10) == ()


def test_what_comes_along_is_bounded() -> None:
    siblings = Siblings()
    most = limits.MAX_SIBLINGS_BYTES // MAX_SIBLING_BYTES
    assert len(siblings.of(results(1, *[MAX_SIBLING_BYTES] * 100), 1)) == most
    assert len(siblings.of(results(1, *[1] * 1000), 1)) == limits.MAX_SIBLINGS


def test_a_value_that_came_along_is_given_once() -> None:
    siblings, made = Siblings(), results(1, 4, 4, 4)
    siblings.keep(made, {2: "two", 3: "three"})
    assert siblings.take(2) == "two"
    assert siblings.take(2) is None
    siblings.forget(3)
    siblings.forget(3)
    assert not siblings.values


def test_a_program_of_which_one_result_is_looked_at_brings_no_others_along() -> None:
    """
    1. Nothing that came along was asked for: the next launch's others stay where they are.
    2. A second result of one launch is asked for: the others come along with it, and with the next launch's first.
    3. Another program is not concerned.
    """
    siblings = Siblings()
    first = results(1, 4, 4, 4)
    assert siblings.of(first, 1) == [2, 3]
    siblings.keep(first, {2: "two", 3: "three"})
    siblings.forget(2)
    siblings.forget(3)
    later = results(4, 4, 4, 4)
    assert siblings.of(later, 4) == ()
    assert siblings.of(results(20, 4, 4, program=2), 20) == [21]
    assert siblings.of(later, 4) == ()
    assert siblings.of(later, 4) == ()
    assert siblings.of(later, 5) == [4, 6]
    assert siblings.of(results(7, 4, 4, 4), 7) == [8, 9]


def test_what_was_of_use_once_comes_along_again() -> None:
    siblings = Siblings()
    for first in (1, 4):
        made = results(first, 4, 4, 4)
        assert siblings.of(made, first) == [first + 1, first + 2]
        siblings.keep(made, {first + 1: "one", first + 2: "two"})
        assert siblings.take(first + 1) == "one"
        siblings.forget(first + 2)
