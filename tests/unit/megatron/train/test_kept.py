"""Snapshots of a training: when they are taken, which are kept, and from which training goes on."""

from __future__ import annotations

from typing import Any

from megatron_ptdp.train.kept import Kept, Taken
from pathways_ray.errors import BufferLost


class Copies:
    """A snapshot: `ready` once it is made, and `whole` until it is lost."""

    def __init__(self, ready: bool = True) -> None:
        self.ready, self.whole, self.waited = ready, True, 0

    def is_ready(self) -> bool:
        return self.ready

    def is_whole(self) -> bool:
        return self.ready and self.whole

    def wait(self, timeout: float | None = None) -> None:
        self.waited += 1
        self.ready = True
        if not self.whole:
            raise BufferLost("gone")

    restore = values = wait


def steps(kept: Kept, first: int, last: int, ready: bool = True, behind: int = 2) -> None:
    """Steps are launched, each when that of two before has landed."""
    for done in range(first, last):
        kept.landed = max(kept.landed, done - behind)
        kept.look(done, lambda done=done: Taken(done, Copies(ready), None))  # type: ignore[misc]


def kept_steps(kept: Kept) -> list[int]:
    return [one.done for one in kept.taken]


def test_one_whose_step_was_seen_and_all_newer_ones_are_kept() -> None:
    kept = Kept(3)
    steps(kept, 0, 4)
    assert kept_steps(kept) == [0, 3], "the loss of step 3 was not seen yet"
    steps(kept, 4, 6)
    assert kept_steps(kept) == [3]
    newest = kept.newest()
    assert newest is not None
    assert newest.done == 3


def test_one_that_is_under_way_is_waited_for_and_the_one_before_it_kept() -> None:
    kept = Kept(3)
    steps(kept, 0, 3)
    steps(kept, 3, 9, ready=False)
    assert kept_steps(kept) == [0, 3, 6]
    newest = kept.newest()
    assert newest is not None
    assert newest.done == 6
    assert newest.snapshot.waited == 1  # type: ignore[attr-defined]


def test_one_that_was_lost_is_passed_over() -> None:
    kept = Kept(2)
    steps(kept, 0, 6)
    assert kept_steps(kept) == [2, 4]
    lost: Any = kept.taken[-1].snapshot
    kept.landed, lost.whole = 6, False
    newest = kept.newest()
    assert newest is not None
    assert newest.done == 2
    newest.snapshot.whole = False  # type: ignore[attr-defined]
    assert kept.newest() is None


def test_one_of_a_step_that_was_not_seen_serves_later_only() -> None:
    kept = Kept(2)
    steps(kept, 0, 3, behind=9)
    newest = kept.newest()
    assert newest is not None
    assert newest.done == 0
    assert kept_steps(kept) == [0, 2]


def test_the_first_step_after_a_loss_takes_another_one() -> None:
    kept = Kept(5)
    steps(kept, 0, 8)
    before = kept.newest()
    kept.begin(5)
    steps(kept, 5, 6)
    assert kept_steps(kept) == [5]
    assert kept.taken[0] is not before, "copies of it may have gone with what was lost"


def test_none_are_taken_where_none_are_asked_for() -> None:
    kept = Kept(0)
    steps(kept, 0, 5)
    assert kept.newest() is None
