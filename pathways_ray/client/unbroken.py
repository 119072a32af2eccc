"""Work in several steps, none of which Ctrl-C breaks off.

Ctrl-C may fall between an answer and the note of it, and then nobody knows what is there. So a thread does the work, to
which Ctrl-C does not come, and the user's thread waits for it; where that is interrupted, the work is told, and takes
back what it has done.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import TypeVar

from pathways_ray.client.interrupted import Lock, check_not_mine

T = TypeVar("T")


NEVER = threading.Event()
"""Set by nobody: for work that no user waits for."""


def unbroken(work: Callable[[threading.Event], T], lock: Lock) -> T:
    """Has a thread do work, and returns what that returns. What is called amid another call of the runtime, as by a
    signal handler, is done in this thread: the other one might wait for what that call has.

    Args:
        work: gets an event that is set once nobody waits for it any more.
        lock: what the work takes.

    Raises:
        UsageError: this thread has the lock, so that the other one would wait for it without end. Beside it, what the
            work raises.
    """
    check_not_mine(lock)
    if _is_amid_a_call():
        return work(NEVER)
    over: Future[T] = Future()
    left = threading.Event()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            over.set_result(context.run(work, left))
        except BaseException as error:  # the caller's
            over.set_exception(error)

    try:
        threading.Thread(target=run, name="pathways-mover", daemon=True).start()
        return over.result()
    finally:
        left.set()


def _is_amid_a_call() -> bool:
    """Whether other code stands between this call of the runtime and another one of this thread."""
    frame: FrameType | None = sys._getframe(1)
    others = False
    while frame is not None:
        is_ours = str(frame.f_globals.get("__name__")).startswith("pathways_ray.")
        if is_ours and others:
            return True
        others |= not is_ours
        frame = frame.f_back
    return False
