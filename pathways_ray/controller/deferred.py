"""Launches that others of their session may pass.

A launch whose hosts are away, or have not compiled its program yet, is set aside. What the session called later goes on
where it has nothing to do with it: on other islands, with other buffers. So each island still sees a session's launches
in the order of its calls, and a buffer is freed after the last launch that was called with it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from pathways_ray.transport.messages import Free, Launch

MOST = 64
"""With so many set aside nothing passes any more: they are looked at again with every event."""


@dataclass(slots=True)
class DeferredLaunches:
    """Calls that were set aside, in their order, and what they lay claim to: islands, and numbers of buffers."""

    calls: list[Launch | Free] = field(default_factory=list)
    islands: set[int] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)

    @property
    def full(self) -> bool:
        return len(self.calls) >= MOST

    def stops(self, launch: Launch, islands: Collection[int], results: int) -> bool:
        """Whether a later launch has to do with one that was set aside."""
        return not (
            self.islands.isdisjoint(islands)
            and self.numbers.isdisjoint(launch.arguments)
            and self.numbers.isdisjoint(range(launch.results, launch.results + results))
        )

    def add(self, launch: Launch, islands: Collection[int], results: int) -> None:
        """Sets a launch on these islands aside, which makes so many results."""
        self.calls.append(launch)
        self.islands.update(islands)
        self.numbers.update(launch.arguments, range(launch.results, launch.results + results))

    def keep(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Of buffers to free, those that may go at once; the others are freed after the launches that claim them."""
        claimed = tuple(n for n in numbers if n in self.numbers)
        if claimed:
            self.calls.append(Free(claimed))
        return tuple(n for n in numbers if n not in self.numbers) if claimed else numbers
