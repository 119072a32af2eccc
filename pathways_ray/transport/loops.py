"""Event loops of processes that decide."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

from pathways_ray.errors import WireError
from pathways_ray.transport.frames import LinkLost

PACKAGE = __package__.split(".")[0]


def stop_on_errors(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    """Has a loop stop when a callback of this package raises. What that would have sent is lost, and who waits for it
    would wait for ever; a process that ends is followed by another one. Other errors are printed, as before. Returns
    the loop."""
    loop.set_exception_handler(_handle)
    return loop


@contextlib.contextmanager
def vital() -> Iterator[None]:
    """Has the loop stop when the body raises, in a task that others catch the errors of: those of a link, which would
    end with it and be opened again, and what its messages meant for others would be lost. Errors of the link itself,
    and of what comes from it, are not meant."""
    try:
        yield
    except (WireError, LinkLost):
        raise
    except Exception as error:
        asyncio.get_running_loop().call_soon(_raise, error)
        raise


def _raise(error: Exception) -> None:
    raise error


def begin(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Has work done that nobody awaits; it is one of `tasks` meanwhile. What it raises stops the loop, as what a
    callback raises does."""
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(partial(_ended, tasks))


def _ended(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    tasks.discard(task)
    if not task.cancelled():
        task.result()  # raises here, in a callback: asyncio itself would print it when the task is collected


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    loop.default_exception_handler(context)
    error = context.get("exception")
    if "handle" not in context or not isinstance(error, Exception):
        return  # of a connection, or of a task that somebody awaits
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(module.split(".")[0] == PACKAGE for module in modules):
        loop.stop()
