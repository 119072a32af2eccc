"""Copies between devices of a host are made together, and no later than those who need them, or take their sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pathways_ray.errors import Failure
from pathways_ray.executor.run.local_copies import CopyStep, with_copies_joined
from pathways_ray.executor.run.steps import Slots
from pathways_ray.ir.plan import Execute, Receive, Reshard, Send, Step
from pathways_ray.transport.messages import IslandLaunch

HOST = 3
REMOTE = 9
"""A bundle that leaves the host."""

LOST = Failure("BufferLost", "it is gone")
LAUNCH = IslandLaunch(1, 1, 1, (), 1)


def copies(bundles: Sequence[int]) -> Any:
    """Copies are their values, one higher."""

    def copy(*values: int) -> list[int]:
        if any(isinstance(value, Failure) for value in values):
            raise TypeError("no array")
        return [value + 1 for value in values]

    return None if REMOTE in bundles else copy


def execute(takes: tuple[int, ...], gives: int, drops: tuple[int, ...] = ()) -> Execute:
    return Execute(0, 0, 0, takes, (gives,), drops)


def joined(steps: Sequence[Step], donated: tuple[int, ...] = ()) -> list[Any]:
    """The steps that are left, by themselves or as those that copy."""
    made, _ = with_copies_joined(steps, steps, copies, lambda step: set(donated) & set(step.inputs), HOST)
    return made


def test_copies_are_made_together_before_the_first_who_needs_one() -> None:
    first, second, third = execute((0,), 2), execute((1,), 3), execute((2, 5), 6)
    steps: list[Step] = [
        first,
        Send(0, 0, (2,)),
        second,
        Send(0, 1, (3,), (3,)),
        Receive(0, 1, (5,)),
        third,
        Receive(0, 0, (4,)),
    ]
    made = joined(steps)
    assert [made[0], made[1], made[3]] == [first, second, third]
    (copy,) = (step for step in made if isinstance(step, CopyStep))
    assert made.index(copy) == 2
    slots = Slots(LAUNCH, 7)
    slots.values[:] = [10, 20, 30, 40, None, None, None]
    copy.run(slots)
    assert slots.values == [10, 20, 30, None, 31, 41, None]


def test_what_takes_a_source_away_comes_behind_its_copy() -> None:
    for taker, donated in ((execute((2,), 3, drops=(2,)), ()), (execute((2,), 3), (2,))):
        made = joined([Send(0, 0, (2,)), taker, Receive(0, 0, (4,))], donated)
        assert isinstance(made[0], CopyStep)
        assert made[1:] == [taker]


def test_other_steps_come_behind_the_copies_before_them() -> None:
    reshard = Reshard(0, 5, (4,), (6,))
    leaving = Send(0, REMOTE, (4,))
    steps: list[Step] = [Send(0, 0, (2,)), Receive(0, 0, (4,)), reshard, Send(0, 1, (2,)), leaving, Receive(0, 1, (5,))]
    made = joined(steps)
    assert [type(step) for step in made] == [CopyStep, Reshard, CopyStep, Send]
    assert made[3] == leaving


def test_a_failure_stays_that_of_its_bundle() -> None:
    steps: list[Step] = [Send(0, 0, (0,)), Send(0, 1, (1, 2)), Receive(0, 0, (3,)), Receive(0, 1, (4, 5))]
    (copy,) = joined(steps)
    slots = Slots(LAUNCH, 6)
    slots.values[:] = [10, 20, LOST, None, None, None]
    copy.run(slots)
    assert slots.values == [10, 20, LOST, 11, LOST, LOST]


def test_a_copy_that_raises_fails_the_transfer_on_this_host() -> None:
    steps: list[Step] = [Send(0, 0, (0,)), Send(0, 1, (1,)), Receive(0, 0, (2,)), Receive(0, 1, (3,))]
    (copy,) = joined(steps)
    slots = Slots(LAUNCH, 4)
    slots.values[:] = [10, "deleted", None, None]
    copy.run(slots)
    assert slots.values[2] == 11
    failure = slots.values[3]
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.node, failure.host) == ("ExecutionError", "transfer", HOST)
