"""The hardware of a host, as JAX says it beside what was declared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pathways_ray.ir.links import Hardware, Place


def described(declared: Hardware, devices: Sequence[Any], memory: int) -> Hardware:
    """The hardware of a host with these devices of JAX. What was declared stands; a place that JAX says is a better
    one, since it is where the device is.

    Args:
        memory: the bytes of each device; 0 where unknown.
    """
    places = tuple(tuple(getattr(device, "coords", None) or ()) for device in devices)
    if not all(places) or len(set(places)) < len(places):
        places, grid = declared.places, declared.grid
    else:
        grid = _padded(declared.grid, places)
    generation = declared.generation or str(devices[0].device_kind)
    return msgspec.structs.replace(
        declared, memory=declared.memory or memory, generation=generation, grid=grid, places=places
    )


def _padded(grid: tuple[int, ...], places: Sequence[Place]) -> tuple[int, ...]:
    """A declared grid with as many sides as places have; () where a place is outside of it."""
    dimensions = len(places[0])
    padded = (*grid, *(1,) * (dimensions - len(grid)))
    inside = all(at < side for place in places for at, side in zip(place, padded, strict=False))
    return padded if grid and len(padded) == dimensions and inside else ()
