"""Snapshots of a training's state in the memory of islands, from which it goes on after a loss.

Training goes on from a snapshot of a step whose loss was seen: the losses of later steps may have gone with the host,
and each step is to be in the records. So of the snapshots that are whole, the newest one of such a step is kept, and
all that are newer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pathways_ray.errors import PathwaysError


class Snapshot(Protocol):
    """The part of a `pw.Snapshot` that is used."""

    def is_ready(self) -> bool: ...

    def is_whole(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> None: ...

    def restore(self, timeout: float | None = None) -> Any: ...

    def values(self, timeout: float | None = None) -> Any: ...


@dataclass(frozen=True)
class Taken:
    """A snapshot of the state after `done` steps of a training (`setup.Training`)."""

    done: int
    snapshot: Snapshot
    training: Any


class Kept:
    """The snapshots of a run.

    Args:
        every: steps between two of them; 0: none are taken.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.taken: list[Taken] = []
        self.landed = 0
        self._last: int | None = None

    def begin(self, done: int) -> None:
        """Training goes on after `done` steps: the next step needs a snapshot of its own, as copies may be gone."""
        self.landed, self._last = done, None

    def look(self, done: int, take: Callable[[], Taken]) -> None:
        """Takes a snapshot of the state after `done` steps if it is time, and forgets those that are not needed."""
        if not self.every:
            return
        if self._last is None or done - self._last >= self.every:
            self._last = done
            self.taken.append(take())
        able = [number for number, one in enumerate(self.taken) if self._is_good(one)]
        if able:
            del self.taken[: able[-1]]

    def newest(self) -> Taken | None:
        """The snapshot from which training goes on; waits for those under way. None where no copy is whole."""
        for one in self.taken:
            try:
                one.snapshot.wait()
            except PathwaysError:
                continue  # the look says that it is not whole
        self.taken = [one for one in self.taken if one.snapshot.is_whole()]
        return next((one for one in reversed(self.taken) if self._is_good(one)), None)

    def _is_good(self, one: Taken) -> bool:
        return one.done <= self.landed and one.snapshot.is_ready() and one.snapshot.is_whole()
