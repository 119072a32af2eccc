"""Callbacks of arrays, and `await`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar

from pathways_ray.client.buffer import PENDING, Buffer
from pathways_ray.client.guards import THREAD

_LOG = logging.getLogger(__name__)


class Waited(Protocol):
    """The part of a `pw.Array` that is used here."""

    _buffer: Buffer

    def block_until_ready(self, timeout: float | None = None) -> Any: ...


A = TypeVar("A", bound=Waited)


def when_done(array: A, call: Callable[[A], Any]) -> None:
    """Has the session's thread for that call `call` once a `pw.Array` is computed or has failed; calls it at once where
    it has."""
    if array._buffer.record.state is not PENDING:
        return _call(array, call)
    callbacks = array._buffer.session.callbacks
    callbacks.start()
    _watch(array, lambda: callbacks.put(lambda: _call(array, call)))


def _watch(array: Waited, done: Callable[[], None]) -> None:
    """Has `done` called once, in the thread that hears that an array is computed or has failed: it must not wait."""
    session, look = array._buffer.session, _Look(array, done)
    session.watch(look)
    session.hurry()
    look()


class _Look:
    """A look at an array, made again and again. No function that refers to itself: arrays would stay on their devices
    until Python's collector has found them."""

    def __init__(self, array: Waited, done: Callable[[], None]) -> None:
        self._array, self._done, self._once = array, done, threading.Lock()

    def __call__(self) -> None:
        if self._array._buffer.record.state is not PENDING and self._once.acquire(blocking=False):
            self._array._buffer.session.unwatch(self)
            self._done()


def _call(array: A, call: Callable[[A], Any]) -> None:
    """Makes a call of the user, and logs what it raises."""
    THREAD.callbacks += 1
    try:
        call(array)
    except BaseException as error:  # SystemExit too: the thread has the callbacks behind it to call
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C, which comes to no other thread
        _LOG.exception("a callback of %r failed", array)
    finally:
        THREAD.callbacks -= 1


def awaited(array: A) -> Generator[Any, None, A]:
    """`await array`: waits without holding up the event loop. Returns the array, or raises its failure."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def set_result() -> None:
        if not future.done():  # it may have been cancelled
            future.set_result(None)

    def done() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(set_result)

    _watch(array, done)
    yield from future
    array.block_until_ready()
    return array
