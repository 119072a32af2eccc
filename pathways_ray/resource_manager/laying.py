"""Mappings of a mesh to a sub-grid of devices: which of its axes runs along which links.

Each axis is a walk through the sub-grid. It has a factor of its size along each dimension, and the factors of all axes
along a dimension fill the sub-grid's side; an axis with several factors folds itself through them. Such walks are
tried, as far as `MAX_LAYINGS` goes, and the one with the fewest hops (`ir.links.cost`) is taken; row-major order where
none is better.

Since a hop depends on the difference of two coordinates alone, the hops of an axis are those of one of its lines, times
their number. Axes that share a dimension may be *reflected* as well: each takes every other turn backwards, so that one
turn ends where the next one begins.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pathways_ray.ir.links import Links, Place, cost, factors

MAX_LAYINGS = 2000
"""Ways to lay a mesh of which the cost is computed."""

MAX_REFLECTED = 10_000
"""Devices for which reflected ways are looked at, in all of them: there the hops of each line are counted."""


class Laying(NamedTuple):
    """Places of a mesh's devices in its sub_grid, in row-major order, and the cost."""

    places: tuple[Place, ...]
    cost: int


class _Step(NamedTuple):
    """A factor of an axis: its dimension, how many places it has there, and how far apart they are."""

    dimension: int
    length: int
    stride: int


Split = tuple[tuple[int, ...], ...]
"""For each axis of a mesh its factor along each dimension."""


@functools.lru_cache(maxsize=1024)
def lay(shape: tuple[int, ...], sub_grid: tuple[int, ...], links: Links) -> Laying:
    """The best way that was found to lay a mesh into a sub-grid of as many devices.

    Args:
        sub_grid: sides, one for each dimension of `links`.
    """
    in_order = tuple(itertools.product(*(range(side) for side in sub_grid)))
    best = Laying(in_order, cost(links, shape, in_order))
    looked = 0
    for steps in itertools.islice(_layings(shape, sub_grid), MAX_LAYINGS):
        lines = [_cheapest(own, links) for own in steps]
        total = sum(len(in_order) // count * line.cost for count, line in zip(shape, lines, strict=True))
        if total < best.cost:
            places = itertools.product(*(line.places for line in lines))
            best = Laying(tuple(tuple(map(sum, zip(*one, strict=True))) for one in places), total)
        shared = len({step.dimension for own in steps for step in own}) < sum(map(len, steps))
        if shared and looked < MAX_REFLECTED:
            looked += len(in_order)
            turned = _reflected(steps, [line.places for line in lines], len(links))
            if (total := cost(links, shape, turned)) < best.cost:
                best = Laying(turned, total)
    return best


def _layings(shape: Sequence[int], sub_grid: Sequence[int]) -> Iterator[list[tuple[_Step, ...]]]:
    """The factors of all axes, in every way that fills the sub-grid; the simplest ones first."""
    fitting = list(itertools.islice(_splits(shape, sub_grid), MAX_LAYINGS))
    fitting.sort(key=lambda split: sum(f > 1 for own in split for f in own))
    dimensions = range(len(sub_grid))
    for split in fitting:
        sharing = [[axis for axis, own in enumerate(split) if own[d] > 1] for d in dimensions]
        for orders in itertools.product(*(itertools.permutations(axes) for axes in sharing)):
            yield [
                tuple(
                    _Step(d, own[d], math.prod(split[inner][d] for inner in orders[d][: orders[d].index(axis)]))
                    for d in dimensions
                    if own[d] > 1
                )
                for axis, own in enumerate(split)
            ]


def _splits(shape: Sequence[int], sub_grid: Sequence[int]) -> Iterator[Split]:
    if not shape:
        yield ()
        return
    for own in factors(shape[0], len(sub_grid)):
        if all(side % factor == 0 for side, factor in zip(sub_grid, own, strict=True)):
            for others in _splits(shape[1:], [side // factor for side, factor in zip(sub_grid, own, strict=True)]):
                yield (own, *others)


@functools.lru_cache(maxsize=4096)
def _cheapest(steps: tuple[_Step, ...], links: Links) -> Laying:
    """The walk along an axis's factors with the fewest hops, closed to a ring; places are from its first device on."""
    best: Laying | None = None
    for order in itertools.permutations(steps):
        for walk in _walks([step.length for step in order]):
            places = tuple(_place(order, at, len(links)) for at in walk)
            total = cost(links, (len(places),), places)
            if best is None or total < best.cost:
                best = Laying(places, total)
    assert best is not None
    return best


def _reflected(
    steps: Sequence[tuple[_Step, ...]], lines: Sequence[tuple[Place, ...]], dimensions: int
) -> tuple[Place, ...]:
    """The places of a mesh whose axes are reflected along each dimension that they share, the outer ones first."""
    along: list[list[tuple[int, _Step]]] = [[] for _ in range(dimensions)]
    for axis, own in enumerate(steps):
        for step in own:
            along[step.dimension].append((axis, step))
    found = []
    for one in itertools.product(*lines):
        place = []
        for dimension, sharing in enumerate(along):
            at = 0
            for axis, step in sorted(sharing, key=lambda pair: -pair[1].stride):
                digit = one[axis][dimension] // step.stride
                at = at * step.length + (step.length - 1 - digit if at % 2 else digit)
            place.append(at)
        found.append(tuple(place))
    return tuple(found)


def _walks(counts: Sequence[int]) -> Iterator[Sequence[tuple[int, ...]]]:
    """Walks through a sub-grid of these sides: to and fro, round and round, there and back."""
    if not counts:
        yield [()]
        return
    yield list(_snake(counts))
    if len(counts) > 1:
        yield list(_winding(counts))
        rest = list(_snake(counts[1:]))
        if counts[0] % 2 == 0 and len(rest) > 1:
            yield list(_there_and_back(counts[0], rest))


def _snake(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Each factor runs up and down in turn, so that consecutive positions differ by one."""
    if not counts:
        yield ()
        return
    inner = list(_snake(counts[1:]))
    for outer in range(counts[0]):
        for at in inner if outer % 2 == 0 else reversed(inner):
            yield (outer, *at)


def _winding(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Each factor goes on where it was when the one before it takes a step: along rings, one hop each."""
    size = math.prod(counts)
    for number in range(size):
        at, before, rest = [], 0, size
        for count in counts:
            rest //= count
            digit = number // rest
            at.append((digit - before) % count)
            before = digit
        yield tuple(at)


def _there_and_back(first: int, rest: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Rows to and fro without their first place, and back along the first places: a closed walk of single steps."""
    for row in range(first):
        places = rest[1:] if row % 2 == 0 else list(reversed(rest[1:]))
        for at in places:
            yield (row, *at)
    for row in reversed(range(first)):
        yield (row, *rest[0])


def _place(order: Sequence[_Step], at: Sequence[int], dimensions: int) -> Place:
    found = [0] * dimensions
    for step, position in zip(order, at, strict=True):
        found[step.dimension] += step.stride * position
    return tuple(found)
