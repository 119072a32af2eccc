"""The order in which a host compiles programs: one tenant after the other. Pure.

A tenant with a thousand programs delays the next tenant's first one by one of them, not by a thousand. Programs of one
tenant keep their order.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Work by tenant."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}

    def add(self, tenant: str, work: T) -> None:
        self._waiting.setdefault(tenant, deque()).append(work)

    def take(self) -> T:
        """The first of the tenant whose turn it is, which then goes to the end. Raises `IndexError` when empty."""
        if not self._waiting:
            raise IndexError("nothing waits")
        tenant = next(iter(self._waiting))
        works = self._waiting.pop(tenant)
        work = works.popleft()
        if works:
            self._waiting[tenant] = works
        return work

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))
