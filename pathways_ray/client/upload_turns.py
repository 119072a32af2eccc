"""The uploads on their way to one host: so many at a time, and a further one waits for its turn.

Who ends a turn waits for nobody. It may be the thread that reads from the host, and the one that takes a turn may have
been interrupted by a signal handler that waits for a value which that thread is to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import RLock

from pathways_ray.client.local_reader import Sleeper
from pathways_ray.waits import slice_s

MAX_PIPES = 16
"""Arrays that go to a host by pipes and in files, and that it has not stored; a further one waits for its turn. A host
allows a client twice as many."""

MAX_COMING_BYTES = 256 << 20
"""Arrays that go to a host in parts, and that it has not stored: there are copies of them here. A further one waits for
its turn, unless it is alone."""

_WAIT_SLICE_S = slice_s()


class UploadTurns:
    """The uploads that a host has not stored, by their requests.

    Args:
        is_over: whether nothing more goes to the host: then no upload waits.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._handed: set[int] = set()
        self._coming: dict[int, int] = {}
        self._taking = RLock()  # for no wait, and never by one that ends a turn
        self._waiting: dict[Sleeper, None] = {}

    def __contains__(self, request: int) -> bool:
        return request in self._handed or request in self._coming

    @property
    def are_taken(self) -> bool:
        """Whether one more by a pipe or in a file would have to wait."""
        return len(self._handed) >= MAX_PIPES

    def hand(self, request: int, behind_parts: bool) -> None:
        """Takes a turn for an upload by a pipe or in a file, when there is one.

        Args:
            behind_parts: it comes behind those that are on their way in parts.
        """
        before = set(self._coming) if behind_parts else set[int]()
        self._take(lambda: not self.are_taken and before.isdisjoint(self._coming), lambda: self._handed.add(request))

    def come(self, sizes: Mapping[int, int], waits: bool) -> None:
        """Takes turns for uploads over the stream, each of so many bytes by its request: when there is room for all of
        them, or at once, where they may not wait."""
        size = sum(sizes.values())

        def may() -> bool:
            if not waits:
                return True
            coming = list(self._coming.values())  # in one step: others end some meanwhile
            return not coming or sum(coming) + size <= MAX_COMING_BYTES

        self._take(may, lambda: self._coming.update(sizes))

    def end(self, request: int) -> None:
        """Ends a turn, if the upload has one; from any thread."""
        self._handed.discard(request)
        self._coming.pop(request, None)
        self.wake()

    def wake(self) -> None:
        """Has those that wait look again; from any thread."""
        for sleeper in list(self._waiting):
            sleeper.wake()

    def _take(self, may: Callable[[], bool], take: Callable[[], None]) -> None:
        if self._taken(may, take):
            return
        sleeper = Sleeper()
        self._waiting[sleeper] = None
        try:
            while not self._taken(may, take):  # looked at behind the entry: who ends a turn now finds it there
                sleeper.sleep(_WAIT_SLICE_S)
        finally:
            self._waiting.pop(sleeper, None)

    def _taken(self, may: Callable[[], bool], take: Callable[[], None]) -> bool:
        with self._taking:
            if free := may() or self._is_over():
                take()
            return free
