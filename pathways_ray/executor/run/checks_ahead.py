"""Functions that came ahead of their program and wait to be checked: the last few of each tenant."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping

from pathways_ray.executor.run.instructions import Checked
from pathways_ray.transport.messages import FunctionsAhead

MAX_AHEAD = 8
"""Messages of one tenant, of at most 1 MiB of functions each, that wait. A further one takes the place of the oldest:
nobody is charged with them, and those that a program comes to need come with it once more."""


class ChecksAhead:
    """Messages by tenant. One thread adds them, others have them checked; each step on a queue is one of the
    interpreter's, so there is no lock."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[FunctionsAhead]] = {}

    def add(self, message: FunctionsAhead) -> bool:
        """Keeps a message; whether `checked` has to be called once more for it."""
        if message.tenant not in self._waiting:
            self._waiting = {tenant: waiting for tenant, waiting in self._waiting.items() if waiting}
        waiting = self._waiting.setdefault(message.tenant, deque())
        waiting.append(message)
        if len(waiting) <= MAX_AHEAD:
            return True
        with contextlib.suppress(IndexError):  # all were taken meanwhile
            waiting.popleft()
        return False

    def checked(self, tenant: str, check: Callable[[Mapping[str, bytes], bool], None]) -> Checked:
        """Has the functions of a tenant's oldest message checked."""
        waiting = self._waiting.get(tenant)
        try:
            message = waiting.popleft() if waiting is not None else None
        except IndexError:  # the last one made room meanwhile
            message = None
        if message is not None:
            check(message.functions, message.trusted)
        return Checked()
