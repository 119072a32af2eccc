"""Calls of signal handlers and destructors, which may come in the midst of another call of their thread.

Such a call may wait for values. It may not wait for what the call that it has interrupted keeps from others: it would
do so without end. It is refused there, as if Ctrl-C had come with that error.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from operator import methodcaller
from threading import RLock
from typing import Any

from pathways_ray.errors import UsageError
from pathways_ray.transport.thread_links import is_writing

INTERRUPTED = (
    "a signal handler or a destructor uses the session that a call of its own thread is just sending for, or moves or "
    "suspends what that call reads, and would wait for it without end. Set a flag there, and act on it behind the call"
)

_MOMENT_S = 0.01
"""Ctrl-C comes again after this time. A wait that begins just as it comes is not ended by it."""

Lock = Any
"""What `threading.RLock()` gives: locks of the interpreter, which Ctrl-C cannot leave taken at the first step."""


_IS_MINE = methodcaller("_is_owned")
"""Whether this thread has a lock, as `threading.Condition` asks: a function of the interpreter, for each call and each
value that is waited for asks several locks."""


def new_lock() -> Lock:
    """A lock whose threads can be asked for."""
    return RLock()


def is_mine(lock: Lock) -> bool:
    """Whether this thread has the lock."""
    return bool(_IS_MINE(lock))


def check_not_mine(*locks: Lock, why: str = INTERRUPTED) -> None:
    """Raises `UsageError` where this thread has one of the locks: a handler has interrupted what it was taken for. So
    it does where a handler has interrupted a write to a host, behind which all else for that host waits."""
    if any(map(_IS_MINE, locks)):
        raise UsageError(why)
    if is_writing():
        raise UsageError(INTERRUPTED)


def interrupt_again() -> None:
    """Has Ctrl-C come once more, a moment later: where it came is lost what it raises. From another thread, for which
    nobody waits: in this one it would come right here."""
    main = threading.main_thread().ident

    def interrupt() -> None:
        time.sleep(_MOMENT_S)
        if main is not None:
            signal.pthread_kill(main, signal.SIGINT)

    _thread.start_new_thread(interrupt, ())
