"""A host that ignores the island's order, for tests: it differs from its neighbour, and from nothing else."""

from __future__ import annotations

from pathways_ray.executor.profiling.order_check import ignoring_order
from pathways_ray.transport.messages import Drop, IslandLaunch, Peers, ToHost


def run(session: int, sequence: int) -> IslandLaunch:
    return IslandLaunch(sequence, session, session, (), 0)


BATCH: list[ToHost] = [Peers(()), run(1, 1), run(2, 2), Drop(1, (5,)), run(1, 3), run(2, 4)]


def test_neighbours_put_sessions_in_different_orders() -> None:
    even, odd = ignoring_order(BATCH, 0), ignoring_order(BATCH, 1)
    assert [m.sequence for m in even if isinstance(m, IslandLaunch)] == [1, 3, 2, 4]
    assert [m.sequence for m in odd if isinstance(m, IslandLaunch)] == [2, 4, 1, 3]


def test_each_session_keeps_its_own_order_and_nothing_is_lost() -> None:
    for place in (0, 1):
        changed = ignoring_order(BATCH, place)
        assert sorted(map(repr, changed)) == sorted(map(repr, BATCH))
        mine = [m for m in changed if getattr(m, "session", 0) == 1]
        assert mine == [run(1, 1), Drop(1, (5,)), run(1, 3)]


def test_launches_of_one_session_stay_as_they_are() -> None:
    batch: list[ToHost] = [run(1, 1), Drop(1, (5,)), run(1, 2)]
    assert ignoring_order(batch, 1) == batch
