"""The time in which an array is read, and in which it has to stay where it is."""

from __future__ import annotations

from threading import get_ident
from typing import Any, Protocol
from weakref import ref

from pathways_ray.client.interrupted import INTERRUPTED, check_not_mine
from pathways_ray.errors import UsageError


class Arrays(Protocol):
    """The arrays of a session, which stay where they are or are exchanged."""

    reading_now: set[Any]
    locks: tuple[Any, ...]
    held: bool
    suspension: Any

    def wait_to_read(self, reader: Any) -> None:
        """Waits while they are exchanged, or raises, with the reader taken out meanwhile."""

    def end_read(self, asked: int) -> None:
        """Says that a reader has ended."""


class Reading:
    """The context in which an array is read. No generator: each value that is waited for goes through it.

    Ctrl-C may come at the first step of its end, or at the last one of its beginning. What has noted the reader is a
    set of weak references, so one that nobody has any more does not count.
    """

    __slots__ = ("__weakref__", "_arrays", "_noted", "thread")

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self.thread = get_ident()
        self._noted = noted = ref(self, arrays.reading_now.discard)
        hash(noted)  # that of what is gone is not known any more

    def __enter__(self) -> None:
        arrays = self._arrays
        check_not_mine(*arrays.locks)
        arrays.reading_now.add(self._noted)
        if arrays.held or arrays.suspension is not None:  # looked at behind that, here and below: who waits for readers
            arrays.wait_to_read(self._noted)  # says so before it counts them

    def __exit__(self, *_: object) -> None:
        self._arrays.reading_now.discard(self._noted)
        if self._arrays.held:
            self._arrays.end_read(0)


def check_not_reading(arrays: Arrays) -> None:
    """Raises `UsageError` where this thread reads an array: a handler has interrupted that, and would wait for it."""
    readers = [noted() for noted in tuple(arrays.reading_now)]
    if any(reader is not None and reader.thread == get_ident() for reader in readers):
        raise UsageError(INTERRUPTED)
