"""The example of a search: the rule by which members stop early, and a small one in this process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from examples.search import CHECKPOINTS, HOPELESS, Member, Search, split
from tests.unit.client.local import LocalSession, opened


def members(*losses: float) -> list[Member]:
    nowhere: Any = None
    return [Member(f"m{k}", 8, 0.1, nowhere, None, [1.0, loss]) for k, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "keep", "left"),
    [
        ((1.0, 2.0, 2.9, 4.1), 2, ["m0", "m1", "m2"]),
        ((1.0, 2.0, 2.0 * HOPELESS, 2.0 * HOPELESS + 0.1), 2, ["m0", "m1", "m2"]),
        ((5.0, math.nan, 1.0, math.inf), 2, ["m0", "m2"]),
        ((1.0, 1.0), 1, ["m0", "m1"]),
    ],
)
def test_members_that_are_hopelessly_behind_the_last_that_goes_on_stop(
    losses: tuple[float, ...], keep: int, left: list[str]
) -> None:
    on, lost = split(members(*losses), keep)
    assert [member.name for member in on] == left
    assert len(on) + len(lost) == len(losses)
    assert len(on) >= keep


@pytest.fixture
def session() -> Iterator[LocalSession]:
    made = opened()
    yield made
    made.close()


def test_rungs_halve_the_members_and_move_them(session: LocalSession) -> None:
    search = Search(
        [session.virtual_slice((1,), ("x",)) for _ in range(2)], [(4, 1e-5), (8, 1e-2), (4, 1e-6), (4, 1e-2)]
    )
    said: list[str] = []
    best = search.run(said.append)
    assert [line.partition(",")[0] for line in said] == ["4 members", "2 members"]
    assert best.rate == 1e-2
    assert len(best.losses) == CHECKPOINTS + 2 * CHECKPOINTS
    assert best.losses[-1] < best.losses[0]
    left = [member for member in search.members if len(member.losses) > CHECKPOINTS]
    assert len(left) == 2
    assert {member.slice for member in left} == set(search.slices), "one on each slice"
