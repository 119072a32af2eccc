"""The holdings of a suspended session, as its client keeps them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pathways_ray.client.wanted import ANY, Wanted
from pathways_ray.ir.types import SliceType
from pathways_ray.transport import messages as wire


@dataclass(frozen=True)
class Part:
    """A part of a slice that moves: it is on its devices number `places`."""

    mesh: SliceType
    places: tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """A slice of a suspended session: what another one has to be to take its place, and where it was."""

    mesh: SliceType
    name: str
    island: int
    parts: tuple[Part, ...]
    wanted: Wanted = ANY


@dataclass(frozen=True)
class Suspension:
    """Everything that a suspended session holds: slices, and the number and type of each saved array, by its buffer.
    `gives_way` where it was suspended for another session, and not by its user; `tried` where the controller may have
    slices of it, since its resumption began, or was not heard of. No island could hold one of its slices since
    `refused_since`, while it gave way; `stuck` is the last refusal, once it waits no longer for such an island."""

    slices: tuple[Kept, ...]
    arrays: dict[int, tuple[int, wire.HeldBuffer]]
    gives_way: bool = False
    tried: bool = False
    refused_since: float = math.inf
    stuck: str = ""
