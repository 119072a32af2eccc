"""Which launches pass others of their session, as a rule of its own and in an island's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pathways_ray.scheduler.policies import fifo
from pathways_ray.scheduler.priorities import Accesses, Fixed, passing, place_of, rank_of
from pathways_ray.transport.messages import (
    Account,
    CancelLaunch,
    Done,
    Drop,
    IslandLaunch,
    IslandLaunchFailed,
    PrioritizedIslandLaunch,
    Program,
)
from tests.unit.scheduler.island import Island, devices
from tests.unit.scheduler.test_order import BOOM, dispatched, told, up

PLAIN, TAKING, CROSSING = 1, 2, 3


def accesses(
    called: float, priority: int = 0, takes: tuple[int, ...] = (), makes: int = 100, gives: int = 1
) -> Accesses:
    return Accesses(rank_of(called, priority), takes, range(makes, makes + gives))


def test_a_launch_counts_as_called_a_second_earlier_for_each_level() -> None:
    assert passing(accesses(10.0, 3))(accesses(7.5))
    assert not passing(accesses(10.0, 2))(accesses(7.5)), (
        "what has waited for longer than the levels between is not passed"
    )
    assert passing(accesses(10.0))(accesses(9.0, -2)), "nor does it have to be the later one that has the priority"
    assert not passing(accesses(9.0, 5))(accesses(9.0, 5)), "those of one priority keep their order"


def test_it_passes_nothing_that_it_depends_on() -> None:
    assert not passing(accesses(1.0, 50, takes=(7,)))(accesses(0.0, makes=6, gives=2))
    assert passing(accesses(1.0, 50, takes=(8,)))(accesses(0.0, makes=6, gives=2))
    taking = Accesses(rank_of(1.0, 50), (7,), range(9, 10), donated=(0,))
    assert not passing(taking)(accesses(0.0, takes=(7,))), "that reads the array whose memory it takes"
    assert passing(accesses(1.0, 50, takes=(7,)))(accesses(0.0, takes=(7,)))


@pytest.mark.parametrize(
    ("waiting", "place"),
    [
        ([accesses(0.0), accesses(0.5)], 0),
        ([accesses(0.0, makes=7), accesses(0.5)], 1),
        ([accesses(0.0), accesses(0.5, makes=7)], 2),
        ([accesses(0.0), Fixed.FOLLOWS, accesses(0.5), Fixed.FOLLOWS], 0),
        ([accesses(0.0, makes=7), Fixed.FOLLOWS, accesses(0.5), Fixed.FOLLOWS], 2),
        ([Fixed.BARRIER, accesses(0.5)], 1),
        ([accesses(0.0), Fixed.BARRIER], 2),
        ([], 0),
    ],
)
def test_it_goes_before_the_first_that_it_passes(waiting: Sequence[Accesses | Fixed], place: int) -> None:
    assert place_of(accesses(1.0, 10, takes=(7,)), waiting, lambda one: one) == place


class Counted(Sequence[int]):
    """Numbers, and how many of them were looked at."""

    looked = 0

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        Counted.looked += 1
        return self.numbers[index]

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers:
            Counted.looked += 1
            yield number


@pytest.mark.parametrize(("donated", "passed"), [(range(0), 1024), (range(8192), 2)])
def test_the_work_of_finding_a_place_is_bounded(monkeypatch: pytest.MonkeyPatch, donated: range, passed: int) -> None:
    """However many arguments the launches have: one that takes no memory needs its own alone, and passes all; one that
    does passes as many as it may compare its own with."""
    monkeypatch.setattr(Counted, "looked", 0)
    waiting = [Accesses(0.0, Counted(range(8192)), range(20_000, 28_192))] * 1024
    later = Accesses(rank_of(0.0, 100), Counted(range(10_000, 18_192)), range(30_000, 30_001), donated)
    assert place_of(later, waiting, lambda one: one) == 1024 - passed
    assert Counted.looked <= 2 * 8192 + 16_384


# --- in an island's order ---------------------------------------------------------------------------------------------


def launch(sequence: int, takes: tuple[int, ...] = (), program: int = PLAIN, session: int = 1) -> IslandLaunch:
    """A launch that makes buffer 100 + its number."""
    return IslandLaunch(sequence, session, program, takes, 100 + sequence)


def urgent(sequence: int, takes: tuple[int, ...] = (), program: int = PLAIN) -> PrioritizedIslandLaunch:
    return PrioritizedIslandLaunch(launch(sequence, takes, program), 10)


@pytest.fixture
def island() -> Island:
    """An island that has room for one launch at a time, and has it."""
    island = Island([0], 1, fifo)
    where = devices("0.0")
    island.from_controller(Program(PLAIN, b"", {}, "plain", where, results=1))
    island.from_controller(Program(TAKING, b"", {}, "taking", where, results=1, donated=(0,)))
    island.from_controller(Program(CROSSING, b"", {}, "crossing", where, cross_island=True, results=1))
    island.host_up(up(0))
    assert dispatched(island.from_controller(launch(1))) == [launch(1)]
    return island


def rest(island: Island, first: int = 1) -> list[int]:
    """The order in which the launches go that wait."""
    order, last = [], first
    while found := [m for m in dispatched(island.from_host(0, 1, Done((last,)))) if isinstance(m, IslandLaunch)]:
        (one,) = found
        last = one.sequence
        order.append(last)
    return order


def test_an_urgent_launch_passes_those_that_wait(island: Island) -> None:
    for message in (launch(2), launch(3), urgent(4), urgent(5), launch(6)):
        island.from_controller(message)
    assert rest(island) == [4, 5, 2, 3, 6]


def test_an_urgent_launch_waits_for_what_it_takes_and_for_readers_of_what_it_consumes(island: Island) -> None:
    """
    1. Launch 4 takes what 2 makes, and passes 3.
    2. Launch 5 takes the memory of what 3 reads, and passes nothing.
    """
    for message in (launch(2), launch(3, takes=(7,)), urgent(4, takes=(102,)), urgent(5, takes=(7,), program=TAKING)):
        island.from_controller(message)
    assert rest(island) == [2, 4, 3, 5]


def test_a_drop_stays_behind_the_launches_before_it(island: Island) -> None:
    for message in (launch(2, takes=(7,)), Drop(1, (7,)), launch(3), urgent(4)):
        island.from_controller(message)
    sent: list[object] = []
    for sequence in (1, 4, 2, 3):
        sent += dispatched(island.from_host(0, 1, Done((sequence,))))
    assert sent == [launch(4), launch(2, takes=(7,)), Drop(1, (7,)), launch(3)]


def test_nothing_passes_a_cross_island_launch_and_none_passes_others(island: Island) -> None:
    """Their places are those of all islands and tenants."""
    for message in (launch(2), urgent(3, program=CROSSING), launch(4), urgent(5)):
        island.from_controller(message)
    assert rest(island) == [2, 3, 5, 4]


def test_a_launch_that_has_waited_for_long_is_not_passed(island: Island) -> None:
    island.from_controller(launch(2))
    island.from_controller(launch(3))
    island.tick(9.0)
    island.from_controller(launch(4))
    island.tick(10.5)
    island.from_controller(urgent(5))
    assert rest(island) == [2, 3, 5, 4]


def test_nothing_starves_behind_the_priorities_of_its_session(island: Island) -> None:
    """
    1. Launch 2 is called at 0 and comes to the head of the empty queue; 3 goes before it.
    2. 3 starts at 9: launch 2 is at the head again, and was still called at 0.
    3. An urgent launch at 10.5, of ten levels, does not pass it.
    """
    island.from_controller(launch(2))
    island.from_controller(urgent(3))
    island.tick(9.0)
    assert dispatched(island.from_host(0, 1, Done((1,)))) == [launch(3)]
    island.tick(10.5)
    island.from_controller(urgent(4))
    assert rest(island, 3) == [2, 4]
    assert not island.order.sessions[1].ranks


def test_a_launch_of_lower_priority_lets_later_ones_pass(island: Island) -> None:
    for message in (PrioritizedIslandLaunch(launch(2), -1), launch(3), PrioritizedIslandLaunch(launch(4), -2)):
        island.from_controller(message)
    island.from_controller(launch(5))
    assert rest(island) == [3, 5, 2, 4]


def test_priorities_change_nothing_between_sessions(island: Island) -> None:
    """Session 2 called before session 1's urgent launch, which takes the place of its own session."""
    island.from_controller(Account(2, "other", 1.0, 0))
    for message in (launch(2, session=2), launch(3), urgent(4), launch(5, session=2)):
        island.from_controller(message)
    assert rest(island) == [2, 4, 3, 5]


def test_a_launch_that_passed_others_can_be_cancelled(island: Island) -> None:
    for message in (launch(2), urgent(3)):
        island.from_controller(message)
    assert told(island.from_controller(CancelLaunch(3, BOOM))) == [IslandLaunchFailed(3, BOOM)]
    assert set(island.order.sessions[1].ranks) == {2}
    assert rest(island) == [2]
