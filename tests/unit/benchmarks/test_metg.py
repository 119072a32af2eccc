"""METG: the task graphs, what a task computes in each system, and the search for 50 % efficiency."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest

from benchmarks import metg
from benchmarks.peers import task_graphs
from benchmarks.peers.pathways_tasks import row_of_tasks, task
from benchmarks.peers.task_graphs import PATTERNS, WIDTH

# From Task Bench's core, for 4 columns: for each row of a period, for each task, its inputs.
EDGES: dict[str, list[list[list[int]]]] = {
    "trivial": [[[], [], [], []]],
    "no_comm": [[[0], [1], [2], [3]]],
    "stencil": [[[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]],
    "tree": [[[0], [0], [1], [1]]],
    "fft": [[[0, 2], [1, 3], [0, 2], [1, 3]], [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]],
    "spread": [[[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]], [[0, 2, 3], [1, 3, 0], [2, 0, 1], [3, 1, 2]]],
}


ROWS = 3
"""A period of every pattern, and the first row of the next."""


@pytest.mark.parametrize("pattern", PATTERNS)
def test_edges_are_those_of_task_bench_and_repeat(pattern: str) -> None:
    period = task_graphs.period(pattern)
    assert period == len(EDGES[pattern])
    for row in range(2 * period):
        found = [task_graphs.dependencies(pattern, row, p) for p in range(WIDTH)]
        assert found == EDGES[pattern][row % period]


def test_programs_begin_where_the_one_before_ended() -> None:
    assert all(task_graphs.STEPS % task_graphs.period(pattern) == 0 for pattern in PATTERNS)


def test_an_unknown_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match="no pattern 'ring'"):
        task_graphs.dependencies("ring", 0, 0)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_tasks_and_gangs_find_the_last_row(pattern: str) -> None:
    """The two ways of this runtime, without it: tasks called one by one, and a row on four mapped places."""
    tasks, gang = [task_graphs.START] * WIDTH, np.full((WIDTH, 1), task_graphs.START, np.float32)
    for row in range(ROWS):
        inputs = [[tasks[q] for q in task_graphs.dependencies(pattern, row, p)] for p in range(WIDTH)]
        tasks = [float(task(3, *inputs[p], point=p)) for p in range(WIDTH)]
        places = functools.partial(row_of_tasks, pattern=pattern, row=row)
        gang = jax.vmap(places, in_axes=(None, 0), axis_name="x")(3, gang)
    assert tasks == task_graphs.last_row(pattern, ROWS)
    assert np.asarray(gang)[:, 0].tolist() == task_graphs.last_row(pattern, ROWS)


@pytest.mark.parametrize("pattern", [pattern for pattern in PATTERNS if pattern != "trivial"])
def test_one_wrong_edge_shows_in_the_last_row(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, edges = task_graphs.last_row(pattern, 64), task_graphs.dependencies

    def wrong(pattern: str, row: int, point: int) -> list[int]:
        found = edges(pattern, row, point)
        return [(found[0] + 1) % WIDTH, *found[1:]] if (row, point) == (63, 1) else found

    monkeypatch.setattr(task_graphs, "dependencies", wrong)
    assert task_graphs.last_row(pattern, 64) != right


def with_overhead(overhead: float) -> Callable[[float], float]:
    """A system that spends so much on each task besides the task."""
    return lambda duration: duration + overhead


@pytest.mark.parametrize("overhead", [3e-6, 100e-6, 20e-3])
@pytest.mark.parametrize("first", [20e-6, 5e-3])
def test_the_search_finds_where_half_of_the_time_is_work(overhead: float, first: float) -> None:
    found = metg.search(with_overhead(overhead), first)
    assert found.granularity == pytest.approx(2 * overhead, rel=0.01)
    assert found.efficiency == pytest.approx(0.5)


def test_a_system_that_never_reaches_half_is_said_to() -> None:
    with pytest.raises(metg.NotReached, match="run at 25%"):
        metg.search(lambda duration: 4 * duration, 1e-3)


def test_a_search_ends_although_measurements_contradict_each_other() -> None:
    noise = iter([1.3, 0.8, 1.1, 0.7, 1.4, 0.9, 1.2, 0.75, 1.0] * 10)
    found = metg.search(lambda duration: (duration + 100e-6) * next(noise), 200e-6)
    assert 50e-6 < found.duration < 400e-6
