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
    """Has `call` called once a `pw.Array` is computed or has failed; at once where it has."""
    session = array._buffer.session
    once = threading.Lock()

    def look() -> None:
        if array._buffer.record.state is not PENDING and once.acquire(blocking=False):
            session.unwatch(look)
            THREAD.callbacks += 1
            try:
                call(array)
            except BaseException as error:  # SystemExit too: the thread that reads messages has to go on
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise  # Ctrl-C, which comes to no other thread
                _LOG.exception("a callback of %r failed", array)
            finally:
                THREAD.callbacks -= 1

    session.watch(look)
    session.hurry()
    look()


def awaited(array: A) -> Generator[Any, None, A]:
    """`await array`: waits without holding up the event loop. Returns the array, or raises its failure."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def set_result() -> None:
        if not future.done():  # it may have been cancelled
            future.set_result(None)

    def done(_: A) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(set_result)

    when_done(array, done)
    yield from future
    array.block_until_ready()
    return array
