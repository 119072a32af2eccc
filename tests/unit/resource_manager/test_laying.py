"""The mapping of a mesh to a sub-grid of devices, beside exhaustive search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from pathways_ray.ir.links import Links, cost, factors, grid_of, hops, hosts_of, pairs
from pathways_ray.resource_manager.laying import lay


def best(shape: Sequence[int], sub_grid: Sequence[int], links: Links) -> int:
    """The least cost of all ways to give a mesh's positions the places of a sub-grid."""
    places = list(itertools.product(*(range(side) for side in sub_grid)))
    apart = [[int(hops(links, a, b)) for b in places] for a in places]
    positions = list(itertools.product(*(range(size) for size in shape)))
    number = {at: k for k, at in enumerate(positions)}
    earlier: list[list[int]] = [[] for _ in positions]
    for at in positions:
        for axis, size in enumerate(shape):
            if size == 1 or (size == 2 and at[axis]):
                continue
            one, other = number[at], number[(*at[:axis], (at[axis] + 1) % size, *at[axis + 1 :])]
            earlier[max(one, other)].append(min(one, other))
    found = sum(map(sum, apart))

    def extend(chosen: list[int], total: int) -> None:
        nonlocal found
        if len(chosen) == len(places):
            found = min(found, total)
            return
        for place in range(len(places)):
            if place not in chosen:
                more = total + sum(apart[place][chosen[k]] for k in earlier[len(chosen)])
                if more < found:
                    extend([*chosen, place], more)

    extend([], 0)
    return found


@pytest.mark.parametrize("torus", [False, True])
@pytest.mark.parametrize(
    ("sub_grid", "shape"),
    [
        (sub_grid, tuple(side for side in shape if side > 1))
        for sub_grid in [(6,), (2, 4), (4, 2), (1, 8), (2, 3), (2, 2, 2), (1, 2, 3)]
        for shape in factors(math.prod(sub_grid), 3)
    ],
)
def test_no_mapping_of_a_small_mesh_is_better(sub_grid: tuple[int, ...], shape: tuple[int, ...], torus: bool) -> None:
    links = grid_of(sub_grid, torus)
    found = lay(shape, sub_grid, links)
    assert sorted(found.places) == sorted(itertools.product(*(range(side) for side in sub_grid)))
    assert found.cost == cost(links, shape, found.places) == best(shape, sub_grid, links)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (3, 2), (4,), (2, 2)])
def test_on_hosts_neighbours_are_on_one_host(shape: tuple[int, ...]) -> None:
    rows = 2
    columns = shape[0] * (shape[1] if len(shape) > 1 else 1) // rows
    links = hosts_of(rows, columns)
    found = lay(shape, (rows, columns), links)
    assert found.cost == best(shape, (rows, columns), links)


@pytest.mark.parametrize(
    ("shape", "sub_grid", "torus"),
    [
        ((16,), (4, 4), False),  # there and back
        ((9,), (3, 3), True),  # round and round
        ((64,), (4, 4, 4), False),
        ((4, 4, 4), (4, 4, 4), True),
        ((16, 4), (4, 4, 4), True),
        ((2, 2, 4), (2, 2, 4), True),
        ((16, 16, 16), (16, 16, 16), True),
    ],
)
def test_where_all_neighbours_can_be_linked_they_are(
    shape: tuple[int, ...], sub_grid: tuple[int, ...], torus: bool
) -> None:
    assert lay(shape, sub_grid, grid_of(sub_grid, torus)).cost == pairs(shape)


def test_an_axis_lies_along_the_ring_and_not_along_the_line() -> None:
    """Two sub-grids of one island of 4x8: the first has a whole ring along its second side."""
    links = grid_of((4, 8), True)
    assert lay((8, 2), (2, 8), links).cost == pairs((8, 2))
    turned = lay((2, 8), (2, 8), links)
    assert [turned.places[k] for k in range(8)] == [(0, k) for k in range(8)], "in order where nothing is better"


def test_sizes_with_many_factors_are_laid_in_time() -> None:
    shape = (12, 12, 30)
    assert lay(shape, (20, 12, 18), grid_of((20, 12, 18), True)).cost >= pairs(shape)
