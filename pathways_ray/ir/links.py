"""The links between the devices of an island, and the cost of a mesh that lies along them.

A device has a *place*: a coordinate along each dimension of its island's links. Along a line a device is linked to the
one before it and the one after it, along a ring the last one to the first one too; a switch links all of them. Where
nothing is known of links, they are those of hosts: a switch inside of each, and one between them that is `STRANGERS`
hops long.

The *cost* of a mesh is the number of hops between neighbours along its axes, each axis closed to a ring, as collectives
use them. A mesh all of whose neighbours are linked costs as many hops as it has pairs of neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

STRANGERS = 4
"""Hops between two hosts of an island whose links are not known."""

Place = tuple[int, ...]

Places = Sequence[Place] | np.ndarray
"""Some places; as an array, their coordinates are its last dimension."""


class Dimension(msgspec.Struct, frozen=True, array_like=True):
    """One dimension of links: its devices, how they are linked, and the hops of one link."""

    size: int
    kind: Literal["line", "ring", "switch"]
    hops: int = 1

    def between(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Hops from coordinates to other ones."""
        apart = np.abs(one - other)
        if self.kind == "switch":
            return self.hops * (apart > 0)
        return self.hops * (np.minimum(apart, self.size - apart) if self.kind == "ring" else apart)


Links = tuple[Dimension, ...]


class Hardware(msgspec.Struct, frozen=True, array_like=True):
    """The devices of a host, as its owner declared them or as JAX says.

    `memory` is the bytes of each device, 0 where unknown, `generation` what the maker calls them. `grid` has the sizes
    of the island's links, which are rings where it is a `torus`; `places` the place of each device in it, () where it
    has none.
    """

    memory: int = 0
    generation: str = ""
    grid: tuple[int, ...] = ()
    torus: bool = False
    places: tuple[Place, ...] = ()


def grid_of(sizes: Sequence[int], torus: bool) -> Links:
    """The links of a grid. A ring of two devices is a line."""
    return tuple(Dimension(size, "ring" if torus and size > 2 else "line") for size in sizes)


def hosts_of(hosts: int, devices: int) -> Links:
    """The links of hosts of which nothing else is known, each with so many devices."""
    return Dimension(hosts, "switch", STRANGERS), Dimension(devices, "switch")


def hops(links: Links, one: Place | np.ndarray, other: Place | np.ndarray) -> np.ndarray:
    """Hops from places to other ones. Who goes through a switch between hosts need not go through one inside."""
    places, others = np.asarray(one), np.asarray(other)
    apart = np.array([d.between(places[..., k], others[..., k]) for k, d in enumerate(links)])
    return apart.max(0) if links[0].kind == "switch" else apart.sum(0)


def pairs(shape: Sequence[int]) -> int:
    """The pairs of neighbours of a mesh, each axis closed to a ring."""
    size = math.prod(shape)
    return sum(size // count * _edges(count) for count in shape)


def axis_cost(links: Links, shape: Sequence[int], places: Places, axis: int) -> tuple[int, int]:
    """Hops between neighbours along one axis of a mesh: all of them, and the most between two.

    Args:
        places: of the mesh's devices, in row-major order.
    """
    if shape[axis] == 1:
        return 0, 0
    mesh = np.asarray(places).reshape(*shape, len(links))
    edges = np.arange(_edges(shape[axis]))
    apart = hops(links, mesh.take(edges, axis), mesh.take(edges + 1, axis, mode="wrap"))
    return int(apart.sum()), int(apart.max())


def cost(links: Links, shape: Sequence[int], places: Places) -> int:
    """Hops between neighbours along all axes of a mesh, see `axis_cost`."""
    known = np.asarray(places)
    return sum(axis_cost(links, shape, known, axis)[0] for axis in range(len(shape)))


def declared_places(grid: Sequence[int], host: int, devices: int) -> tuple[Place, ...]:
    """The places of the devices of the host number `host` of an island whose grid was declared: each host has a block
    of it, as near to a cube as one can be; blocks and devices in them are in row-major order.

    Raises:
        ValueError: no such block divides the grid.
    """
    fitting = [
        sides for sides in factors(devices, len(grid)) if all(n % s == 0 for n, s in zip(grid, sides, strict=True))
    ]
    if not fitting:
        raise ValueError(f"hosts of {devices} devices do not divide a grid of {text(grid)}")
    block = min(fitting, key=lambda sides: (sum(sides), [-side for side in reversed(sides)]))
    blocks = [n // s for n, s in zip(grid, block, strict=True)]
    corner = [at * side for at, side in zip(_at(host, blocks), block, strict=True)]
    inside = itertools.product(*(range(side) for side in block))
    return tuple(tuple(c + i for c, i in zip(corner, one, strict=True)) for one in inside)


def factors(number: int, count: int) -> list[tuple[int, ...]]:
    """All ways to write a number as a product of so many factors, in order."""
    if count == 1:
        return [(number,)]
    return [
        (first, *rest)
        for first in range(1, number + 1)
        if number % first == 0
        for rest in factors(number // first, count - 1)
    ]


def text(sizes: Sequence[int]) -> str:
    """A grid in words: `4x4`."""
    return "x".join(map(str, sizes))


def _edges(count: int) -> int:
    return {1: 0, 2: 1}.get(count, count)


def _at(number: int, sizes: Sequence[int]) -> list[int]:
    found = []
    for size in reversed(sizes):
        number, at = divmod(number, size)
        found.append(at)
    return found[::-1]
