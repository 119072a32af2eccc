"""The checker sees every planted bug, and sees nothing in the same run without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pathways_ray.simulation.settings import Settings
from pathways_ray.simulation.world import World
from tests.drawn import some
from tests.simulation import (
    planted_accounts,
    planted_calls,
    planted_carried,
    planted_decisions,
    planted_early,
    planted_following,
    planted_islands,
    planted_leading,
    planted_preemption,
    planted_priorities,
    planted_reunion,
    planted_routes,
    planted_served,
    planted_takeover,
    planted_unregistered,
)
from tests.simulation.planted import BUGS, Planted

assert planted_accounts  # its bugs too
assert planted_calls  # its bugs too
assert planted_carried
assert planted_routes
assert planted_decisions  # its bugs are in the table now
assert planted_early  # and its
assert planted_following  # and its
assert planted_islands  # and its
assert planted_leading  # and its
assert planted_preemption  # and its
assert planted_priorities  # and its
assert planted_takeover  # and its
assert planted_unregistered  # and its
assert planted_reunion  # and its
assert planted_served  # and its

SLOW = "a gate forgets what did not arrive"
"""The one that takes many seeds."""


def violations(bug: Planted, seed: int) -> list[str]:
    return World(seed, replace(Settings.drawn(seed, bug.faults, ""), **bug.settings)).run().violations


@pytest.mark.timeout(300)  # a change may have moved what some bug needs to hundreds of seeds later
@pytest.mark.parametrize(
    "bug", [pytest.param(b, id=b.name, marks=[pytest.mark.long] * (b.name == SLOW)) for b in some(BUGS)]
)
def test_a_planted_bug_is_caught(bug: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        bug.plant(patch)
        seeds = ((bug.shown + k) % bug.seeds for k in range(bug.seeds))
        seed = next((seed for seed in seeds if violations(bug, seed)), None)
    assert seed is not None, f"nobody sees that {bug.name}"
    print(f"shown={seed}")
    assert violations(bug, seed) == []


def test_there_are_many_planted_bugs() -> None:
    assert len({bug.name for bug in BUGS}) >= 30
