"""Requests of a proxy's client that wait for bytes, and all those behind them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pathways_ray.proxy.arrays import Status
from pathways_ray.proxy.events import Requested


class Ready(NamedTuple):
    """A request that waits no longer: the host buffers that it takes, and what is wrong with one of them."""

    request: Requested
    taken: tuple[int, ...]
    failure: Status | None


class Parking:
    """Requests in their order, and the host buffers whose bytes have come.

    Args:
        needed: the host buffers that a request takes.
    """

    def __init__(self, needed: Callable[[Requested], Sequence[int]]) -> None:
        self._needed = needed
        self._requests: deque[Requested] = deque()
        self._stored: dict[int, Status | None] = {}
        self._given_up: set[int] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Requested) -> None:
        """Takes a request to the end; what it needs is wanted again."""
        self._given_up.difference_update(self._needed(request))
        self._requests.append(request)

    def store(self, handle: int, failure: Status | None) -> bool:
        """Notes that bytes have come, or will not; whether somebody may take them: not those of requests that have
        failed for them."""
        if handle in self._given_up:
            return False
        self._stored[handle] = failure
        return True

    @property
    def awaited(self) -> tuple[int, ...]:
        """The host buffers whose bytes the first request waits for."""
        needed = self._needed(self._requests[0]) if self._requests else ()
        return tuple(handle for handle in needed if handle not in self._stored)

    def ready(self) -> Iterator[Ready]:
        """Requests in order, up to one whose bytes have not come."""
        while self._requests:
            request = self._requests[0]
            needed = tuple(self._needed(request))
            failure = next((failure for handle in needed if (failure := self._stored.get(handle))), None)
            if failure is None and any(handle not in self._stored for handle in needed):
                return
            self._requests.popleft()
            self._given_up.update(handle for handle in needed if self._stored.pop(handle, failure) is not None)
            yield Ready(request, needed, failure)
