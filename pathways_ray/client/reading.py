"""The time in which an array is read, and in which it has to stay where it is."""

from __future__ import annotations

from threading import get_ident
from typing import Any, Protocol
from weakref import ref

from pathways_ray.client.interrupted import INTERRUPTED
from pathways_ray.errors import UsageError


class Arrays(Protocol):
    """The arrays of a session, which stay where they are or are exchanged."""

    reading_now: set[Any]

    def wait_to_read(self, reader: Any) -> None:
        """Waits while they are exchanged; has them stay until `end_read`."""

    def end_read(self, reader: Any) -> None:
        """Ends what `wait_to_read` began."""


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
        self._arrays.wait_to_read(self._noted)

    def __exit__(self, *_: object) -> None:
        self._arrays.end_read(self._noted)


def check_not_reading(arrays: Arrays) -> None:
    """Raises `UsageError` where this thread reads an array: a handler has interrupted that, and would wait for it."""
    readers = [noted() for noted in tuple(arrays.reading_now)]
    if any(reader is not None and reader.thread == get_ident() for reader in readers):
        raise UsageError(INTERRUPTED)
