"""Threads of a host: none ends by itself, and one says that the process runs."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from typing import Any

from pathways_ray.transport.messages import Message


def ending_with_process(run: Callable[..., None]) -> Callable[..., None]:
    """A thread's function, which ends only by an error of ours. Then the process ends too, and Ray restarts it: a host
    that serves but does not dispatch or report would be a hang for all clients."""

    def guarded(*args: Any) -> None:
        try:
            run(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    return guarded


def heartbeat(send: Callable[[Message], None], message: Callable[[], Message], period_s: float) -> None:
    """Sends what `message` gives every `period_s` seconds, without end; for a thread of its own."""
    while True:
        send(message())
        time.sleep(period_s)
