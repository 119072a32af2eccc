"""The examples, seeds and cases that tests draw: all of them in CI, a fifth in the loop of a developer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

VARIABLE = "PATHWAYS_TESTS_DRAW"
"""Has a test draw one in so many of its examples or seeds."""

ONE_IN = int(os.environ.get(VARIABLE, "1"))


T = TypeVar("T")


def drawn(count: int) -> int:
    """The part that is drawn of `count` examples or seeds: ten, or all that there are, if that is more."""
    return max(min(count, 10), count // ONE_IN)


def some(cases: Iterable[T]) -> list[T]:
    """One in so many of the cases of a long table that all try the same code; in CI each."""
    return list(cases)[::ONE_IN]
