"""Progress by counts: random exchanges with rows that leave in any order, a check of what must hold, and bugs that are
planted to see that the check finds them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pathways_ray.errors import GraphError
from pathways_ray.ir import routing
from pathways_ray.ir.routing import Progress, Send, Start, hops_of, rounded


def exchange(seed: int) -> None:
    """One exchange with events in a random order. A destination starts once, with all that it can get and no earlier;
    what it gets are the first rows in the order of the sources, whoever came first."""
    choose = random.Random(seed)
    sources, destinations = choose.randint(1, 5), choose.randint(1, 5)
    capacity = choose.choice([None, None, 1, 3, 10])
    counts = [[choose.choice([0, 0, 1, 2, 7]) for _ in range(destinations)] for _ in range(sources)]
    progress = Progress(sources, destinations, capacity)
    silent = list(range(sources))
    flying: list[Send] = []
    got: dict[int, dict[int, int]] = {k: {} for k in range(destinations)}
    started: dict[int, int] = {}
    while silent or flying:
        if silent and (not flying or choose.random() < 0.5):
            source = silent.pop(choose.randrange(len(silent)))
            commands = progress.announce(source, counts[source])
        else:
            one = flying.pop(choose.randrange(len(flying)))
            got[one.destination][one.source] = one.rows
            commands = list(progress.left(*one))
        for command in commands:
            if isinstance(command, Send):
                assert command.rows > 0, "nobody takes part who sends nothing"
                assert command.destination not in started, "more comes after the start"
                flying.append(command)
            else:
                assert command.destination not in started, "it starts a second time"
                assert command.rows > 0, "who gets nothing takes part"
                assert command.rows == sum(got[command.destination].values()), "it starts before all has come"
                assert not any(counts[source][command.destination] for source in silent if capacity is None)
                started[command.destination] = command.rows
    assert progress.is_over
    for k in range(destinations):
        total = sum(row[k] for row in counts)
        wanted = total if capacity is None else min(total, capacity)
        assert started.get(k, 0) == wanted, "it never starts, or not with what it can have"
        assert progress.dropped[k] == total - wanted
        left = wanted
        for source in range(sources):
            assert got[k].get(source, 0) == min(left, counts[source][k]), "rows are admitted in the order of sources"
            left -= min(left, counts[source][k])


def exchanges(seeds: int = 300) -> None:
    for seed in range(seeds):
        exchange(seed)


def test_a_destination_starts_once_with_all_that_can_come() -> None:
    exchanges(2000)


def starts_with_what_is_there(self: Any, number: int, at: Any) -> list[Start]:
    total = sum(max(left, 0) for left in at.left)
    if at.is_over or not total:
        return []
    at.is_over = True
    return [Start(number, total)]


def does_not_wait_for_those_that_are_silent(self: Any, number: int, at: Any) -> list[Start]:
    if at.is_over or any(left < 0 < rows for rows, left in zip(at.admitted, at.left, strict=True)):
        return []
    at.is_over = True
    total = sum(max(rows, 0) for rows in at.admitted)
    return [Start(number, total)] if total else []


def does_not_wait_for_rows_on_their_way(self: Any, number: int, at: Any) -> list[Start]:
    if at.is_over or any(rows < 0 for rows in at.admitted):
        return []
    at.is_over = True
    return [Start(number, sum(at.admitted))] if sum(at.admitted) else []


def starts_who_gets_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: Any, number: int, at: Any) -> list[Start]:
        before = at.is_over
        found: list[Start] = original(self, number, at)
        return found or ([Start(number, 0)] if at.is_over and not before else [])

    return start


def admits_whoever_comes_first(self: Any, number: int, at: Any) -> list[Send]:
    commands = []
    for source, count in enumerate(at.announced):
        if count >= 0 and at.admitted[source] < 0:
            room = count if self.capacity is None else self.capacity - sum(max(rows, 0) for rows in at.admitted)
            at.admitted[source] = min(count, room)
            self.dropped[number] += count - at.admitted[source]
            commands += [Send(source, number, at.admitted[source])] if at.admitted[source] else []
    return commands


@pytest.mark.parametrize(
    ("method", "bug"),
    [
        ("_start", starts_with_what_is_there),
        ("_start", does_not_wait_for_those_that_are_silent),
        ("_start", does_not_wait_for_rows_on_their_way),
        ("_start", starts_who_gets_nothing(Progress._start)),
        ("_admit", admits_whoever_comes_first),
    ],
)
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, method: str, bug: Any) -> None:
    monkeypatch.setattr(routing.Progress, method, bug)
    with pytest.raises((AssertionError, GraphError)):
        exchanges()


def test_events_that_cannot_be_are_refused() -> None:
    progress = Progress(2, 2)
    assert progress.announce(0, [3, 0]) == [Send(0, 0, 3)]
    with pytest.raises(GraphError, match="source 0 announces"):
        progress.announce(0, [3, 0])
    with pytest.raises(GraphError, match=r"announces \[1\] rows for 2 destinations"):
        progress.announce(1, [1])
    with pytest.raises(GraphError, match="2 rows of source 0 leave for destination 0, which takes 3"):
        progress.left(0, 0, 2)
    assert progress.left(0, 0, 3) == []
    with pytest.raises(GraphError, match="leave for destination 0"):
        progress.left(0, 0, 3)
    assert progress.announce(1, [0, 0]) == [Start(0, 3)]


def test_sizes_are_few_and_at_most_a_quarter_too_large() -> None:
    sizes = [rounded(rows) for rows in range(1, 100_000)]
    assert all(rows <= size <= max(rows * 5 / 4, routing.MIN_ROWS) for rows, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 60
    assert rounded(9, 5) == 10
    assert rounded(8, 5) == 10


def test_hops_are_those_of_every_row() -> None:
    """Row by row, for random counts of up to six shards."""
    choose = random.Random(5)
    for _ in range(300):
        given = [choose.choice([0, 0, 1, 5, 30]) for _ in range(choose.randint(1, 6))]
        rows = rounded(sum(given)) + choose.randint(0, 9)
        mine = -(-rows // len(given))
        owners = [shard for shard, count in enumerate(given) for _ in range(count)]
        hops = [0, *(shard - place // mine for place, shard in enumerate(owners))]
        least, most = hops_of(given, rows)
        assert least <= min(hops) <= max(hops) <= most
        assert {abs(least), abs(most)} <= {0, 1, len(given) - 1}, "few ranges, each of which is compiled"
