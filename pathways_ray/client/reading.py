"""The time in which an array is read, and in which it has to stay where it is."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol, TypeVar

from pathways_ray.client.interrupted import INTERRUPTED, check_not_mine
from pathways_ray.errors import UsageError

T = TypeVar("T")


class Arrays(Protocol):
    """The arrays of a session, which stay where they are or are exchanged."""

    core: Any
    reading_now: list[int]
    held: bool
    suspension: Any

    @property
    def locks(self) -> tuple[Any, ...]: ...

    def wait_to_read(self) -> None:
        """Waits while they are exchanged."""

    def end_read(self, asked: int) -> None:
        """Says that a reader has ended."""


def reading(arrays: Arrays, read: Callable[..., T], *arguments: Any) -> T:
    """The result of `read`, while which the arrays stay where they are, once they are not exchanged.

    No context, at the first step of whose end Ctrl-C may come, and at the last one of its beginning. A reader is noted,
    and taken out, by a function of the interpreter, with no step between it and its `try` or `finally`.
    """
    check_not_mine(*arrays.locks)
    readers, thread = arrays.reading_now, get_ident()
    while True:
        if arrays.held or arrays.suspension is not None:
            arrays.wait_to_read()
        try:
            readers.append(thread)
            # Looked at behind that, here and below: who waits for readers says so before it counts them.
            if (not arrays.held and arrays.suspension is None) or arrays.core.ended is not None:
                return read(*arguments)
        finally:
            readers.remove(thread)
            if arrays.held:
                arrays.end_read(0)


def check_not_reading(arrays: Arrays) -> None:
    """Raises `UsageError` where this thread reads an array: a handler has interrupted that, and would wait for it."""
    if get_ident() in arrays.reading_now:
        raise UsageError(INTERRUPTED)
