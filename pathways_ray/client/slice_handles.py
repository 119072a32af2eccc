"""Handles of slices: their names for others, and their new devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.suspension import Kept, Part
from pathways_ray.client.weak import living
from pathways_ray.transport import messages as wire


def kept_of(where: VirtualSlice) -> Kept:
    """A slice with its parts, as a suspended session has it."""
    parts = tuple(Part(part.type, part.places) for part in living(where.parts))
    return Kept(where.type, where.name, where.island, parts, where.wanted)


def known(where: VirtualSlice) -> wire.KnownSlice:
    """A slice as a successor of the controller hears of it."""
    return wire.KnownSlice(where.placed, where.tag, where.name, where.whole.id if where.whole is not None else 0)


def place(slices: Mapping[int, VirtualSlice], created: Sequence[wire.SliceCreated]) -> None:
    """Gives handles of slices their new devices."""
    for made in created:
        one = slices.get(made.placed.mesh.id)
        if one is not None:  # its last handle may have gone while the session was suspended
            one.placed, one.tag = made.placed, made.slice_tag
            ArgumentType.forget_covers(one)
