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

import numpy as np

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
            best = Laying(_tuples(sum(_along(lines), np.zeros(len(links), int))), total)
        shared = len({step.dimension for own in steps for step in own}) < sum(map(len, steps))
        if shared and looked < MAX_REFLECTED:
            looked += len(in_order)
            turned = _reflected(steps, lines)
            if (total := cost(links, shape, turned)) < best.cost:
                best = Laying(_tuples(turned), total)
    return best


def _along(lines: Sequence[Laying]) -> list[np.ndarray]:
    """The places of the lines of a mesh's axes, each along its own axis of an array; the last one has coordinates."""
    count = len(lines)
    arrays = [np.array(line.places) for line in lines]
    return [
        array.reshape([-1 if k == axis else 1 for k in range(count)] + [array.shape[1]])
        for axis, array in enumerate(arrays)
    ]


def _tuples(places: np.ndarray) -> tuple[Place, ...]:
    return tuple(map(tuple, places.reshape(-1, places.shape[-1]).tolist()))


def _layings(shape: Sequence[int], sub_grid: Sequence[int]) -> Iterator[list[tuple[_Step, ...]]]:
    """The factors of all axes, in every way that fills the sub-grid; the simplest ones first."""
    fitting = list(itertools.islice(_splits(shape, sub_grid), MAX_LAYINGS))
    fitting.sort(key=lambda split: sum(f > 1 for own in split for f in own))
    dimensions = range(len(sub_grid))
    for split in fitting:
        sharing = [[axis for axis, own in enumerate(split) if own[d] > 1] for d in dimensions]
        ordered = [[_steps(d, order, split) for order in itertools.permutations(sharing[d])] for d in dimensions]
        for along in itertools.product(*ordered):
            yield [tuple(steps[axis] for steps in along if axis in steps) for axis in range(len(split))]


def _steps(dimension: int, order: Sequence[int], split: Split) -> dict[int, _Step]:
    """The step of each axis along a dimension, the innermost one first."""
    found: dict[int, _Step] = {}
    stride = 1
    for axis in order:
        found[axis] = _Step(dimension, split[axis][dimension], stride)
        stride *= split[axis][dimension]
    return found


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
        strides = np.zeros((len(order), len(links)), int)
        for at, step in enumerate(order):
            strides[at, step.dimension] = step.stride
        for walk in _walks(tuple(step.length for step in order)):
            places = walk @ strides
            total = cost(links, (len(walk),), places)
            if best is None or total < best.cost:
                best = Laying(_tuples(places), total)
    assert best is not None
    return best


def _reflected(steps: Sequence[tuple[_Step, ...]], lines: Sequence[Laying]) -> np.ndarray:
    """The places of a mesh whose axes are reflected along each dimension that they share, the outer ones first."""
    places = _along(lines)
    found = np.zeros(np.broadcast_shapes(*(along.shape for along in places)), int)
    sharing = [(step, places[axis]) for axis, own in enumerate(steps) for step in own]
    for step, own_places in sorted(sharing, key=lambda pair: -pair[0].stride):
        at, digit = found[..., step.dimension], own_places[..., step.dimension] // step.stride
        found[..., step.dimension] = at * step.length + np.where(at % 2, step.length - 1 - digit, digit)
    return found


@functools.lru_cache(maxsize=64)
def _walks(counts: tuple[int, ...]) -> list[np.ndarray]:
    """Walks through a sub-grid of these sides: to and fro, round and round, there and back."""
    found = [_snake(counts)]
    if len(counts) > 1:
        found.append(_winding(counts))
        rest = list(_snake(counts[1:]))
        if counts[0] % 2 == 0 and len(rest) > 1:
            found.append(_there_and_back(counts[0], rest))
    return [np.array(list(walk), int) for walk in found]


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
