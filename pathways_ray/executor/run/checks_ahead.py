"""Functions that came ahead of their program and wait to be checked: the last few of each tenant."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

from pathways_ray.executor.run.instructions import Checked
from pathways_ray.transport.messages import FunctionsAhead

MAX_AHEAD = 8
"""Messages of one tenant, of at most 1 MiB of functions each, that wait. A further one takes the place of the oldest:
nobody is charged with them, and those that a program comes to need come with it once more."""


class ChecksAhead:
    """Messages by tenant; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[FunctionsAhead]] = {}

    def add(self, message: FunctionsAhead) -> bool:
        """Keeps a message; whether `checked` has to be called once more for it."""
        with self._lock:
            waiting = self._waiting.setdefault(message.tenant, deque(maxlen=MAX_AHEAD))
            more = len(waiting) < MAX_AHEAD
            waiting.append(message)
        return more

    def checked(self, tenant: str, check: Callable[[Mapping[str, bytes], bool], None]) -> Checked:
        """Has the functions of a tenant's oldest message checked."""
        with self._lock:
            waiting = self._waiting[tenant]
            message = waiting.popleft()
            if not waiting:
                del self._waiting[tenant]
        check(message.functions, message.trusted)
        return Checked()
