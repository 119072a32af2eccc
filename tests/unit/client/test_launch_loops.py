"""Loops in a stream of launches, found by their first two rounds."""

from __future__ import annotations

from pathways_ray.client.launch_loops import LaunchLoop, Shape, find_loop
from pathways_ray.ir.graph import Ref
from pathways_ray.transport.messages import Launch

OUTPUTS = {1: 1, 2: 1, 3: 2, 4: 0}
FIRST = 100
"""The number of the first result."""


def stream(*calls: tuple[int, tuple[int, ...]], first: int = FIRST) -> list[Launch]:
    """Launches of programs, with their arguments. Results are numbered from `first` on."""
    made: list[Launch] = []
    for number, (program, arguments) in enumerate(calls, 1):
        made.append(Launch(number, program, arguments, first if OUTPUTS[program] else 0))
        first += OUTPUTS[program]
    return made


def found(launches: list[Launch], fewest: int = 2) -> LaunchLoop | None:
    return find_loop(launches, [launch.program for launch in launches], 0, OUTPUTS, fewest)


def test_one_program_that_is_fed_is_a_round() -> None:
    loop = found(stream((1, (7, 8)), (1, (100, 8)), (1, (101, 8)), (1, (101, 8))))
    assert loop == LaunchLoop(Shape((1,), ((Ref(-1, 0), Ref(-1, 1)),), ((0, Ref(0, 0)),), (), (1,)), 3)


def test_a_round_of_several_programs_says_where_each_takes_its_arguments_from() -> None:
    """loss, grads = f(weights, batch); weights = g(weights, grads): another batch in each round."""
    calls = []
    weights = 7
    for turn in range(4):
        grads = FIRST + 3 * turn + 1
        calls += [(3, (weights, 50 + turn)), (1, (weights, grads))]
        weights = FIRST + 3 * turn + 2
    loop = found(stream(*calls))
    assert loop is not None
    assert loop.rounds == 4
    taken = (Ref(-1, 0), Ref(-1, 1)), (Ref(-1, 0), Ref(0, 1))
    assert loop.shape == Shape((3, 1), taken, ((0, Ref(1, 0)),), (1,), (2, 1)), (
        "the weights are one argument, though two programs take them"
    )
    assert loop.shape.made == [Ref(0, 0), Ref(0, 1), Ref(1, 0)]
    assert loop.shape.places == [(0, 0), (0, 1)]


def test_the_shortest_round_is_taken() -> None:
    calls = [(1, (7,)), *((1, (FIRST + k,)) for k in range(7))]
    loop = found(stream(*calls))
    assert loop is not None
    assert (loop.shape.period, loop.rounds) == (1, 8)


def test_a_round_that_differs_ends_the_loop() -> None:
    """x = f(x); x = g(x): in the third round g takes what f took."""
    same = [(1, (7,)), (2, (100,)), (1, (101,)), (2, (102,))]
    loop = found(stream(*same, (1, (103,)), (2, (103,))))
    assert loop is not None
    assert loop.rounds == 2
    assert found(stream(*same, (1, (103,)), (2, (103,))), fewest=5) is None


def test_launches_that_do_not_feed_each_other_are_no_loop() -> None:
    assert found(stream((1, (7,)), (1, (8,)), (1, (9,)))) is None
    assert found(stream((1, (7,)), (2, (8,)), (1, (7,)), (2, (8,)))) is None
    assert found(stream((1, (7,)))) is None
    assert found([]) is None


def test_what_stays_and_what_varies_are_not_mixed_up() -> None:
    """An argument that stays in two rounds and is another one in the third ends the loop before that; one that varies
    may come again, but not be what a round before the last has made."""
    stays = [(1, (7, 50)), (1, (100, 50)), (1, (101, 50)), (1, (102, 51))]
    loop = found(stream(*stays))
    assert loop is not None
    assert loop.rounds == 3
    varies = [(1, (7, 50)), (1, (100, 51)), (1, (101, 51)), (1, (102, 50)), (1, (103, 101))]
    loop = found(stream(*varies))
    assert loop is not None
    assert (loop.rounds, loop.shape.varied) == (4, (1,))


def test_programs_without_results_may_be_part_of_a_round() -> None:
    loop = found(stream((4, (7,)), (1, (7,)), (4, (100,)), (1, (100,)), (4, (101,)), (1, (101,))))
    assert loop is not None
    assert (loop.rounds, loop.shape.taken) == (3, ((Ref(-1, 0),), (Ref(-1, 0),)))
