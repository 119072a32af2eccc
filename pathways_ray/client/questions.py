"""Questions for small shards to hosts of this machine: asked now, answered by a call, with no thread that waits.

The caller looks at the failures of the array by itself, and takes the question back; then a fetch, which waits, says
what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pathways_ray.client.array_pieces import FetchedArray, FetchPlan
from pathways_ray.client.data import DataLinks
from pathways_ray.client.data_link import SHARED_BYTES
from pathways_ray.transport import messages as wire

Done = Callable[[np.ndarray[Any, Any] | None], None]
"""Takes what was asked for, None where it cannot come; called once, by the thread that reads."""


class Question:
    """A question under way."""

    def __init__(self, link: Any, request: int, done: Done) -> None:
        self._link, self._request, self._done = link, request, done

    def end(self, value: np.ndarray[Any, Any] | None) -> bool:
        """Gives the answer, unless it was given or taken back before."""
        if self._link.fetches.pop(self._request, None) is None:
            return False
        self._done(value)
        return True

    def take_back(self) -> bool:
        """Gives up; False when it has been answered."""
        if self._link.fetches.pop(self._request, None) is None:
            return False
        self._link.send_local(wire.CancelFetch(self._request))
        return True


def ask(data: DataLinks, buffer: int, cover: FetchPlan, done: Done) -> Question | None:
    """Asks for a shard; None where it is big, or its host is not of this machine, or was not spoken to yet."""
    if len(cover.by_host) != 1 or cover.nbytes >= SHARED_BYTES:
        return None
    ((host, devices),) = cover.by_host.items()
    link = data.link_of(host)
    if link is None or not link.is_local:
        return None
    question = Question(link, data.new_request(), done)

    def told() -> None:
        question.end(None if fetching.failure is not None else found.value())

    found = FetchedArray(cover, told)
    fetching = link.fetches[question._request] = found.by_host[host]
    if not link.send_local(wire.Fetch(question._request, buffer, devices, ())):
        link.fetches.pop(question._request, None)
        return None
    if link.dead is not None:
        question.end(None)
    return question


def read(data: DataLinks) -> None:
    """Reads what hosts of this machine have sent, unless a thread that waits for it does: for a loop that polls their
    reader."""
    if data.reader.leading.acquire(blocking=False):
        try:
            data.reader.read()
        finally:
            data.reader.leading.release()
            data.wake()  # another one leads
