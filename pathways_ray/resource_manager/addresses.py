"""The addresses of the controller and of schedulers, and those who wait for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pathways_ray.resource_manager import events
from pathways_ray.story import Entry, Story

SCHEDULER = "scheduler-"
"""How the names of schedulers begin; the number of their island follows."""

Waiting = events.LookedUp | events.JoinRequested


class Addresses:
    """The addresses that are published, by name."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.known: dict[str, str] = {}
        self.waiting: dict[str, list[Waiting]] = {}

    def publish(self, name: str, address: str, now: float) -> list[Waiting]:
        """Notes an address; returns what waited for it."""
        self.known[name] = address
        self.story.note(Entry(now, "address published", f"{name} at {address}"))
        return self.waiting.pop(name, [])

    def withdraw(self, name: str, address: str, now: float) -> None:
        """Forgets an address, unless a successor was quicker."""
        if self.known.get(name) == address:
            del self.known[name]
            self.story.note(Entry(now, "address withdrawn", f"{name} at {address}"))

    def find(self, name: str, asks: Waiting) -> str | None:
        """The address of `name`; the event that needs it waits until there is one."""
        if (found := self.known.get(name)) is None:
            self.waiting.setdefault(name, []).append(asks)
        return found

    def forget_schedulers(self, but: Iterable[str] = ()) -> None:
        """Forgets the addresses of schedulers, but those of these names."""
        for name in [name for name in self.known if name.startswith(SCHEDULER) and name not in but]:
            del self.known[name]


def of_schedulers(schedulers: Iterable[tuple[int, str]]) -> Mapping[str, str]:
    """Names and addresses of the schedulers of some islands."""
    return {f"{SCHEDULER}{island}": address for island, address in schedulers}
