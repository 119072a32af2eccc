"""The devices that a slice is to have, beside their number: what its owner asked for, and what a move keeps to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from pathways_ray.errors import UsageError
from pathways_ray.ir.types import plain_name
from pathways_ray.transport import messages as wire

MAX_SIDE = 1 << 20
"""The longest side of a sub-grid of devices; what is longer is a slip."""


@dataclass(frozen=True)
class Wanted:
    """Properties of devices, see `pw.virtual_slice`; "", () and 0 leave one open."""

    platform: str = ""
    topology: tuple[int, ...] = ()
    memory: int = 0
    generation: str = ""

    def added_to(self, request: wire.CreateSlice) -> wire.CreateSlice:
        """The request for a slice on such devices."""
        return msgspec.structs.replace(request, **asdict(self)) if self != ANY else request


ANY = Wanted()


def wanted_of(
    platform: Any, name: Any, topology: Sequence[int] | None = None, memory: Any = 0, generation: Any = ""
) -> Wanted:
    """The devices a user asked for; the name of the slice is checked as well.

    Raises:
        UsageError: a value that nothing can have.
    """
    if not isinstance(name, str) or not isinstance(platform, str | None):
        raise UsageError(f"name= and platform= of a slice are text, not {name!r} and {platform!r}")
    if not isinstance(generation, str):
        raise UsageError(f"generation= of a slice is a text, not {generation!r}")
    if not _is_whole(memory) or not 0 <= memory < 1 << 63:
        raise UsageError(f"memory= of a slice is the bytes of each device, a whole number, not {memory!r}")
    sides: Sequence[Any] = () if topology is None else topology
    fits = isinstance(sides, tuple | list) and len(sides) <= 3 and (bool(sides) or topology is None)
    if not fits or not all(_is_whole(side) and 0 < side <= MAX_SIDE for side in sides):
        raise UsageError(f"topology= of a slice is one to three sides of a sub-grid of devices, not {topology!r}")
    return Wanted(plain_name(platform or ""), tuple(map(int, sides)), int(memory), plain_name(generation))


def _is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)
