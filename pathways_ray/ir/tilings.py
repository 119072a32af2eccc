"""Tile assignments, XLA's form of a layout, as specs over a mesh.

XLA says how an array is cut by a grid of tiles, one for each device, in some order of the devices; a spec says which
axes of a mesh cut each dimension. Every mesh has a finest form, whose axes have prime sizes (`refined`): then layouts
that were said over different meshes of the same devices are equal specs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pathways_ray.ir.types import Spec, canonical_spec


def refined(sizes: Sequence[int]) -> tuple[int, ...]:
    """The mesh with each axis cut into prime sizes, in order; (1,) for a single device."""
    found: list[int] = []
    for size in sizes:
        prime = 2
        while size > 1:
            while size % prime == 0:
                found.append(prime)
                size //= prime
            prime += 1
    return tuple(found) or (1,)


MAX_AXES = 256
"""Axes of a grid of tiles: those of an array, and those along which devices hold the same tile."""


def fills(sizes: Sequence[int], count: int, order: Sequence[int] | None = None) -> bool:
    """Whether a box of these sizes has `count` places, and an `order` each of its axes once. Cheap for any numbers."""
    if len(sizes) > MAX_AXES or (order is not None and sorted(order) != list(range(len(sizes)))):
        return False
    found = 1
    for size in sizes:
        found *= size
        if not 0 < found <= count:
            return False
    return found == count


def axis_names(mesh: Sequence[int]) -> tuple[str, ...]:
    """The names of the axes of a refined mesh."""
    return tuple(f"f{k}" for k in range(len(mesh)))


def iota(tiles: Sequence[int], sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The devices of a grid of tiles in row-major order: counted in a box of `sizes` whose axes are then taken in
    `order`, which is how XLA writes most assignments."""
    strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    devices = [0]
    for axis in order:
        devices = [device + step * strides[axis] for device in devices for step in range(sizes[axis])]
    if len(devices) != math.prod(tiles):
        raise ValueError(f"{math.prod(tiles)} tiles for {len(devices)} devices")
    return tuple(devices)


def spec_of(tiles: Sequence[int], devices: Sequence[int], dimensions: int, mesh: Sequence[int]) -> Spec | None:
    """The spec of a grid of tiles over a refined mesh; None where no spec says the same.

    Args:
        tiles: tiles along each dimension, and, in further entries, devices that hold the same tile.
        devices: those of the tiles in row-major order, counted in row-major order of the mesh.
        dimensions: those of the array.
    """
    if sorted(devices) != list(range(math.prod(mesh))) or len(tiles) < dimensions:
        return None
    places: list[tuple[int, ...]] = [()] * len(devices)
    for at, device in enumerate(devices):
        rest, digits = at, []
        for size in reversed(tiles):
            rest, digit = divmod(rest, size)
            digits.append(digit)
        places[device] = tuple(reversed(digits))[:dimensions]
    strides = [math.prod(mesh[k + 1 :]) for k in range(len(mesh))]
    names = axis_names(mesh)
    effects = [places[stride] if size > 1 else (0,) * dimensions for stride, size in zip(strides, mesh, strict=True)]
    spec = []
    for dimension in range(dimensions):
        axes = sorted((k for k in range(len(mesh)) if effects[k][dimension]), key=lambda k: -effects[k][dimension])
        for number, k in enumerate(axes):
            if effects[k][dimension] != math.prod(mesh[other] for other in axes[number + 1 :]):
                return None
        spec.append(tuple(names[k] for k in axes))
    for device, place in enumerate(places):
        digits = [device // stride % size for stride, size in zip(strides, mesh, strict=True)]
        said = tuple(sum(d * effect[i] for d, effect in zip(digits, effects, strict=True)) for i in range(dimensions))
        if said != place:
            return None
    return canonical_spec(tuple(spec))


def tiles_of(spec: Spec, mesh: Sequence[int], dimensions: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The grid of tiles of a spec: tiles along each dimension with, last, the devices that hold the same tile; and the
    order in which the axes of the mesh make it."""
    number = {name: k for k, name in enumerate(axis_names(mesh))}
    used: list[int] = []
    tiles = []
    for dimension in range(dimensions):
        axes = [number[name] for name in spec[dimension]] if dimension < len(spec) else []
        tiles.append(math.prod(mesh[k] for k in axes))
        used += axes
    rest = [k for k in range(len(mesh)) if k not in used]
    return (*tiles, math.prod(mesh[k] for k in rest)), (*used, *rest)
