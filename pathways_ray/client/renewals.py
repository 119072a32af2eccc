"""Programs that are registered again before they are launched, since a slice of theirs has moved. Pure."""

from __future__ import annotations

from collections.abc import Container

from pathways_ray.client.events import Registered
from pathways_ray.transport.messages import Register


class Renewals:
    """The registered programs of a session: which slices they name, and which of them are `stale`.

    Functions are not sent again: the controller has them as long as the session.
    """

    def __init__(self) -> None:
        self.programs: dict[int, tuple[frozenset[int], bytes]] = {}
        self.stale: set[int] = set()

    def registered(self, event: Registered) -> None:
        """A program is registered."""
        self.programs[event.program] = frozenset(mesh.id for mesh in event.graph.slices), event.encoded

    def moved(self, slices: Container[int]) -> None:
        """Slices have other devices: the controller has forgotten the programs that name them."""
        self.stale.update(n for n, (named, _) in self.programs.items() if any(one in slices for one in named))

    def take(self, program: int) -> Register:
        """The message that registers a stale program again."""
        self.stale.discard(program)
        return Register(program, self.programs[program][1], {})
