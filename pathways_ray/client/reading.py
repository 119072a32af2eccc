"""The time in which an array is read, and in which it has to stay where it is."""

from __future__ import annotations

from typing import Protocol


class Arrays(Protocol):
    """The arrays of a session, which stay where they are or are exchanged."""

    def wait_to_read(self) -> None:
        """Waits while they are exchanged; has them stay until `end_read`."""

    def end_read(self) -> None:
        """Ends what `wait_to_read` began."""


class Reading:
    """The context in which an array is read. No generator: each value that is waited for goes through it."""

    __slots__ = ("_arrays",)

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def __enter__(self) -> None:
        self._arrays.wait_to_read()

    def __exit__(self, *_: object) -> None:
        self._arrays.end_read()
